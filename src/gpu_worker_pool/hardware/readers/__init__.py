"""Readers: three ways to ask what the GPUs of this host do, behind one protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from gpu_worker_pool.hardware.samples import DriverAnswer


class Reader(Protocol):
    """Asks the driver, in the one thread it is called from; blocks for as long as the driver takes.

    A failed `read` leaves the reader usable: the next one tries anew, also after the driver was replaced.
    """

    def read(self) -> DriverAnswer:
        """All GPUs of the host; raises `DriverError` where none of them could be asked."""
        ...

    def interrupt(self) -> None:
        """Called from another thread: end what `read` waits for, where it can be ended, and start nothing more."""
        ...

    def close(self) -> None:
        """Let go of the driver; `read` may still be called."""
        ...
