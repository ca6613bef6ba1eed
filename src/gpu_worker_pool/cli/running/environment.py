"""The environment variables that show a command its GPUs and no others, and the words for those GPUs."""

from __future__ import annotations

from typing import Any

from gpu_worker_pool.lease_variables import lease_variables


def variables_of(granted: dict[str, Any], *, by_uuid: bool = False) -> dict[str, str]:
    """By index, because UUIDs break some programs, and with the order in which CUDA numbers GPUs as we do.

    MIG devices have no index, so they are always named by UUID.
    """
    return lease_variables(visible_devices(granted, by_uuid=by_uuid), granted["lease_id"])


def visible_devices(granted: dict[str, Any], *, by_uuid: bool = False) -> str:
    return ",".join(_name(gpu, by_uuid=by_uuid) for gpu in granted["gpus"])


def _name(gpu: dict[str, Any], *, by_uuid: bool) -> str:
    uuid: str | None = gpu["uuid"]
    if uuid is not None and (by_uuid or uuid.startswith("MIG-")):
        return uuid
    return str(gpu["gpu_id"])


def shown_gpus(granted: dict[str, Any]) -> str:
    """`GPU 0`, `GPUs 0, 2`."""
    gpus = granted["gpus"]
    numbers = ", ".join(str(number) for number in sorted(gpu["gpu_id"] for gpu in gpus))
    where = "" if granted["endpoint"] == "local" else f" of {granted['endpoint']}"
    return f"GPU{'s' if len(gpus) > 1 else ''} {numbers}{where}"
