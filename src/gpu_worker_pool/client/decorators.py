"""The decorator `with_gpu`, which gives a function a GPU for each call, async or blocking."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, overload

from gpu_worker_pool.client import client as asynchronous
from gpu_worker_pool.client import sync as blocking
from gpu_worker_pool.client.contexts import GPUContextManager

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from gpu_worker_pool.models import GPUAssignment

__all__ = ["with_gpu"]

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class _TakesGPUFirst(Protocol[P, R_co]):
    def __call__(self, gpu: GPUAssignment, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


# Type checkers can remove only the first parameter; otherwise the arguments stay unchecked.


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
    """Give the function a GPU during each of its calls.

    `@with_gpu(client)` for an `async def` and the async client, or a `def` and the blocking one. The function has a
    parameter `gpu` for the `GPUAssignment`; callers leave it out:

        @with_gpu(client, timeout=60, min_free_memory_mb=8000)
        def train(gpu: GPUAssignment, epochs: int) -> float: ...

        train(10)

    `timeout` and `requirements` are those of `request_gpu`, and the call raises its errors.
    """
    is_async = isinstance(client, asynchronous.GPUWorkerPoolClient)
    if not is_async and not isinstance(client, blocking.GPUWorkerPoolClient):
        raise TypeError(f"write @with_gpu(client) with a GPUWorkerPoolClient, async or blocking, not {client!r}")
    # Report an unknown requirement now, not at the first call.
    inspect.signature(client.request_gpu).bind(timeout, **requirements)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        _check(function, is_async)
        parameters = _Parameters(function)

        if is_async:

            @wraps(function)
            async def call(*args: Any, **kwargs: Any) -> Any:
                parameters.check(args, kwargs)
                block = GPUContextManager(client, timeout, **requirements)
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
    """The parameters of a function with and without `gpu`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = _name(function)
        signature = inspect.signature(function)
        parameters = dict(signature.parameters)
        position = list(parameters).index("gpu") if "gpu" in parameters else None
        gpu = parameters.pop("gpu", None)
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        if not takes_any and (gpu is None or gpu.kind not in by_keyword):
            raise TypeError(f"with_gpu passes the GPU as the argument gpu, which {self._name}{signature} does not take")
        #: None if `gpu` is keyword-only.
        self._position = position if gpu is not None and gpu.kind in by_position else None
        self.others = signature.replace(parameters=list(parameters.values()))

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Report wrong arguments at once, not after a wait for a GPU."""
        if "gpu" in kwargs:
            raise TypeError(f"{self._name}() gets its gpu from with_gpu: leave it out")
        try:
            self.others.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self._name}(): {error}") from None

    def with_gpu(
        self, gpu: GPUAssignment | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._position is not None and len(args) > self._position:
            return (*args[: self._position], gpu, *args[self._position :]), kwargs
        return args, {**kwargs, "gpu": gpu}


def _check(function: object, is_async: bool) -> None:
    if not callable(function) or isinstance(function, type):
        raise TypeError(f"with_gpu is for functions, not for {function!r}; put @staticmethod and the like above it")
    name = _name(function)
    if _is(inspect.isgeneratorfunction, function) or _is(inspect.isasyncgenfunction, function):
        raise TypeError(
            f"{name} is a generator: with_gpu cannot know when it no longer needs the GPU; use "
            "GPUContextManager inside it"
        )
    is_coroutine = _is(inspect.iscoroutinefunction, function)
    if is_coroutine and not is_async:
        raise TypeError(
            f"{name} is an async function, but the client is the blocking one of gpu_worker_pool.sync, which would "
            "block the event loop: use gpu_worker_pool.GPUWorkerPoolClient"
        )
    if is_async and not is_coroutine:
        raise TypeError(
            f"{name} is a plain function, but the client is the async one and must be awaited: make it an "
            "async def, or use gpu_worker_pool.sync.GPUWorkerPoolClient"
        )


def _is(kind: Callable[[object], bool], function: Callable[..., Any]) -> bool:
    """Also for callable objects."""
    return kind(function) or kind(type(function).__call__)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)
