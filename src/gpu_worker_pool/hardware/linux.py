"""Linux calls that the standard library lacks: signalfd, and prctl for orphans."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import signal
    from collections.abc import Iterable

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
#: `struct signalfd_siginfo` begins with the signal number, an errno, the code and the sender's pid.
_SIGNAL_INFO: Final = struct.Struct("=IiiI112x")
_SIGNAL_SET_BYTES: Final = 128

_libc = ctypes.CDLL(None, use_errno=True)


class SignalInfo(NamedTuple):
    number: int
    #: Positive if the kernel sent it, as for Ctrl-C at a terminal.
    code: int
    #: The sender, if a process sent it.
    pid: int

    @property
    def is_from_kernel(self) -> bool:
        return self.code > 0


class SignalQueue:
    """Signals as a readable file. They must be blocked in all threads while it is used."""

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        bits = sum(1 << (number - 1) for number in signals).to_bytes(_SIGNAL_SET_BYTES, "little")
        self._descriptor = _checked(_libc.signalfd(-1, bits, os.O_CLOEXEC | os.O_NONBLOCK))

    def fileno(self) -> int:
        return self._descriptor

    def read(self) -> list[SignalInfo]:
        try:
            read = os.read(self._descriptor, _SIGNAL_INFO.size * 32)
        except BlockingIOError:
            return []
        return [SignalInfo(number, code, pid) for number, _, code, pid in _SIGNAL_INFO.iter_unpack(read)]


def die_with_parent(number: signal.Signals) -> None:
    """The kernel sends this process the signal when the thread that forked it ends."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0))


def adopt_orphans() -> None:
    """Orphaned descendants become our children, so that we see what the command left running."""
    _checked(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
