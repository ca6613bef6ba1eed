"""Disks that misbehave, put between SQLite and the real one: a process dies at a chosen write, or a write fails."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

#: Asked before and after every call that changes something on the disk: what is done, and to which file.
Watcher = Callable[[str, str, bool], None]


class WatchedFile(apsw.VFSFile):
    def __init__(self, filename: Any, flags: list[int], watch: Watcher) -> None:
        self._watch = watch
        self._name = os.fspath(filename.filename() if isinstance(filename, apsw.URIFilename) else filename or "")
        super().__init__("unix", filename, flags)

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802  # as SQLite calls it
        self._watched("write", super().xWrite, data, offset)

    def xSync(self, flags: int) -> None:  # noqa: N802
        self._watched("sync", super().xSync, flags)

    def xTruncate(self, newsize: int) -> None:  # noqa: N802
        self._watched("truncate", super().xTruncate, newsize)

    def _watched(self, what: str, call: Callable[..., None], *args: Any) -> None:
        self._watch(what, self._name, False)
        call(*args)
        self._watch(what, self._name, True)


class WatchedDisk(apsw.VFS):
    """What every ledger of this process is on, from now on."""

    def __init__(self, watch: Watcher) -> None:
        self._watch = watch
        super().__init__("watched", "unix", makedefault=True)

    def xOpen(self, name: Any, flags: list[int]) -> WatchedFile:  # noqa: N802
        return WatchedFile(name, flags, self._watch)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802
        self._watch("delete", filename, False)
        super().xDelete(filename, syncdir)
        self._watch("delete", filename, True)


class DiesAt:
    """Killed with -9 just before, or just after, the so manieth call."""

    def __init__(self, number: int, *, is_after: bool) -> None:
        self.seen = 0
        self._number = number
        self._is_after = is_after

    def __call__(self, _what: str, _name: str, is_done: bool) -> None:
        if not is_done:
            self.seen += 1
        if self.seen == self._number and is_done == self._is_after:
            os.kill(os.getpid(), signal.SIGKILL)


class Unsynced:
    """Which files have been written to and not synced since."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def __call__(self, what: str, name: str, is_done: bool) -> None:
        if what in ("write", "truncate"):
            self.files.add(name)
        elif is_done:
            self.files.discard(name)


class Fails:
    """While `with_error` is set, what is named in `calls` fails with it."""

    def __init__(self, *calls: str) -> None:
        self.calls = calls
        self.with_error: type[apsw.Error] | None = None
        self.failed = 0

    def __call__(self, what: str, _name: str, is_done: bool) -> None:
        if self.with_error is not None and what in self.calls and not is_done:
            self.failed += 1
            raise self.with_error("the disk failed")


@contextlib.contextmanager
def mounted(mount: Path, size: str = "256k") -> Iterator[Path]:
    """A disk so small that it can be filled."""
    mount.mkdir()
    done = subprocess.run(
        ["/bin/mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", mount], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("no right to mount a small disk")
    try:
        yield mount
    finally:
        subprocess.run(["/bin/umount", "-l", mount], check=True)


def fill(disk: Path) -> Path:
    """Until nothing more can be written; returns the file whose removal makes room again."""
    filler = disk / "filler"
    filler.write_bytes(b"")
    with contextlib.suppress(OSError), filler.open("ab", buffering=0) as growing:
        while True:
            growing.write(b"x" * 512)
    return filler
