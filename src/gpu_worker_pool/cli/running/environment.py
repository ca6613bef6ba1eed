"""The environment variables that show a command its GPUs and no others, and the words for those GPUs."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool import lease_variables as names
from gpu_worker_pool.lease_variables import GPUNaming, VisibleGPU, lease_environment, lease_variables, memory_caps

if TYPE_CHECKING:
    from collections.abc import Sequence

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def variables_of(granted: dict[str, Any], *, by_uuid: bool = False) -> dict[str, str]:
    caps = {}
    if granted["share_mb"] is not None and granted["ssh_target"] is None:  # else it is not known what is set there
        caps = memory_caps(granted["share_mb"], [gpu["memory_total_mb"] for gpu in granted["gpus"]])
    return caps | lease_environment(
        _names(granted),
        granted["lease_id"],
        _naming(granted, by_uuid=by_uuid),
        host=granted["host"],
        endpoint=granted["url"],
        outer_leases=granted["outer_leases"],
    )


def named_variables(given: Sequence[str]) -> dict[str, str]:
    """Of `--env`: `NAME`, as it is here if it is set, or `NAME=VALUE`. Raises a `ValueError`."""
    if not given:
        return {}
    from gpu_worker_pool.cli.keys import SECRETS

    variables = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not _NAME.fullmatch(name):
            raise ValueError(f"--env must be NAME or NAME=VALUE, not {text!r}")
        if name in SECRETS:
            raise ValueError(f"--env {name} is not possible: keys are not passed on")
        if name in lease_variables((), "", host="-", endpoint="-", outer_leases="-"):
            raise ValueError(f"--env {name} is not possible: the lease sets it")
        if equals or name in os.environ:
            variables[name] = value if equals else os.environ[name]
    return variables


def visible_devices(granted: dict[str, Any], *, by_uuid: bool = False) -> str:
    return names.visible_devices(_names(granted), _naming(granted, by_uuid=by_uuid))


def _names(granted: dict[str, Any]) -> list[VisibleGPU]:
    return [VisibleGPU(gpu["gpu_id"], gpu["uuid"]) for gpu in granted["gpus"]]


def _naming(granted: dict[str, Any], *, by_uuid: bool) -> GPUNaming:
    """As an option or the environment says; the lease process has read the latter."""
    return "uuid" if by_uuid or granted["gpu_names"] == "uuid" else "index"


def shown_gpus(granted: dict[str, Any]) -> str:
    """`GPU 0`, `GPUs 0, 2`."""
    gpus = granted["gpus"]
    numbers = ", ".join(str(number) for number in sorted(gpu["gpu_id"] for gpu in gpus))
    where = "" if granted["endpoint"] == "local" else f" of {granted['endpoint']}"
    return f"GPU{'s' if len(gpus) > 1 else ''} {numbers}{where}"
