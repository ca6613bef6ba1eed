"""The documented import path of `WorkerPoolManager`; its code is in `client/manager.py`."""

from gpu_worker_pool.client.manager import StaleAssignmentError, WorkerPoolManager, WorkerTimeoutError

__all__ = ["StaleAssignmentError", "WorkerPoolManager", "WorkerTimeoutError"]
