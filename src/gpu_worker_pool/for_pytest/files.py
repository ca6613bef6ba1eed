"""Looks into test files, before they are imported, for tests that use the fixture `gpu` of the plugin.

Importing them may load CUDA, which reads CUDA_VISIBLE_DEVICES only once.
"""

from __future__ import annotations

import ast
import os
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_NAME: Final = "gpu"
#: Most files are not worth parsing.
_WORD: Final = re.compile(rb"\bgpu(_pool)?\b")
_SKIPPED: Final = frozenset({"node_modules", "venv", "__pycache__", "build", "dist"})
#: At most this many files are looked at.
_MOST_FILES: Final = 20_000
_LARGEST_BYTES: Final = 2_000_000


def use_the_fixture(arguments: Sequence[str], root: Path, patterns: Sequence[str]) -> bool:
    """`arguments`: files and folders, as pytest was given them. False if a file defines a fixture `gpu` itself."""
    paths = [Path(argument.partition("::")[0]) for argument in arguments] or [root]
    is_used = False
    for file in dict.fromkeys([*_conftests_above(paths, root), *_test_files(paths, patterns)]):
        source = _source_with_the_name(file)
        if source is None:
            continue
        uses, defines = _uses_and_definitions(source)
        if defines:
            return False
        is_used = is_used or uses
    return is_used


def _conftests_above(paths: Iterable[Path], root: Path) -> Iterator[Path]:
    for path in paths:
        for folder in (path.absolute(), *path.absolute().parents):
            if (file := folder / "conftest.py").is_file():
                yield file
            if folder == root:
                break


def _test_files(paths: Iterable[Path], patterns: Sequence[str]) -> Iterator[Path]:
    number = 0
    for path in paths:
        if path.is_file():
            yield path.absolute()
        for folder, folders, names in os.walk(path):
            folders[:] = [name for name in folders if not name.startswith(".") and name not in _SKIPPED]
            for name in names:
                if name == "conftest.py" or any(fnmatch(name, pattern) for pattern in patterns):
                    number += 1
                    if number > _MOST_FILES:
                        return
                    yield Path(folder, name).absolute()


def _source_with_the_name(file: Path) -> bytes | None:
    try:
        if file.suffix != ".py" or file.stat().st_size > _LARGEST_BYTES:
            return None
        source = file.read_bytes()
    except OSError:
        return None
    return source if _WORD.search(source) else None


def _uses_and_definitions(source: bytes) -> tuple[bool, bool]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # pytest says so
        return False, False
    uses = False
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if node.name == _NAME and _is_fixture(node):
                return False, True
            arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            takes = any(argument.arg == _NAME for argument in arguments)
            is_asked = node.name.startswith("test") or _is_fixture(node)
            uses = uses or (takes and is_asked and not _is_parametrized(node))
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            constants = [each.value for each in node.args if isinstance(each, ast.Constant)]
            if name == "fixture" and any(
                each.arg == "name" and isinstance(each.value, ast.Constant) and each.value.value == _NAME
                for each in node.keywords
            ):
                return False, True
            uses = uses or (name in ("usefixtures", "getfixturevalue") and _NAME in constants)
            # Not a function of that name.
            uses = uses or (name == "gpu_pool" and ast.unparse(node.func).endswith("mark.gpu_pool"))
    return uses, False


def _is_fixture(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("fixture" in ast.unparse(each) for each in node.decorator_list)


def _is_parametrized(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A parametrized argument is not a fixture."""
    return any("parametrize" in (text := ast.unparse(each)) and _NAME in text for each in node.decorator_list)
