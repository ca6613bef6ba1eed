"""The lease tokens that are stored for this user, so that another program of theirs can end a lease of a server."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.environment import Environment, parse_bool
from gpu_worker_pool.state_directory import make_private, own_directory

if TYPE_CHECKING:
    from pathlib import Path

    from gpu_worker_pool.core.events import Request

#: Older tokens belong to leases that were never released, as after a crash: a holder refreshes its token.
_OLD_SECONDS: Final = 7 * 24 * 3600.0
_PREFIX: Final = "request-"


def allows_insecure_key(environment: Environment | None = None) -> bool:
    return (environment or Environment()).get("GPU_POOL_ALLOW_INSECURE_KEY", default=False, parse=parse_bool)


class Tokens:
    """The tokens of this user's requests at servers, so that one program can end what another has begun.

    They are stored in the user's private folder, not in the one that all programs of the host share.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or own_directory() / "requests"

    # A lease can be held without a stored token, so failures here are ignored.

    def remember(self, request: Request) -> None:
        with suppress(OSError):
            make_private(self._folder)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            descriptor = os.open(self._path(request.request_id), flags, 0o600)
            os.fchmod(descriptor, 0o600)  # before the token is in it, whoever made the file
            with os.fdopen(descriptor, "w") as file:
                file.write(request.owner)
            self._forget_old()

    def refresh(self, request: Request) -> None:
        """Mark it as still needed."""
        with suppress(OSError):
            os.utime(self._path(request.request_id))

    def forget(self, request: Request) -> None:
        with suppress(OSError):
            self._path(request.request_id).unlink()

    def of(self, request_id: str) -> str | None:
        try:
            return self._path(request_id).read_text()
        except OSError:
            return None

    def _path(self, request_id: str) -> Path:
        # The id comes from a server and must not lead to another folder.
        name = "".join(char if char.isalnum() or char in "._-" else "_" for char in request_id)
        return self._folder / f"{_PREFIX}{name}"

    def _forget_old(self) -> None:
        oldest = time.time() - _OLD_SECONDS
        # Only what is named like ours: where HOME is another user's, this may be a link that leads anywhere.
        for entry in self._folder.glob(f"{_PREFIX}*"):
            with suppress(OSError):  # another process may have removed it
                if entry.lstat().st_mtime < oldest:
                    entry.unlink()
