"""Share GPUs without running a cluster: a GPU that is really free, and nobody else gets it until you are done."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gpu_worker_pool._version import __version__

if TYPE_CHECKING:
    from gpu_worker_pool.client.client import GPUWorkerPoolClient
    from gpu_worker_pool.client.contexts import GPUContextManager, gpu_worker_pool_client
    from gpu_worker_pool.client.decorators import with_gpu
    from gpu_worker_pool.errors import (
        BrokenGPUWorkerError,
        GPUWorkerPoolError,
        ImpossibleRequestError,
        PoolStoppedError,
        ServiceUnavailableError,
        StaleAssignmentError,
        WorkerTimeoutError,
    )
    from gpu_worker_pool.models import (
        EndpointInfo,
        GlobalGPUAssignment,
        GlobalGPUInfo,
        GPUAssignment,
        GPUInfo,
        GPUStats,
        MultiEndpointPoolStatus,
        PoolStatus,
        WorkerInfo,
    )
    from gpu_worker_pool.workers.executor import GPUProcessPoolExecutor

__all__ = [
    "BrokenGPUWorkerError",
    "EndpointInfo",
    "GPUAssignment",
    "GPUContextManager",
    "GPUInfo",
    "GPUProcessPoolExecutor",
    "GPUStats",
    "GPUWorkerPoolClient",
    "GPUWorkerPoolError",
    "GlobalGPUAssignment",
    "GlobalGPUInfo",
    "ImpossibleRequestError",
    "MultiEndpointPoolStatus",
    "PoolStatus",
    "PoolStoppedError",
    "ServiceUnavailableError",
    "StaleAssignmentError",
    "WorkerInfo",
    "WorkerTimeoutError",
    "__version__",
    "gpu_worker_pool_client",
    "with_gpu",
]

_HOMES = {
    "client": ("GPUContextManager", "GPUWorkerPoolClient", "gpu_worker_pool_client"),
    "decorators": ("with_gpu",),
    "workers.executor": ("GPUProcessPoolExecutor",),
    "errors": tuple(name for name in __all__ if name.endswith("Error")),
}


def __getattr__(name: str) -> Any:
    """Imported when first asked for: a shell command must not wait for an HTTP library that it does not use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((home for home, names in _HOMES.items() if name in names), "models")
    globals()[name] = found = getattr(import_module(f"gpu_worker_pool.{home}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
