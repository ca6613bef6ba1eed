"""`with_gpu`: a function that has a GPU whenever it runs, in both worlds. It asks and releases, and keeps nothing."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, overload

from gpu_worker_pool.client import client as asynchronous
from gpu_worker_pool.client import sync as blocking

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
    client: asynchronous.GPUWorkerPoolClient, timeout: float | None = None, **requirements: Any
) -> _AsyncDecorator: ...
@overload
def with_gpu(
    client: blocking.GPUWorkerPoolClient, timeout: float | None = None, **requirements: Any
) -> _BlockingDecorator: ...
def with_gpu(client: Any, timeout: float | None = None, **requirements: Any) -> Any:
    """Give the function a GPU for as long as each of its calls runs, however it ends.

    `@with_gpu(client)` for an `async def` and the async client, or a `def` and the blocking one. The function has a
    parameter `gpu`, where it gets the `GPUAssignment`; whoever calls it leaves that one out:

        @with_gpu(client, timeout=60, min_free_memory_mb=8000)
        def train(gpu: GPUAssignment, epochs: int) -> float: ...

        train(10)

    `timeout` and `requirements` are those of `request_gpu`, and its errors come from the call.
    """
    is_async = isinstance(client, asynchronous.GPUWorkerPoolClient)
    if not is_async and not isinstance(client, blocking.GPUWorkerPoolClient):
        raise TypeError(f"write @with_gpu(client) with a GPUWorkerPoolClient, async or blocking, not {client!r}")
    # A wish that does not exist is noticed now, not with the first call.
    inspect.signature(client.request_gpu).bind(timeout, **requirements)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        _check(function, is_async)
        parameters = _Parameters(function)

        if is_async:

            @wraps(function)
            async def call(*args: Any, **kwargs: Any) -> Any:
                parameters.check(args, kwargs)
                block = asynchronous.GPUContextManager(client, timeout, **requirements)
                async with block:
                    args, kwargs = parameters.with_gpu(block.assignment, args, kwargs)
                    return await function(*args, **kwargs)

        else:

            @wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                parameters.check(args, kwargs)
                block = blocking.GPUContextManager(client, timeout, **requirements)
                with block:
                    args, kwargs = parameters.with_gpu(block.assignment, args, kwargs)
                    return function(*args, **kwargs)

        call.__signature__ = parameters.others  # type: ignore[attr-defined]  # where `inspect` looks first
        return call

    return decorate


class _Parameters:
    """What a function takes, with its `gpu` and as if it had none."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = _name(function)
        signature = inspect.signature(function)
        parameters = dict(signature.parameters)
        place = list(parameters).index("gpu") if "gpu" in parameters else None
        gpu = parameters.pop("gpu", None)
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        if not takes_any and (gpu is None or gpu.kind not in by_keyword):
            raise TypeError(f"with_gpu gives the GPU as the argument gpu, and {self._name}{signature} takes none")
        #: None if it is given by keyword only.
        self._place = place if gpu is not None and gpu.kind in by_position else None
        self.others = signature.replace(parameters=list(parameters.values()))

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Wrong arguments are told at once, not when a GPU has been waited for."""
        if "gpu" in kwargs:
            raise TypeError(f"{self._name}() gets its gpu from with_gpu: leave it out")
        try:
            self.others.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self._name}(): {error}") from None

    def with_gpu(
        self, gpu: GPUAssignment | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._place is not None and len(args) > self._place:
            return (*args[: self._place], gpu, *args[self._place :]), kwargs
        return args, {**kwargs, "gpu": gpu}


def _check(function: object, is_async: bool) -> None:
    if not callable(function) or isinstance(function, type):
        raise TypeError(f"with_gpu is for functions, and {function!r} is none; @staticmethod and such go above it")
    name = _name(function)
    if _is(inspect.isgeneratorfunction, function) or _is(inspect.isasyncgenfunction, function):
        raise TypeError(
            f"{name} is a generator, which runs while its caller does: with_gpu cannot know when it is done with the "
            "GPU; use GPUContextManager inside it"
        )
    is_coroutine = _is(inspect.iscoroutinefunction, function)
    if is_coroutine and not is_async:
        raise TypeError(
            f"{name} is an async function and the client the blocking one of gpu_worker_pool.sync, which would stop "
            "the event loop: use gpu_worker_pool.GPUWorkerPoolClient"
        )
    if is_async and not is_coroutine:
        raise TypeError(
            f"{name} is a plain function and the client the async one, which nobody would await: make it an "
            "async def, or use gpu_worker_pool.sync.GPUWorkerPoolClient"
        )


def _is(kind: Callable[[object], bool], function: Callable[..., Any]) -> bool:
    """Also of objects that are called like functions."""
    return kind(function) or kind(type(function).__call__)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)
