"""The Unix socket of this host's GPU server: where it is, and which user and process is at its other end."""

from __future__ import annotations

import os
import socket
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from gpu_worker_pool.environment import Environment, refused

if TYPE_CHECKING:
    from collections.abc import Mapping

#: In a folder that only the server's user may write to.
DEFAULT_SOCKET: Final = "/run/gpu-pool/gpu-pool.sock"
VARIABLE: Final = "GPU_POOL_SOCKET"
#: The kernel stores the path in 108 bytes, with a zero at its end.
LONGEST_PATH: Final = 107

_CREDENTIALS: Final = struct.Struct("3i")


class Credentials(NamedTuple):
    """Of the process that opened the other end of a connection, or that listens there: the kernel vouches for them."""

    #: 0 where that process is in another pid namespace.
    pid: int
    uid: int
    gid: int


def peer_credentials(connection: socket.socket) -> Credentials:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Credentials(*_CREDENTIALS.unpack(raw))


def socket_path(environ: Mapping[str, str] | None = None, default: str = DEFAULT_SOCKET) -> str | None:
    """The socket that `local://` uses; None: it uses the ledger itself.

    That is `GPU_POOL_SOCKET`, else `default` if there is such a file. A state directory or simulated GPUs that the
    environment names come first.
    """
    env = os.environ if environ is None else environ
    if env.get("GPU_POOL_STATE_DIR", "").strip() or env.get("GPU_BACKEND", "").strip().lower().startswith("simulated"):
        return None
    # Without the variable this must cost next to nothing: every `gpu-pool run` asks.
    if env.get(VARIABLE, "").strip() and (chosen := Environment(env).get(VARIABLE, None, parse_socket)) is not None:
        return chosen
    return default if os.path.lexists(default) else None


def parse_socket(text: str, name: str = VARIABLE) -> str | None:
    """Raises a `ValueError` that says what was expected."""
    if not text.startswith("/") or text.endswith("/") or len(os.fsencode(text)) > LONGEST_PATH or "\0" in text:
        raise refused(name, f"an absolute path of a file, of at most {LONGEST_PATH} bytes", text)
    return text
