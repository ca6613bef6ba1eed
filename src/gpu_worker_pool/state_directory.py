"""Finds the state directory: the folder for the files that processes of one host share."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

#: Locks and shared memory are unreliable there, and several hosts would share one folder.
NETWORK_FILE_SYSTEMS = frozenset(
    ["9p", "afs", "beegfs", "ceph", "cifs", "fuse.sshfs", "glusterfs", "lustre", "nfs", "nfs4", "smb3", "smbfs"]
)
#: Made by an administrator, writable for the users that share the GPUs.
SHARED_DIRECTORY = Path("/var/lib/gpu-pool")


def state_directory(chosen: str | None = None, environ: Mapping[str, str] | None = None) -> Path:
    """`chosen`, else `GPU_POOL_STATE_DIR`, else the shared directory if it is writable, else the user's own.

    Raises an `OSError` where none can be made.
    """
    env = os.environ if environ is None else environ
    try:
        directory = _state_directory((chosen or env.get("GPU_POOL_STATE_DIR", "")).strip(), env)
    except RuntimeError as error:  # a home directory is unknown
        raise OSError(errno.ENOENT, f"{error}; set GPU_POOL_STATE_DIR") from error
    if (kind := _file_system(directory.resolve())) in NETWORK_FILE_SYSTEMS:
        raise OSError(errno.ENOTSUP, f"on a network file system ({kind}); set GPU_POOL_STATE_DIR", str(directory))
    return directory


def shared_mode(directory: Path) -> int:
    """The mode of a file in it: open to exactly those who may write to the folder."""
    mode = directory.stat().st_mode
    return 0o600 | (0o060 if mode & 0o020 else 0) | (0o006 if mode & 0o002 else 0)


def _state_directory(chosen: str, env: Mapping[str, str]) -> Path:
    if chosen:
        directory = Path(chosen).expanduser()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return directory
    if SHARED_DIRECTORY.is_dir() and os.access(SHARED_DIRECTORY, os.W_OK):
        return SHARED_DIRECTORY
    base = env.get("XDG_STATE_HOME", "").strip()
    directory = (Path(base) if base else Path.home() / ".local" / "state") / "gpu-pool"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    logger.warning(
        "%s does not exist or is not writable: sharing among your own programs only, in %s", SHARED_DIRECTORY, directory
    )
    return directory


def _file_system(path: Path) -> str:
    """The type of the file system, such as `ext4`."""
    kind, longest = "", -1
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        # Blanks in it are written as \\040; for such a mount point its parent's type is returned.
        mount = Path(before.split()[4])
        if path.is_relative_to(mount) and len(mount.parts) >= longest:
            kind, longest = after.split()[0], len(mount.parts)
    return kind
