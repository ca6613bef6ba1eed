"""The environment variables that show a program its GPUs and no others, and tell frameworks how much of them is theirs.

Programs obey the latter or not: they are no walls.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: How `CUDA_VISIBLE_DEVICES` names GPUs.
GPUNaming = Literal["index", "uuid"]


#: The share of a program, for `gpu_worker_pool.torch` and user code.
MEMORY_VARIABLE: Final = "GPU_POOL_MEMORY_MB"
#: Which variables the pool has set for that: those of an outer lease do not count as set by the user.
CAPS_VARIABLE: Final = "GPU_POOL_MEMORY_CAPS"
#: The name that every JAX knows, and the one that is to replace it. With both set JAX refuses to use GPUs.
_JAX_NAME: Final = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_JAX_NEWER_NAME: Final = "XLA_CLIENT_MEM_FRACTION"
#: Where a daemon of CUDA's Multi-Process Service listens, unless it was told otherwise.
_MPS_FOLDER: Final = "/tmp/nvidia-mps"  # noqa: S108  # NVIDIA's choice


class VisibleGPU(NamedTuple):
    #: Its index on its host now; None where that is not known.
    number: int | None
    #: Of the GPU or the MIG device; None where the driver does not report it.
    uuid: str | None


def lease_variables(
    gpus: Sequence[VisibleGPU],
    lease_id: str | None,
    naming: GPUNaming = "index",
    *,
    host: str | None = None,
    endpoint: str | None = None,
    outer_leases: str = "",
) -> dict[str, str]:
    """Without a lease only CUDA is told.

    `host`: of the GPUs. `endpoint`: the URL that granted the lease. `outer_leases`: the ids of the leases around it,
    the outermost first.
    """
    # Otherwise CUDA numbers the fastest GPU first, unlike nvidia-smi.
    cuda = {"CUDA_VISIBLE_DEVICES": visible_devices(gpus, naming), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    cuda |= _hip_variables(gpus)
    if lease_id is None:
        return cuda
    # A container numbers its GPUs again from 0.
    lease = {"NVIDIA_VISIBLE_DEVICES": visible_devices(gpus, "uuid"), "GPU_POOL_LEASE_ID": lease_id}
    more = {"GPU_POOL_HOST": host, "GPU_POOL_LEASE_ENDPOINT": endpoint, "GPU_POOL_OUTER_LEASES": outer_leases}
    return cuda | lease | {name: value for name, value in more.items() if value}


def outer_leases(within: str | None) -> str:
    """For the programs of a lease that is a part of `within`: the ids of the leases around it, the outermost first.

    Processes that they leave behind are left behind in all of these.
    """
    if within is None:
        return ""
    is_known = os.environ.get("GPU_POOL_LEASE_ID") == within
    around = os.environ.get("GPU_POOL_OUTER_LEASES", "") if is_known else ""
    return f"{around},{within}" if around else within


def lease_environment(
    gpus: Sequence[VisibleGPU], lease_id: str, naming: GPUNaming, *, host: str, endpoint: str, outer_leases: str
) -> dict[str, str]:
    """The variables of a program that this one starts inside a lease, besides those that it inherits."""
    variables = lease_variables(gpus, lease_id, naming, host=host, endpoint=endpoint, outer_leases=outer_leases)
    if not outer_leases and os.environ.get("GPU_POOL_OUTER_LEASES"):
        variables["GPU_POOL_OUTER_LEASES"] = ""  # those around this program are not around the new lease
    return variables


def _hip_variables(gpus: Sequence[VisibleGPU], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """For AMD's GPUs; ROCm counts the GPUs of HIP_VISIBLE_DEVICES within those of ROCR_VISIBLE_DEVICES."""
    if not gpus or not all(is_amd(gpu.uuid) for gpu in gpus):
        return {}
    numbers = ",".join(str(gpu.number) for gpu in gpus)
    if (os.environ if environ is None else environ).get("ROCR_VISIBLE_DEVICES"):
        return {"ROCR_VISIBLE_DEVICES": numbers, "HIP_VISIBLE_DEVICES": ",".join(map(str, range(len(gpus))))}
    return {"HIP_VISIBLE_DEVICES": numbers}


def is_amd(uuid: str | None) -> bool:
    """By its form: NVIDIA's have 32 digits in groups."""
    return uuid is not None and (uuid.startswith("AMD-") or (uuid.startswith("GPU-") and len(uuid) == 20))


def visible_devices(gpus: Sequence[VisibleGPU], naming: GPUNaming = "index") -> str:
    """By index, because UUIDs break some programs; all by UUID where one of them has no index, as a MIG device."""
    if gpus and all(is_amd(gpu.uuid) for gpu in gpus):
        naming = "index"  # HIP does not know all of these
    by_uuid = naming == "uuid" or any(gpu.number is None or (gpu.uuid or "").startswith("MIG-") for gpu in gpus)
    return ",".join(gpu.uuid if by_uuid and gpu.uuid is not None else str(gpu.number) for gpu in gpus)


def memory_caps(
    memory_mb: float, totals_mb: Sequence[float | None], environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """For a program with a share of its GPUs: what JAX, TensorFlow and the Multi-Process Service obey.

    `totals_mb`: of its GPUs. `environ`: of the program. What is set there stays. PyTorch reads no such variable:
    `gpu_worker_pool.torch.limit_memory()` is for it.
    """
    environ = os.environ if environ is None else environ
    caps = {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    known = [total for total in totals_mb if total]
    if len(known) == len(totals_mb) > 0:
        # Rounded down: a little more than its share would be others' memory.
        fraction = f"{max(math.floor(min(memory_mb / max(known), 1.0) * 10_000), 1) / 10_000:g}"
        if not environ.get(_JAX_NEWER_NAME):
            caps[_JAX_NAME] = fraction
    if _is_mps_running(environ):
        limit = max(int(memory_mb), 1)
        caps["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = ",".join(f"{place}={limit}M" for place in range(len(totals_mb)))
    ours = set(environ.get(CAPS_VARIABLE, "").split(","))
    caps = {name: value for name, value in caps.items() if name not in environ or name in ours}
    return caps | {MEMORY_VARIABLE: f"{memory_mb:g}", CAPS_VARIABLE: ",".join(caps)}


def _is_mps_running(environ: Mapping[str, str]) -> bool:
    """Whether a daemon serves the programs of this host; one daemon serves all GPUs that it was started with."""
    from pathlib import Path  # for shares alone

    folder = Path(environ.get("CUDA_MPS_PIPE_DIRECTORY") or _MPS_FOLDER)
    try:
        pid = int((folder / "nvidia-cuda-mps-control.pid").read_text())
        return Path(f"/proc/{pid}").exists()
    except (OSError, ValueError):
        return False
