"""The documented import path of the HTTP clients; their code is in `api/`."""

from gpu_worker_pool.api.http_client import AsyncGPUStatsHTTPClient, MultiEndpointHTTPClientPool
from gpu_worker_pool.errors import (
    NetworkRetryableError,
    RetryableError,
    ServiceRefusedError,
    ServiceRetryableError,
    ServiceUnavailableError,
)

__all__ = [
    "AsyncGPUStatsHTTPClient",
    "MultiEndpointHTTPClientPool",
    "NetworkRetryableError",
    "RetryableError",
    "ServiceRefusedError",
    "ServiceRetryableError",
    "ServiceUnavailableError",
]
