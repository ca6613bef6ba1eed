"""The client for people who do not write async code: the same names, blocking, to be called from any thread.

One thread in the background runs an event loop with the async client in it; what is called here is done there. This
file waits, wakes and cleans up; it decides nothing about GPUs.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from inspect import iscoroutinefunction
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, Self, TypeVar
from weakref import finalize, ref

from gpu_worker_pool.client import GPUWorkerPoolClient as AsyncClient
from gpu_worker_pool.errors import AlreadyStartedError, NotStartedError, PoolStoppedError, ServiceUnavailableError
from gpu_worker_pool.models import GPUAssignment

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
    from types import TracebackType

    from gpu_worker_pool.core import Explanation
    from gpu_worker_pool.core.wishes import Policy
    from gpu_worker_pool.models import GPUId, GPUStats, PoolStatus

__all__ = ["GPUContextManager", "GPUWorkerPoolClient", "gpu_worker_pool_client"]

P = ParamSpec("P")
T = TypeVar("T")

#: A thread that waits looks up so often: only a signal to the main thread wakes it, and no other interrupt does.
LOOK_UP_SECONDS = 1.0
#: At exit a client that nobody stopped is given so long to clean up.
EXIT_SECONDS = 5.0


class _Call:
    """Something that the loop does for a thread, and how that thread learns what came of it.

    Belongs to the loop from when it is posted until it is over, and then to the thread.
    """

    __slots__ = ("error", "is_withdrawn", "news", "task", "value", "work")

    def __init__(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        #: Called in the loop's thread.
        self.work = work
        #: None says that it is over; a future asks the thread for something.
        self.news: SimpleQueue[asyncio.Future[Exception | None] | None] = SimpleQueue()
        self.task: asyncio.Task[Any] | None = None
        self.is_withdrawn = False
        self.value: Any = None
        self.error: BaseException | None = None

    def wait(self) -> asyncio.Future[Exception | None] | None:
        while True:
            try:
                return self.news.get(timeout=LOOK_UP_SECONDS)
            except Empty:
                continue

    def fail(self) -> NoReturn:
        assert self.error is not None  # whoever calls this has looked
        try:
            raise self.error
        finally:
            self.error = None  # which knows this frame, and must not be known by it


class _Executor(ThreadPoolExecutor):
    """Looks up host names, also for threads that go on when the main thread has ended and Python's own refuses to."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            future: Future[T] = Future()

            def work() -> None:
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(fn(*args, **kwargs))
                    except BaseException as error:
                        future.set_exception(error)

            threading.Thread(target=work, name="gpu-worker-pool-late", daemon=True).start()
            return future


