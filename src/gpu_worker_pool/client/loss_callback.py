"""Calls the user's `on_lease_lost` or `on_yield_asked` in its own thread: a slow or failing one delays nothing else."""

from __future__ import annotations

import logging
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_worker_pool.models import GPUAssignment

logger: logging.Logger = logging.getLogger("gpu_worker_pool.leases.callbacks")


class LeaseCallback:
    """Calls it in the order of what happened. Only the lease thread uses `tell` and `end`."""

    def __init__(self, callback: Callable[[GPUAssignment], object], name: str = "on_lease_lost") -> None:
        self._callback = callback
        self._name = name
        #: None ends the thread.
        self._queue: SimpleQueue[GPUAssignment | None] = SimpleQueue()
        #: Started when it is first needed: most programs never need it.
        self._thread: threading.Thread | None = None

    def tell(self, assignment: GPUAssignment) -> None:
        self._queue.put(assignment)
        if self._thread is None:
            # A daemon: a callback that never returns must not keep the program running.
            self._thread = threading.Thread(target=self._run, name=f"gpu-pool {self._name}", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """The thread ends after the last callback. Do not wait for it: a callback may stop the client."""
        self._queue.put(None)

    def _run(self) -> None:
        while (assignment := self._queue.get()) is not None:
            try:
                self._callback(assignment)
            except BaseException:  # also SystemExit: the next loss must be reported
                logger.exception("%s failed for %s", self._name, assignment.worker_id)
