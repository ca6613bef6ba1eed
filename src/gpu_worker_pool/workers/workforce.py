"""The workers of an executor, as it knows them: their connections, their lease process, and the signals that end them.

It decides nothing about tasks. Belongs to the executor's thread.
"""

from __future__ import annotations

import logging
import math
import selectors
import signal
import time
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from gpu_worker_pool import errors
from gpu_worker_pool.errors import GPUWorkerPoolError
from gpu_worker_pool.workers import messages
from gpu_worker_pool.workers.lease_process import WorkerLeaseProcess
from gpu_worker_pool.workers.messages import WaitlessEnd
from gpu_worker_pool.workers.pickling import unpickled_exception

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gpu_worker_pool.workers.tasks import Task
    from gpu_worker_pool.workers.worker_spec import WorkerSpec

logger: logging.Logger = logging.getLogger("gpu_worker_pool.workers")

#: After an interrupt: time for the workers to hear of it themselves, to end their tasks, and to end after SIGTERM.
HEARD_SECONDS: Final = 0.3
INTERRUPT_SECONDS: Final = 30.0
TERMINATE_SECONDS: Final = 5.0
#: Time for a worker without a task to end by itself.
END_SECONDS: Final = 30.0


class WorkerSettings(NamedTuple):
    spec: WorkerSpec
    #: For the environment of the lease process.
    variables: Mapping[str, str | None]
    #: The first message to a worker.
    preparation: bytes


class WorkerState(Enum):
    #: It waits for a GPU.
    WAITING = "waiting"
    #: It has a GPU and is importing its modules.
    STARTING = "starting"
    IDLE = "idle"
    BUSY = "busy"
    #: It is being ended.
    ENDING = "ending"


class Worker:
    def __init__(self, number: int, end: WaitlessEnd) -> None:
        self.number = number
        self.end = end
        self.state: WorkerState = WorkerState.WAITING
        #: When that began.
        self.since: float = time.monotonic()
        self.pid = 0
        self.gpus: list[int] = []
        self.task: Task | None = None
        self.tasks_done = 0
        self.was_ready = self.has_heard_interrupt = False
        #: Whether any endpoint has answered its request.
        self.is_answered = False
        self.is_connected = True
        #: Why it cannot be used, in its own words or those of its lease process.
        self.failure: BaseException | None = None
        #: Why it lost its lease.
        self.lost = ""
        #: When to send which signal, if it has not ended before.
        self.signals: list[tuple[float, int]] = []

    def becomes(self, state: WorkerState) -> None:
        self.state, self.since = state, time.monotonic()

    def why_it_ended(self, code: int, when: str) -> str:
        """`code`: negative for a signal."""
        plural = "s" if len(self.gpus) > 1 else ""
        where = f", GPU{plural} {', '.join(map(str, self.gpus))}" if self.gpus else ""
        shown = f"the worker (pid {self.pid}{where})" if self.pid else "a worker that waited for a GPU"
        if self.lost:
            return f"{shown} was ended {when}, because it lost its GPU: {self.lost}"
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
            hint = ": by someone, or by the kernel because memory ran out" if code == -signal.SIGKILL else ""
            return f"{shown} was killed {when} (signal {name}{hint})"
        return f"{shown} ended with status {code} {when}"


class Listener(Protocol):
    def on_message(self, worker: Worker, kind: bytes, payload: bytes) -> None:
        """Of a task."""

    def on_ended(self, worker: Worker, code: int) -> None:
        """It is no longer among the workers."""


