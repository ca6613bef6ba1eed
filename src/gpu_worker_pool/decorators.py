"""`with_gpu`: a function that has a GPU whenever it runs, in both worlds. It asks and releases, and keeps nothing."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, overload

from gpu_worker_pool import client as asynchronous
from gpu_worker_pool import sync as blocking

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from gpu_worker_pool.models import GPUAssignment

__all__ = ["with_gpu"]

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class _TakesGPUFirst(Protocol[P, R_co]):
    def __call__(self, gpu: GPUAssignment, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


# A type checker can take a parameter away only where it comes first; elsewhere the arguments are left unchecked.


class _AsyncDecorator(Protocol):
    @overload
    def __call__(
        self, function: _TakesGPUFirst[P, Coroutine[Any, Any, R]], /
    ) -> Callable[P, Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(self, function: Callable[..., Coroutine[Any, Any, R]], /) -> Callable[..., Coroutine[Any, Any, R]]: ...


class _BlockingDecorator(Protocol):
    @overload
    def __call__(self, function: _TakesGPUFirst[P, R], /) -> Callable[P, R]: ...
    @overload
    def __call__(self, function: Callable[..., R], /) -> Callable[..., R]: ...


@overload
def with_gpu(
    client: asynchronous.GPUWorkerPoolClient, timeout: float | None = None, **wishes: Any
) -> _AsyncDecorator: ...
@overload
def with_gpu(
    client: blocking.GPUWorkerPoolClient, timeout: float | None = None, **wishes: Any
) -> _BlockingDecorator: ...
def with_gpu(client: Any, timeout: float | None = None, **wishes: Any) -> Any:
    """Give the function a GPU for as long as each of its calls runs, however it ends.

    `@with_gpu(client)` for an `async def` and the async client, or a `def` and the blocking one. The function has a
    parameter `gpu`, where it gets the `GPUAssignment`; whoever calls it leaves that one out:

        @with_gpu(client, timeout=60, min_free_memory_mb=8000)
        def train(gpu: GPUAssignment, epochs: int) -> float: ...

        train(10)

    `timeout` and `wishes` are those of `request_gpu`, and its errors come from the call.
    """
    is_async = isinstance(client, asynchronous.GPUWorkerPoolClient)
    if not is_async and not isinstance(client, blocking.GPUWorkerPoolClient):
        raise TypeError(f"write @with_gpu(client) with a GPUWorkerPoolClient, async or blocking, not {client!r}")
    # A wish that does not exist is noticed now, not with the first call.
    inspect.signature(client.request_gpu).bind(timeout, **wishes)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        name = _check(function, is_async)
        put = _putter(function, name)

        if is_async:

            @wraps(function)
            async def call(*args: Any, **kwargs: Any) -> Any:
                has_gpu = asynchronous.GPUContextManager(client, timeout, **wishes)
                async with has_gpu:
                    args, kwargs = put(has_gpu.assignment, args, kwargs)
                    return await function(*args, **kwargs)

        else:

            @wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                has_gpu = blocking.GPUContextManager(client, timeout, **wishes)
                with has_gpu:
                    args, kwargs = put(has_gpu.assignment, args, kwargs)
                    return function(*args, **kwargs)

        call.__signature__ = _without_gpu(function)  # type: ignore[attr-defined]  # where `inspect` looks first
        return call

    return decorate
