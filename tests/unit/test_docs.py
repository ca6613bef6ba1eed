"""Documentation that runs: every Python block is executed, here or elsewhere; the diagrams are those of the code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: Their programs need a server, or are one: `tests/acceptance/test_*_examples.py` run every one of them.
RUN_ELSEWHERE = [
    ROOT / "README.md",
    *(
        ROOT / "docs" / name
        for name in ("API.md", "FLEET.md", "LEASES.md", "MIGRATION_GUIDE.md", "RECIPES.md", "SERVER.md")
    ),
]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    if page not in RUN_ELSEWHERE
    for number, block in enumerate(BLOCK.findall(page.read_text(encoding="utf-8")), 1)
    if "import optuna" not in block  # which `make test-integrations` installs, and runs
]
#: Stands in for PyTorch.
FAKES = ROOT / "tests" / "fakes" / "modules"


@pytest.mark.parametrize("block", BLOCKS)
def test_every_python_block_runs(block: str, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(block, encoding="utf-8")
    variables = {
        "GPU_BACKEND": "simulated:4",
        "GPU_POOL_STATE_DIR": str(tmp_path / "state"),
        "PYTHONPATH": str(FAKES),
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_what_workers_need_is_shown_in_ten_lines() -> None:
    page = (ROOT / "docs" / "WORKERS.md").read_text(encoding="utf-8")
    blocks = BLOCK.findall(page)
    assert len(blocks) == 6
    assert [block for block in blocks if len(block.splitlines()) > 10] == []


def test_there_are_blocks_to_run() -> None:
    assert len(BLOCKS) >= 2


def test_the_diagrams_are_those_of_the_code() -> None:
    done = subprocess.run([sys.executable, ROOT / "docs" / "draw_diagrams.py", "--check"], timeout=30, check=False)
    assert done.returncode == 0, "run `make docs`"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    names = re.findall(r"`((?:tests|src|docs|bench)/[\w./-]+)`", text)
    missing += [name for name in names if not (ROOT / name).exists()]
    assert missing == []


def test_the_architecture_names_every_file_of_the_core() -> None:
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    files = sorted(path.name for path in (ROOT / "src/gpu_worker_pool/core").glob("[a-z]*.py"))
    assert [name for name in files if f"`{name}`" not in page] == []


def test_the_files_that_the_architecture_names_exist() -> None:
    """`leases/engine` and `leases/engine.py` are named from the package, as `gpu_server/leases/routes` is."""
    package, page = ROOT / "src/gpu_worker_pool", (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rooms = "|".join(folder.name for folder in package.iterdir() if folder.is_dir())
    names = set(re.findall(rf"`((?:{rooms})/[\w./]+)`", page))
    assert len(names) > 80
    missing = [name for name in names if not ((package / name).exists() or (package / f"{name}.py").exists())]
    assert missing == []


def _anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")
        name, number = plain, 0
        while name in found:
            number += 1
            name = f"{plain}-{number}"
        found.add(name)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_a_heading_that_is_there(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", page.read_text())
    pages = [(page.parent / file if file else page, anchor) for file, anchor in links if "://" not in file]
    missing = [f"{found.name}#{anchor}" for found, anchor in pages if found.exists() and anchor not in _anchors(found)]
    assert missing == []
