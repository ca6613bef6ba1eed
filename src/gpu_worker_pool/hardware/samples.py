"""Samples: all GPUs of this host at one moment, as the driver tells. What could not be read is None, never 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpu_worker_pool.core.readings import LARGEST_MB, ProcessReading

#: What a sensor may say; anything else (NaN among it) is not a measurement.
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
#: Of a GPU that never told.
UNKNOWN_NAME: Final = "unknown GPU"
#: Whoever decides on a GPU decides by these: an impossible one makes the GPU unusable, not just the value unknown.
_DECISIVE: Final = frozenset({"memory_total_mb", "memory_used_mb", "utilization_percent"})


def _drop_impossible(sample: GPUReading | MIGReading) -> None:
    for name, (lowest, highest) in _POSSIBLE.items():
        value = getattr(sample, name, None)
        if value is not None and not lowest <= value <= highest:
            _spoil(sample, name, f"{name} is {value}")
    total, used, free = sample.memory_total_mb, sample.memory_used_mb, sample.memory_free_mb
    if total is None:
        return
    if used is not None and used > total:
        _spoil(sample, "memory_used_mb", f"{used} MB of {total} MB used")
    if free is not None and free > total:
        _spoil(sample, "memory_free_mb", f"{free} MB of {total} MB free")


def _spoil(sample: GPUReading | MIGReading, name: str, fault: str) -> None:
    object.__setattr__(sample, name, None)
    if name in _DECISIVE and sample.fault is None:
        object.__setattr__(sample, "fault", f"impossible reading: {fault}")


def _usage_percent(total_mb: float | None, used_mb: float | None) -> float | None:
    return None if not total_mb or used_mb is None else 100.0 * used_mb / total_mb


@dataclass(frozen=True, slots=True)
class MIGReading:
    """One MIG device of a GPU: a part of it that computes for itself."""

    uuid: str
    #: The profile, such as `3g.40gb`.
    name: str
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    memory_total_mb: float | None = None
    memory_used_mb: float | None = None
    memory_free_mb: float | None = None
    #: None where it is not known which of the GPU's processes are on this device.
    processes: tuple[ProcessReading, ...] | None = None
    fault: str | None = None

    def __post_init__(self) -> None:
        _drop_impossible(self)

    @property
    def memory_usage_percent(self) -> float | None:
        return _usage_percent(self.memory_total_mb, self.memory_used_mb)


@dataclass(frozen=True, slots=True)
class GPUReading:
    """One GPU at one moment; a lost one is a row too, with its `fault` and nothing else known.

    Numbers that cannot be true (NaN, 250 %, more used than there is) are dropped here, at the edge: a broken sensor
    must never look like an idle card, and must not spoil the reading of its neighbours.
    """

    index: int
    name: str
    uuid: str | None = None
    pci_bus_id: str | None = None
    memory_total_mb: float | None = None
    memory_used_mb: float | None = None
    #: As the driver tells: less than total - used, since it keeps some for itself.
    memory_free_mb: float | None = None
    utilization_percent: float | None = None
    #: False where the device cannot report utilization at all, as one with MIG devices cannot.
    reports_utilization: bool = True
    temperature_c: float | None = None
    power_draw_w: float | None = None
    power_limit_w: float | None = None
    #: Uncorrected memory errors since the driver was loaded; None where ECC is off or absent.
    ecc_uncorrected_errors: int | None = None
    #: What the driver asks an administrator to do, such as `Reset`; None where nothing, or where it cannot tell.
    recovery_action: str | None = None
    #: Why the GPU must not be used; None while it is healthy.
    fault: str | None = None
    #: Processes that compute on it; None where the reader may not see them.
    processes: tuple[ProcessReading, ...] | None = None
    #: Empty where MIG is off; also where it is on and no device was made.
    mig_devices: tuple[MIGReading, ...] = ()
    mig_enabled: bool = False

    def __post_init__(self) -> None:
        _drop_impossible(self)

    @property
    def memory_usage_percent(self) -> float | None:
        return _usage_percent(self.memory_total_mb, self.memory_used_mb)

    def lost(self, fault: str) -> GPUReading:
        """The same GPU when nothing more can be read of it: who it is, with its MIG devices, and why not."""
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
        """Names the GPU across samples: indices may change their order when the driver is loaded anew."""
        return self.uuid or f"gpu-{self.index}"


@dataclass(frozen=True, slots=True)
class DriverAnswer:
    """What a reader returns: every GPU of the host, whatever this process is allowed to use."""

    gpus: tuple[GPUReading, ...]
    driver_version: str | None = None
    #: Which reader it was, for people to read: `nvml`, `nvidia-smi` or `simulated`.
    backend: str = ""


@dataclass(frozen=True, slots=True)
class DriverFailure:
    """Why a reader returned nothing."""

    message: str
    #: The `code` of the `DriverError`.
    code: str


@dataclass(frozen=True, slots=True)
class HostSample:
    """One attempt to read the host's GPUs, and what came of it."""

    #: Grows with every attempt on this host, whichever process made it.
    number: int
    #: How many attempts failed up to this one.
    failed_total: int
    #: Seconds since the host booted: the one clock that its processes share and that nobody sets.
    begun_at: float
    took_seconds: float
    #: Local and naive, for people to read; nothing is reckoned with it.
    timestamp: str
    answer: DriverAnswer | DriverFailure
