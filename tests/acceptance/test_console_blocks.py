"""Every command that a page shows is typed into a real shell, on a host with simulated GPUs and a server on port 8000's
place. What cannot be run says why, in a comment before its block; those are counted, and listed by `-rs`.

`SERVER.md` has a runner of its own, `test_server_examples.py`: its commands start servers and ask them. `FLEET.md` has
one, too, in `tests/fleet`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.server_process import ServerProcess

ROOT = Path(__file__).parents[2]
#: They have runners of their own.
RUN_ELSEWHERE = {"SERVER.md", "FLEET.md"}
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").glob("*.md") if path.name not in RUN_ELSEWHERE)]
#: Blocks that say why they are not run. Whoever adds one raises this, and is asked why in review.
NOT_RUN = 10
SECONDS = 40
#: Programs that the recipes name and this machine may not have.
NAMED_PROGRAMS = ROOT / "tests" / "fakes" / "programs"


class Block(NamedTuple):
    page: str
    number: int
    heading: str
    #: What is typed: every line after a `$`, with the lines it goes on in.
    commands: str
    why_not: str | None

    def __str__(self) -> str:
        return re.sub(r"\W+", "-", f"{self.page} {self.number} {self.heading}").strip("-")


def blocks_of(page: Path) -> list[Block]:
    found: list[Block] = []
    heading, why_not = "", None
    pattern = (
        r"^#+ (?P<heading>[^\n]+)$|<!-- not run: (?P<why>[^\n]+?) -->"
        r"|^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$"
    )
    for match in re.finditer(pattern, page.read_text(encoding="utf-8"), re.M | re.S):
        if match["heading"]:
            heading = match["heading"]
        elif match["why"]:
            why_not = match["why"]
        else:
            if match["language"] == "console":
                found.append(Block(page.stem, len(found) + 1, heading, typed(match["text"]), why_not))
            why_not = None
    return found


def typed(text: str) -> str:
    commands, goes_on = [], False
    for line in text.splitlines():
        line = line.strip()
        if goes_on or line.startswith("$ "):
            commands.append(line.removeprefix("$ "))
            goes_on = line.endswith("\\")
    return "\n".join(commands)


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    with ServerProcess(folder, GPU_BACKEND="simulated:4", ACCESS_LOG="false") as running:
        yield running


@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_what_a_page_shows_can_be_typed(block: Block, server: ServerProcess, tmp_path: Path) -> None:
    if block.why_not is not None:
        pytest.skip(block.why_not)
    assert block.commands, "nothing in it is typed: begin the lines that are with a $"
    home = tmp_path / "home"
    shutil.copytree(ROOT / "examples", home)
    (home / "train.py").write_text("import os\nprint('training on GPU', os.environ['CUDA_VISIBLE_DEVICES'])\n")
    inherited = {name: os.environ[name] for name in ("LANG", "LC_ALL", "TMPDIR") if name in os.environ}
    environment = inherited | {
        "PATH": os.pathsep.join([str(NAMED_PROGRAMS), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "HOME": str(home),
        "GPU_BACKEND": "simulated:4",
        "GPU_POOL_STATE_DIR": str(tmp_path / "state"),
    }
    commands = block.commands.replace("localhost:8000", f"localhost:{server.port}")
    script = f"set -euo pipefail\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{commands}\n"
    shell = subprocess.Popen(
        ["/bin/bash", "-c", script],
        cwd=home,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = shell.communicate(timeout=SECONDS)
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
    assert shell.returncode == 0, f"{commands}\n>>> {output}"
    assert "Traceback" not in output, output


def test_there_is_something_to_type() -> None:
    assert len(BLOCKS) > 5


def test_blocks_that_are_not_run_are_few() -> None:
    skipped = [f"{block}: {block.why_not}" for block in BLOCKS if block.why_not is not None]
    assert len(skipped) == NOT_RUN, skipped
