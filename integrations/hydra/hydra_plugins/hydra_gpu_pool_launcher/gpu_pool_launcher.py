"""The launcher, as Hydra finds it: at each start of each program that uses Hydra, so this loads fast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hydra.plugins.launcher import Launcher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hydra.core.utils import JobReturn
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

    from gpu_worker_pool import GPUProcessPoolExecutor


class GPUPoolLauncher(Launcher):
    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.config: DictConfig | None = None
        self.task_function: TaskFunction | None = None
        self.hydra_context: HydraContext | None = None
        #: Its workers stay from one batch of a sweeper to the next.
        self.executor: GPUProcessPoolExecutor | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.task_function, self.hydra_context = config, task_function, hydra_context

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from ._jobs import launch

        return launch(self, job_overrides, initial_job_idx)
