"""The documented import path of `with_gpu`; its code is in `client/decorators.py`."""

from gpu_worker_pool.client.decorators import with_gpu

__all__ = ["with_gpu"]
