"""`GPUProcessPoolExecutor`: a `concurrent.futures` executor whose worker processes have a GPU each.

A worker's lease comes first, then its process, which finds its GPU in `CUDA_VISIBLE_DEVICES` from the beginning.
"""

from __future__ import annotations

import atexit
import itertools
import math
import os
import sys
from concurrent.futures import Executor
from functools import partial
from multiprocessing import process, spawn
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar
from weakref import WeakSet, finalize

from gpu_worker_pool import forks
from gpu_worker_pool.config import parse_endpoints, validate_lease_ttl
from gpu_worker_pool.core.requirements import make_requirements
from gpu_worker_pool.errors import NotStartedError
from gpu_worker_pool.hardware.origin import origin_of_this_process
from gpu_worker_pool.workers.lease_process import python_command
from gpu_worker_pool.workers.manager import Manager, Settings
from gpu_worker_pool.workers.pickling import dumps, name_of, pickled_task
from gpu_worker_pool.workers.progress import progress_of
from gpu_worker_pool.workers.tasks import Task, copy_of
from gpu_worker_pool.workers.worker_spec import WorkerSpec
from gpu_worker_pool.workers.workforce import WorkerSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from concurrent.futures import Future
    from types import TracebackType

    from gpu_worker_pool.core.requirements import Policy, Requirements

__all__ = ["GPUProcessPoolExecutor"]

T = TypeVar("T")

#: The default of `idle_release`.
IDLE_SECONDS: Final = 60.0
_NO_GUARD: Final = (
    "this process is a worker that imports the main module, and that makes an executor while it is imported: put what"
    " starts the program below `if __name__ == '__main__':`"
)


class GPUProcessPoolExecutor(Executor):
    """Runs functions in worker processes, each of which holds a GPU, or several, or a part of one.

        with GPUProcessPoolExecutor() as pool:
            for loss in pool.map(train, learning_rates):
                print(loss)

    `max_workers`: a number, or "gpus": as many as there are GPUs. Workers are started as tasks need them and GPUs
    become free. `min_workers`: how many start immediately and keep their GPUs. The others end and give their GPUs back
    after `idle_release` seconds without a task; None: only at the end.

    `count`, `memory_mb`, `share` and so on are those of `request_gpu`, for each worker; `policy` is "idle", as in the
    shell: a GPU that is really free. Tasks that wait for a first GPU for longer than `gpu_timeout` seconds fail.

    A task whose worker dies, or loses its GPU, fails with a `BrokenGPUWorkerError`, or is tried again `retries` times;
    the worker is replaced. `initializer(*initargs)` is called in each worker before its first task; a worker ends after
    `max_tasks_per_child` tasks. `progress`: True for a line on stderr, a tqdm bar, or a
    function that is called with the number of tasks that have just finished.

    `service_endpoints`: URLs of GPU servers of this host, or `local://`; by default the configured ones, else `local://`.
    """

    def __init__(
        self,
        max_workers: int | Literal["gpus"] | None = None,
        *,
        min_workers: int = 0,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        max_tasks_per_child: int | None = None,
        idle_release: float | None = IDLE_SECONDS,
        retries: int = 0,
        gpu_timeout: float | None = None,
        progress: object = None,
        count: int = 1,
        memory_mb: float | None = None,
        share: bool = False,
        min_free_memory_mb: float | None = None,
        gpu_model: str | None = None,
        only: Iterable[int | str] | None = None,
        exclude: Iterable[int | str] | None = None,
        priority: int = 0,
        policy: Policy = "idle",
        label: str | None = None,
        service_endpoints: str | Iterable[str] | None = None,
        lease_ttl: float | None = None,
        _variables: Mapping[str, str | None] | None = None,
    ) -> None:
        """`_variables`: settings that the lease process finds in its environment."""
        if sys.platform != "linux":
            raise NotImplementedError("GPUProcessPoolExecutor needs Linux, where a process can be watched safely")
        if getattr(process.current_process(), "_inheriting", False):
            raise RuntimeError(_NO_GUARD)
        most = math.inf if max_workers in (None, "gpus") else _number("max_workers", max_workers, 1)
        least = int(_number("min_workers", min_workers, 0))
        if least > most:
            raise ValueError(f"min_workers must be at most max_workers, {most:g}, not {least}")
        if initializer is not None and not callable(initializer):
            raise TypeError(f"initializer must be a function, not {initializer!r}")
        requirements = make_requirements(
            count, memory_mb, share, min_free_memory_mb, gpu_model, only, exclude, priority, policy
        )
        endpoints: list[str] = []
        if service_endpoints is not None:
            parsed = parse_endpoints(service_endpoints, "service_endpoints")
            endpoints = [f"{each.endpoint_id}={each.url}" if each.url != "local://" else each.url for each in parsed]
        settings = Settings(
            WorkerSettings(
                WorkerSpec(
                    _options_of(requirements),
                    endpoints,
                    label,
                    None if lease_ttl is None else validate_lease_ttl(lease_ttl),
                    origin_of_this_process().program or "python",
                    os.getpid(),
                    python_command("worker"),
                ),
                {} if _variables is None else dict(_variables),
                _preparation(initializer, initargs),
            ),
            max_workers=most,
            min_workers=least,
            idle_release=math.inf if idle_release is None else _seconds("idle_release", idle_release),
            gpu_timeout=math.inf if gpu_timeout is None else _seconds("gpu_timeout", gpu_timeout),
            retries=int(_number("retries", retries, 0)),
            max_tasks_per_child=(
                math.inf if max_tasks_per_child is None else _number("max_tasks_per_child", max_tasks_per_child, 1)
            ),
        )
        self._manager = Manager(settings, progress_of(progress))
        _running.add(self._manager)
        forks.watch(self)
        # An executor that is garbage collected finishes its tasks first.
        self._dropped = finalize(self, self._manager.shutdown)
        self._dropped.atexit = False
        if least:
            self._manager.start()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """What cannot be pickled fails at once, whether there is a GPU or not."""
        manager = self._usable()
        task = Task(b"", name_of(fn), manager.settings.retries)
        try:
            task.payload = pickled_task(fn, args, kwargs)
        except Exception as error:
            if manager.broken is not None:
                raise copy_of(manager.broken) from None
            task.future.set_running_or_notify_cancel()
            task.future.set_exception(error)
        else:
            manager.submit(task)
        return task.future

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        **more: Any,
    ) -> Iterator[T]:
        """As in `ProcessPoolExecutor`. A chunk is one task: it fails, or is tried again, as a whole."""
        if chunksize < 1:
            raise ValueError(f"chunksize must be at least 1, not {chunksize!r}")
        if chunksize == 1:
            return super().map(fn, *iterables, timeout=timeout, **more)
        chunks = _chunks(zip(*iterables, strict=False), chunksize)
        return itertools.chain.from_iterable(super().map(partial(_run_chunk, fn), chunks, timeout=timeout, **more))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # of `Executor`
        """Every GPU is given back when this returns, unless `wait` is False."""
        manager = self._manager
        if manager.pid != os.getpid():
            return
        manager.shutdown(cancel_futures=cancel_futures)
        if wait:
            manager.join()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, Exception):
            self.shutdown(wait=True)
        else:
            self.interrupt()  # by Ctrl-C, for example

    def interrupt(self) -> None:
        """Like `shutdown`, but tasks that have begun end, too, by a `KeyboardInterrupt`; a second Ctrl-C kills them."""
        manager = self._manager
        if manager.pid != os.getpid():
            return
        manager.interrupt()
        try:
            manager.join()
        except BaseException:
            manager.kill()
            raise

    @property
    def is_broken(self) -> bool:
        """It accepts no more tasks: no worker can ever get a GPU, or workers cannot start."""
        return self._manager.broken is not None

    def release_idle(self) -> None:
        """Workers that are idle now end, and give their GPUs back, except `min_workers`."""
        self._usable().release_idle()

    def _usable(self) -> Manager:
        manager = self._manager
        if manager.pid != os.getpid():
            raise NotStartedError(
                f"the executor was made in process {manager.pid}, of which this one, {os.getpid()}, is a fork: make a "
                "new executor in this process"
            )
        return manager

    def _forked(self) -> None:
        """In a forked child, which must not use its copies."""
        self._dropped.detach()
        _running.discard(self._manager)
        self._manager.forked()


