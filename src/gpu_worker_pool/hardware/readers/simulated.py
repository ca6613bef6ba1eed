"""Simulates GPUs without hardware: idle unless they are held, or outside programs are simulated on them."""

from __future__ import annotations

import random
import re
import zlib
from typing import TYPE_CHECKING, Final, Self

from gpu_worker_pool.core.readings import ProcessReading
from gpu_worker_pool.core.record import frozen
from gpu_worker_pool.environment import refused
from gpu_worker_pool.hardware.samples import DriverAnswer, GPUReading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

DEFAULT_COUNT: Final = 4
MOST: Final = 10_000
MEMORY_TOTAL_MB: Final = 24_576
#: A real program needs some time to load its model: until then its GPU looks idle.
LOADING_SECONDS: Final = 0.2
#: Memory of a holder that declared none.
DEFAULT_LOAD_MB: Final = 18_000.0
#: How long one step of the script lasts.
SCRIPT_SECONDS: Final = 5.0
#: Outsiders that sit idle with memory loaded, such as a notebook that was left open.
OUTSIDERS_VARIABLE: Final = "GPU_SIMULATED_OUTSIDERS"
MOST_OUTSIDERS: Final = 64
_SIZES_MB: Final = {"mb": 1.0, "mib": 1.0, "gb": 1000.0, "g": 1024.0, "gib": 1024.0}
_OUTSIDER: Final = re.compile(r"(\d{1,5}):(\d{1,6}(?:\.\d{1,3})?)([A-Za-z]{1,3})", re.ASCII)


@frozen
class SimulatedHost:
    """The parsed form of `simulated[:N][,seed=S][,linger=SECONDS]`, and of `with_outsiders`."""

    count: int = DEFAULT_COUNT
    #: The seed of the script of outside programs; None for no such programs.
    seed: int | None = None
    #: How long memory stays in use after its holder has ended.
    linger_seconds: float = 0.0
    #: Idle outsiders: index of the GPU, and MB.
    outsiders: tuple[tuple[int, float], ...] = ()

    @classmethod
    def parse(cls, text: str, name: str = "backend") -> Self:
        match = re.fullmatch(
            r"simulated(?::(?P<count>\d{1,5}))?(?:,seed=(?P<seed>\d{1,9}))?(?:,linger=(?P<linger>\d{1,4}(?:\.\d+)?))?"
            r"(?:,outsiders=(?P<outsiders>[0-9:.+]+))?",
            text,
        )
        count = int(match["count"] or DEFAULT_COUNT) if match else 0
        if match is None or count > MOST:
            raise refused(name, f"simulated:N with N up to {MOST}, optionally with ,seed=7 and ,linger=2.5", text)
        seed = None if match["seed"] is None else int(match["seed"])
        pairs = [pair.split(":") for pair in (match["outsiders"] or "").split("+") if pair]
        outsiders = tuple((int(index), float(memory_mb)) for index, memory_mb in pairs)
        return cls(count, seed, float(match["linger"] or 0.0), outsiders)

    @property
    def name(self) -> str:
        """Processes that simulate the same host share its samples."""
        seed = "" if self.seed is None else f"-seed{self.seed}"
        linger = f"-linger{self.linger_seconds:g}" if self.linger_seconds else ""
        outsiders = f"-outsiders{zlib.crc32(repr(self.outsiders).encode()):08x}" if self.outsiders else ""
        return f"simulated-{self.count}{seed}{linger}{outsiders}"


def with_outsiders(backend: str, text: str, name: str = OUTSIDERS_VARIABLE) -> str:
    """A simulated backend with idle outsiders such as `0:15GiB,2:4GiB`; `ValueError` if they do not fit it."""
    count = SimulatedHost.parse(backend).count
    expected = (
        f"GPU:SIZE, such as 0:15GiB,2:4GiB, each GPU once, below {count}, and each size up to {MEMORY_TOTAL_MB} MiB"
    )
    found: dict[int, float] = {}
    for word in re.split(r"[\s,]+", text.strip(" ,")):
        match = _OUTSIDER.fullmatch(word)
        unit = _SIZES_MB.get(match[3].lower()) if match else None
        index, memory_mb = (int(match[1]), float(match[2]) * unit) if match and unit else (count, 0.0)
        if not (index < count and 0 < memory_mb <= MEMORY_TOTAL_MB) or index in found or len(found) == MOST_OUTSIDERS:
            raise refused(name, expected, text)
        found[index] = memory_mb
    return f"{backend},outsiders=" + "+".join(f"{index}:{memory_mb:g}" for index, memory_mb in sorted(found.items()))


@frozen
class SimulatedHolder:
    """The holder of a simulated GPU, which causes load on it."""

    uuid: str
    since: float
    #: When it released the GPU; None while it holds it. Holders that ended long ago may be left out.
    until: float | None = None
    memory_mb: float | None = None
    pid: int = 1
    name: str = "holder"


def simulated_uuid(index: int) -> str:
    return f"GPU-51309a7e-0000-4000-8000-{index:012d}"


class SimulatedReader:
    """Its readings follow from the time and the holders, so that they are the same in every process.

    `clock` must be the clock of `SimulatedHolder.since`.
    """

    def __init__(
        self,
        host: SimulatedHost,
        *,
        clock: Callable[[], float],
        holders: Callable[[], Iterable[SimulatedHolder]] = tuple,
    ) -> None:
        self._host = host
        self._clock = clock
        self._holders = holders

    def read(self) -> DriverAnswer:
        now = self._clock()
        by_gpu: dict[str, list[SimulatedHolder]] = {}
        for holder in self._holders():
            by_gpu.setdefault(holder.uuid, []).append(holder)
        gpus = tuple(self._gpu(index, by_gpu.get(simulated_uuid(index), ()), now) for index in range(self._host.count))
        return DriverAnswer(gpus, driver_version=None, backend="simulated")

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _gpu(self, index: int, holders: Iterable[SimulatedHolder], now: float) -> GPUReading:
        processes = self._scripted(index, now)
        idle = self._idle_outsiders(index)
        lingering_mb = 0.0
        for holder in holders:
            memory_mb = DEFAULT_LOAD_MB if holder.memory_mb is None else holder.memory_mb
            if now < holder.since + LOADING_SECONDS:
                continue
            if holder.until is None or now < holder.until:
                processes.append(ProcessReading(holder.pid, name=holder.name, memory_used_mb=memory_mb))
            elif now < holder.until + self._host.linger_seconds:
                lingering_mb += memory_mb
        used = lingering_mb + sum(process.memory_used_mb or 0.0 for process in (*idle, *processes))
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
            processes=(*idle, *processes),
            graphics=(),
        )

    def _idle_outsiders(self, index: int) -> list[ProcessReading]:
        return [
            # Since the host booted: an identity that is the same in every process.
            ProcessReading(50_000 + index, 0.0, name="notebook", user="outsider", memory_used_mb=memory_mb)
            for gpu, memory_mb in self._host.outsiders
            if gpu == index
        ]

    def _scripted(self, index: int, now: float) -> list[ProcessReading]:
        """The script: outside programs, determined by the seed and the time."""
        if self._host.seed is None:
            return []
        line = random.Random(f"{self._host.seed}:{index}:{now // SCRIPT_SECONDS}")  # noqa: S311  # not a secret
        if line.random() >= 0.3:
            return []
        return [ProcessReading(40_000 + index, name="outsider", memory_used_mb=float(line.randrange(2_000, 20_000)))]
