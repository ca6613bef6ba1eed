"""Simulated GPUs, for trying things out without hardware: idle unless somebody holds them, or a script is asked for."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from gpu_worker_pool.core.readings import ProcessReading
from gpu_worker_pool.environment import refused
from gpu_worker_pool.hardware.samples import DriverAnswer, GPUReading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

DEFAULT_COUNT: Final = 4
MOST: Final = 10_000
MEMORY_TOTAL_MB: Final = 24_576
#: A real program loads its model some time after it was given the GPU: until then the card looks idle.
LOADING_SECONDS: Final = 0.2
#: What a holder that declared nothing takes.
DEFAULT_LOAD_MB: Final = 18_000.0
#: How long one line of the script lasts.
SCRIPT_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class SimulatedHost:
    """What `simulated[:N][,seed=S][,linger=SECONDS]` says."""

    count: int = DEFAULT_COUNT
    #: Of the script of outsiders' programs that come and go; None for no outsiders.
    seed: int | None = None
    #: How long memory stays in use after its holder has ended.
    linger_seconds: float = 0.0

    @classmethod
    def parse(cls, text: str, name: str = "backend") -> Self:
        match = re.fullmatch(
            r"simulated(?::(?P<count>\d{1,5}))?(?:,seed=(?P<seed>\d{1,9}))?(?:,linger=(?P<linger>\d{1,4}(?:\.\d+)?))?",
            text,
        )
        count = int(match["count"] or DEFAULT_COUNT) if match else 0
        if match is None or count > MOST:
            raise refused(name, f"simulated:N with N up to {MOST}, optionally with ,seed=7 and ,linger=2.5", text)
        seed = None if match["seed"] is None else int(match["seed"])
        return cls(count, seed, float(match["linger"] or 0.0))

    @property
    def name(self) -> str:
        """Two processes that simulate the same host share its readings; others do not."""
        seed = "" if self.seed is None else f"-seed{self.seed}"
        return f"simulated-{self.count}{seed}" + (f"-linger{self.linger_seconds:g}" if self.linger_seconds else "")


@dataclass(frozen=True, slots=True)
class Holder:
    """Somebody who was given a simulated GPU, and so puts load on it."""

    uuid: str
    since: float
    #: When it gave the GPU back; None while it has it. Those that ended long ago need not be told of.
    until: float | None = None
    memory_mb: float | None = None
    pid: int = 1
    name: str = "holder"


def simulated_uuid(index: int) -> str:
    return f"GPU-51309a7e-0000-4000-8000-{index:012d}"


class SimulatedReader:
    """Everything it tells follows from the time and the holders, so that it is the same in every process.

    `clock` must be the one that `Holder.since` is of.
    """

    def __init__(
        self,
        host: SimulatedHost,
        *,
        clock: Callable[[], float],
        holders: Callable[[], Iterable[Holder]] = tuple,
    ) -> None:
        self._host = host
        self._clock = clock
        self._holders = holders

    def read(self) -> DriverAnswer:
        now = self._clock()
        by_gpu: dict[str, list[Holder]] = {}
        for holder in self._holders():
            by_gpu.setdefault(holder.uuid, []).append(holder)
        gpus = tuple(self._gpu(index, by_gpu.get(simulated_uuid(index), ()), now) for index in range(self._host.count))
        return DriverAnswer(gpus, driver_version=None, backend="simulated")

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _gpu(self, index: int, holders: Iterable[Holder], now: float) -> GPUReading:
        processes = self._outsiders(index, now)
        lingering_mb = 0.0
        for holder in holders:
            memory_mb = DEFAULT_LOAD_MB if holder.memory_mb is None else holder.memory_mb
            if now < holder.since + LOADING_SECONDS:
                continue
            if holder.until is None or now < holder.until:
                processes.append(ProcessReading(holder.pid, name=holder.name, memory_used_mb=memory_mb))
            elif now < holder.until + self._host.linger_seconds:
                lingering_mb += memory_mb
        used = lingering_mb + sum(process.memory_used_mb or 0.0 for process in processes)
        used_mb = round(min(used, MEMORY_TOTAL_MB))
        return GPUReading(
            index=index,
            name="Simulated GPU 24GB",
            uuid=simulated_uuid(index),
            pci_bus_id=f"00000000:{index // 256:02X}:{index % 256:02X}.0",
            memory_total_mb=MEMORY_TOTAL_MB,
            memory_used_mb=used_mb,
            memory_free_mb=MEMORY_TOTAL_MB - used_mb,
            utilization_percent=95 if processes else 0,
            temperature_c=71 if processes else 34,
            power_draw_w=285.5 if processes else 21.0,
            power_limit_w=320.0,
            processes=tuple(processes),
        )

    def _outsiders(self, index: int, now: float) -> list[ProcessReading]:
        """The script: programs that nobody was asked about, of its seed and the time alone."""
        if self._host.seed is None:
            return []
        line = random.Random(f"{self._host.seed}:{index}:{now // SCRIPT_SECONDS}")  # noqa: S311  # a script, no secret
        if line.random() >= 0.3:
            return []
        return [ProcessReading(40_000 + index, name="outsider", memory_used_mb=float(line.randrange(2_000, 20_000)))]
