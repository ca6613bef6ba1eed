"""Share GPUs without running a cluster."""

from gpu_worker_pool._version import __version__

__all__ = ["__version__"]
