"""The server's Unix socket: makes and removes its file, and says which user and process each connection comes from."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from gpu_worker_pool.core.accounts import account_of_user
from gpu_worker_pool.hardware.proc import user_name
from gpu_worker_pool.hardware.processes import name_of_process
from gpu_worker_pool.host_socket import peer_credentials

if TYPE_CHECKING:
    import asyncio

#: Where the scope of a request has its `Peer`. No client can set it: headers do not get there.
PEER: Final = "gpu_pool.peer"
#: As uvicorn has it for TCP.
BACKLOG: Final = 2048
#: The credentials say who a caller is, so any user may connect.
SOCKET_MODE: Final = 0o666
FOLDER_MODE: Final = 0o755
#: How long another server has to accept or refuse a connection; longer than a busy one takes.
PROBE_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Peer:
    """The process that opened a connection to a Unix socket, as the kernel knew it at that moment."""

    #: Which socket.
    path: str
    #: None where the user is not known in this server's user namespace.
    uid: int | None
    #: None where the process is in another pid namespace.
    pid: int | None
    #: Identifies it for `is_gone`; empty where that is unknown.
    process: str

    @property
    def account(self) -> str:
        """The same as that of this user's `local://` programs."""
        return account_of_user(self.uid)

    @property
    def user(self) -> str | None:
        return None if self.uid is None else user_name(self.uid)


def peer_of(transport: asyncio.BaseTransport) -> Peer | None:
    """None for a connection over TCP; raises an `OSError` if the kernel does not say who it is."""
    connection = transport.get_extra_info("socket")
    if connection is None or connection.family != socket.AF_UNIX:
        return None
    found = peer_credentials(connection)
    name = connection.getsockname()
    return Peer(
        name if isinstance(name, str) else "",
        None if _is_unmapped(found.uid) else found.uid,
        found.pid or None,
        name_of_process(found.pid),
    )


@lru_cache(maxsize=256)
def _is_unmapped(uid: int) -> bool:
    """Users outside this server's user namespace all have the same number there, so it identifies none of them."""
    try:
        if uid != int(Path("/proc/sys/kernel/overflowuid").read_text()):
            return False
        mapped = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    except (OSError, ValueError):
        return True
    return not any(first <= uid < first + count for first, _, count in mapped)


class UnixListener:
    """A listening socket at this path, until it is removed. Raises an `OSError` that says what to do.

    What is there already is replaced only if it is a socket of this user on which no server listens.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        _check_folder(Path(path).parent)
        _remove_old(path)
        self.socket: socket.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.socket.bind(path)
            Path(path).chmod(SOCKET_MODE)  # whatever the umask
            self._file = _identity(path)
            # Before the application has started: clients that connect meanwhile wait instead of being refused.
            self.socket.listen(BACKLOG)
        except OSError as error:
            self.socket.close()
            raise OSError(f"cannot listen on {path}: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
        self.socket.close()

    def remove(self) -> None:
        """Remove the file, unless another server has replaced it."""
        with suppress(OSError):
            if _identity(self.path) == self._file:
                Path(self.path).unlink()


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def _check_folder(folder: Path) -> None:
    """Clients trust a socket by its folder: only this server's user, or root, may write to it."""
    try:
        with suppress(FileExistsError):
            folder.mkdir(FOLDER_MODE)
            folder.chmod(FOLDER_MODE)  # whatever the umask
        found = folder.lstat()
    except OSError as error:
        raise OSError(f"the folder {folder} of the socket cannot be used: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise OSError(f"{folder} must be a folder, for the socket: choose another path")
    if found.st_uid not in (0, os.geteuid()):
        owner = user_name(found.st_uid)
        raise OSError(f"the folder {folder} belongs to {owner}, who could replace the socket: choose another path")
    if found.st_mode & 0o022:
        # One like /tmp is for all users, and must stay so.
        advice = "" if found.st_mode & stat.S_ISVTX else f"chmod go-w {folder}, or "
        raise OSError(
            f"other users can write to the folder {folder}, and could replace the socket: {advice}choose another path, "
            "in a folder of its own"
        )


def _remove_old(path: str) -> None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise OSError(f"cannot listen on {path}: {error.strerror}") from None
    if not stat.S_ISSOCK(found.st_mode):
        raise OSError(f"{path} exists and is not a socket: remove it, or choose another path")
    if found.st_uid != os.geteuid():
        raise OSError(f"{path} is a socket of {user_name(found.st_uid)}: remove it, or choose another path")
    if _is_listening(path):
        raise OSError(f"another server listens on {path}: stop it, or choose another path")
    with suppress(FileNotFoundError):
        Path(path).unlink()


def _is_listening(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_SECONDS)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # one that is too busy to accept a connection, for example
            return True
    return True
