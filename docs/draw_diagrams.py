"""Updates the state diagrams in ARCHITECTURE.md from the core's tables: `make docs`. `--check` only compares."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
DIAGRAMS = {
    "request": diagram(REQUEST_MOVES, [RequestState.WAITING]),
    "lease": diagram(LEASE_MOVES, [LeaseState.HELD, LeaseState.OFFERED]),
}


def drawn(page: str) -> str:
    for name, text in DIAGRAMS.items():
        marked = re.compile(rf"(<!-- {name} moves -->\n).*?(<!-- end -->)", re.DOTALL)
        if not marked.search(page):
            raise SystemExit(f"ARCHITECTURE.md has no <!-- {name} moves --> mark for its diagram")
        page = marked.sub(lambda place, text=text: f"{place[1]}```mermaid\n{text}\n```\n{place[2]}", page)
    return page


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    if "--check" in sys.argv:
        return int(drawn(page) != page)
    PAGE.write_text(drawn(page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
