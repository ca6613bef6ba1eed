"""The environment variables that show a program its GPUs and no others, and how they name these GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

#: How `CUDA_VISIBLE_DEVICES` names GPUs.
GPUNaming = Literal["index", "uuid"]


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
    if lease_id is None:
        return cuda
    # A container numbers its GPUs again from 0.
    lease = {"NVIDIA_VISIBLE_DEVICES": visible_devices(gpus, "uuid"), "GPU_POOL_LEASE_ID": lease_id}
    more = {"GPU_POOL_HOST": host, "GPU_POOL_LEASE_ENDPOINT": endpoint, "GPU_POOL_OUTER_LEASES": outer_leases}
    return cuda | lease | {name: value for name, value in more.items() if value}


def visible_devices(gpus: Sequence[VisibleGPU], naming: GPUNaming = "index") -> str:
    """By index, because UUIDs break some programs; all by UUID where one of them has no index, as a MIG device."""
    by_uuid = naming == "uuid" or any(gpu.number is None or (gpu.uuid or "").startswith("MIG-") for gpu in gpus)
    return ",".join(gpu.uuid if by_uuid and gpu.uuid is not None else str(gpu.number) for gpu in gpus)
