"""What `hydra/launcher=gpu_pool` can be configured with."""

# Without `from __future__ import annotations`: Hydra loads plugins so that dataclasses cannot find their module.
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore


@dataclass
class GPUPoolLauncherConf:
    """The arguments of `GPUProcessPoolExecutor`; those that are None have its defaults."""

    _target_: str = "hydra_plugins.hydra_gpu_pool_launcher.gpu_pool_launcher.GPUPoolLauncher"
    #: "gpus": as many as there are GPUs; or a number.
    max_workers: Any = "gpus"
    #: Of GPUs for each job.
    count: int = 1
    memory_mb: Any = None
    share: bool = False
    min_free_memory_mb: Any = None
    gpu_model: Any = None
    only: Any = None
    exclude: Any = None
    priority: int = 0
    policy: str = "idle"
    label: Any = None
    #: How often a job is tried again whose process dies or loses its GPU.
    retries: int = 0
    gpu_timeout: Any = None
    idle_release: Any = 60.0
    #: 1: each job has a new process.
    max_tasks_per_child: Any = None
    service_endpoints: Any = None
    lease_ttl: Any = None


ConfigStore.instance().store(
    group="hydra/launcher", name="gpu_pool", node=GPUPoolLauncherConf, provider="hydra_gpu_pool_launcher"
)
