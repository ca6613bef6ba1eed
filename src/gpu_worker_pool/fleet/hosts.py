"""A host as the dispatcher knows it: its `Join`, its GPUs as last reported, and its leases."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.core.readings import Reading
from gpu_worker_pool.fleet.messages import FORMAT, OLDEST_FORMAT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpu_worker_pool.core.requirements import Requirements
    from gpu_worker_pool.fleet.messages import GPURow, HostOrder, Join

#: Between the name of a host and a GPU of it, in the ids of the dispatcher's pool.
OF: Final = "/"


def pool_gpu_id(host: str, gpu_id: str) -> str:
    return f"{host}{OF}{gpu_id}"


def host_of_gpu(pool_id: str) -> str:
    return pool_id.partition(OF)[0]


def gpu_id_at_host(pool_id: str) -> str:
    return pool_id.partition(OF)[2]


def at_host(requirements: Requirements, host: str) -> Requirements:
    """The same for this host's GPUs alone, in the words of the fleet (`core.requirements.names_gpu`)."""
    only = (host,) if requirements.only is None else tuple([f"{host}:{name}" for name in requirements.only])
    exclude = tuple([f"{host}:{name}" for name in requirements.exclude])
    return replace(requirements, only=only, exclude=exclude)


@dataclass(slots=True, eq=False)
class KnownHost:
    name: str
    ledger_id: str
    url: str
    version: str = ""
    format: int = FORMAT
    is_candidate: bool = False
    is_draining: bool = False
    #: The fleet-wide number of each GPU, by the host's own id; it never changes.
    numbers: dict[str, int] = field(default_factory=dict)
    is_linked: bool = False
    #: Whether everything it has is known: a whole report came over this link.
    is_heard: bool = False
    #: The number of its last report, and of the last command for it.
    reported: int = 0
    commanded: int = 0
    rows: dict[str, GPURow] = field(default_factory=dict)
    #: The same for the pool; None: it must be rebuilt.
    readings: tuple[Reading, ...] | None = None
    #: When the last reading began, and when it last said anything.
    begun_at: float = -math.inf
    seen_at: float = -math.inf
    #: By its ids of its leases, the pool's.
    leases: dict[str, str] = field(default_factory=dict)
    #: Requests that wait in its ledger, and what was said to it last of the order in which they do.
    waiting: dict[str, None] = field(default_factory=dict)
    order: HostOrder | None = None

    @property
    def is_compatible(self) -> bool:
        return OLDEST_FORMAT <= self.format <= FORMAT

    @property
    def state(self) -> str:
        if not self.is_linked:
            return "unreachable"
        if not self.is_compatible:
            return "incompatible"
        return "draining" if self.is_draining else "up"

    def joined(self, join: Join, now: float) -> None:
        self.url, self.version, self.format, self.is_candidate = join.url, join.version, join.format, join.is_candidate
        self.is_linked, self.is_heard, self.reported, self.seen_at = True, False, 0, now
        self.order = None

    def next_command(self) -> int:
        self.commanded += 1
        return self.commanded

    def readings_for(self, owner_of_uuid: Mapping[str, str]) -> tuple[Reading, ...]:
        """`owner_of_uuid`: the host to which a GPU belongs if two hosts report it."""
        if self.readings is None:
            self.readings = tuple(
                [self._reading(row, owner_of_uuid) for row in self.rows.values() if row.gpu_id in self.numbers]
            )
        return self.readings

    def _reading(self, row: GPURow, owner_of_uuid: Mapping[str, str]) -> Reading:
        fault = row.fault
        if self.is_draining:
            fault = f"{self.name} is being drained"
        elif not self.is_compatible:
            fault = f"{self.name} runs version {self.version}, which this dispatcher does not understand"
        elif row.uuid is not None and not row.is_simulated and owner_of_uuid.get(row.uuid, self.name) != self.name:
            fault = f"{owner_of_uuid[row.uuid]} has a GPU with the same UUID, and it is counted there"
        foreign = row.foreign_processes
        return Reading(
            pool_gpu_id(self.name, row.gpu_id),
            self.numbers[row.gpu_id],
            row.name,
            row.uuid,
            row.memory_total_mb,
            row.memory_used_mb,
            row.memory_usage_percent,
            row.utilization_percent,
            row.reports_utilization,
            fault,
            () if foreign == 0 else None,
            (),
            unnamed_processes=foreign or 0,
            reports_processes=row.reports_processes,
            has_unified_memory=row.has_unified_memory,
            is_mig_device=row.is_mig_device,
            host=self.name,
            host_index=row.index,
        )

    def document(self) -> dict[str, Any]:
        return {
            "ledger_id": self.ledger_id,
            "url": self.url,
            "version": self.version,
            "format": self.format,
            "is_candidate": self.is_candidate,
            "is_draining": self.is_draining,
            "numbers": dict(self.numbers),
        }

    @classmethod
    def of_document(cls, name: str, row: Mapping[str, Any]) -> KnownHost:
        return cls(
            name,
            str(row["ledger_id"]),
            str(row["url"]),
            str(row.get("version", "")),
            int(row.get("format", FORMAT)),
            bool(row.get("is_candidate", False)),
            bool(row.get("is_draining", False)),
            {str(gpu_id): int(number) for gpu_id, number in row.get("numbers", {}).items()},
        )
