"""Keys from the environment, and the lease tokens that `gpu-pool` stores for this user."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.environment import Environment, parse_bool

if TYPE_CHECKING:
    from gpu_worker_pool.core.events import Request

#: Variables that are shown to nobody, and passed on to no other host.
SECRETS: Final = frozenset({"GPU_POOL_API_KEY", "GPU_POOL_API_KEYS", "GPU_POOL_ADMIN_KEY", "GPU_POOL_ADMIN_KEYS"})
#: Older tokens belong to leases that were never released, as after a crash: a holder refreshes its token.
_OLD_SECONDS: Final = 7 * 24 * 3600.0


def allows_insecure_key(environment: Environment | None = None) -> bool:
    return (environment or Environment()).get("GPU_POOL_ALLOW_INSECURE_KEY", default=False, parse=parse_bool)


def admin_key() -> str | None:
    return Environment().text("GPU_POOL_ADMIN_KEY") or None


class Tokens:
    """The tokens of this user's requests at servers, so that one `gpu-pool` can end what another has begun.

    They are stored in the user's private folder, not in the one that all programs of the host share.
    """

    def __init__(self, folder: Path | None = None) -> None:
        base = os.environ.get("XDG_STATE_HOME", "").strip()
        usual = (Path(base) if base else Path.home() / ".local" / "state") / "gpu-pool" / "requests"
        self._folder = folder or usual

    # A lease can be held without a stored token, so failures here are ignored.

    def remember(self, request: Request) -> None:
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self._path(request.request_id), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
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
        return self._folder / f"request-{name}"

    def _forget_old(self) -> None:
        oldest = time.time() - _OLD_SECONDS
        for entry in self._folder.iterdir():
            with suppress(OSError):  # another process may have removed it
                if entry.lstat().st_mtime < oldest:
                    entry.unlink()
