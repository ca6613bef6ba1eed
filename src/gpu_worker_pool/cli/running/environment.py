"""The variables by which a program sees its GPUs and no others."""

from __future__ import annotations

from typing import Any


def lease_variables(granted: dict[str, Any], *, by_uuid: bool = False) -> dict[str, str]:
    """Numbers, since UUIDs break some programs, with the order that makes them mean the same for CUDA as for us.

    A MIG device has no number of its own.
    """
    devices = visible_devices(granted, by_uuid=by_uuid)
    return {
        "CUDA_VISIBLE_DEVICES": devices,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NVIDIA_VISIBLE_DEVICES": devices,
        "GPU_POOL_LEASE_ID": granted["lease_id"],
    }


def visible_devices(granted: dict[str, Any], *, by_uuid: bool = False) -> str:
    return ",".join(_name(gpu, by_uuid=by_uuid) for gpu in granted["gpus"])


def _name(gpu: dict[str, Any], *, by_uuid: bool) -> str:
    uuid: str | None = gpu["uuid"]
    if uuid is not None and (by_uuid or uuid.startswith("MIG-")):
        return uuid
    return str(gpu["gpu_id"])


def shown_gpus(granted: dict[str, Any]) -> str:
    """As people are told: `GPU 0`, `GPUs 0, 2`."""
    gpus = granted["gpus"]
    numbers = ", ".join(str(number) for number in sorted(gpu["gpu_id"] for gpu in gpus))
    where = "" if granted["endpoint"] == "local" else f" of {granted['endpoint']}"
    return f"GPU{'s' if len(gpus) > 1 else ''} {numbers}{where}"
