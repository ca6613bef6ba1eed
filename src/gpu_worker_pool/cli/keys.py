"""The keys and tokens that the command line sends to servers."""

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

#: Tokens of leases that were never released, as when the host crashed. Tokens in use are refreshed.
_OLD_SECONDS: Final = 7 * 24 * 3600.0


def allows_insecure_key(environment: Environment | None = None) -> bool:
    return (environment or Environment()).get("GPU_POOL_ALLOW_INSECURE_KEY", default=False, parse=parse_bool)


def admin_key() -> str | None:
    return Environment().text("GPU_POOL_ADMIN_KEY") or None


def bearer(key: str, url: str) -> str:
    """Raises a `ServiceRefusedError` if others could read the key on the network."""
    if not (is_private_url(url) or allows_insecure_key()):
        raise ServiceRefusedError(
            "keys are not sent over plain http to another host, where others can read them: use https://, or "
            "export GPU_POOL_ALLOW_INSECURE_KEY=1 in a network you trust"
        )
    return f"Bearer {key}"


class Tokens:
    """The tokens of this user's requests, so that `gpu-pool release` can end what `gpu-pool run` began.

    They are in the user's own state folder, never in the shared state directory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        base = os.environ.get("XDG_STATE_HOME", "").strip()
        usual = (Path(base) if base else Path.home() / ".local" / "state") / "gpu-pool" / "requests"
        self._folder = folder or usual

    # A lease can be held without them, so errors here are ignored.

    def keep(self, ask: LeaseAsk) -> None:
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self._path(ask.request_id), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(ask.token)
            self._forget_old()

    def refresh(self, ask: LeaseAsk) -> None:
        """Mark it as still needed."""
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
        # The id may come from a server: it must not leave the folder.
        name = "".join(char if char.isalnum() or char in "._-" else "_" for char in request_id)
        return self._folder / f"request-{name}"

    def _forget_old(self) -> None:
        oldest = time.time() - _OLD_SECONDS
        for entry in self._folder.iterdir():
            with suppress(OSError):  # another process cleans up as well
                if entry.lstat().st_mtime < oldest:
                    entry.unlink()
