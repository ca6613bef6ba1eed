"""Documentation that runs: every Python block is executed, here or elsewhere; the diagrams are those of the code."""

from __future__ import annotations

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
    *(ROOT / "docs" / name for name in ("API.md", "LEASES.md", "MIGRATION_GUIDE.md", "RECIPES.md", "SERVER.md")),
]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    if page not in RUN_ELSEWHERE
    for number, block in enumerate(BLOCK.findall(page.read_text(encoding="utf-8")), 1)
]


@pytest.mark.parametrize("block", BLOCKS)
def test_every_python_block_runs(block: str, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(block, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", script], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr


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
