"""Cuts a connection whose answer is overdue: the kernel ends it only if the other host is gone, not if it hangs."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

#: How late a connection may be cut.
_LOOK_SECONDS: Final = 0.2


class OverdueCutter:
    """One thread that checks at intervals: a timer per guarded call would cost more than most of the calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._guarded: tuple[int, float] | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        #: Whether what was guarded last was cut.
        self.has_cut: bool = False

    @contextmanager
    def limit(self, file_number: int, seconds: float) -> Iterator[None]:
        """Within it, the socket with this number is shut down after `seconds`, and blocked calls on it fail."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="gpu-pool-overdue", daemon=True)
            self._thread.start()
        self.has_cut = False
        with self._lock:
            self._guarded = file_number, time.monotonic() + seconds
        try:
            yield
        finally:
            # Under the lock, so that the number cannot be another connection's by the time it is cut.
            with self._lock:
                self._guarded = None

    def close(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._stopping.wait(_LOOK_SECONDS):
            with self._lock:
                if self._guarded is None or time.monotonic() < self._guarded[1]:
                    continue
                self.has_cut = True
                with suppress(OSError), socket.socket(fileno=os.dup(self._guarded[0])) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
                self._guarded = None
