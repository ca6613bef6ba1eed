"""The values of a sample: all GPUs of this host at one moment. What could not be read is None, never 0."""

from __future__ import annotations

from typing import Final

from gpu_worker_pool.core.readings import LARGEST_MB, ProcessReading
from gpu_worker_pool.core.record import frozen

#: The possible range of each sensor; a value outside it, or NaN, is dropped.
_POSSIBLE: Final[dict[str, tuple[float, float]]] = {
    "memory_total_mb": (0, LARGEST_MB),
    "memory_used_mb": (0, LARGEST_MB),
    "memory_free_mb": (0, LARGEST_MB),
    "utilization_percent": (0, 100),
    "temperature_c": (-100, 300),
    "power_draw_w": (0, 100_000),
    "power_limit_w": (0, 100_000),
    "ecc_uncorrected_errors": (0, 2**63),
}
#: For a GPU that never reported its name.
UNKNOWN_NAME: Final = "unknown GPU"
#: Grants depend on these: an impossible value makes the GPU unusable.
_DECISIVE: Final = frozenset({"memory_total_mb", "memory_used_mb", "utilization_percent"})


class _Sensors:
    """Drops impossible numbers (NaN, 250 %, more used than total).

    A broken sensor must never look like an idle GPU, and must not affect other GPUs.
    """

    __slots__ = ()
    memory_total_mb: float | None
    memory_used_mb: float | None
    memory_free_mb: float | None
    fault: str | None

    def __post_init__(self) -> None:
        for name, (lowest, highest) in _POSSIBLE.items():
            value = getattr(self, name, None)
            if value is not None and not lowest <= value <= highest:
                self._drop(name, f"{name} is {value}")
        total, used, free = self.memory_total_mb, self.memory_used_mb, self.memory_free_mb
        if total is None:
            return
        if used is not None and used > total:
            self._drop("memory_used_mb", f"{used} MB of {total} MB used")
        if free is not None and free > total:
            self._drop("memory_free_mb", f"{free} MB of {total} MB free")

    def _drop(self, name: str, fault: str) -> None:
        object.__setattr__(self, name, None)
        if name in _DECISIVE and self.fault is None:
            object.__setattr__(self, "fault", f"impossible reading: {fault}")

    @property
    def memory_usage_percent(self) -> float | None:
        total, used = self.memory_total_mb, self.memory_used_mb
        return None if not total or used is None else 100.0 * used / total


@frozen
class MIGReading(_Sensors):
    """One MIG device, an isolated part of a GPU."""

    uuid: str
    #: The profile, such as `3g.40gb`.
    name: str
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    memory_total_mb: float | None = None
    memory_used_mb: float | None = None
    memory_free_mb: float | None = None
    #: None if it is unknown which processes of the GPU are on this device.
    processes: tuple[ProcessReading, ...] | None = None
    graphics: tuple[ProcessReading, ...] | None = None
    fault: str | None = None


@frozen
class GPUReading(_Sensors):
    """One GPU at one moment; a lost GPU has a reading too, with its `fault`."""

    index: int
    name: str
    uuid: str | None = None
    pci_bus_id: str | None = None
    memory_total_mb: float | None = None
    memory_used_mb: float | None = None
    #: As the driver reports it: less than total - used, because it reserves some.
    memory_free_mb: float | None = None
    utilization_percent: float | None = None
    #: False if the GPU cannot report utilization at all, as with MIG.
    reports_utilization: bool = True
    temperature_c: float | None = None
    power_draw_w: float | None = None
    power_limit_w: float | None = None
    #: Uncorrected memory errors since the driver was loaded; None if ECC is off or absent.
    ecc_uncorrected_errors: int | None = None
    #: What the driver asks an administrator to do, such as `Reset`; None if nothing, or unknown.
    recovery_action: str | None = None
    #: Why the GPU must not be used; None while it is healthy.
    fault: str | None = None
    #: Compute processes on it; None if the reader may not see them.
    processes: tuple[ProcessReading, ...] | None = None
    #: Processes that only draw, such as a desktop's; None if they cannot be seen.
    graphics: tuple[ProcessReading, ...] | None = None
    #: False if the driver cannot list processes at all.
    reports_processes: bool = True
    #: The GPU has no memory of its own: the memory above is the host's.
    unified_memory: bool = False
    #: Empty if MIG is off, or no device was created.
    mig_devices: tuple[MIGReading, ...] = ()
    mig_enabled: bool = False
    #: By index, how far the other GPUs are (`core/readings.py`); empty if all are equally far, or nothing is known.
    distances: tuple[int | None, ...] = ()

    def lost(self, fault: str) -> GPUReading:
        """The same GPU without values: its identity, its MIG devices, and the fault."""
        devices = tuple(
            MIGReading(mig.uuid, mig.name, mig.gpu_instance_id, mig.compute_instance_id, fault=fault)
            for mig in self.mig_devices
        )
        return GPUReading(
            self.index,
            self.name,
            self.uuid,
            self.pci_bus_id,
            fault=fault,
            reports_utilization=self.reports_utilization,
            mig_devices=devices,
            mig_enabled=self.mig_enabled,
        )

    @property
    def identity(self) -> str:
        """Identifies the GPU across samples: indices may change when the driver is reloaded."""
        return self.uuid or f"gpu-{self.index}"


@frozen
class DriverAnswer:
    """The answer of a reader: all GPUs of the host, regardless of `CUDA_VISIBLE_DEVICES`."""

    gpus: tuple[GPUReading, ...]
    driver_version: str | None = None
    #: The reader, for display: `nvml`, `nvidia-smi` or `simulated`.
    backend: str = ""


@frozen
class DriverFailure:
    """Why a read failed."""

    message: str
    #: The `code` of the `DriverError`.
    code: str


@frozen
class HostSample:
    """One attempt to read the host's GPUs, and its result."""

    #: Counts the attempts of all processes on this host.
    number: int
    #: How many attempts failed up to this one.
    failed_total: int
    #: Seconds since the host booted: the only clock that all its processes share and that never jumps.
    begun_at: float
    took_seconds: float
    #: Local time without zone, for display only.
    timestamp: str
    answer: DriverAnswer | DriverFailure
