"""The manager of an executor: hands out its tasks to workers, and decides how many workers there are.

Everything runs in its thread, except what says otherwise.
"""

from __future__ import annotations

import logging
import math
import os
import selectors
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpu_worker_pool.errors import BrokenGPUWorkerError, GPUWorkerPoolError, WorkerTimeoutError
from gpu_worker_pool.workers import messages
from gpu_worker_pool.workers.tasks import copy_of
from gpu_worker_pool.workers.workforce import WorkerState, Workforce

if TYPE_CHECKING:
    from concurrent.futures import Future

    from gpu_worker_pool.workers.progress import TaskProgress
    from gpu_worker_pool.workers.tasks import Task
    from gpu_worker_pool.workers.workforce import Worker, WorkerSettings

logger: logging.Logger = logging.getLogger("gpu_worker_pool.workers")

#: The executor gives up after this many workers in a row have died before they were ready.
MOST_STILLBORN: Final = 5
#: How long to wait for the first answer of an endpoint, whatever `gpu_timeout` is.
FIRST_ANSWER_SECONDS: Final = 10.0


class Settings(NamedTuple):
    workers: WorkerSettings
    #: May be infinite, as may all numbers of seconds and of tasks.
    max_workers: float
    min_workers: int
    #: How long an idle worker keeps its GPU.
    idle_release: float
    gpu_timeout: float
    retries: int
    max_tasks_per_child: float


