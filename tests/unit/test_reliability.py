"""docs/RELIABILITY.md lists the tests of each fault: the list and the marks of the tests agree."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "RELIABILITY.md"
TESTS = ROOT / "tests"
#: Up to 37 of one host, then of a fleet.
LAST_FAULT = 55
ROW = re.compile(r"^\| (\d+) \| .* \| .* \| (.+) \|$", re.MULTILINE)


@lru_cache(maxsize=1)
def marked() -> dict[int, set[str]]:
    """By fault: the tests that `@pytest.mark.fault(number, …)` gives its number."""
    found: dict[int, set[str]] = {}
    for path in TESTS.rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        if "mark.fault(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
                    for number in map(ast.literal_eval, mark.args):
                        found.setdefault(number, set()).add(f"{path.relative_to(TESTS)}::{node.name}")
    return found


def listed() -> dict[int, set[str]]:
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    numbers = [int(number) for number, _ in rows]
    assert len(set(numbers)) == len(numbers), "a fault has one row"
    return {int(number): set(re.findall(r"`([^`]+::[^`]+)`", tests)) for number, tests in rows}


def test_each_fault_lists_the_tests_that_have_its_number() -> None:
    assert listed() == marked()


def test_each_fault_has_a_test() -> None:
    assert [number for number in range(1, LAST_FAULT + 1) if not marked().get(number)] == []
