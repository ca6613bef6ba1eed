"""The public API as pyright judges it: at least 99 % of its symbols have a type that every type checker agrees on."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpu_worker_pool

LEAST_COMPLETENESS = 0.99
_PACKAGE = Path(gpu_worker_pool.__file__).parent


def _pyright() -> list[str]:
    """The program within the wheel, without its wrapper, which would download what is missing."""
    found = importlib.util.find_spec("pyright")
    program = None if found is None or found.origin is None else Path(found.origin).parent / "dist" / "index.js"
    if program is None or not program.is_file():
        pytest.skip("no pyright here: make install")
    node = shutil.which("node")
    if node is None or subprocess.run([node, program, "--version"], capture_output=True, check=False).returncode != 0:
        pytest.skip("pyright needs node 14 or later, which is not here: apt-get install nodejs")
    return [node, str(program)]


@pytest.mark.timeout(300)
def test_the_public_api_is_typed_completely() -> None:
    done = subprocess.run(
        [*_pyright(), "--outputjson", "--ignoreexternal", "--verifytypes", "gpu_worker_pool"],
        cwd=_PACKAGE.parent,
        # It asks the first `python` of the PATH where packages are; `--pythonpath` does not count here.
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    judged = json.loads(done.stdout)["typeCompleteness"]
    assert judged["pyTypedPath"] == str(_PACKAGE / "py.typed")
    # A thousand: a package that was not found has no symbols at all.
    assert judged["exportedSymbolCounts"]["withKnownType"] > 1000
    assert judged["completenessScore"] >= LEAST_COMPLETENESS, "\n".join(_incomplete(judged))


def _incomplete(judged: dict[str, Any]) -> list[str]:
    return [
        f"{symbol['name']}: {found['message']}"
        for symbol in judged["symbols"]
        if symbol["isExported"] and not symbol["isTypeKnown"]
        for found in symbol["diagnostics"]
    ]
