"""The core is pure: what it may import is written down here, and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import gpu_worker_pool.core

CORE = Path(gpu_worker_pool.core.__file__).parent
#: Of the standard library; nothing here can do I/O, read a clock, draw a random number, log, or start a thread.
ALLOWED = {
    "__future__",
    "collections",
    "collections.abc",
    "dataclasses",
    "enum",
    "heapq",
    "math",
    "operator",
    "threading",  # one lock, for the documented queue; no pool has threads
    "typing",
}
OWN = ("gpu_worker_pool.core", "gpu_worker_pool.errors", "gpu_worker_pool.wording")
#: Built-in functions that reach outside without an import.
FORBIDDEN_CALLS = {"open", "print", "input", "exec", "eval", "__import__"}


def imports_of(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.add(node.module or "")
    return found


def impurities(source: str) -> set[str]:
    tree = ast.parse(source)
    imports = {name for name in imports_of(tree) if name not in ALLOWED and not name.startswith(OWN)}
    calls = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS
    }
    return imports | calls


@pytest.mark.parametrize("path", sorted(CORE.rglob("*.py")), ids=lambda path: path.name)
def test_the_core_imports_nothing_that_could_reach_outside(path: Path) -> None:
    assert impurities(path.read_text(encoding="utf-8")) == set()


def test_what_the_core_imports_of_the_package_imports_nothing_in_turn() -> None:
    for name in ("errors.py", "wording.py"):
        source = (CORE.parent / name).read_text(encoding="utf-8")
        assert imports_of(ast.parse(source)) <= {"__future__", "typing"}, name


@pytest.mark.parametrize(
    "source",
    [
        "import asyncio",
        "from time import monotonic",
        "import random",
        "def f():\n    import logging",
        "import os.path",
        "from socket import socket",
        "from gpu_worker_pool import config",
        "open('x')",
    ],
)
def test_an_impure_line_would_be_found(source: str) -> None:
    assert impurities(source)
