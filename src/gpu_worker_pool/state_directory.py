"""Where processes of one host meet: the folder that holds what they share."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

#: An administrator makes it, writable for those who share the GPUs.
SHARED_DIRECTORY = Path("/var/lib/gpu-pool")


def state_directory(chosen: str | None = None, environ: Mapping[str, str] | None = None) -> Path:
    """The one that was chosen, else `GPU_POOL_STATE_DIR`, else the shared one if it is writable, else the user's.

    Raises an `OSError` where none can be made.
    """
    env = os.environ if environ is None else environ
    try:
        return _state_directory((chosen or env.get("GPU_POOL_STATE_DIR", "")).strip(), env)
    except RuntimeError as error:  # nobody's home is known, or the one that was named
        raise OSError(errno.ENOENT, f"{error}; set GPU_POOL_STATE_DIR") from error


def _state_directory(chosen: str, env: Mapping[str, str]) -> Path:
    if chosen:
        directory = Path(chosen).expanduser()
        directory.mkdir(parents=True, exist_ok=True)
        return directory
    if SHARED_DIRECTORY.is_dir() and os.access(SHARED_DIRECTORY, os.W_OK):
        return SHARED_DIRECTORY
    base = env.get("XDG_STATE_HOME", "").strip()
    directory = (Path(base) if base else Path.home() / ".local" / "state") / "gpu-pool"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    logger.warning(
        "%s is not there or not writable: sharing with your own programs only, in %s", SHARED_DIRECTORY, directory
    )
    return directory
