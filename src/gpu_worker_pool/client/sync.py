"""The blocking client: the same names as the async client, callable from any thread.

A background thread runs an event loop with the async client; every call here is executed there. This file waits, wakes
and cleans up; it makes no decisions about GPUs.
"""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import contextmanager, suppress
from functools import partial
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, cast, overload

from gpu_worker_pool.client.client import GPUWorkerPoolClient as AsyncClient
from gpu_worker_pool.client.loop_thread import LoopCall, LoopThread
from gpu_worker_pool.errors import (
    AlreadyStartedError,
    NotStartedError,
    PoolStoppedError,
    ServiceUnavailableError,
    StaleAssignmentError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from types import TracebackType

    from gpu_worker_pool.core import Explanation
    from gpu_worker_pool.core.requirements import Policy
    from gpu_worker_pool.models import GPUAssignment, GPUId, GPUStats, PoolStatus

__all__ = ["GPUContextManager", "GPUWorkerPoolClient", "gpu_worker_pool_client"]

T = TypeVar("T")
#: What the block gets: the id of its GPU, or a tuple of several ids.
Got = TypeVar("Got")


class GPUWorkerPoolClient:
    """Hands out GPUs to threads, first come first served; use it in a `with`, or `start` and `stop` it.

    Arguments, results and errors are those of the async client. Every method may be called from any thread, and from
    many at once, but not from a thread that runs an event loop, because it would block the loop: use the async client
    there. A forked process must create its own client.
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
        coordination: str | None = None,
        lease_ttl: float | None = None,
        gpu_names: str | None = None,
        api_key: str | None = None,
        allow_insecure_key: bool = False,
        on_lease_lost: Callable[[GPUAssignment], object] | None = None,
        on_yield_asked: Callable[[GPUAssignment], object] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        # The async client has the same arguments.
        self._client = AsyncClient(**{name: value for name, value in locals().items() if name != "self"})
        #: Guards concurrent starts and stops; held only briefly.
        self._starting = threading.RLock()
        self._running: LoopThread | None = None

    # --- start and stop ---

    def start(self) -> None:
        """Begin to poll the endpoints. Succeeds even if none answers: requests then wait until one does."""
        self._check_thread()
        self._check_process()
        running = None
        try:
            with self._starting:
                self._check_not_started()
                running = self._running = LoopThread(self._client, self)
                running.start()
            running.do(self._client.start)
        except BaseException:
            if running is not None:
                self._stop(running)
            raise
        if not self._client.is_running:
            raise PoolStoppedError("the client was stopped while it started")

    def stop(self) -> None:
        """End every waiting request and clean up. Does nothing if the client is not started."""
        running = self._running
        if running is None or running.pid != os.getpid():
            return
        self._check_thread()
        with self._starting:
            running = self._running
        if running is not None:
            self._stop(running)

    def _stop(self, running: LoopThread) -> None:
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
        expected_seconds: float | None = None,
        max_seconds: float | None = None,
    ) -> GPUAssignment:
        """Wait for a GPU, or several of one host, and hold it until `release_gpu`.

        Raises `WorkerTimeoutError` after `timeout` seconds (the client's `worker_timeout` if None), which is a
        `ServiceUnavailableError` too if no endpoint answered; `ImpossibleRequestError` at once if no GPU can ever
        serve it; `PoolStoppedError` if another thread stops the client meanwhile. An interrupt, such as Ctrl-C,
        cancels the request.
        """
        arguments = {name: value for name, value in locals().items() if name != "self"}
        return self._usable().request(LoopCall(partial(self._client.request_gpu, **arguments)))

    def release_gpu(self, assignment: GPUAssignment) -> None:
        """Release a GPU. Twice is harmless; `StaleAssignmentError` if the assignment was already lost."""
        running = self._usable()
        try:
            running.do(partial(running.release, assignment))
        except Exception:
            raise
        except BaseException:
            running.give_back(assignment)  # interrupted, perhaps before the call was posted; twice is harmless
            raise

    def explain(self, **requirements: Any) -> Explanation:
        """Why such a request would wait now: GPU by GPU, with the numbers."""
        return self._look(partial(self._client.explain, **requirements))

    # --- status ---

    def is_multi_endpoint_mode(self) -> bool:
        return self._client.is_multi_endpoint_mode()

    def get_pool_status(self) -> PoolStatus:
        """A `MultiEndpointPoolStatus` with many endpoints."""
        return self._look(self._client.get_pool_status)

    def get_endpoints_info(self) -> list[dict[str, Any]] | None:
        """One dict per endpoint; None if the client is not started or has only one endpoint."""
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
        """Call `callback` with new statistics of any endpoint; returns a function that unsubscribes.

        It runs in the client's own thread and blocks the client meanwhile. It may read the client's status, but not
        make calls that wait.
        """
        return self._client.on_stats_update(callback)

    # --- errors and recovery ---

    def get_error_recovery_status(self) -> dict[str, Any]:
        return self._look(self._client.get_error_recovery_status)

    def trigger_endpoint_recovery(self, endpoint_id: str) -> bool:
        """Poll a failed endpoint now instead of waiting for its breaker; False if the id is unknown."""
        return self._usable().do(partial(self._client.trigger_endpoint_recovery, endpoint_id))

    def queue_request_for_retry(self, request_func: Callable[[], T]) -> T:
        """Call `request_func` once an endpoint answers; again if it raises `ServiceUnavailableError`.

        It runs in the calling thread.
        """
        if iscoroutinefunction(request_func):
            raise TypeError("request_func must be a plain function: the blocking client cannot await it")
        running = self._usable()

        async def ask_the_thread() -> None:
            turn: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
            call.news.put(turn)
            error = await turn
            if error is not None:
                raise error

        call = LoopCall(partial(self._client.queue_request_for_retry, ask_the_thread))
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

    # --- adding and removing endpoints ---

    def add_endpoint(self, entry: str) -> str:
        """Add a server, `URL` or `name=URL`; returns its id."""
        return self._usable().do(partial(self._client.add_endpoint, entry))

    def remove_endpoint(self, endpoint_id: str) -> None:
        """Stop using its GPUs; existing assignments stay until they are released."""
        self._usable().do(partial(self._client.remove_endpoint, endpoint_id))

    # --- checks before a call ---

    def _look(self, look: Callable[[], T]) -> T:
        running = self._running
        if running is not None and running.is_current:
            return look()  # called from a callback
        return self._usable().look(look)

    def _usable(self) -> LoopThread:
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
                f"the client was started in process {running.pid}, and this process, {os.getpid()}, is a fork without "
                "the client's thread: create a new client in this process"
            )

    def _check_thread(self) -> None:
        """A blocking call in a thread with a running event loop would block that loop."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        if self._running is not None and self._running.is_current:
            raise RuntimeError("this call would wait for the client's own thread, in which this callback runs")
        raise RuntimeError(
            "a blocking call would stop the event loop of this thread: use the async client here, "
            "gpu_worker_pool.GPUWorkerPoolClient, or call this with asyncio.to_thread"
        )


class GPUContextManager(Generic[Got]):
    """`with GPUContextManager(client) as gpu_id:` holds a GPU while the block runs.

    Yields the GPU's index, or with several endpoints its global id; for `count=` above 1 the tuple of all. Make one for
    each block: threads cannot share it.
    """

    @overload
    def __init__(
        self: GPUContextManager[GPUId],
        client: GPUWorkerPoolClient,
        timeout: float | None = None,
        *,
        count: Literal[1] = 1,
        **requirements: Any,
    ) -> None: ...
    @overload
    def __init__(
        self: GPUContextManager[GPUId | tuple[GPUId, ...]],
        client: GPUWorkerPoolClient,
        timeout: float | None = None,
        *,
        count: int,
        **requirements: Any,
    ) -> None: ...
    def __init__(self, client: GPUWorkerPoolClient, timeout: float | None = None, **requirements: Any) -> None:
        self._client = client
        self._timeout = timeout
        self._requirements = requirements
        self._request: tuple[LoopThread, LoopCall] | None = None
        self.assignment: GPUAssignment | None = None

    def __enter__(self) -> Got:
        if self._request is not None:
            raise RuntimeError("this GPUContextManager is already in use: make one for each block")
        client, running = self._client._client, self._client._usable()  # noqa: SLF001  # its other half
        call = LoopCall(partial(client.request_gpu, self._timeout, **self._requirements))
        self._request = (running, call)
        try:
            assignment = self.assignment = running.request(call)
            ids: tuple[GPUId, ...] = assignment.gpu_ids
            got: Any = ids if len(ids) > 1 else assignment.gpu_id
            return cast("Got", got)
        except BaseException:
            self._give_back()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self.assignment is not None:
                # A stopped client has reported it already; an error of the block is more important.
                with suppress(NotStartedError, *((StaleAssignmentError,) if kind else ())):
                    self._client.release_gpu(self.assignment)
        except BaseException:
            self._give_back()
            raise
        self._request = self.assignment = None

    def _give_back(self) -> None:
        """Cancel the request, or release what it was granted: after an interrupt nothing else does."""
        if self._request is not None:
            running, call = self._request
            running.withdraw(call)
        self._request = self.assignment = None


@contextmanager
def gpu_worker_pool_client(**kwargs: Any) -> Iterator[GPUWorkerPoolClient]:
    """A started client, which is stopped at the end of the block."""
    with GPUWorkerPoolClient(**kwargs) as client:
        yield client
