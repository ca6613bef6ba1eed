"""One card must not be two: the same UUID at two endpoints, or under another number than the one it is held by."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpu_worker_pool.models import GPUInfo, GPUStats

logger = logging.getLogger(__name__)

#: Simulated GPUs have the same UUIDs on every host, and are not the same.
SIMULATED_UUIDS = "GPU-51309a7e-"


class SameGPUs:
    """Marks GPUs that must not be handed out because they are another one that is known already."""

    def __init__(self) -> None:
        #: Which endpoint showed a UUID first.
        self._shown_by: dict[str, str] = {}
        self._told: set[tuple[str, str]] = set()

    def marked(
        self, endpoint_id: str, stats: GPUStats, held: Mapping[str, str], name_of: Callable[[int], str]
    ) -> GPUStats:
        """`held`: by UUID, the id of the GPU that somebody holds; `name_of`: the id of a GPU of this endpoint."""
        faults = [self._fault(endpoint_id, row, held, name_of) for row in stats.gpus_summary]
        if not any(faults):
            return stats
        rows = [replace(row, fault=row.fault or fault) for row, fault in zip(stats.gpus_summary, faults, strict=True)]
        return replace(stats, gpus_summary=rows)

    def forget(self, endpoint_id: str) -> None:
        """It does not answer: another one may show its GPUs."""
        self._shown_by = {uuid: shown_by for uuid, shown_by in self._shown_by.items() if shown_by != endpoint_id}

    def is_shadow(self, endpoint_id: str, stats: GPUStats) -> bool:
        """Whether all that an endpoint shows are GPUs of another one."""
        uuids = [row.uuid for row in stats.gpus_summary if row.uuid is not None]
        return bool(uuids) and all(self._shown_by.get(uuid, endpoint_id) != endpoint_id for uuid in uuids)

    def _fault(
        self, endpoint_id: str, row: GPUInfo, held: Mapping[str, str], name_of: Callable[[int], str]
    ) -> str | None:
        uuid = row.uuid
        if uuid is None or uuid.startswith(SIMULATED_UUIDS):
            return None
        first = self._shown_by.setdefault(uuid, endpoint_id)
        if first != endpoint_id:
            if (first, endpoint_id) not in self._told:
                self._told.add((first, endpoint_id))
                logger.warning("%s shows the same GPUs as %s, which counts: are they one server?", endpoint_id, first)
            return f"it is the same GPU as one of {first}"
        if (name := held.get(uuid)) is not None and name != name_of(row.gpu_id):
            return f"it is the GPU that is held as {name}: their numbers have changed"
        return None
