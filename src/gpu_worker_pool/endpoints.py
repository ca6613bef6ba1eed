"""The documented import path of `EndpointManager`; its code is in `client/endpoints.py`."""

from gpu_worker_pool.client.endpoints import EndpointManager

__all__ = ["EndpointManager"]
