"""The documented import path of the monitors; their code is in `client/monitor.py`."""

from gpu_worker_pool.client.monitor import GPUMonitor, MultiEndpointGPUMonitor

#: Its other documented name.
AsyncGPUMonitor = GPUMonitor

__all__ = ["AsyncGPUMonitor", "GPUMonitor", "MultiEndpointGPUMonitor"]
