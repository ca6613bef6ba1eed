"""Only a pool changes a pool: no other module writes its fields, or calls what changes the parts it is made of."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

import gpu_worker_pool
from gpu_worker_pool.core import Pool, PoolSettings, Ticked
from gpu_worker_pool.core.mirror import MirrorPool
from gpu_worker_pool.errors import IllegalEventError

SRC = Path(gpu_worker_pool.__file__).parent
#: Parts of `Pool` that have a file of their own: `Pool` calls them, and nobody else does.
PARTS_OF_POOL = {
    "core/pool.py": "the pool itself",
    "core/assigning.py": "Pool._follow_up serves waiters by it",
    "core/ending.py": "Pool ends leases by it",
    "core/fleet_order.py": "Pool serves waiters by it, once the dispatcher of a fleet says so",
    "core/leaving.py": "Pool asks holders to leave by it",
    "core/placing.py": "Pool grants for a dispatcher by it, and undoes what a host refused",
    "core/observing.py": "Pool takes readings by it",
    "core/renewing.py": "Pool renews leases by it",
    "core/replication.py": "Pool.replicate takes over by it",
    "core/mirror.py": "a Pool that shows what others decided",
}
FIELDS = frozenset(vars(Pool(PoolSettings())))
#: Of the parts of a pool, what only looks.
READS = frozenset(
    {"available", "copy", "enclosing", "get", "gpus_of", "heads", "impossible", "in_order", "inside", "is_any_gpu"}
    | {"is_eligible", "is_fresh", "class_of", "held_by", "limits_of", "is_overdue", "asking"}
    | {"is_old", "items", "keys", "lookup", "next_at", "of_account", "of_lease", "only_class", "order", "position"}
    | {"enclosing", "inside", "request_class", "request_classes", "size", "used", "uses", "values"}
)


def offences(source: str) -> Iterator[str]:
    """Assignments to a field of a pool, or of what it is made of, and calls that change one of them."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        aliases: dict[str, list[str]] = {}
        for node in _own_nodes(function):
            if isinstance(node, ast.Assign) and _is_part(path := _path(node.value, aliases)):
                aliases.update({target.id: path for target in node.targets if isinstance(target, ast.Name)})
        for node in _own_nodes(function):
            if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
                if _is_part(_path(node, aliases)):
                    yield f"line {node.lineno}: {ast.unparse(node)} is written"
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr not in READS
                and _is_part(_path(node.func.value, aliases))
            ):
                yield f"line {node.lineno}: {ast.unparse(node.func)}() may write"


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(function):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _own_nodes(child)


def _path(node: ast.AST, aliases: dict[str, list[str]]) -> list[str]:
    """`self.pool.queue` as its names; what is subscripted counts as what it was taken from."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, [node.id])
    if isinstance(node, ast.Attribute):
        return [*_path(node.value, aliases), node.attr]
    return _path(node.value, aliases) if isinstance(node, ast.Subscript) else [""]


def _is_part(path: list[str]) -> bool:
    return any(
        name.lstrip("_") in ("pool", "_pool") or name.endswith("_pool")
        for name, following in pairwise(path)
        if following in FIELDS
    )


def test_no_other_module_writes_into_a_pool() -> None:
    found = {
        str(path.relative_to(SRC)): list(offences(path.read_text(encoding="utf-8")))
        for path in sorted(SRC.rglob("*.py"))
        if str(path.relative_to(SRC)) not in PARTS_OF_POOL
    }
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    [
        "pool.now = 1.0",
        "self.pool.fence += 1",
        "self._pool.tally[state] = 2",
        "pool.queue.enqueue(waiter)",
        "del pool.allocator.gpus[name].leases[lease]",
        "pool.allocator.gpus[name].is_gone = True",
        "allocator = pool.allocator; allocator.observe('', (), 1.0)",
        "read_only_pool.improved.clear()",
        "pool.fence, pool.ticket = 1, 2",
    ],
)
def test_it_is_found(line: str) -> None:
    assert len(list(offences(f"def function(pool, self):\n    {line}"))) >= 1


@pytest.mark.parametrize("line", ["pool.apply(event, now)", "pool.queue.in_order()", "now = pool.now", "pool.x = 1"])
def test_it_is_allowed(line: str) -> None:
    assert list(offences(f"def function(pool):\n    {line}")) == []


def test_the_parts_are_called_by_the_pool_only() -> None:
    importers = {
        str(path.relative_to(SRC))
        for path in SRC.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if not line.startswith("    ")  # those are for type checkers
        if "core.assigning import" in line
        or "core.observing import" in line
        or "import ending, leaving, legality" in line
    }
    assert importers == {"core/pool.py"}


def test_a_mirror_takes_no_events() -> None:
    mirror = MirrorPool(PoolSettings())
    with pytest.raises(IllegalEventError, match="only shows what others decided, and takes no Ticked"):
        mirror.apply(Ticked(), 1.0)
