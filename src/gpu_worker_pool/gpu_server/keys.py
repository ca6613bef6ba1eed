"""The keys of the lease API: how they are written, and the file of keys, which is read again when it changes.

A key is written `name:key` or `key`. Requests are counted by the name, and others see it.
"""

from __future__ import annotations

import logging
import re
import stat
import time
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from gpu_worker_pool.core.accounts import account_of_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gpu_worker_pool.gpu_server.settings import ServerSettings

logger: logging.Logger = logging.getLogger(__name__)

#: Shorter ones can be guessed.
SHORTEST_KEY: Final = 16
#: How often to check whether the file has changed.
LOOK_SECONDS: Final = 1.0
#: Larger files hold something else.
LARGEST_FILE_BYTES: Final = 1024 * 1024

_KEY: Final = re.compile(r"[!-~]+")
_NAMED: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,31}):([!-~]*)")
_COMMENT: Final = re.compile(r"#.*")


class Key(NamedTuple):
    #: Keys are compared by digests, which all have the same length.
    digest: bytes
    account: str
    is_admin: bool


def digest_of(key: bytes) -> bytes:
    return sha256(key).digest()


def parse_keys(name: str, text: str, complain: Callable[[str], object]) -> tuple[str, ...]:
    """The usable keys as they are written; of the others only the number is reported, as they may be secrets."""
    words = list(dict.fromkeys(re.split(r"[\s,]+", text.strip(" \t\r\n,"))))
    keys = [word for word in words if word]
    good = tuple(key for key in keys if _is_usable(key))
    if len(good) < len(keys):
        complain(
            f"{name}: {len(keys) - len(good)} of {len(keys)} keys cannot be used (expected {SHORTEST_KEY} or more "
            "ASCII characters, with or without a name: before them, commas or blanks between keys): ignoring them"
        )
    return good


def _is_usable(entry: str) -> bool:
    named = _NAMED.fullmatch(entry)
    key = entry if named is None else named[2]
    return len(key) >= SHORTEST_KEY and _KEY.fullmatch(key) is not None


def keys_of(entries: Iterable[str], *, is_admin: bool) -> list[Key]:
    found = []
    for entry in entries:
        whole = digest_of(entry.encode())
        named = _NAMED.fullmatch(entry)
        if named is None:
            found.append(Key(whole, account_of_key(None, whole.hex()), is_admin))
            continue
        account = account_of_key(named[1], "")
        found.append(Key(digest_of(named[2].encode()), account, is_admin))
        # Keys had no names at first, and old ones may contain a colon: these still work when sent as a whole.
        found.append(Key(whole, account, is_admin))
    return found


def _read(path: Path) -> str:
    with path.open("rb") as file:
        found = file.read(LARGEST_FILE_BYTES + 1)
    if len(found) > LARGEST_FILE_BYTES:
        raise OSError(f"it has more than {LARGEST_FILE_BYTES} bytes")
    return found.decode()


class KeyRing:
    """All keys of a server. Belongs to one thread."""

    def __init__(self, settings: ServerSettings, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        # The last one counts: an administrator's key also works as an ordinary key.
        self._admin = keys_of(settings.gpu_pool_admin_keys, is_admin=True)
        self._api = keys_of(settings.gpu_pool_api_keys, is_admin=False)
        self._path = None if settings.gpu_pool_api_keys_file is None else Path(settings.gpu_pool_api_keys_file)
        self._seen: tuple[int, ...] | None = None
        self._look_at = now()
        self._complaint = ""
        self._keys = (*self._api, *self._admin)
        self.current()

    def current(self) -> tuple[Key, ...]:
        """The current keys. If the file cannot be read, its previous keys stay."""
        if self._path is not None and self._now() >= self._look_at:
            self._look_at = self._now() + LOOK_SECONDS
            self._look(self._path)
        return self._keys

    def _look(self, path: Path) -> None:
        try:
            found = path.stat()
            seen = (found.st_ino, found.st_size, found.st_mtime_ns)
            if seen == self._seen:
                return
            text = _read(path)
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self._complain(f"GPU_POOL_API_KEYS_FILE: {path} cannot be read ({why}): its keys stay as they were")
            return
        self._complaint, is_first = "", self._seen is None
        self._seen = seen
        if found.st_mode & stat.S_IROTH:
            logger.warning("GPU_POOL_API_KEYS_FILE: all users can read %s: chmod o-rwx %s", path, path)
        entries = parse_keys(f"GPU_POOL_API_KEYS_FILE, {path}", _COMMENT.sub("", text), self._complain)
        self._keys = (*self._api, *keys_of(entries, is_admin=False), *self._admin)
        if not is_first:
            logger.info("%s was read again: it has %d keys", path, len(entries))

    def _complain(self, message: str) -> None:
        if message != self._complaint:
            self._complaint = message
            logger.error("%s", message)