class Manager:
    """Holds no reference to its executor, so that an executor that is dropped can end."""

    def __init__(self, settings: Settings, progress: TaskProgress | None) -> None:
        self.settings = settings
        self.pid: int = os.getpid()
        #: Why no task can be run any more.
        self.broken: BaseException | None = None
        self._progress = progress
        #: Guards what other threads change, too: the tasks, what ends the executor, and the start of its thread.
        self._lock = threading.Lock()
        self._tasks: deque[Task] = deque()
        self._is_shutdown = self._is_interrupted = self._is_killed = False
        self._thread: threading.Thread | None = None
        self._wake_end, self._wakeup = socket.socketpair()
        self._wake_end.setblocking(False)
        self._wakeup.setblocking(False)
        self._is_woken = self._has_cancelled = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_end, selectors.EVENT_READ, self._on_wakeup)
        self._workers = Workforce(settings.workers, self._selector, self)
        self._stillborn = 0
        #: The most workers that can get a GPU, once a refusal has shown it.
        self._limit = math.inf
        self._was_interrupted = self._was_killed = self._is_idle_unwanted = False

    # --- for any thread ---

    def submit(self, task: Task) -> None:
        with self._lock:
            if self.broken is not None:
                raise copy_of(self.broken)
            if self._is_shutdown:
                raise RuntimeError("cannot schedule new tasks after shutdown")
            if self._progress is not None:
                self._progress.submitted(1)
            self._tasks.append(task)
            self._start_thread()
        task.future.add_done_callback(self._on_done)
        self.wake()

    def start(self) -> None:
        with self._lock:
            self._start_thread()

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gpu-pool executor", daemon=True)
            self._thread.start()

    def shutdown(self, *, cancel_futures: bool = False) -> None:
        """Accept no more tasks. Pending ones are finished, or with `cancel_futures` cancelled."""
        with self._lock:
            is_first = not self._is_shutdown
            self._is_shutdown = True
            cancelled = list(self._tasks) if cancel_futures else []
            if self._thread is None and is_first:
                self._close()
        for task in cancelled:
            task.future.cancel()
        self.wake()

    def interrupt(self) -> None:
        """Like Ctrl-C: running tasks get a `KeyboardInterrupt`."""
        self._is_interrupted = True
        self.shutdown(cancel_futures=True)

    def kill(self) -> None:
        """Kill the workers, whatever they are doing."""
        self._is_killed = True
        self.interrupt()

    def release_idle(self) -> None:
        """Make workers that are idle now give their GPUs back."""
        self._is_idle_unwanted = True
        self.wake()

    def join(self) -> None:
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    @property
    def is_over(self) -> bool:
        thread = self._thread
        return thread is None or not thread.is_alive()

    def wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            with suppress(OSError):  # full, or closed
                self._wakeup.send(b"\0")

    def _on_done(self, future: Future[Any]) -> None:
        if future.cancelled():
            self._has_cancelled = True
            self.wake()

    def forked(self) -> None:
        """In a forked child: nothing of this is its own."""
        self._workers.forked()
        for end in (self._wake_end, self._wakeup):
            end.close()

    # --- the thread ---

    def _run(self) -> None:
        try:
            while self._advance():
                for key, mask in self._selector.select(self._seconds_to_deadline()):
                    key.data(mask)
        except BaseException as error:  # a bug; no caller may wait for ever
            logger.exception("the executor has failed")
            self._break(GPUWorkerPoolError(f"the executor has failed: {error!r}"))
            for worker in self._workers:
                if worker.task is not None:
                    worker.task.fail(copy_of(self.broken or error))
        finally:
            # Its lease process ends what is left.
            self._workers.close()
            if self._progress is not None:
                self._progress.close()
            self._close()

    def _on_wakeup(self, _: int) -> None:
        self._is_woken = False
        with suppress(OSError):
            self._wake_end.recv(4096)

    def _close(self) -> None:
        self._selector.close()
        self._wake_end.close()
        self._wakeup.close()

    def _advance(self) -> bool:
        """Do what can be done now; False when everything is over."""
        workers = self._workers
        self._drop_cancelled()
        if self._is_interrupted and not self._was_interrupted:
            self._was_interrupted = True
            workers.interrupt()
        if self._is_killed and not self._was_killed:
            self._was_killed = True
            workers.kill()
        for worker in workers:
            if worker.state is WorkerState.IDLE and worker.is_connected:
                self._hand_out_to(worker)
        workers.send_due_signals()
        self._fail_what_waits_too_long()
        self._adjust_workers()
        if self._progress is not None:
            has_gpu = len(workers) - workers.count(WorkerState.WAITING)
            self._progress.show(workers.count(WorkerState.BUSY), has_gpu, workers.waiting_for)
        return bool(len(workers) or self._tasks) or not self._is_shutdown

    def _seconds_to_deadline(self) -> float | None:
        deadlines = [self._workers.next_signal_at]
        for worker in self._workers:
            if worker.state is WorkerState.WAITING:
                deadlines.append(self._deadline_of(worker))
            elif worker.state is WorkerState.IDLE and len(self._workers) > self.settings.min_workers:
                deadlines.append(worker.since + self.settings.idle_release)
        if self._progress is not None:
            deadlines.append(self._progress.next_show)
        first = min(deadlines)
        return None if math.isinf(first) else max(first - time.monotonic(), 0.0)

    def _deadline_of(self, waiting: Worker) -> float:
        first_answer = 0.0 if waiting.is_answered else FIRST_ANSWER_SECONDS  # its answer says why there is no GPU
        return waiting.since + max(self.settings.gpu_timeout, first_answer)

    # --- how many workers there are ---

    def _adjust_workers(self) -> None:
        is_ending = self._is_shutdown or self.broken is not None
        least = 0 if is_ending else self.settings.min_workers
        alive = len(self._workers) - self._workers.count(WorkerState.ENDING)
        waiting, starting = self._workers.count(WorkerState.WAITING), self._workers.count(WorkerState.STARTING)
        is_wanted = len(self._tasks) > waiting + starting or alive < least
        # One at a time waits in the queue: others who ask meanwhile are served in between.
        if is_wanted and waiting == 0 and alive < min(self.settings.max_workers, self._limit) and self.broken is None:
            self._start_worker()
            return
        for worker in self._workers:
            if alive > least and self._is_not_needed(worker, is_ending=is_ending):
                self._workers.tell_to_end(worker)
                alive -= 1
            elif worker.state is WorkerState.IDLE and worker.tasks_done >= self.settings.max_tasks_per_child:
                self._workers.tell_to_end(worker)  # another one takes its place
        self._is_idle_unwanted = False

    def _is_not_needed(self, worker: Worker, *, is_ending: bool) -> bool:
        if self._tasks:
            return False
        match worker.state:
            case WorkerState.WAITING:
                return True
            case WorkerState.STARTING:
                return is_ending
            case WorkerState.IDLE:
                is_idle_for_long = time.monotonic() >= worker.since + self.settings.idle_release
                return is_ending or is_idle_for_long or self._is_idle_unwanted
        return False

    def _start_worker(self) -> None:
        try:
            self._workers.start_one()
        except OSError as error:
            self._break(GPUWorkerPoolError(f"no worker process can be started: {error}"))

    # --- tasks ---

    def _drop_cancelled(self) -> None:
        if not self._has_cancelled:
            return
        self._has_cancelled = False
        with self._lock:
            cancelled = [task for task in self._tasks if task.future.cancelled()]
            self._tasks = deque(task for task in self._tasks if not task.future.cancelled())
        for task in cancelled:
            task.begin()
            self._finished_one()

    def _hand_out_to(self, worker: Worker) -> None:
        while self._tasks and worker.tasks_done < self.settings.max_tasks_per_child:
            with self._lock:
                task = self._tasks.popleft()
            if task.begin():
                worker.task = task
                worker.becomes(WorkerState.BUSY)
                worker.has_heard_interrupt = False
                self._workers.send(worker, messages.TASK, task.payload)
                return
            self._finished_one()

    def on_message(self, worker: Worker, kind: bytes, payload: bytes) -> None:
        task, worker.task = worker.task, None
        if task is None:
            return
        worker.tasks_done += 1
        worker.signals = []
        self._stillborn = 0
        if worker.state is WorkerState.BUSY:
            worker.becomes(WorkerState.IDLE)
            self._hand_out_to(worker)  # it need not wait for the callbacks of the future
        task.settle(kind, payload)
        self._finished_one()

    def _finished_one(self) -> None:
        if self._progress is not None:
            self._progress.finished(1)

    # --- workers that have ended ---

    def on_ended(self, worker: Worker, code: int) -> None:
        if worker.was_ready:
            self._stillborn = 0
        task, worker.task = worker.task, None
        if task is not None:
            self._try_again(task, worker.why_it_ended(code, f"while it ran {task.name}"))
        elif worker.state is WorkerState.ENDING:
            pass
        elif worker.was_ready:
            logger.warning("%s", worker.why_it_ended(code, "between two tasks"))
        elif worker.state is WorkerState.WAITING:
            if worker.failure is not None:
                self._not_granted(worker.failure)
        elif worker.failure is None:
            self._count_stillborn(worker.why_it_ended(code, "before its first task"))
        else:
            self._not_started(worker.failure)

    def _try_again(self, task: Task, why: str) -> None:
        if task.tries_left > 0 and self.broken is None and not self._is_interrupted:
            task.tries_left -= 1
            logger.warning("%s; the task is tried again", why)
            with self._lock:
                self._tasks.appendleft(task)
        else:
            task.fail(BrokenGPUWorkerError(why))
            self._finished_one()

    def _not_granted(self, failure: BaseException) -> None:
        if any(each.was_ready for each in self._workers):
            self._limit = len(self._workers)
            logger.warning("no further worker: %s", failure)
        else:
            self._break(failure)

    def _not_started(self, failure: BaseException) -> None:
        error = BrokenGPUWorkerError(
            f"a worker could not begin: what it imports, or its initializer, raised {type(failure).__name__}: {failure}"
        )
        error.__cause__ = failure.__cause__
        self._break(error)

    def _count_stillborn(self, why: str) -> None:
        self._stillborn += not any(each.was_ready for each in self._workers)
        if self._stillborn >= MOST_STILLBORN:
            self._break(BrokenGPUWorkerError(f"{why}, as did the {MOST_STILLBORN - 1} before it"))
        else:
            logger.warning("%s", why)

    # --- ends ---

    def _fail_what_waits_too_long(self) -> None:
        waiting = next((each for each in self._workers if each.state is WorkerState.WAITING), None)
        timeout = self.settings.gpu_timeout
        if waiting is None or len(self._workers) > 1 or time.monotonic() < self._deadline_of(waiting):
            return
        why = f": {self._workers.waiting_for}" if self._workers.waiting_for else ""
        waiting.since = math.inf  # once
        self._fail_all(WorkerTimeoutError(f"no GPU became free for a worker within {timeout:g} s{why}"))

    def _break(self, error: BaseException) -> None:
        with self._lock:
            self.broken = error
        self._fail_all(error)

    def _fail_all(self, error: BaseException) -> None:
        with self._lock:
            tasks, self._tasks = self._tasks, deque()
        for task in tasks:
            if task.begin():
                task.fail(copy_of(error))
            self._finished_one()
