"""Finds GPUs that are listed twice: by two endpoints, or under a new number while held under another one."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpu_worker_pool.models import GPUInfo, GPUStats

logger: logging.Logger = logging.getLogger(__name__)

#: Simulated GPUs have the same UUIDs on every host, but are different GPUs.
SIMULATED_UUIDS = "GPU-51309a7e-"


class SameGPUs:
    """Marks GPUs that must not be granted because they are already known under another id."""

    def __init__(self) -> None:
        #: The endpoint that listed a UUID first.
        self._listed_by: dict[str, str] = {}
        self._warned: set[tuple[str, str]] = set()

    def marked(
        self, endpoint_id: str, stats: GPUStats, held: Mapping[str, str], name_of: Callable[[int], str]
    ) -> GPUStats:
        """`held`: the id under which each UUID is held; `name_of`: the id of a GPU of this endpoint."""
        faults = [self._fault(endpoint_id, row, held, name_of) for row in stats.gpus_summary]
        if not any(faults):
            return stats
        rows = [replace(row, fault=row.fault or fault) for row, fault in zip(stats.gpus_summary, faults, strict=True)]
        return replace(stats, gpus_summary=rows)

    def forget(self, endpoint_id: str) -> None:
        """It does not answer: another endpoint may list its GPUs."""
        self._listed_by = {uuid: listed_by for uuid, listed_by in self._listed_by.items() if listed_by != endpoint_id}

    def is_shadow(self, endpoint_id: str, stats: GPUStats) -> bool:
        """Whether an endpoint lists only GPUs of other endpoints."""
        uuids = [row.uuid for row in stats.gpus_summary if row.uuid is not None]
        return bool(uuids) and all(self._listed_by.get(uuid, endpoint_id) != endpoint_id for uuid in uuids)

    def _fault(
        self, endpoint_id: str, row: GPUInfo, held: Mapping[str, str], name_of: Callable[[int], str]
    ) -> str | None:
        uuid = row.uuid
        if uuid is None or uuid.startswith(SIMULATED_UUIDS):
            return None
        first = self._listed_by.setdefault(uuid, endpoint_id)
        if first != endpoint_id:
            if (first, endpoint_id) not in self._warned:
                self._warned.add((first, endpoint_id))
                logger.warning("%s lists the same GPUs as %s and is ignored: are they one server?", endpoint_id, first)
            return f"it is the same GPU as one of {first}"
        if (name := held.get(uuid)) is not None and name != name_of(row.gpu_id):
            return f"it is the GPU that is held as {name}: their numbers have changed"
        return None
