"""The documented import path of the blocking client; its code is in `client/sync.py`."""

from gpu_worker_pool.client.sync import GPUContextManager, GPUWorkerPoolClient, gpu_worker_pool_client

__all__ = ["GPUContextManager", "GPUWorkerPoolClient", "gpu_worker_pool_client"]