def _preparation(initializer: Callable[..., object] | None, initargs: tuple[Any, ...]) -> bytes:
    """What a worker needs to import what this program has imported, and to begin."""
    data = spawn.get_preparation_data("GPUWorker")
    data["authkey"] = bytes(data["authkey"])  # else it can be pickled for children of this process only
    try:
        begin = dumps((initializer, tuple(initargs)))
    except Exception as error:
        raise TypeError(
            "the initializer or one of its arguments cannot be pickled, and so cannot be sent to a worker process "
            f"({type(error).__name__}: {error}): define the function at the top level of a module"
        ) from error
    return dumps((data, begin))


def _options_of(requirements: Requirements) -> dict[str, Any]:
    """The options that differ from the defaults, as JSON values."""
    usual = make_requirements()
    names = ("count", "memory_mb", "share", "min_free_memory_mb", "gpu_model", "only", "exclude", "priority", "policy")
    values = {
        name: getattr(requirements, name) for name in names if getattr(requirements, name) != getattr(usual, name)
    }
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _number(name: str, value: object, least: int) -> float:
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return value
    choice = ' or "gpus"' if name == "max_workers" else ""
    raise ValueError(f"{name} must be a whole number of at least {least}{choice}, not {value!r}")


def _seconds(name: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        return float(value)
    raise ValueError(f"{name} must be a number of seconds of at least 0, or None, not {value!r}")


def _chunks(rows: Iterable[tuple[Any, ...]], size: int) -> Iterator[list[tuple[Any, ...]]]:
    iterator = iter(rows)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk


def _run_chunk(fn: Callable[..., T], chunk: list[tuple[Any, ...]]) -> list[T]:
    """In a worker."""
    return [fn(*args) for args in chunk]


#: Managers to shut down at exit.
_running: WeakSet[Manager] = WeakSet()


@atexit.register
def _exit() -> None:
    """As `concurrent.futures` does, tasks are finished first; but not those of a program that Ctrl-C has ended."""
    error = getattr(sys, "last_value", None)
    for manager in list(_running):
        if manager.pid != os.getpid() or manager.is_over:
            continue
        if isinstance(error, KeyboardInterrupt):
            manager.interrupt()
        else:
            manager.shutdown()
        try:
            manager.join()
        except KeyboardInterrupt:
            manager.kill()
            manager.join()
