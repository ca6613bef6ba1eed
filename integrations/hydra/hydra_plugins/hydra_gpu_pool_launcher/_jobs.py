"""Runs one batch of jobs: sends each to a worker, and collects what became of it."""

from __future__ import annotations

import logging
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, run_job, setup_globals
from omegaconf import OmegaConf, open_dict

from gpu_worker_pool import GPUProcessPoolExecutor

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

    from .gpu_pool_launcher import GPUPoolLauncher

log = logging.getLogger(__name__)


def launch(
    launcher: GPUPoolLauncher, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
) -> Sequence[JobReturn]:
    config = launcher.config
    assert config is not None
    setup_globals()
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    Path(str(config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
    if launcher.executor is None:
        launcher.executor = GPUProcessPoolExecutor(**_plain(launcher.arguments))
    log.info("gpu-pool: %d jobs, each with a GPU; output in %s", len(job_overrides), config.hydra.sweep.dir)
    state = Singleton.get_state()
    futures = []
    for number, overrides in enumerate(job_overrides, initial_job_idx):
        log.info("\t#%d : %s", number, " ".join(filter_overrides(overrides)))
        # By value: the function of the main module has its decorator's name, by which it could not be imported.
        job = (number, list(overrides), launcher.hydra_context, config, launcher.task_function, state)
        futures.append(launcher.executor.submit(_run, cloudpickle.dumps(job)))
    try:
        return [_outcome(future, overrides) for future, overrides in zip(futures, job_overrides, strict=True)]
    except BaseException:  # Ctrl-C, for example: it reaches jobs that have begun, too
        launcher.executor.interrupt()
        launcher.executor = None
        raise


def _plain(arguments: dict[str, Any]) -> dict[str, Any]:
    """As lists and numbers, and not as Hydra's configuration has them."""
    return {
        name: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        for name, value in arguments.items()
    }


def _outcome(future: Future[bytes], overrides: Sequence[str]) -> JobReturn:
    try:
        done: JobReturn = cloudpickle.loads(future.result())
    except Exception as error:  # its worker died, or there is no GPU for it
        done = JobReturn(overrides=list(overrides), status=JobStatus.FAILED)
        done.return_value = error
    return done


# --- in a worker ---


def _run(payload: bytes) -> bytes:
    number: int
    overrides: list[str]
    context: HydraContext
    config: DictConfig
    function: TaskFunction
    setup_globals()
    number, overrides, context, config, function, state = cloudpickle.loads(payload)
    Singleton.set_state(state)
    job_config = context.config_loader.load_sweep_config(config, overrides)
    with open_dict(job_config):
        job_config.hydra.job.id = f"{job_config.hydra.job.name}_{number}"
        job_config.hydra.job.num = number
    HydraConfig.instance().set_config(job_config)
    done = run_job(
        hydra_context=context,
        config=job_config,
        task_function=function,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )
    return _pickled(done)


def _pickled(done: JobReturn) -> bytes:
    value = done._return_value  # noqa: SLF001  # the property raises it
    if isinstance(value, BaseException):
        value.add_note("in the worker:\n" + "".join(traceback.format_exception(value)))
    try:
        pickled = cloudpickle.dumps(done)
        cloudpickle.loads(pickled)
    except Exception as error:
        what = f"{type(value).__name__}: {value}" if isinstance(value, BaseException) else "what the job returned"
        done.status = JobStatus.FAILED
        done.return_value = TypeError(f"{what} cannot be pickled, and so cannot be sent back ({error})")
        return bytes(cloudpickle.dumps(done))
    return bytes(pickled)
