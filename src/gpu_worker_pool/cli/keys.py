"""Keys and tokens that the command line sends to servers: whose, and to whom they may be sent."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.config import is_private_url
from gpu_worker_pool.environment import Environment, parse_bool
from gpu_worker_pool.errors import ServiceRefusedError

if TYPE_CHECKING:
    from gpu_worker_pool.leases.values import LeaseAsk

#: Those of leases that nobody gave back, as when the host went down; whoever holds one says so all the time.
_OLD_SECONDS: Final = 7 * 24 * 3600.0


def allows_insecure_key(environment: Environment | None = None) -> bool:
    return (environment or Environment()).get("GPU_POOL_ALLOW_INSECURE_KEY", default=False, parse=parse_bool)


def admin_key() -> str | None:
    return Environment().text("GPU_POOL_ADMIN_KEY") or None


def bearer(key: str, url: str) -> str:
    """Raises a `ServiceRefusedError` rather than show a key to a network."""
    if not (is_private_url(url) or allows_insecure_key()):
        raise ServiceRefusedError(
            "a key is not sent over plain http to another host, where others can read it: use https://, or, in a "
            "network you trust, set GPU_POOL_ALLOW_INSECURE_KEY=1"
        )
    return f"Bearer {key}"


class Tokens:
    """The secrets of this user's requests at servers, so that another `gpu-pool` may end what one has begun.

    In a folder of the user's own, whatever folder the host's programs share.
    """

    def __init__(self, folder: Path | None = None) -> None:
        base = os.environ.get("XDG_STATE_HOME", "").strip()
        usual = (Path(base) if base else Path.home() / ".local" / "state") / "gpu-pool" / "requests"
        self._folder = folder or usual

    # Without them a lease can be held all the same: so what goes wrong here is no error.

    def keep(self, ask: LeaseAsk) -> None:
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self._path(ask.request_id), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(ask.token)
            self._forget_old()

    def refresh(self, ask: LeaseAsk) -> None:
        """It is still needed."""
        with suppress(OSError):
            os.utime(self._path(ask.request_id))

    def forget(self, ask: LeaseAsk) -> None:
        with suppress(OSError):
            self._path(ask.request_id).unlink()

    def of(self, request_id: str) -> str | None:
        try:
            return self._path(request_id).read_text()
        except OSError:
            return None

    def _path(self, request_id: str) -> Path:
        # A server says it: it must not lead elsewhere.
        name = "".join(char if char.isalnum() or char in "._-" else "_" for char in request_id)
        return self._folder / f"request-{name}"

    def _forget_old(self) -> None:
        oldest = time.time() - _OLD_SECONDS
        for entry in self._folder.iterdir():
            with suppress(OSError):  # others tidy up as well
                if entry.lstat().st_mtime < oldest:
                    entry.unlink()
