"""The output of jobs: collected in files while they run, written in one piece when they have ended."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Final, Literal

from gpu_worker_pool.cli.exits import CommandError

Stream = Literal["out", "err"]

_STREAMS: Final[dict[Stream, int]] = {"out": 1, "err": 2}
_PIECE_BYTES: Final = 1 << 18


class Outputs:
    """`log_folder`: keeps the files, as `7.out` and `7.err`; None: they are not kept."""

    def __init__(self, log_folder: Path | None) -> None:
        self._folder = log_folder
        #: Files of jobs that have ended and left no process behind; the next jobs write there.
        self._unused: list[int] = []
        if log_folder is not None:
            try:
                log_folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise _no_file(log_folder, error) from None

    @property
    def shown_folder(self) -> str:
        return str(self._folder or tempfile.gettempdir())

    def open(self, name: str) -> tuple[int, int]:
        """The files that a job writes its stdout and its stderr to. Raises a `CommandError`."""
        out = self._open(name, "out")
        try:
            return out, self._open(name, "err")
        except BaseException:
            os.close(out)
            raise

    def _open(self, name: str, stream: Stream) -> int:
        if self._folder is None and self._unused:
            return self._unused.pop()
        path = None if self._folder is None else self._folder / f"{name}.{stream}"
        try:
            if path is not None:
                return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666)
            # Unnamed: nothing is left of it when we are killed.
            descriptor, temporary = tempfile.mkstemp(prefix="gpu-pool-map-")
            Path(temporary).unlink()
            os.set_inheritable(descriptor, False)
        except OSError as error:
            raise _no_file(path or Path(tempfile.gettempdir()), error) from None
        return descriptor

    def write_out(self, files: tuple[int, int]) -> None:
        """Copy them to our own stdout and stderr. Raises `OSError` if these cannot be written."""
        for descriptor, target in zip(files, _STREAMS.values(), strict=True):
            position, size = 0, os.fstat(descriptor).st_size
            while position < size and (piece := os.pread(descriptor, min(size - position, _PIECE_BYTES), position)):
                position += len(piece)
                view = memoryview(piece)
                while view:
                    view = view[os.write(target, view) :]

    def is_disk_full(self, files: tuple[int, int]) -> bool:
        """Whether a job may have failed to write."""
        found = os.fstatvfs(files[0])
        return found.f_blocks > 0 and found.f_bavail == 0

    def close(self, files: tuple[int, int], *, is_reusable: bool) -> None:
        for descriptor in files:
            if is_reusable and self._folder is None:
                os.ftruncate(descriptor, 0)
                os.lseek(descriptor, 0, os.SEEK_SET)
                self._unused.append(descriptor)
            else:
                os.close(descriptor)


def _no_file(path: Path, error: OSError) -> CommandError:
    advice: dict[int | None, str] = {
        errno.ENOSPC: ": free some space, or choose another folder by --log-dir",
        errno.EACCES: ": choose a folder that you may write to by --log-dir",
    }
    reason = (error.strerror or str(error)).lower()
    return CommandError(f"the output of jobs cannot be stored in {path} ({reason}){advice.get(error.errno, '')}")
