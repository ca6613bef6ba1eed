"""A user's callback in a thread of its own: however long it takes, and whatever it raises, nobody else waits for it."""

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
    """`on_lease_lost`, called in the order of the losses. `tell` and `end` are for the thread of the `LeaseThread`."""

    def __init__(self, callback: Callable[[GPUAssignment], object]) -> None:
        self._callback = callback
        #: None says that no more will come.
        self._untold: SimpleQueue[GPUAssignment | None] = SimpleQueue()
        #: From the first loss on: most programs never have one.
        self._thread: threading.Thread | None = None

    def tell(self, assignment: GPUAssignment) -> None:
        self._untold.put(assignment)
        if self._thread is None:
            # A daemon: a callback that never returns must not keep a program from ending.
            self._thread = threading.Thread(target=self._run, name="gpu-pool on_lease_lost", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """The thread ends when all are told. Nobody waits for that, since a callback may be what stops the client."""
        self._untold.put(None)

    def _run(self) -> None:
        while (assignment := self._untold.get()) is not None:
            try:
                self._callback(assignment)
            except BaseException:  # also what would end a thread: the next loss must be told
                logger.exception("on_lease_lost failed for %s", assignment.worker_id)
