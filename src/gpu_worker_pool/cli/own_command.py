"""How to type this very `gpu-pool` again: it need not be on the PATH, as in a virtual environment."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def own_command(words: Sequence[str] | None = None, python: str | None = None) -> str:
    """For a shell in the current folder. `words`: how this process was started; `python`: its interpreter."""
    script = (sys.argv if words is None else words)[0]
    if os.path.basename(script) == "__main__.py" or not os.access(script, os.X_OK):  # noqa: PTH119  # pathlib is slow
        return f"{_typed(python or sys.executable)} -m gpu_worker_pool"
    return _typed(script)


def _typed(program: str) -> str:
    full = os.path.abspath(program)  # noqa: PTH100  # links are not followed: that of a Python leaves its environment
    name = os.path.basename(full)  # noqa: PTH119
    if (found := shutil.which(name)) is not None and os.path.abspath(found) == full:  # noqa: PTH100
        return shlex.quote(name)
    here = os.path.join(".", os.path.relpath(full))  # noqa: PTH118
    # With a slash a shell does not look for it on the PATH.
    relative = here if os.sep not in here[2:] else here[2:]
    return shlex.quote(min(full, relative, key=len))
