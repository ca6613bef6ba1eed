"""joblib with a GPU for each of its workers: `register()`, then `parallel_config(backend="gpu-pool")`."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

try:
    from joblib import register_parallel_backend  # type: ignore[import-untyped]
    from joblib.parallel import ParallelBackendBase  # type: ignore[import-untyped]
except ModuleNotFoundError as error:
    if error.name != "joblib":
        raise
    raise ModuleNotFoundError("joblib is not installed: pip install joblib", name="joblib") from None

from gpu_worker_pool.workers.executor import GPUProcessPoolExecutor

__all__ = ["GPUPoolBackend", "register"]

NAME: Final = "gpu-pool"
cloudpickle: Any
try:
    cloudpickle = import_module("cloudpickle")
except ImportError:  # joblib before 1.6 has its own copy
    cloudpickle = import_module("joblib.externals.cloudpickle")

#: For joblib, as many as there may ever be GPUs: that many calls are handed to the executor at a time, and it finds out
#: itself how many GPUs there are.
_MANY: Final = 1024


def register(*, make_default: bool = False) -> None:
    """Make the backend known to joblib by its name, `gpu-pool`."""
    register_parallel_backend(NAME, GPUPoolBackend, make_default=make_default)


class GPUPoolBackend(ParallelBackendBase):  # type: ignore[misc]  # joblib has no types
    """Runs calls in the workers of a `GPUProcessPoolExecutor`.

    `n_jobs=-1`, which is the default, is as many workers as there are GPUs. Further arguments of `parallel_config` are
    those of the executor:

        with parallel_config(backend="gpu-pool", n_jobs=4, memory_mb=8192, share=True):
            Parallel()(delayed(train)(rate) for rate in learning_rates)
    """

    supports_retrieve_callback = True
    default_n_jobs = -1

    def __init__(
        self, nesting_level: int | None = None, inner_max_num_threads: int | None = None, **arguments: Any
    ) -> None:
        super().__init__(nesting_level=nesting_level, inner_max_num_threads=inner_max_num_threads)
        self._arguments = arguments
        self._n_jobs: int | None = None
        self._executor: GPUProcessPoolExecutor | None = None

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        # At least two: of one, joblib would run the calls in this process, which has no GPU.
        return max(n_jobs, 2) if n_jobs is not None and n_jobs > 0 else _MANY

    def configure(self, n_jobs: int | None = None, parallel: Any = None, **_: Any) -> int:
        self.parallel: Any = parallel
        self._n_jobs = n_jobs
        most = n_jobs if n_jobs is not None and n_jobs > 0 else "gpus"
        self._executor = GPUProcessPoolExecutor(**{"max_workers": most, **self._arguments})
        return self.effective_n_jobs(n_jobs)

    def submit(self, func: Any, callback: Any = None) -> Any:
        assert self._executor is not None  # `configure` comes first
        # By value: joblib is used in notebooks, with functions that no module has.
        future = self._executor.submit(_call, cloudpickle.dumps(func))
        if callback is not None:
            future.add_done_callback(callback)
        return future

    def retrieve_result_callback(self, out: Any) -> Any:
        return out.result()

    def terminate(self) -> None:
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()

    def abort_everything(self, ensure_ready: bool = True) -> None:  # of joblib
        """A call has failed, or Ctrl-C came: the others end, too."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.interrupt()
        if ensure_ready:
            self.configure(n_jobs=self._n_jobs, parallel=self.parallel)


def _call(payload: bytes) -> Any:
    """In a worker."""
    return cloudpickle.loads(payload)()
