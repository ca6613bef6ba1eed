"""Readings: what one GPU reported at one moment. A value that could not be read is None, never 0."""

from __future__ import annotations

from gpu_worker_pool.core.record import frozen
from gpu_worker_pool.wording import spoken_mb, spoken_seconds

#: No GPU has more: larger values, and NaN, are reading errors.
LARGEST_MB = 1e12


@frozen
class ProcessReading:
    """A process seen on a GPU."""

    pid: int
    #: With the pid it identifies the process, even if the pid is used again.
    started_at: float | None = None
    name: str | None = None
    user: str | None = None
    memory_used_mb: float | None = None

    @property
    def identity(self) -> tuple[int, float | None]:
        return (self.pid, self.started_at)

    def __str__(self) -> str:
        return f"{self.name or 'process'} (pid {self.pid}{f', {self.user}' if self.user else ''})"

    def described(self, now: float | None) -> str:
        """With its memory, and with how long it has run by `now`, which is in seconds since the host booted."""
        memory = "" if self.memory_used_mb is None else f" with {spoken_mb(self.memory_used_mb)}"
        since = "" if now is None or self.started_at is None else f" for {spoken_seconds(now - self.started_at)}"
        return f"{self}{memory}{since}"


@frozen
class Reading:
    """One GPU at one moment.

    Numbers that cannot be true (NaN, 250 %, more used than there is) are dropped and become the GPU's `fault`:
    a broken sensor must never look like an idle card, and must not spoil the reading of its neighbours.
    """

    #: Its UUID, or endpoint and index.
    gpu_id: str
    index: int
    name: str
    uuid: str | None = None
    memory_total_mb: float | None = None
    memory_used_mb: float | None = None
    #: Computed from the two above where it is not given.
    memory_usage_percent: float | None = None
    utilization_percent: float | None = None
    #: False where the device cannot report utilization at all, as MIG devices cannot.
    reports_utilization: bool = True
    #: Why the GPU must not be used, or None while it is healthy.
    fault: str | None = None
    #: Processes that compute. None where the reader may not see them; an empty tuple if there are none.
    processes: tuple[ProcessReading, ...] | None = None
    #: Processes that only draw, such as a desktop's; None where they cannot be seen.
    graphics: tuple[ProcessReading, ...] | None = None
    #: Where `processes` is None, how many there are known to be.
    unnamed_processes: int = 0
    #: False where the driver cannot list processes at all; a query that failed once is not that.
    reports_processes: bool = True
    #: The GPU has no memory of its own, and the memory above is the host's.
    has_unified_memory: bool = False
    #: A process can use only one MIG device.
    is_mig_device: bool = False
    #: Leased by its server, as seen by a client that assigns in process.
    is_leased_elsewhere: bool = False
    #: Its host in a fleet, which requests may name instead of single GPUs; empty: not in a fleet.
    host: str = ""
    #: Its index there, where `index` is its number in the whole fleet.
    host_index: int | None = None
    #: By index, how far the GPUs of its host are from it: 0 by NVLink, else as NVML counts (10: the same PCIe switch, …
    #: 50: another socket). None, or missing: unknown. Empty where all are equally far.
    distances: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        for field, upper in (
            ("memory_total_mb", LARGEST_MB),
            ("memory_used_mb", LARGEST_MB),
            ("memory_usage_percent", 100.0),
            ("utilization_percent", 100.0),
        ):
            value = getattr(self, field)
            if value is not None and not 0 <= value <= upper:  # which NaN is not either
                self._spoil(field, f"{field} is {value}")
        total, used = self.memory_total_mb, self.memory_used_mb
        if total is not None and used is not None:
            if used > total:
                self._spoil("memory_used_mb", f"{used} MB of {total} MB used")
            elif self.memory_usage_percent is None and total > 0:
                object.__setattr__(self, "memory_usage_percent", 100.0 * used / total)

    def _spoil(self, field: str, fault: str) -> None:
        object.__setattr__(self, field, None)
        if self.fault is None:
            object.__setattr__(self, "fault", f"impossible reading: {fault}")

    @property
    def memory_free_mb(self) -> float | None:
        if self.memory_total_mb is None or self.memory_used_mb is None:
            return None
        return self.memory_total_mb - self.memory_used_mb

    @property
    def process_identities(self) -> frozenset[tuple[int, float | None]] | None:
        return None if self.processes is None else frozenset(process.identity for process in self.processes)
