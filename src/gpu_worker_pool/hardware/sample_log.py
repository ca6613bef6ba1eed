"""Shares the host's samples through one file: the process that reads the driver appends, all others follow.

So a hundred programs do not run a hundred `nvidia-smi`, and all workers of a server have the same readings and history.
The file is rewritten in place, never replaced: in a shared folder a user may not replace the file of another. It is
never synced: after a crash of the host its content is worthless.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool import forks
from gpu_worker_pool.core.readings import ProcessReading
from gpu_worker_pool.hardware.processes import boot_id, is_stopped, process_identity
from gpu_worker_pool.hardware.samples import DriverAnswer, DriverFailure, GPUReading, HostSample, MIGReading
from gpu_worker_pool.state_directory import open_shared

if TYPE_CHECKING:
    from pathlib import Path

#: Part of the file's name, so that versions with different formats do not mix.
_FORMAT: Final = 3
_READ_BYTES: Final = 1 << 20
_IDENTITY_BYTES: Final = 128
_LINE_OPENS: Final = b'{"number":'


class SampleLog:
    """The file as one process uses it, in one thread."""

    def __init__(self, directory: Path, hardware: str, *, keep: int) -> None:
        """`hardware` separates real and simulated GPUs; `keep`: the number of samples for later processes."""
        self._path = directory / f"readings-{hardware}-v{_FORMAT}.jsonl"
        #: The largest value of all writers counts.
        self._keep = keep
        self._boot_id = boot_id()
        self._identity = json.dumps(process_identity()).encode().ljust(_IDENTITY_BYTES)
        self._last_number = 0
        self._file = self._lock = self._relief = -1
        self._locked = -1
        self._open()
        forks.watch(self)

    def _forked(self) -> None:
        """Close it: a forked child would keep holding the lock after its parent's death."""
        self.close()

    def _open(self) -> None:
        self.close()
        #: How far the file was read, and its generation; None if it must be rewritten first.
        self._offset = 0
        self._generation: int | None = None
        self._lines_in_file = 0
        self._file = open_shared(self._path)
        self._lock = open_shared(self._path.with_suffix(".lock"))
        self._relief = open_shared(self._path.with_suffix(".relief"))

    def close(self) -> None:
        for descriptor in (self._file, self._lock, self._relief):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._lock = self._relief = self._locked = -1

    # --- the lock: only its holder reads the driver; it ends with the process ---

    def try_lock(self) -> bool:
        if any(os.fstat(descriptor).st_nlink == 0 for descriptor in (self._file, self._lock, self._relief)):
            self._open()  # the files were deleted: our lock would exclude no process
        if _try_flock(self._lock):
            self._locked = self._lock
            os.pwrite(self._lock, self._identity, 0)
        # A stopped program (Ctrl-Z) that holds the lock must not block all others.
        elif is_stopped(_parse(os.pread(self._lock, _IDENTITY_BYTES, 0))) and _try_flock(self._relief):
            self._locked = self._relief
        return self._locked >= 0

    def unlock(self) -> None:
        if self._locked >= 0:
            fcntl.flock(self._locked, fcntl.LOCK_UN)
            self._locked = -1

    # --- reading ---

    def follow(self) -> list[HostSample]:
        """The samples that were appended since the last call, oldest first."""
        header = _parse(os.pread(self._file, 256, 0).partition(b"\n")[0])
        generation, keep = header.get("generation"), header.get("keep")
        if header.get("boot") != self._boot_id or type(generation) is not int or type(keep) is not int:
            self._generation = None
            return []
        self._keep = max(self._keep, keep)
        if generation != self._generation:
            self._generation = generation
            self._offset = self._lines_in_file = 0
        found = []
        for line in self._new_lines():
            sample = _decode(line)
            if sample is None:
                continue  # the header, or half a line of a failed write
            self._lines_in_file += 1
            # A rewritten file begins with samples we have read already.
            if sample.number > self._last_number:
                self._last_number = sample.number
                found.append(sample)
        return found

    def _new_lines(self) -> list[bytes]:
        whole, newline, _ = self._read_from(self._offset).rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return whole.split(b"\n") if whole else []

    def _read_from(self, offset: int) -> bytes:
        chunks = []
        while chunk := os.pread(self._file, _READ_BYTES, offset):
            chunks.append(chunk)
            offset += len(chunk)
        return b"".join(chunks)

    # --- writing: only with the lock, and after `follow` ---

    def append(self, sample: HostSample) -> None:
        line = _encode(sample)
        self._last_number = sample.number
        if self._generation is None:
            self._rewrite([line])
            return
        if self._lines_in_file >= 2 * self._keep:
            # Skip the header and half lines by a cheap test: a request may be waiting for this sample.
            kept = [line for line in self._read_from(0).split(b"\n") if line[:10] == _LINE_OPENS and line[-2:] == b"}}"]
            self._rewrite([*kept[1 - self._keep :], line] if self._keep > 1 else [line])
            return
        end = os.fstat(self._file).st_size
        # After half a line, the newline turns it into a line that readers skip.
        self._write((b"\n" if end > self._offset else b"") + line + b"\n", end)
        self._lines_in_file += 1

    def _rewrite(self, lines: list[bytes]) -> None:
        generation = self._last_number  # grows, so it is unique
        header = json.dumps({"boot": self._boot_id, "generation": generation, "keep": self._keep}).encode()
        self._generation = None
        os.ftruncate(self._file, 0)
        self._write(b"\n".join([header, *lines, b""]), 0)
        self._generation = generation
        self._lines_in_file = len(lines)

    def _write(self, content: bytes, offset: int) -> None:
        written = os.pwrite(self._file, content, offset)
        if written < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._offset = offset + written


