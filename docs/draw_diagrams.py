"""Updates what ARCHITECTURE.md takes from the code, its state diagrams and its list of files: `make docs`.

`--check` only compares.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpu_worker_pool
from gpu_worker_pool.core.moves import LEASE_MOVES, REQUEST_MOVES, LeaseState, RequestState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def diagram(moves: Mapping[Any, Mapping[Any, str]], starts: Iterable[str]) -> str:
    """The table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2"]
    lines += [f"    [*] --> {start}" for start in starts]
    lines += [
        f"    {origin} --> {target}: {cause}" for origin, targets in moves.items() for target, cause in targets.items()
    ]
    lines += [f"    {state} --> [*]" for state, targets in moves.items() if not targets]
    return "\n".join(lines)


PAGE = Path(__file__).parent / "ARCHITECTURE.md"
PACKAGE = Path(gpu_worker_pool.__file__).parent


def mermaid(text: str) -> str:
    return f"```mermaid\n{text}\n```"


def files() -> str:
    """A table for each folder, with the first line of each file's docstring."""
    folders = sorted({path.parent for path in PACKAGE.rglob("*.py")})
    return "\n\n".join(_table(folder) for folder in folders)


def _table(folder: Path) -> str:
    name = folder.relative_to(PACKAGE).as_posix()
    rows = [f"| file, {'at the root' if name == '.' else f'in `{name}/`'} | |", "| --- | --- |"]
    for path in sorted(folder.glob("*.py")):
        head = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
        if path.name != "__init__.py":
            rows.append(f"| `{path.name}` | {head} |")
    return "\n".join(rows)


PARTS = {
    "request moves": lambda: mermaid(diagram(REQUEST_MOVES, [RequestState.WAITING])),
    "lease moves": lambda: mermaid(diagram(LEASE_MOVES, [LeaseState.HELD, LeaseState.OFFERED])),
    "files": files,
}


def updated(page: str) -> str:
    for name, make in PARTS.items():
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not marked.search(page):
            raise SystemExit(f"ARCHITECTURE.md has no <!-- {name} --> mark")
        page = marked.sub(lambda place, make=make: f"{place[1]}{make()}\n{place[2]}", page)
    return page


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    if "--check" in sys.argv:
        return int(updated(page) != page)
    PAGE.write_text(updated(page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
