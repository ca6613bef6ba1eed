"""The usage files beside a ledger: a line of JSON for each request that has ended. Rotated, so that they stay bounded.

A record is stored in the ledger with the transaction that ends the request. The next transaction of any process writes
it to the file and then removes it from the ledger. A crash between the two writes a line twice, never not at all;
readers count equal lines once.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.ledger.records import seconds_of
from gpu_worker_pool.state_directory import check_ordinary, share_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

#: A file that is larger gets a number, and a new one is begun.
ROTATE_BYTES: Final = 16 * 1024 * 1024
#: How many numbered ones are kept: about 400,000 records in all.
KEPT_FILES: Final = 10
#: Longer lines were not written by this program.
LONGEST_LINE: Final = 64 * 1024


def usage_path(ledger: Path) -> Path:
    """`usage-real-v1.jsonl` beside `ledger-real-v1.db`."""
    return ledger.with_name(f"usage-{ledger.stem.removeprefix('ledger-')}.jsonl")


class UsageFile:
    """Written within transactions of the ledger, so that one process writes at a time."""

    def __init__(self, path: Path, rotate_bytes: int = ROTATE_BYTES) -> None:
        self.path = path
        self._rotate_bytes = rotate_bytes

    def append(self, lines: Sequence[str]) -> None:
        """In one write, synced. Raises an `OSError`; then some lines may be there, and are written again later."""
        self._rotate()
        is_new = not self.path.exists()
        descriptor = _open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            if is_new:
                share_file(descriptor, self.path.parent)
            content = "".join(f"{line}\n" for line in lines).encode()
            if _is_cut_off(descriptor):
                content = b"\n" + content  # the disk was full, or a process was killed, in the middle of it
            if os.write(descriptor, content) < len(content):
                raise OSError(f"{self.path} could not be written to the end: is the disk full?")
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def _rotate(self) -> None:
        try:
            if self.path.stat().st_size < self._rotate_bytes:
                return
        except FileNotFoundError:
            return
        for number in range(KEPT_FILES - 1, 0, -1):
            older = _numbered(self.path, number)
            if older.exists():
                older.replace(_numbered(self.path, number + 1))
        self.path.replace(_numbered(self.path, 1))


def _open(path: Path, flags: int) -> int:
    """Open a file of a shared folder: links are not followed, pipes do not block. Raises an `OSError`."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        check_ordinary(descriptor, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _is_cut_off(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


@dataclass
class UsageRead:
    records: list[dict[str, Any]] = field(default_factory=list)
    #: Lines that are not records, and files that could not be read, with the reason.
    broken_lines: int = 0
    unreadable: list[str] = field(default_factory=list)


def read_usage(path: Path, is_wanted: Callable[[dict[str, Any]], bool] = lambda _: True) -> UsageRead:
    """All records of a ledger that are in its files, oldest first; `is_wanted` chooses among them."""
    found = UsageRead()
    seen: set[int] = set()
    for file in (*(_numbered(path, number) for number in range(KEPT_FILES, 0, -1)), path):
        try:
            for line in _lines_of(file):
                record = parse_record(line)
                if record is None:
                    found.broken_lines += 1
                elif (key := hash(line)) not in seen:
                    seen.add(key)
                    if is_wanted(record):
                        found.records.append(record)
        except FileNotFoundError:
            continue
        except OSError as error:
            found.unreadable.append(f"{file}: {error.strerror}")
    return found


def has_ended_after(record: dict[str, Any], begin: float) -> bool:
    ended = seconds_of(record["ended"])
    return ended is not None and ended >= begin


def _lines_of(file: Path) -> Iterator[bytes]:
    with os.fdopen(_open(file, os.O_RDONLY), "rb") as opened:
        while line := opened.readline(LONGEST_LINE):
            if line.strip():
                yield line


_TEXTS: Final = ("kind", "request", "account", "ended", "how")
_LEASE_TEXTS: Final = ("lease", "asked", "granted")
_LEASE_NUMBERS: Final = ("waited_seconds", "held_seconds", "gpu_seconds")


def parse_record(line: bytes | str) -> dict[str, Any] | None:
    """None if it is not a record: many users can write the file, and a write may have been cut off."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not all(isinstance(found.get(name), str) for name in _TEXTS):
        return None
    if not (found.get("label") is None or isinstance(found["label"], str)):
        return None
    if found["kind"] == "lease":
        is_whole = all(isinstance(found.get(name), str) for name in _LEASE_TEXTS) and all(
            _is_number(found.get(name)) for name in _LEASE_NUMBERS
        )
        gpus = found.get("gpus")
        if not is_whole or not isinstance(gpus, list) or not all(isinstance(gpu, str) for gpu in gpus):
            return None
        if not (found.get("idle_seconds") is None or _is_number(found["idle_seconds"])):
            return None
        if not _is_number(found.get("observed_seconds", 0.0)):
            return None
    found.setdefault("within", None)
    found.setdefault("idle_seconds", None)
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e12
