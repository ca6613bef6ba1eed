"""The documented import path of the monitors; their code is in `client/monitor.py`."""

from gpu_worker_pool.client.monitor import GPUMonitor, MultiEndpointGPUMonitor

__all__ = ["GPUMonitor", "MultiEndpointGPUMonitor"]