class _LoopThread:
    """A client from its start to its stop: the thread, its event loop, and the calls that are open."""

    def __init__(self, client: AsyncClient, owner: object) -> None:
        self._client = client
        self.pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._is_stop_wanted = asyncio.Event()
        self._is_exiting = False
        #: Whether calls are taken from threads, and whether those that were taken are begun.
        self._is_open = self._begins_calls = True
        self.is_over = False
        #: Whatever threads wait for. No lock: a signal's handler may call while its own thread is in the middle of it.
        self._calls: set[_Call] = set()
        #: By worker id: what was handed out and not released.
        self._held: dict[str, ref[GPUAssignment]] = {}
        #: Dropped without a stop, it ends as well, a moment later; at exit there is more to do.
        self._owner_dropped = finalize(owner, self.want_stop)
        self._owner_dropped.atexit = False
        # A daemon: a client that nobody stopped must not keep a program from ending.
        self._thread = threading.Thread(target=self._run, name="gpu-worker-pool", daemon=True)

    # --- for any thread ---

    def start(self) -> None:
        if not self.is_over:  # by a signal's handler that stopped it
            _running.add(self)
            self._thread.start()

    @property
    def is_current(self) -> bool:
        return threading.get_ident() == self._thread.ident

    def post(self, call: _Call) -> None:
        """Calls are begun in the order in which they are posted."""
        # First known, then asked for: so `_close` finds it, or we find that it is closed.
        self._calls.add(call)
        if self._is_open:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._begin, call)
                return
        self._calls.discard(call)
        raise NotStartedError("the client is not started: it has been stopped")

    def look(self, look: Callable[[], T]) -> T:
        async def looked() -> T:
            # A task like everything else, so that it sees what was posted before.
            return look()

        return self.do(looked)

    def do(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Done to its end, also if the thread that asked is interrupted meanwhile."""
        call = _Call(work)
        self.post(call)
        call.wait()
        if call.error is not None:
            call.fail()
        result: T = call.value
        return result

    def request(self, call: _Call) -> GPUAssignment:
        """Withdrawn, and given back if it was granted, should the thread that asks be interrupted."""
        try:
            self.post(call)
            call.wait()
        except BaseException:
            try:
                self.withdraw(call)
            finally:
                self.withdraw(call)  # again, which is harmless: the next interrupt may have hit the first one
            raise
        # Interrupts come after calls into C and where functions begin: none from here to the caller's next step.
        if call.error is None:
            result: GPUAssignment = call.value
            return result
        return call.fail()

    def releasing(self, assignment: GPUAssignment) -> _Call:
        async def release() -> None:
            await self._client.release_gpu(assignment)
            self._held.pop(assignment.worker_id, None)

        return _Call(release)

    def withdraw(self, call: _Call) -> None:
        self._tell(self._withdraw, call)

    def answer(self, turn: asyncio.Future[Exception | None], error: Exception | None) -> None:
        self._tell(_set, turn, error)

    def _tell(self, function: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # the loop is closed, and everything has ended
            self._loop.call_soon_threadsafe(function, *args)

    def want_stop(self) -> None:
        """Returns at once, and takes no lock: garbage is collected in any thread and at any moment."""
        if self.pid == os.getpid():
            self._tell(self._is_stop_wanted.set)

    def stop(self) -> None:
        self.want_stop()
        if self._thread.ident is None:  # an interrupt came before it was started
            self._close()
            self._loop.close()
        else:
            self._thread.join()

    def exit(self) -> None:
        """The program ends: whoever still waits is a daemon, and left where it is, as the interpreter does."""
        if self.pid == os.getpid():
            self._is_exiting = True
            self.want_stop()
            self._thread.join(EXIT_SECONDS)

    # --- in the loop's own thread ---

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._live())
        except RuntimeError:
            # From Python 3.12 on no thread is started at exit, not even the one that waits for resolvers of names.
            if not self._is_exiting:
                raise
        finally:
            self._close()

    async def _live(self) -> None:
        self._loop.set_default_executor(_Executor(thread_name_prefix="gpu-worker-pool-names"))
        await self._is_stop_wanted.wait()
        self._is_open = False
        await asyncio.sleep(0)  # so that whatever was posted is begun
        if self._is_exiting:
            for call in list(self._calls):
                call.news = SimpleQueue()
            await self._cancel_calls()
            # They end with the program, which needs no warning.
            for held in list(self._held.values()):
                if (assignment := held()) is not None:
                    with suppress(Exception):
                        await self._client.release_gpu(assignment)
        await self._client.stop()
        for _ in range(2):  # requests end by themselves now: the answer comes, the error is raised
            await asyncio.sleep(0)
        await self._cancel_calls()
        await self._client.stop()  # again, if what was left was its start

    async def _cancel_calls(self) -> None:
        self._begins_calls = False
        left = [call.task for call in list(self._calls) if call.task is not None]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _close(self) -> None:
        """Whatever happened: nobody waits for a loop that does not run."""
        self._is_open = False
        for call in list(self._calls):
            self._end(call, PoolStoppedError())
        self._owner_dropped.detach()
        self.is_over = True
        _running.discard(self)

    def _begin(self, call: _Call) -> None:
        if not self._begins_calls:
            self._end(call, PoolStoppedError())
            return
        try:
            # As it is, without a coroutine around it: the pool must not take its end for the end of who asked.
            call.task = self._loop.create_task(call.work())
        except Exception as error:  # of arguments, before there is a coroutine
            self._end(call, error)
        else:
            call.task.add_done_callback(partial(self._task_done, call))

    def _task_done(self, call: _Call, task: asyncio.Task[Any]) -> None:
        error = PoolStoppedError() if task.cancelled() else task.exception()
        if error is None:
            call.value = task.result()
            if isinstance(call.value, GPUAssignment):
                self._held[call.value.worker_id] = ref(call.value)
        self._end(call, error)
        if call.is_withdrawn:
            self._give_back(call)

    def _end(self, call: _Call, error: BaseException | None) -> None:
        call.error = error
        # It dies here, where no signal comes: in the main thread one would be lost in what Python does with dead tasks.
        call.task = None
        self._calls.discard(call)
        call.news.put(None)

    def _withdraw(self, call: _Call) -> None:
        call.is_withdrawn = True
        if call.task is not None:
            call.task.cancel()
        else:  # it is over, or the interrupt came before it was posted
            self._calls.discard(call)
            self._give_back(call)

    def _give_back(self, call: _Call) -> None:
        assignment, call.value = call.value, None
        if isinstance(assignment, GPUAssignment):
            release = self.releasing(assignment)
            self._calls.add(release)
            self._begin(release)


def _set(turn: asyncio.Future[Exception | None], error: Exception | None) -> None:
    if not turn.done():
        turn.set_result(error)


#: What is to be stopped at exit.
_running: set[_LoopThread] = set()


@atexit.register
def _exit() -> None:
    for running in list(_running):
        running.exit()


class GPUWorkerPoolClient:
    """Hands out GPUs to threads, first come first served; use it in a `with`, or `start` and `stop` it.

    Arguments, results and errors are those of the async client. Every method may be called from any thread, and from
    many at once, but not from a thread that runs an event loop, which would stand still: that is what the async
    client is for. A process that was forked makes a client of its own.
    """

    def __init__(
        self,
        service_endpoint: str | None = None,
        service_endpoints: str | Iterable[str] | None = None,
        load_balancing_strategy: str | None = None,
        memory_threshold: float | None = None,
        utilization_threshold: float | None = None,
        polling_interval: float | None = None,
        worker_timeout: float = 300.0,
        request_timeout: float = 30.0,
        *,
        endpoint_timeout: float | None = None,
        endpoint_max_retries: int | None = None,
        endpoint_health_check_interval: float | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._client = AsyncClient(
            service_endpoint,
            service_endpoints,
            load_balancing_strategy,
            memory_threshold,
            utilization_threshold,
            polling_interval,
            worker_timeout,
            request_timeout,
            endpoint_timeout=endpoint_timeout,
            endpoint_max_retries=endpoint_max_retries,
            endpoint_health_check_interval=endpoint_health_check_interval,
            environ=environ,
        )
        #: For starts and stops at the same moment; nobody keeps it for long.
        self._starting = threading.RLock()
        self._running: _LoopThread | None = None

    # --- life ---

    def start(self) -> None:
        """Begin to ask the endpoints. Succeeds also while none of them answers: requests wait until one does."""
        self._check_thread()
        self._check_process()
        running = None
        try:
            with self._starting:
                self._check_not_started()
                running = self._running = _LoopThread(self._client, self)
                running.start()
            running.do(self._client.start)
        except BaseException:
            if running is not None:
                self._stop(running)
            raise
        if not self._client.is_running:
            raise PoolStoppedError("the client was stopped while it started")

    def stop(self) -> None:
        """End every request that waits, and leave nothing behind. Does nothing to a client that is not started."""
        running = self._running
        if running is None or running.pid != os.getpid():
            return
        self._check_thread()
        with self._starting:
            running = self._running
        if running is not None:
            self._stop(running)

    def _stop(self, running: _LoopThread) -> None:
        running.stop()
        with self._starting:
            if self._running is running:
                self._running = None

    @property
    def is_running(self) -> bool:
        running = self._running
        return running is not None and running.pid == os.getpid() and self._client.is_running

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    # --- GPUs ---

    def request_gpu(
        self,
        timeout: float | None = None,
        *,
        count: int = 1,
        memory_mb: float | None = None,
        share: bool = False,
        min_free_memory_mb: float | None = None,
        gpu_model: str | None = None,
        only: Iterable[int | str] | None = None,
        exclude: Iterable[int | str] | None = None,
        priority: int = 0,
        policy: Policy = "thresholds",
        label: str | None = None,
    ) -> GPUAssignment:
        """Wait for a GPU, or several of one host, and have it until `release_gpu`.

        Raises `WorkerTimeoutError` after `timeout` seconds (the client's `worker_timeout` if None), which is a
        `ServiceUnavailableError` too if no endpoint answered; `ImpossibleRequestError` at once if no GPU can ever
        serve it; `PoolStoppedError` if another thread stops the client meanwhile. Whoever is interrupted, as by
        Ctrl-C, waits no longer and has nothing.
        """
        request = partial(
            self._client.request_gpu,
            timeout,
            count=count,
            memory_mb=memory_mb,
            share=share,
            min_free_memory_mb=min_free_memory_mb,
            gpu_model=gpu_model,
            only=only,
            exclude=exclude,
            priority=priority,
            policy=policy,
            label=label,
        )
        running = self._usable()
        return running.request(_Call(request))

    def release_gpu(self, assignment: GPUAssignment) -> None:
        """Give a GPU back. Twice is harmless; `StaleAssignmentError` if it was taken back before."""
        running = self._usable()
        release = running.releasing(assignment)
        try:
            running.post(release)
            release.wait()
        except NotStartedError:
            raise
        except BaseException:
            # Interrupted, perhaps before it was posted.
            with suppress(NotStartedError):
                running.post(_Call(release.work))
            raise
        if release.error is not None:
            release.fail()

    def explain(self, **wishes: Any) -> Explanation:
        """Why somebody who asked for this now would wait: GPU by GPU, with the numbers."""
        return self._look(partial(self._client.explain, **wishes))

    # --- looking ---

    def is_multi_endpoint_mode(self) -> bool:
        return self._client.is_multi_endpoint_mode()

    def get_pool_status(self) -> PoolStatus:
        """A `MultiEndpointPoolStatus` with many endpoints."""
        return self._look(self._client.get_pool_status)

    def get_endpoints_info(self) -> list[dict[str, Any]] | None:
        """What is known of each endpoint; None where the client is not started or has one endpoint only."""
        self._check_process()
        try:
            return self._look(self._client.get_endpoints_info)
        except NotStartedError:
            return None

    def get_detailed_metrics(self) -> dict[str, Any]:
        return self._look(self._client.get_detailed_metrics)

    def get_health(self) -> dict[str, Any]:
        """`status` is healthy, degraded (some endpoints do not answer) or unhealthy (none does)."""
        return self._look(self._client.get_health)

    def on_stats_update(self, callback: Callable[[GPUStats], object]) -> Callable[[], None]:
        """Call `callback` with every statistics that arrive, of any endpoint; what is returned ends that.

        It is called in the client's own thread, and holds up everybody for as long as it takes. It may look at the
        client, but not wait for it.
        """
        return self._client.on_stats_update(callback)

    # --- errors and recovery ---

    def get_error_recovery_status(self) -> dict[str, Any]:
        return self._look(self._client.get_error_recovery_status)

    def trigger_endpoint_recovery(self, endpoint_id: str) -> bool:
        """Ask a sick endpoint now instead of when its breaker says so; False if there is none of this name."""
        return self._usable().do(partial(self._client.trigger_endpoint_recovery, endpoint_id))

    def queue_request_for_retry(self, request_func: Callable[[], T]) -> T:
        """Call it once an endpoint answers; again, when one does, if it found the service unavailable after all.

        It is called in the thread that calls this.
        """
        if iscoroutinefunction(request_func):
            raise TypeError("request_func is called, not awaited: give a plain function to the blocking client")
        running = self._usable()

        async def ask_the_thread() -> None:
            turn: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
            call.news.put(turn)
            error = await turn
            if error is not None:
                raise error

        call = _Call(partial(self._client.queue_request_for_retry, ask_the_thread))
        results: list[T] = []
        try:
            running.post(call)
            while (turn := call.wait()) is not None:
                try:
                    results.append(request_func())
                except ServiceUnavailableError as error:
                    running.answer(turn, error)
                else:
                    running.answer(turn, None)
        except BaseException:
            running.withdraw(call)
            raise
        if not results:
            call.fail()
        return results[0]

    def print_error_recovery_summary(self) -> None:
        self._look(self._client.print_error_recovery_summary)

    # --- endpoints that come and go ---

    def add_endpoint(self, entry: str) -> str:
        """Use the GPUs of one more server, `URL` or `name=URL`; returns its id."""
        return self._usable().do(partial(self._client.add_endpoint, entry))

    def remove_endpoint(self, endpoint_id: str) -> None:
        """Use its GPUs no more; what is assigned there stays so until it is released."""
        self._usable().do(partial(self._client.remove_endpoint, endpoint_id))

    # --- whether and where it may be called ---

    def _look(self, look: Callable[[], T]) -> T:
        running = self._running
        if running is not None and running.is_current:
            return look()  # from a callback
        return self._usable().look(look)

    def _usable(self) -> _LoopThread:
        self._check_thread()
        self._check_process()
        if self._running is None:
            raise NotStartedError("the client is not started: call start() or use it as a context manager")
        return self._running

    def _check_not_started(self) -> None:
        if self._running is not None and not self._running.is_over:
            raise AlreadyStartedError("the client is already started")

    def _check_process(self) -> None:
        running = self._running
        if running is not None and running.pid != os.getpid():
            raise NotStartedError(
                f"the client was started in process {running.pid}, of which this one, {os.getpid()}, is a fork without "
                "the client's thread: make a new client in this process"
            )

    def _check_thread(self) -> None:
        """A blocking call in a thread that runs an event loop stops that loop, and everything in it."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        if self._running is not None and self._running.is_current:
            raise RuntimeError("a callback is called in the client's own thread, which would wait for itself")
        raise RuntimeError(
            "this thread runs an event loop, which a blocking call would stop: use the async client here, "
            "gpu_worker_pool.GPUWorkerPoolClient, or call this in a thread, as by asyncio.to_thread"
        )


class GPUContextManager:
    """`with GPUContextManager(client) as gpu_id:`: a GPU for as long as the block runs.

    Yields the GPU's number, with many endpoints its global id; for `count=` above 1 the tuple of all. One for each
    block: it is not shared by threads.
    """

    def __init__(self, client: GPUWorkerPoolClient, timeout: float | None = None, **wishes: Any) -> None:
        self._client = client
        self._timeout = timeout
        self._wishes = wishes
        self._call: _Call | None = None
        self.assignment: GPUAssignment | None = None

    def __enter__(self) -> Any:
        if self._call is not None:
            raise RuntimeError("this GPUContextManager is in use: make one for each block")
        client, running = self._client._client, self._client._usable()  # noqa: SLF001  # its other half
        call = self._call = _Call(partial(client.request_gpu, self._timeout, **self._wishes))
        try:
            assignment = self.assignment = running.request(call)
            ids: tuple[GPUId, ...] = assignment.gpu_ids
            return ids if len(ids) > 1 else assignment.gpu_id
        except BaseException:
            self._call = self.assignment = None
            running.withdraw(call)  # also what was granted already: nobody else will give it back
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self.assignment is not None:
                self._client.release_gpu(self.assignment)
        finally:
            self._call = self.assignment = None


@contextmanager
def gpu_worker_pool_client(**kwargs: Any) -> Iterator[GPUWorkerPoolClient]:
    """A started client, stopped at the end of the block."""
    with GPUWorkerPoolClient(**kwargs) as client:
        yield client
