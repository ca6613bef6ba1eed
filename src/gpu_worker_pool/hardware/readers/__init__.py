"""The protocol of readers, which ask the driver about the GPUs of this host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from gpu_worker_pool.hardware.samples import DriverAnswer


class Reader(Protocol):
    """Used by one thread; blocks as long as the driver takes.

    After a failed `read` the next one tries again, also with a replaced driver.
    """

    def read(self) -> DriverAnswer:
        """All GPUs of the host; raises `DriverError` if none could be read."""
        ...

    def interrupt(self) -> None:
        """Called from another thread: abort a running `read` if possible, and start no other."""
        ...

    def close(self) -> None:
        """Unload the driver library; `read` may still be called."""
        ...
