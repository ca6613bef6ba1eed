"""A host with any GPUs, for tests: a libnvidia-ml.so.1 built from nvml.c that tells what the test wrote.

    fake = FakeNVML(tmp_path)
    fake.gpus = fake_gpus(2)
    fake.write()
    subprocess.run([...], env={**os.environ, **fake.env})

Whatever is changed and written later is seen by the processes that run already.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

#: NVML's numbers of what may go wrong, for `errors`.
UNINITIALIZED = 1
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
DRIVER_NOT_LOADED = 9
GPU_IS_LOST = 15
RESET_REQUIRED = 16
VERSION_MISMATCH = 18
GPU_NOT_FOUND = 28
UNKNOWN = 999

MIB = 2**20


@dataclass
class FakeDevice:
    """What a GPU and a MIG device have in common; None is a value the device cannot tell."""

    name: str | None = "NVIDIA H100 80GB HBM3"
    uuid: str | None = None
    memory_total_mb: int | None = 81559
    memory_used_mb: int = 0
    #: What the driver keeps for itself: counted as used by the old call, and apart by the new one.
    memory_reserved_mb: int = 551
    #: (pid, MiB or None where the driver does not know).
    processes: list[tuple[int, int | None]] = field(default_factory=list)
    #: The same for those that draw; None where the device cannot list them.
    graphics: list[tuple[int, int | None]] | None = field(default_factory=list)
    #: By the key of the lines below, such as `memory`, `processes` or `handle`, which error that call gives.
    errors: dict[str, int] = field(default_factory=dict)

    def lines(self) -> dict[str, object]:
        memory = None
        if self.memory_total_mb is not None:
            free_mb = max(0, self.memory_total_mb - self.memory_reserved_mb - self.memory_used_mb)
            sizes = (self.memory_total_mb, self.memory_reserved_mb, self.memory_used_mb, free_mb)
            memory = " ".join(str(size * MIB) for size in sizes)
        graphics = None if self.graphics is None else "below"
        return {"name": self.name, "uuid": self.uuid, "memory": memory, "processes": "below", "graphics": graphics}

    def text(self, heading: str) -> str:
        lines = {**self.lines(), **{key: f"!{error}" for key, error in self.errors.items()}}
        rows = [f"{key} {value}" for key, value in lines.items() if value is not None]
        rows += [f"process {pid} {-1 if size_mb is None else size_mb * MIB}" for pid, size_mb in self.processes]
        rows += [f"drawing {pid} {-1 if size_mb is None else size_mb * MIB}" for pid, size_mb in self.graphics or ()]
        return "\n".join([heading, *rows])


@dataclass
class FakeMIGDevice(FakeDevice):
    name: str | None = "NVIDIA H100 80GB HBM3 MIG 3g.40gb"
    memory_total_mb: int | None = 40448
    memory_reserved_mb: int = 0
    gpu_instance_id: int | None = 1
    compute_instance_id: int | None = 0

    def lines(self) -> dict[str, object]:
        return {
            **super().lines(),
            "gpu_instance": self.gpu_instance_id,
            "compute_instance": self.compute_instance_id,
        }


@dataclass
class FakeGPU(FakeDevice):
    pci_bus_id: str | None = None
    utilization_percent: int | None = 0
    temperature_c: int | None = 31
    power_draw_w: float | None = 72.5
    power_limit_w: float | None = 700.0
    ecc_uncorrected_errors: int | None = 0
    #: NVML's number: 0 none, 1 reset, 2 reboot, 3 drain P2P, 4 drain and reset.
    recovery_action: int | None = 0
    #: None on a GPU that has no MIG.
    mig_enabled: bool | None = False
    mig_devices: list[FakeMIGDevice] = field(default_factory=list)
    #: By the index of another GPU: 0 for NVLink, else NVML's number of what is between them.
    distances: dict[int, int] = field(default_factory=dict)

    def lines(self) -> dict[str, object]:
        return {
            **super().lines(),
            "pci": self.pci_bus_id,
            "utilization": self.utilization_percent,
            "temperature": self.temperature_c,
            "power_draw": None if self.power_draw_w is None else round(self.power_draw_w * 1000),
            "power_limit": None if self.power_limit_w is None else round(self.power_limit_w * 1000),
            "ecc": self.ecc_uncorrected_errors,
            "recovery_action": self.recovery_action,
            "mig_mode": None if self.mig_enabled is None else int(self.mig_enabled),
            **{f"distance_{index}": distance for index, distance in self.distances.items()},
        }


def fake_gpus(count: int) -> list[FakeGPU]:
    """GPUs that are well and idle, with names of their own."""
    return [
        FakeGPU(uuid=f"GPU-00000000-0000-0000-0000-{index:012d}", pci_bus_id=f"00000000:{index + 12:02X}:00.0")
        for index in range(count)
    ]


class FakeNVML:
    """Set what the host should look like, then `write`; a process started with `env` sees it, now and later."""

    def __init__(self, folder: Path, *, gpus: list[FakeGPU] | None = None, without: tuple[str, ...] = ()) -> None:
        self.gpus = [] if gpus is None else gpus
        self.driver_version = "570.86.15"
        #: For the library as a whole, as `init` or `count`, and for calls to every device.
        self.errors: dict[str, int] = {}
        #: By call, the file that keeps it from returning while it exists.
        self.hangs: dict[str, Path] = {}
        self.delay_us = 0
        self.library = folder / "lib" / "libnvidia-ml.so.1"
        self._state = folder / "nvml-state.txt"
        self._log = folder / "nvml-calls.txt"
        self._log_seen = 0
        #: Whether the names of all calls are written down for `calls`.
        self.is_logging = False
        self.library.parent.mkdir(parents=True)
        self.install(without=without)
        self.write()

    @property
    def env(self) -> dict[str, str]:
        """To add to the environment of a process, before it is started."""
        return {"LD_LIBRARY_PATH": str(self.library.parent), "FAKE_NVML_STATE": str(self._state)}

    def install(self, *, without: tuple[str, ...] = (), init_fails: int | None = None) -> None:
        """Put a library on the disk, in the place of the present one, as an upgrade of the driver does."""
        replacement = self.library.with_suffix(".new")
        replacement.write_bytes(_compile(without, init_fails))
        replacement.replace(self.library)

    def uninstall(self) -> None:
        self.library.unlink()

    def write(self) -> None:
        settings = {"driver_version": self.driver_version, "delay_us": self.delay_us}
        rows = [f"{key} {value}" for key, value in settings.items()]
        rows += [f"{call} !{error}" for call, error in self.errors.items()]
        rows += [f"hang {call} {path}" for call, path in self.hangs.items()]
        if self.is_logging:
            rows.append(f"log {self._log}")
        for gpu in self.gpus:
            rows += [gpu.text("gpu"), *(device.text("mig") for device in gpu.mig_devices)]
        # Replaced as a whole, so that nobody reads half of it; a new file also is how the library sees a change.
        replacement = self._state.with_suffix(".new")
        replacement.write_bytes(("\n".join(rows) + "\n").encode(errors="surrogateescape"))
        replacement.replace(self._state)

    def calls(self) -> list[str]:
        """The calls made since `is_logging` was written, or since they were last asked for."""
        if not self._log.exists():
            return []
        # What is written only in part is left for the next time.
        text = self._log.read_text()[self._log_seen :]
        text = text[: text.rfind("\n") + 1]
        self._log_seen += len(text)
        return text.split()


@functools.cache
def _compile(without: tuple[str, ...], init_fails: int | None) -> bytes:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc or gcc) to build the fake NVML library with")
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-Wl,-soname,libnvidia-ml.so.1"]
    options += [f"-D{call}=without_{call}" for call in without]
    if init_fails is not None:
        options.append(f"-DINIT_FAILS={init_fails}")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "library.so")
        source = Path(__file__).with_suffix(".c")
        subprocess.run([compiler, *options, "-o", str(library), str(source)], check=True)
        return library.read_bytes()
