"""How users of a host share its GPUs: one instruction, the same in every document and message."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Other ways to make the folder, which older versions advised: each of them kept somebody out.
OLD = re.compile(
    r"install -d|mkdir [^\n]*/var/lib/gpu-pool|chmod [^\n]*/var/lib/gpu-pool|groupadd|writable for all|-m 1777|-m 2770"
)
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
SOURCES = sorted((ROOT / "src").rglob("*.py"))
#: Calls the system's tools.
TOOLS = ROOT / "src" / "gpu_worker_pool" / "cli" / "setup" / "accounts.py"


@pytest.mark.parametrize("path", [*DOCUMENTS, *SOURCES], ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_gives_another_instruction(path: Path) -> None:
    found = [line for line in path.read_text(encoding="utf-8").splitlines() if OLD.search(line) and path != TOOLS]
    assert found == []


@pytest.mark.parametrize("name", ["LEASES.md", "SERVER.md", "API.md", "TROUBLESHOOTING.md", "CLI.md"])
def test_the_documents_that_speak_of_the_folder_give_it(name: str) -> None:
    assert "sudo gpu-pool setup" in (ROOT / "docs" / name).read_text(encoding="utf-8")
