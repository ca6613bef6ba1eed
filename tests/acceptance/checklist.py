"""A document ticked off: what its lines promise, in short, and the tests that prove it."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
#: Where the documents lie for those who develop this; they are not part of the project.
DOCUMENTS = ROOT.parent / "shared" / "spec"


@dataclass(frozen=True)
class Lines:
    first: int
    last: int
    #: What they promise, in short.
    what: str
    proofs: tuple[str, ...] = ()


def lines(first: int, last: int, what: str, *proofs: str) -> Lines:
    return Lines(first, last, what, proofs)


def existing_tests() -> set[str]:
    found = set()
    for file in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                found.add(f"{file.relative_to(TESTS)}::{node.name}")
    return found


def without_proof(checklist: Iterable[Lines]) -> list[tuple[int, str]]:
    """Line and name of every test that does not exist."""
    existing = existing_tests()
    return [(entry.first, proof) for entry in checklist for proof in entry.proofs if proof not in existing]


def check_that_it_is_whole(checklist: Sequence[Lines], last_line: int) -> None:
    """From the first line to the last, none left out, none twice, each with a proof."""
    assert checklist[0].first == 1
    for before, after in itertools.pairwise(checklist):
        assert after.first == before.last + 1, after
        assert before.first <= before.last
    assert checklist[-1].last == last_line
    assert [entry for entry in checklist if not entry.proofs] == []
