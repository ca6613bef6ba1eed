"""Calls the user's `on_lease_lost` in its own thread, so that a slow or failing callback delays nothing else."""

from __future__ import annotations

import logging
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_worker_pool.models import GPUAssignment

logger = logging.getLogger("gpu_worker_pool.leases.callbacks")


class LossCallback:
    """Calls it in the order of the losses. Only the lease thread uses `tell` and `end`."""

    def __init__(self, callback: Callable[[GPUAssignment], object]) -> None:
        self._callback = callback
        #: None ends the thread.
        self._queue: SimpleQueue[GPUAssignment | None] = SimpleQueue()
        #: Started at the first loss: most programs never have one.
        self._thread: threading.Thread | None = None

    def tell(self, assignment: GPUAssignment) -> None:
        self._queue.put(assignment)
        if self._thread is None:
            # A daemon: a callback that never returns must not keep the program running.
            self._thread = threading.Thread(target=self._run, name="gpu-pool on_lease_lost", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """The thread ends after the last callback. Do not wait for it: a callback may stop the client."""
        self._queue.put(None)

    def _run(self) -> None:
        while (assignment := self._queue.get()) is not None:
            try:
                self._callback(assignment)
            except BaseException:  # also SystemExit: the next loss must be reported
                logger.exception("on_lease_lost failed for %s", assignment.worker_id)
