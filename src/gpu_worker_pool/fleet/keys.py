"""The fleet's key, from a file: candidates and hosts prove to each other that they know it, and it is never sent."""

from __future__ import annotations

import hmac
import os
from pathlib import Path
from typing import Final

LEAST_CHARACTERS: Final = 16
#: A file of keys is never this large.
MOST_BYTES: Final = 64 * 1024
MOST_KEYS: Final = 8


def read_keys(path: str) -> tuple[bytes, ...]:
    """One key per line: the first is the one in use, and the others are still accepted while keys are changed.

    Raises a `ValueError` that says what is wrong with the file, and never what is in it.
    """
    try:
        with Path(path).open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(
            f"the fleet's key cannot be read from {path}: {(error.strerror or str(error)).lower()}"
        ) from None
    if len(text) > MOST_BYTES:
        raise ValueError(f"{path} is too large for a file of fleet keys: it must hold one key per line")
    keys = tuple(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))
    if not keys:
        raise ValueError(f"{path} is empty: write a key of {LEAST_CHARACTERS} characters or more into it")
    if any(len(key) < LEAST_CHARACTERS for key in keys):
        raise ValueError(
            f"a key in {path} is shorter than {LEAST_CHARACTERS} characters: head -c 32 /dev/urandom | base64 makes one"
        )
    if len(keys) > MOST_KEYS:
        raise ValueError(f"{path} holds more than {MOST_KEYS} keys: remove old ones")
    return keys


class FleetKeys:
    """The keys of a file, which is read again when it changes; a file that became unusable leaves the last ones."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._keys = read_keys(path)
        self._seen = self._stamp()
        #: Why the file cannot be used now.
        self.problem: str | None = None

    def current(self) -> tuple[bytes, ...]:
        if (stamp := self._stamp()) != self._seen:
            try:
                self._keys, self.problem = read_keys(self.path), None
            except ValueError as error:
                self.problem = str(error)
            self._seen = stamp
        return self._keys

    def _stamp(self) -> tuple[int, ...]:
        try:
            found = os.stat(self.path)  # noqa: PTH116  # by every handshake
        except OSError:
            return ()
        return (found.st_ino, found.st_mtime_ns, found.st_size)


def id_of(key: bytes) -> str:
    """Tells keys apart without revealing them."""
    return hmac.new(key, b"gpu-pool fleet: which key", "sha256").hexdigest()[:16]


def proof_of(key: bytes, role: str, nonces: str) -> str:
    """A proof that `role` knows the key; the nonces of both sides tie it to one connection."""
    return hmac.new(key, f"gpu-pool fleet: {role} {nonces}".encode(), "sha256").hexdigest()
