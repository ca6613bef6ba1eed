"""The client: GPUs of one or many servers, or of this host, handed out to the workers of one program."""

from gpu_worker_pool.client.client import GPUWorkerPoolClient
from gpu_worker_pool.client.contexts import GPUContextManager, gpu_worker_pool_client

__all__ = ["GPUContextManager", "GPUWorkerPoolClient", "gpu_worker_pool_client"]