class Workforce:
    def __init__(self, settings: WorkerSettings, selector: selectors.BaseSelector, listener: Listener) -> None:
        """A selected key's data is to be called with its events."""
        self._settings = settings
        self._selector = selector
        self._listener = listener
        self._lease_process: WorkerLeaseProcess | None = None
        #: By number.
        self._workers: dict[int, Worker] = {}
        self._numbers = 0
        #: Why the worker that waits for a GPU has none yet.
        self.waiting_for: str = ""

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def __len__(self) -> int:
        return len(self._workers)

    def count(self, *states: WorkerState) -> int:
        return sum(worker.state in states for worker in self._workers.values())

    # --- their beginning and their end ---

    def start_one(self) -> None:
        """Raises an `OSError` if no process can be started."""
        self._numbers += 1
        if self._lease_process is None:
            self._lease_process = WorkerLeaseProcess(self._settings.spec, self._settings.variables)
            self._selector.register(self._lease_process.channel, selectors.EVENT_READ, self._hear)
        worker = Worker(self._numbers, WaitlessEnd(self._lease_process.start_worker(self._numbers)))
        self._workers[worker.number] = worker
        self.send(worker, messages.PREPARE, self._settings.preparation)

    def send(self, worker: Worker, kind: bytes, payload: bytes) -> None:
        worker.end.send(kind, payload)
        self._watch(worker)

    def tell_to_end(self, worker: Worker) -> None:
        if worker.state is WorkerState.WAITING and self._lease_process is not None:
            self._lease_process.send("unwanted", worker=worker.number)
        worker.becomes(WorkerState.ENDING)
        begin = worker.since + (END_SECONDS if worker.was_ready else 0.0)  # else it has begun nothing
        worker.signals = [(begin, signal.SIGTERM), (begin + TERMINATE_SECONDS, signal.SIGKILL)]
        self._disconnect(worker)  # which it sees as the end

    def interrupt(self) -> None:
        """Those in the foreground of a terminal have got Ctrl-C, too; a second one would end what they do about it."""
        now = time.monotonic()
        for worker in self:
            if worker.state is WorkerState.BUSY:
                worker.signals = [
                    (now + HEARD_SECONDS, signal.SIGINT),
                    (now + INTERRUPT_SECONDS, signal.SIGTERM),
                    (now + INTERRUPT_SECONDS + TERMINATE_SECONDS, signal.SIGKILL),
                ]

    def kill(self) -> None:
        for worker in self:
            if worker.state is WorkerState.WAITING:
                self.tell_to_end(worker)
            worker.signals = [(0.0, signal.SIGKILL)]

    def send_due_signals(self) -> None:
        now = time.monotonic()
        for worker in self:
            while worker.signals and now >= worker.signals[0][0]:
                _, number = worker.signals.pop(0)
                if number == signal.SIGINT and worker.has_heard_interrupt:
                    continue
                if self._lease_process is not None:
                    self._lease_process.send("signal", worker=worker.number, signal=int(number))

    @property
    def next_signal_at(self) -> float:
        return min((worker.signals[0][0] for worker in self if worker.signals), default=math.inf)

    def close(self) -> None:
        """After the last one has ended: every GPU is given back."""
        if self._lease_process is not None:
            self._lease_process.end()
            self._lease_process = None

    def forked(self) -> None:
        """In a forked child: nothing of this is its own."""
        for worker in self:
            worker.end.close()
        if self._lease_process is not None:
            self._lease_process.forked()

    # --- what workers say ---

    def _watch(self, worker: Worker) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.end.is_sending else 0)
        known = self._selector.get_map().get(worker.end)
        if known is None:
            self._selector.register(worker.end, wanted, lambda mask: self._on_ready(worker, mask))
        elif known.events != wanted:
            self._selector.modify(worker.end, wanted, known.data)

    def _disconnect(self, worker: Worker) -> None:
        if worker.is_connected:
            worker.is_connected = False
            self._selector.unregister(worker.end)
            worker.end.close()

    def _on_ready(self, worker: Worker, mask: int) -> None:
        if not worker.is_connected:
            return
        if mask & selectors.EVENT_WRITE:
            worker.end.flush()
            self._watch(worker)
        if mask & selectors.EVENT_READ:
            self._read(worker)

    def _read(self, worker: Worker) -> None:
        received, is_open = worker.end.receive()
        for kind, payload in received:
            if kind == messages.READY:
                worker.was_ready = True
                worker.becomes(WorkerState.IDLE)
            elif kind == messages.UNUSABLE:
                worker.failure = unpickled_exception(payload)
            elif kind == messages.INTERRUPTED:
                worker.has_heard_interrupt = True
            else:
                self._listener.on_message(worker, kind, payload)
        if not is_open:
            self._disconnect(worker)  # its lease process says how it ended

    # --- what their lease process says ---

    def _hear(self, _: int) -> None:
        assert self._lease_process is not None
        received = self._lease_process.channel.receive()
        if received is None:
            self._lease_process_is_gone()
            return
        for message in received:
            if message["kind"] == "log":
                logging.getLogger(message["name"]).log(message["level"], "%s", message["text"])
            elif (worker := self._workers.get(message["worker"])) is not None:
                self._hear_of(worker, message)

    def _hear_of(self, worker: Worker, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "waiting":
                worker.is_answered = True
                if message["text"] != self.waiting_for:
                    self.waiting_for = message["text"]
                    logger.info("waiting for a GPU: %s", self.waiting_for)
            case "granted":
                worker.pid, worker.gpus = message["pid"], message["gpus"]
                self.waiting_for = ""
                if worker.state is WorkerState.WAITING:
                    worker.becomes(WorkerState.STARTING)
            case "failed":
                worker.failure = _error_of(message)
            case "lost":
                worker.lost = message["text"]
            case "ended":
                self._ended(worker, message["code"])

    def _ended(self, worker: Worker, code: int) -> None:
        if worker.is_connected:
            self._read(worker)  # its last result may still be there
        self._disconnect(worker)
        del self._workers[worker.number]
        if worker.state is WorkerState.WAITING:
            self.waiting_for = ""
        self._listener.on_ended(worker, code)

    def _lease_process_is_gone(self) -> None:
        assert self._lease_process is not None
        self._selector.unregister(self._lease_process.channel)
        self._lease_process.reap()
        self._lease_process = None
        for worker in self:
            worker.lost = worker.lost or "the process that held its lease has ended; was it killed?"
            self._ended(worker, -signal.SIGKILL)


def _error_of(message: dict[str, Any]) -> Exception:
    kind: Any = getattr(errors, message["error"], GPUWorkerPoolError)
    error: Exception = (ValueError if message["error"] == "ValueError" else kind)(message["text"])
    if message["reasons"]:
        error.__dict__["reasons"] = tuple(message["reasons"])
    return error
