"""The public values: immutable, and checked when they are made; no I/O, no clock, no decisions.

What could not be read is `None`, never 0: a broken sensor must not look like an idle GPU.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, fields
from datetime import datetime
from typing import Any, Protocol, TypeAlias

from gpu_worker_pool.checks import (
    NUMBERS,
    check_at_most,
    check_count,
    check_datetime,
    check_endpoint_id,
    check_flag,
    check_number,
    check_percent,
    check_text,
)
from gpu_worker_pool.lease_variables import GPUNaming, VisibleGPU, lease_variables, memory_caps

#: A GPU's index on its host, or, with several endpoints, its global id `"endpoint:index"`.
GPUId: TypeAlias = int | str
#: The name of a GPU whose name could not be read.
UNKNOWN_GPU = "unknown GPU"


# --- global GPU ids ---


def make_global_gpu_id(endpoint_id: str, local_gpu_id: int) -> str:
    check_endpoint_id("endpoint_id", endpoint_id)
    check_count("local_gpu_id", local_gpu_id)
    return f"{endpoint_id}:{local_gpu_id}"


def gpu_id_in_pool(endpoint_id: str, index: int) -> str:
    """For the pool itself: a single endpoint has no id, and its GPUs have plain indices."""
    return f"{endpoint_id}:{index}" if endpoint_id else str(index)


def split_global_gpu_id(global_gpu_id: str) -> tuple[str, int]:
    """Undo `make_global_gpu_id`; other spellings are refused, so that equal GPUs have equal ids."""
    check_text("global_gpu_id", global_gpu_id)
    endpoint_id, _, index = global_gpu_id.partition(":")
    canonical = index.isascii() and index.isdigit() and (index == "0" or index[0] != "0")
    if not (endpoint_id and canonical):
        raise ValueError(f"global_gpu_id must look like 'endpoint:0', not {global_gpu_id!r}")
    return endpoint_id, int(index)


# --- what the GPUs report ---


@dataclass(frozen=True)
class GPUInfo:
    """One GPU as its server last read it."""

    gpu_id: int
    name: str
    memory_usage_percent: float | None
    utilization_percent: float | None
    _: KW_ONLY
    uuid: str | None = None
    memory_total_mb: float | None = None
    memory_used_mb: float | None = None
    #: Why the GPU cannot be used; `None` for a healthy one.
    fault: str | None = None
    #: Its server has leased it, so clients that assign in process must not use it.
    leased: bool = False
    #: False if the device has no such sensor (MIG); that is not a fault.
    reports_utilization: bool = True
    #: Processes on the GPU; `None` if the server cannot see them or does not report them.
    process_count: int | None = None
    #: The GPU has no memory of its own: the memory is its host's.
    unified_memory: bool = False

    def __post_init__(self) -> None:
        # Hundreds of endpoints are read every few seconds: one look at what is nearly always right.
        given: Any = self  # of any type, until this has looked
        memory, utilization = given.memory_usage_percent, given.utilization_percent
        total, used = given.memory_total_mb, given.memory_used_mb
        if (
            type(memory) in NUMBERS
            and type(utilization) in NUMBERS
            and type(total) in NUMBERS
            and type(used) in NUMBERS
            and 0 <= memory <= 100
            and 0 <= utilization <= 100
            and 0 <= used <= total <= sys.float_info.max
            and type(given.gpu_id) is type(given.process_count) is int
            and given.gpu_id >= 0 <= given.process_count
            and type(given.name) is type(given.uuid) is str
            and given.uuid
            and given.name
            and given.fault is None
            and type(given.leased) is type(given.reports_utilization) is bool
        ):
            return
        check_count("gpu_id", self.gpu_id)
        check_text("name", self.name)
        check_percent("memory_usage_percent", self.memory_usage_percent)
        check_percent("utilization_percent", self.utilization_percent)
        check_number("memory_total_mb", self.memory_total_mb)
        check_number("memory_used_mb", self.memory_used_mb)
        check_at_most("memory_used_mb", self.memory_used_mb, "memory_total_mb", self.memory_total_mb)
        if self.uuid is not None:
            check_text("uuid", self.uuid)
        if self.fault is not None:
            check_text("fault", self.fault)
        check_flag("leased", self.leased)
        check_flag("reports_utilization", self.reports_utilization)
        check_flag("unified_memory", self.unified_memory)
        if self.process_count is not None:
            check_count("process_count", self.process_count)


@dataclass(frozen=True)
class GPUStats:
    """All GPUs of one endpoint at one moment; averages and totals are over the known values."""

    gpu_count: int
    total_memory_mb: float | None
    total_used_memory_mb: float | None
    average_utilization_percent: float | None
    gpus_summary: list[GPUInfo]
    total_memory_usage_percent: float | None
    #: The server's local time, for display; use `sample_age_seconds` for calculations.
    timestamp: str
    _: KW_ONLY
    sample_age_seconds: float = 0.0

    def __post_init__(self) -> None:
        check_count("gpu_count", self.gpu_count)
        check_number("total_memory_mb", self.total_memory_mb)
        check_number("total_used_memory_mb", self.total_used_memory_mb)
        check_at_most("total_used_memory_mb", self.total_used_memory_mb, "total_memory_mb", self.total_memory_mb)
        check_percent("average_utilization_percent", self.average_utilization_percent)
        check_percent("total_memory_usage_percent", self.total_memory_usage_percent)
        check_text("timestamp", self.timestamp, may_be_empty=True)
        check_number("sample_age_seconds", self.sample_age_seconds, may_be_unknown=False)
        # Fewer rows than GPUs is fine: invalid rows were left out.
        if (listed := len(self.gpus_summary)) != self.gpu_count:
            raise ValueError(f"gpu_count must be {listed}, the length of gpus_summary, not {self.gpu_count}")
        if len({gpu.gpu_id for gpu in self.gpus_summary}) < len(self.gpus_summary):
            raise ValueError(f"gpus_summary lists a GPU twice: {[gpu.gpu_id for gpu in self.gpus_summary]}")


@dataclass(frozen=True)
class GlobalGPUInfo:
    """One GPU of one of several endpoints."""

    global_gpu_id: str
    endpoint_id: str
    local_gpu_id: int
    name: str
    memory_usage_percent: float | None
    utilization_percent: float | None
    is_available: bool

    def __post_init__(self) -> None:
        _check_global_gpu_id(self.global_gpu_id, self.endpoint_id, self.local_gpu_id)
        check_text("name", self.name)
        check_percent("memory_usage_percent", self.memory_usage_percent)
        check_percent("utilization_percent", self.utilization_percent)
        check_flag("is_available", self.is_available)


@dataclass(frozen=True)
class EndpointInfo:
    """One endpoint as the client sees it."""

    endpoint_id: str
    url: str
    is_healthy: bool
    #: When it last answered; `None` if it never did.
    last_seen: datetime | None
    total_gpus: int
    available_gpus: int
    response_time_ms: float | None

    def __post_init__(self) -> None:
        check_endpoint_id("endpoint_id", self.endpoint_id)
        check_text("url", self.url)
        check_flag("is_healthy", self.is_healthy)
        if self.last_seen is not None:
            check_datetime("last_seen", self.last_seen)
        check_count("total_gpus", self.total_gpus)
        check_count("available_gpus", self.available_gpus)
        check_at_most("available_gpus", self.available_gpus, "total_gpus", self.total_gpus)
        check_number("response_time_ms", self.response_time_ms)


# --- assignments and waiting workers ---


class LeaseHealth(Protocol):
    """What an assignment needs to know about its lease, from any thread."""

    @property
    def is_lost(self) -> bool: ...
    @property
    def reason(self) -> str: ...
    async def wait(self) -> None:
        """Return when the lease is lost."""


class AssignedGPU(Protocol):
    @property
    def index(self) -> int: ...
    @property
    def uuid(self) -> str | None: ...


@dataclass(frozen=True)
class GPUAssignment:
    """One GPU for a worker or, if it asked for more, several of one host."""

    #: The first GPU: an index with one endpoint, a global id in a `GlobalGPUAssignment`.
    gpu_id: GPUId
    worker_id: str
    assigned_at: datetime
    _: KW_ONLY
    #: All GPUs, `gpu_id` first.
    gpu_ids: tuple[GPUId, ...] = ()
    #: In the order of `gpu_ids`; empty where the server does not report them.
    gpu_uuids: tuple[str, ...] = ()
    lease_id: str | None = None
    #: Grows with every grant of a GPU, so that a late message of an old holder is recognised.
    fence: int | None = None
    expires_at: datetime | None = None
    #: Of a share: the memory of each GPU that is its holder's; `None`: all of it.
    memory_mb: float | None = None
    _lease_health: LeaseHealth | None = field(default=None, repr=False, compare=False)
    #: How `env` names the GPUs.
    _gpu_names: GPUNaming = field(default="index", repr=False, compare=False)
    #: Of each GPU, where it is known.
    _memory_total_mb: tuple[float | None, ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        # One of these is made for every request, so what is right is found to be so without a call.
        if type(self.gpu_id) is not int or self.gpu_id < 0:
            self._check_gpu_id("gpu_id", self.gpu_id)
        if type(self.worker_id) is not str or not self.worker_id:
            check_text("worker_id", self.worker_id)
        if type(self.assigned_at) is not datetime:
            check_datetime("assigned_at", self.assigned_at)
        gpu_ids = self.gpu_ids
        if type(gpu_ids) is not tuple or len(gpu_ids) != 1 or gpu_ids[0] is not self.gpu_id:
            self._complete_gpu_ids()
        if self.gpu_uuids:
            if type(self.gpu_uuids) is not tuple:
                object.__setattr__(self, "gpu_uuids", tuple(self.gpu_uuids))
            if len(self.gpu_uuids) != len(self.gpu_ids):
                raise ValueError(f"gpu_uuids must be one per entry of gpu_ids {self.gpu_ids!r}, not {self.gpu_uuids!r}")
            for uuid in self.gpu_uuids:
                if type(uuid) is not str or not uuid:
                    check_text("gpu_uuids", uuid)
        if self.lease_id is not None:
            check_text("lease_id", self.lease_id)
        if self.fence is not None and (type(self.fence) is not int or self.fence < 0):
            check_count("fence", self.fence)
        if self.expires_at is not None:
            check_datetime("expires_at", self.expires_at)
        if self.memory_mb is not None:
            check_number("memory_mb", self.memory_mb)

    @property
    def local_gpu_ids(self) -> tuple[int, ...]:
        """The indices of the GPUs on their host."""
        return tuple(map(int, self.gpu_ids))

    @property
    def env(self) -> dict[str, str]:
        """Environment variables that show a process on the GPUs' host these GPUs and no others.

        For a share also those by which frameworks keep to their memory, unless this process has them already.
        """
        indices = self.local_gpu_ids
        uuids = self.gpu_uuids or (None,) * len(indices)
        gpus = [VisibleGPU(index, uuid) for index, uuid in zip(indices, uuids, strict=True)]
        variables = lease_variables(gpus, self.lease_id, self._gpu_names)
        if self.memory_mb is None or self.lease_id is None:
            return variables
        return variables | memory_caps(self.memory_mb, self._memory_total_mb or [None] * len(gpus))

    @property
    def lost(self) -> bool:
        """True when the GPU is no longer yours although you did not release it: stop using it. Safe in any thread.

        Only a lease can be lost: its server says so, or it was not renewed for its whole TTL.
        """
        return self._lease_health is not None and self._lease_health.is_lost

    @property
    def lost_reason(self) -> str | None:
        return self._lease_health.reason if self._lease_health is not None and self._lease_health.is_lost else None

    async def wait_lost(self) -> None:
        """Return when `lost` becomes true; without a lease that is never."""
        if self._lease_health is not None:
            await self._lease_health.wait()
        else:
            import asyncio  # already loaded where this is called; elsewhere it is not worth the time

            await asyncio.Event().wait()

    def _complete_gpu_ids(self) -> None:
        gpu_ids = tuple(self.gpu_ids) or (self.gpu_id,)
        if gpu_ids[0] != self.gpu_id:
            raise ValueError(f"gpu_ids must begin with gpu_id {self.gpu_id!r}, not {gpu_ids!r}")
        for gpu_id in gpu_ids:
            self._check_gpu_id("gpu_ids", gpu_id)
        object.__setattr__(self, "gpu_ids", gpu_ids)

    def _check_gpu_id(self, name: str, gpu_id: object) -> None:
        check_count(name, gpu_id)


@dataclass(frozen=True, init=False)
class GlobalGPUAssignment(GPUAssignment):
    """An assignment on one of several endpoints; `gpu_id` and `gpu_ids` hold global ids."""

    # Inherited fields come first in a dataclass; patterns should match the constructor.
    __match_args__ = ("global_gpu_id", "endpoint_id", "local_gpu_id", "worker_id", "assigned_at")

    gpu_id: str = field(init=False, repr=False)
    gpu_ids: tuple[str, ...] = field(default=(), kw_only=True)
    global_gpu_id: str
    endpoint_id: str
    local_gpu_id: int

    def __init__(
        self,
        global_gpu_id: str,
        endpoint_id: str,
        local_gpu_id: int,
        worker_id: str,
        assigned_at: datetime,
        *,
        gpu_ids: tuple[str, ...] = (),
        gpu_uuids: tuple[str, ...] = (),
        lease_id: str | None = None,
        fence: int | None = None,
        expires_at: datetime | None = None,
        memory_mb: float | None = None,
        _lease_health: LeaseHealth | None = None,
        _gpu_names: GPUNaming = "index",
        _memory_total_mb: tuple[float | None, ...] = (),
    ) -> None:
        _check_global_gpu_id(global_gpu_id, endpoint_id, local_gpu_id)
        object.__setattr__(self, "global_gpu_id", global_gpu_id)
        object.__setattr__(self, "endpoint_id", endpoint_id)
        object.__setattr__(self, "local_gpu_id", local_gpu_id)
        super().__init__(
            global_gpu_id,
            worker_id,
            assigned_at,
            gpu_ids=gpu_ids,
            gpu_uuids=gpu_uuids,
            lease_id=lease_id,
            fence=fence,
            expires_at=expires_at,
            memory_mb=memory_mb,
            _lease_health=_lease_health,
            _gpu_names=_gpu_names,
            _memory_total_mb=_memory_total_mb,
        )

    @property
    def local_gpu_ids(self) -> tuple[int, ...]:
        return tuple(split_global_gpu_id(gpu_id)[1] for gpu_id in self.gpu_ids)

    def _check_gpu_id(self, name: str, gpu_id: object) -> None:
        if gpu_id == self.global_gpu_id:
            return
        check_text(name, gpu_id)
        if split_global_gpu_id(str(gpu_id))[0] != self.endpoint_id:
            raise ValueError(f"{name} must all be on endpoint {self.endpoint_id!r}, not {gpu_id!r}")


def make_assignment(
    endpoint_id: str,
    gpus: Sequence[AssignedGPU],
    worker_id: str,
    assigned_at: datetime,
    *,
    fence: int,
    lease_id: str | None = None,
    expires_at: datetime | None = None,
    lease_health: LeaseHealth | None = None,
    gpu_names: GPUNaming = "index",
    memory_mb: float | None = None,
    memory_total_mb: tuple[float | None, ...] = (),
) -> GPUAssignment:
    """A global one unless `endpoint_id` is empty, which it is with a single endpoint."""
    first, uuid = gpus[0].index, gpus[0].uuid
    gpu_ids: tuple[int, ...] = (first,)
    gpu_uuids: tuple[str, ...] = () if uuid is None else (uuid,)
    if len(gpus) > 1:
        gpu_ids = tuple([gpu.index for gpu in gpus])
        uuids = tuple([gpu.uuid for gpu in gpus if gpu.uuid is not None])
        gpu_uuids = uuids if len(uuids) == len(gpus) else ()
    if not endpoint_id:
        return GPUAssignment(
            first,
            worker_id,
            assigned_at,
            gpu_ids=gpu_ids,
            gpu_uuids=gpu_uuids,
            lease_id=lease_id,
            fence=fence,
            expires_at=expires_at,
            _lease_health=lease_health,
            memory_mb=memory_mb,
            _gpu_names=gpu_names,
            _memory_total_mb=memory_total_mb,
        )
    names = [make_global_gpu_id(endpoint_id, gpu.index) for gpu in gpus]
    return GlobalGPUAssignment(
        names[0],
        endpoint_id,
        first,
        worker_id,
        assigned_at,
        gpu_ids=tuple(names),
        gpu_uuids=gpu_uuids,
        lease_id=lease_id,
        fence=fence,
        expires_at=expires_at,
        _lease_health=lease_health,
        memory_mb=memory_mb,
        _gpu_names=gpu_names,
        _memory_total_mb=memory_total_mb,
    )


def _do_nothing(_: object) -> None:
    pass


@dataclass(frozen=True)
class WorkerInfo:
    """A worker that holds a GPU or waits for one."""

    id: str
    enqueued_at: datetime
    #: Called with the id of the assigned GPU: `Any`, because it is an int or, with many endpoints, a str.
    callback: Callable[[Any], object] = field(default=_do_nothing, repr=False, compare=False)
    on_error: Callable[[Exception], object] = field(default=_do_nothing, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_text("id", self.id)
        check_datetime("enqueued_at", self.enqueued_at)
        for name in ("callback", "on_error"):
            if not callable(getattr(self, name)):
                raise TypeError(f"{name} must be callable, not {getattr(self, name)!r}")


@dataclass(frozen=True)
class PoolStatus:
    """The pool at one moment."""

    total_gpus: int
    available_gpus: int
    active_workers: int
    blocked_workers: int
    gpu_assignments: dict[GPUId, list[WorkerInfo]]

    def __post_init__(self) -> None:
        for name in ("total_gpus", "available_gpus", "active_workers", "blocked_workers"):
            check_count(name, getattr(self, name))
        check_at_most("available_gpus", self.available_gpus, "total_gpus", self.total_gpus)


@dataclass(frozen=True, init=False)
class MultiEndpointPoolStatus(PoolStatus):
    """The pool of several endpoints; construct it with either `endpoint_details` or `endpoints`."""

    total_endpoints: int
    healthy_endpoints: int
    #: May have more keys than `EndpointInfo` has fields.
    endpoint_details: list[dict[str, Any]]

    def __init__(
        self,
        total_gpus: int,
        available_gpus: int,
        active_workers: int,
        blocked_workers: int,
        gpu_assignments: dict[GPUId, list[WorkerInfo]],
        total_endpoints: int,
        healthy_endpoints: int,
        endpoint_details: list[dict[str, Any]] | None = None,
        *,
        endpoints: Iterable[EndpointInfo] | None = None,
    ) -> None:
        if (endpoint_details is None) == (endpoints is None):
            raise TypeError("give either endpoint_details or endpoints")
        super().__init__(total_gpus, available_gpus, active_workers, blocked_workers, gpu_assignments)
        check_count("total_endpoints", total_endpoints)
        check_count("healthy_endpoints", healthy_endpoints)
        check_at_most("healthy_endpoints", healthy_endpoints, "total_endpoints", total_endpoints)
        if endpoint_details is None:
            endpoint_details = [asdict(endpoint) for endpoint in endpoints or ()]
        object.__setattr__(self, "total_endpoints", total_endpoints)
        object.__setattr__(self, "healthy_endpoints", healthy_endpoints)
        object.__setattr__(self, "endpoint_details", endpoint_details)

    @property
    def endpoints(self) -> list[EndpointInfo]:
        names = [field.name for field in fields(EndpointInfo)]
        known: list[dict[str, Any]] = [{name: details.get(name) for name in names} for details in self.endpoint_details]
        return [EndpointInfo(**values) for values in known]


def _check_global_gpu_id(global_gpu_id: object, endpoint_id: str, local_gpu_id: int) -> None:
    expected = make_global_gpu_id(endpoint_id, local_gpu_id)
    if global_gpu_id != expected:
        raise ValueError(f"global_gpu_id must be {expected!r}, not {global_gpu_id!r}")
