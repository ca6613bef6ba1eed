"""The client for people who do not write async code: the same names, blocking, to be called from any thread.

One thread in the background runs an event loop with the async client in it; what is called here is done there. This
file waits, wakes and cleans up; it decides nothing about GPUs.
"""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import contextmanager, suppress
from functools import partial
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from gpu_worker_pool.client.client import GPUWorkerPoolClient as AsyncClient
from gpu_worker_pool.client.loop_thread import Call, LoopThread
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

P = ParamSpec("P")
T = TypeVar("T")


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
        coordination: str | None = None,
        lease_ttl: float | None = None,
        api_key: str | None = None,
        allow_insecure_key: bool = False,
        on_lease_lost: Callable[[GPUAssignment], object] | None = None,
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
            coordination=coordination,
            lease_ttl=lease_ttl,
            api_key=api_key,
            allow_insecure_key=allow_insecure_key,
            on_lease_lost=on_lease_lost,
            environ=environ,
        )
        #: For starts and stops at the same moment; nobody keeps it for long.
        self._starting = threading.RLock()
        self._running: LoopThread | None = None

    # --- life ---

    def start(self) -> None:
        """Begin to ask the endpoints. Succeeds also while none of them answers: requests wait until one does."""
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
        """End every request that waits, and leave nothing behind. Does nothing to a client that is not started."""
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
        return running.request(Call(request))

    def release_gpu(self, assignment: GPUAssignment) -> None:
        """Give a GPU back. Twice is harmless; `StaleAssignmentError` if it was taken back or lost before."""
        running = self._usable()
        try:
            running.do(partial(running.release, assignment))
        except Exception:
            raise
        except BaseException:
            running.give_back(assignment)  # interrupted, perhaps before anything was posted; twice is harmless
            raise

    def explain(self, **requirements: Any) -> Explanation:
        """Why somebody who asked for this now would wait: GPU by GPU, with the numbers."""
        return self._look(partial(self._client.explain, **requirements))

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

        call = Call(partial(self._client.queue_request_for_retry, ask_the_thread))
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

    def __init__(self, client: GPUWorkerPoolClient, timeout: float | None = None, **requirements: Any) -> None:
        self._client = client
        self._timeout = timeout
        self._wishes = requirements
        self._asked: tuple[LoopThread, Call] | None = None
        self.assignment: GPUAssignment | None = None

    def __enter__(self) -> Any:
        if self._asked is not None:
            raise RuntimeError("this GPUContextManager is in use: make one for each block")
        client, running = self._client._client, self._client._usable()  # noqa: SLF001  # its other half
        call = Call(partial(client.request_gpu, self._timeout, **self._wishes))
        self._asked = (running, call)
        try:
            assignment = self.assignment = running.request(call)
            ids: tuple[GPUId, ...] = assignment.gpu_ids
            return ids if len(ids) > 1 else assignment.gpu_id
        except BaseException:
            self._give_back()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self.assignment is not None:
                # A client that was stopped meanwhile has said so; what the block raised matters more.
                with suppress(NotStartedError, *((StaleAssignmentError,) if kind else ())):
                    self._client.release_gpu(self.assignment)
        except BaseException:
            self._give_back()
            raise
        self._asked = self.assignment = None

    def _give_back(self) -> None:
        """Whatever was asked for, or granted already: after an interrupt nobody else will."""
        if self._asked is not None:
            running, call = self._asked
            running.withdraw(call)
        self._asked = self.assignment = None


@contextmanager
def gpu_worker_pool_client(**kwargs: Any) -> Iterator[GPUWorkerPoolClient]:
    """A started client, stopped at the end of the block."""
    with GPUWorkerPoolClient(**kwargs) as client:
        yield client