def _try_flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# --- lines ---


def _parse(line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return entry if isinstance(entry, dict) else {}


def _encode(sample: HostSample) -> bytes:
    entry = _fields_of(sample)
    answer = entry.pop("answer")
    entry["answer" if isinstance(answer, DriverAnswer) else "failure"] = answer
    return _ENCODER.encode(entry).encode()


def _fields_of(value: Any) -> dict[str, Any]:
    kind: Any = type(value)
    return {name: getattr(value, name) for name in _names_of(kind)}


@cache
def _names_of(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


#: `asdict` would be too slow: a request may be waiting for this sample.
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=_fields_of)


def _decode(line: bytes) -> HostSample | None:
    entry = _parse(line)
    answer: DriverAnswer | DriverFailure
    try:
        if "failure" in entry:
            answer = DriverFailure(**entry.pop("failure"))
        else:
            found = entry.pop("answer")
            answer = DriverAnswer(**found | {"gpus": tuple(_decode_gpu(gpu) for gpu in found["gpus"])})
        sample = HostSample(**entry, answer=answer)
    except (KeyError, TypeError):
        return None
    # Check what we calculate with; the rest is only displayed.
    numbers = (sample.number, sample.failed_total, sample.begun_at, sample.took_seconds)
    is_sane = all(type(number) in {int, float} and 0 <= number < math.inf for number in numbers)
    return sample if is_sane and isinstance(sample.timestamp, str) else None


def _decode_gpu(gpu: dict[str, Any]) -> GPUReading:
    devices = tuple(MIGReading(**mig | _decode_processes(mig)) for mig in gpu["mig_devices"])
    distances = tuple(gpu["distances"])
    return GPUReading(**gpu | _decode_processes(gpu) | {"mig_devices": devices, "distances": distances})


def _decode_processes(device: dict[str, Any]) -> dict[str, tuple[ProcessReading, ...] | None]:
    return {
        name: None if device[name] is None else tuple(ProcessReading(**process) for process in device[name])
        for name in ("processes", "graphics")
    }
