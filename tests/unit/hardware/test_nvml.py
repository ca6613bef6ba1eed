"""The NVML reader against a library that does whatever a driver may do, in processes that load it for real."""

from __future__ import annotations

import os
import pickle
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.nvml import (
    DRIVER_NOT_LOADED,
    GPU_IS_LOST,
    GPU_NOT_FOUND,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
    RESET_REQUIRED,
    UNINITIALIZED,
    UNKNOWN,
    VERSION_MISMATCH,
    FakeMIGDevice,
    FakeNVML,
    fake_gpus,
)

from gpu_worker_pool.core.readings import ProcessReading
from gpu_worker_pool.errors import DriverError
from gpu_worker_pool.hardware.host_memory import read_host_memory
from gpu_worker_pool.hardware.processes import describe_process
from gpu_worker_pool.hardware.samples import DriverAnswer, GPUReading, MIGReading

#: Evaluates one line at a time and answers with the result, or with what was raised.
CHILD = """
import os, pickle, struct, sys, threading
from gpu_worker_pool.hardware.readers.nvml import NVMLReader
reader = NVMLReader()
names = globals()
for line in sys.stdin:
    try:
        answer = eval(line, names)
    except Exception as error:
        answer = error
    answer = pickle.dumps(answer)
    sys.stdout.buffer.write(struct.pack("I", len(answer)) + answer)
    sys.stdout.buffer.flush()
"""


class ReaderProcess:
    """A process with an NVMLReader: the library is found by the environment a process is started with."""

    def __init__(self, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **env},
        )

    def send(self, expression: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{expression}\n".encode())
        self.process.stdin.flush()

    def answers_within(self, seconds: float) -> bool:
        return bool(select.select([self.process.stdout], [], [], seconds)[0])

    def receive(self) -> Any:
        assert self.process.stdout is not None
        size = int.from_bytes(self.process.stdout.read(4), sys.byteorder)
        assert size, f"the process ended with {self.process.wait()}"
        return pickle.loads(self.process.stdout.read(size))  # noqa: S301  # from our own child

    def evaluate(self, expression: str) -> Any:
        self.send(expression)
        return self.receive()

    def read(self) -> DriverAnswer:
        answer = self.evaluate("reader.read()")
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, DriverAnswer)
        return answer

    def gpus(self) -> tuple[GPUReading, ...]:
        return self.read().gpus

    def failure(self) -> DriverError:
        error = self.evaluate("reader.read()")
        assert isinstance(error, DriverError), error
        assert str(error).endswith("."), "one sentence that says what to do"
        return error

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def fake(tmp_path: Path) -> FakeNVML:
    return FakeNVML(tmp_path, gpus=fake_gpus(2))


@pytest.fixture
def reader(fake: FakeNVML) -> Iterator[ReaderProcess]:
    process = ReaderProcess(fake.env)
    yield process
    process.end()


def healthy(index: int, **changes: Any) -> GPUReading:
    values: dict[str, Any] = {
        "name": "NVIDIA H100 80GB HBM3",
        "uuid": f"GPU-00000000-0000-0000-0000-{index:012d}",
        "pci_bus_id": f"00000000:{index + 12:02X}:00.0",
        "memory_total_mb": 81559,
        "memory_used_mb": 0,
        "memory_free_mb": 81008,
        "utilization_percent": 0,
        "temperature_c": 31,
        "power_draw_w": 72.5,
        "power_limit_w": 700.0,
        "ecc_uncorrected_errors": 0,
        "processes": (),
        "graphics": (),
    }
    return GPUReading(index, **{**values, **changes})


def silent(index: int, fault: str, **changes: Any) -> GPUReading:
    sample = healthy(index)
    names = {"name": sample.name, "uuid": sample.uuid, "pci_bus_id": sample.pci_bus_id}
    return GPUReading(index, fault=fault, **{**names, **changes})


LOST = "the GPU is lost, for example off the bus: see `dmesg`, then reboot the host"


# --- a host that is well ---


def test_all_gpus_with_all_values(fake: FakeNVML, reader: ReaderProcess) -> None:
    fake.gpus[1].memory_used_mb = 40_000
    fake.gpus[1].utilization_percent = 97
    fake.gpus[1].temperature_c = 64
    fake.gpus[1].power_draw_w = 512.25
    fake.gpus[1].ecc_uncorrected_errors = 3
    fake.write()
    busy = healthy(
        1,
        memory_used_mb=40_000,
        memory_free_mb=41_008,
        utilization_percent=97,
        temperature_c=64,
        power_draw_w=512.25,
        ecc_uncorrected_errors=3,
    )
    assert reader.read() == DriverAnswer((healthy(0), busy), driver_version="570.86.15", backend="nvml")


def test_hidden_from_cuda_is_not_hidden_here(fake: FakeNVML) -> None:
    process = ReaderProcess({**fake.env, "CUDA_VISIBLE_DEVICES": ""})
    assert len(process.gpus()) == 2
    process.end()


def test_no_gpu_is_no_failure(fake: FakeNVML, reader: ReaderProcess) -> None:
    fake.gpus = []
    fake.write()
    assert reader.gpus() == ()


def test_gpus_that_come_and_go_are_seen(fake: FakeNVML, reader: ReaderProcess) -> None:
    for count in (2, 3, 1):
        fake.gpus = fake_gpus(count)
        fake.write()
        assert reader.gpus() == tuple(healthy(index) for index in range(count))


def test_initializes_once_and_asks_what_never_changes_once(fake: FakeNVML, reader: ReaderProcess) -> None:
    fake.gpus = fake_gpus(1)
    fake.is_logging = True
    fake.write()
    each_time = [
        "count",
        "handle",
        "uuid",
        "memory",
        "mig_mode",
        "utilization",
        "power_draw",
        "power_limit",
        "recovery_action",
        "temperature",
        "ecc",
        "processes",
        "graphics",
    ]
    reader.read()
    assert sorted(fake.calls()) == sorted(["init", "driver_version", "name", "pci", *each_time])
    reader.read()
    assert sorted(fake.calls()) == sorted(each_time)


def test_how_far_gpus_are_is_asked_once_and_told_only_where_it_differs(fake: FakeNVML, reader: ReaderProcess) -> None:
    fake.gpus = fake_gpus(3)
    fake.is_logging = True
    fake.write()
    assert [gpu.distances for gpu in reader.gpus()] == [()] * 3, "a driver that does not tell"
    nvlink, switch, socket = 0, 10, 40
    fake.gpus = fake_gpus(4)
    for near, far in ((0, 1), (1, 0)):
        fake.gpus[near].distances = {far: switch, 2: socket, 3: socket}
        fake.gpus[near + 2].distances = {far + 2: nvlink, 0: socket, 1: socket}
    fake.write()
    fake.calls()
    told = [(0, 10, 40, 40), (10, 0, 40, 40), (40, 40, 0, 0), (40, 40, 0, 0)]
    assert [gpu.distances for gpu in reader.gpus()] == told
    assert [gpu.distances for gpu in reader.gpus()] == told
    assert fake.calls().count("topology") == 5, "each pair once, but for the one with NVLink"
    fake.gpus[3].errors["handle"] = GPU_IS_LOST
    fake.write()
    assert [gpu.distances for gpu in reader.gpus()] == [(0, 10, 40), (10, 0, 40), (40, 40, 0), ()]
    fake.gpus[3].errors.clear()
    for gpu in fake.gpus:
        gpu.distances = dict.fromkeys(range(4), nvlink)
    fake.write()
    assert [gpu.distances for gpu in reader.gpus()] == [()] * 4, "all are equally far: there is nothing to choose"


def test_another_order_of_the_indices_is_noticed(fake: FakeNVML, reader: ReaderProcess) -> None:
    fake.gpus[1].name = "NVIDIA A30"
    fake.write()
    before = reader.gpus()
    fake.gpus.reverse()
    fake.write()
    after = reader.gpus()
    assert [(gpu.index, gpu.uuid, gpu.name, gpu.pci_bus_id) for gpu in after] == [
        (index, gpu.uuid, gpu.name, gpu.pci_bus_id) for index, gpu in enumerate(reversed(before))
    ]


# --- values that cannot be told ---


def test_unsupported_is_unknown_and_never_zero(fake: FakeNVML, reader: ReaderProcess) -> None:
    fake.gpus = fake_gpus(1)
    gpu = fake.gpus[0]
    gpu.memory_total_mb = gpu.utilization_percent = gpu.temperature_c = gpu.power_draw_w = gpu.power_limit_w = None
    gpu.ecc_uncorrected_errors = gpu.recovery_action = gpu.mig_enabled = gpu.pci_bus_id = gpu.name = None
    gpu.errors = {"processes": NOT_SUPPORTED, "memory": NO_PERMISSION}
    gpu.graphics = None
    fake.write()
    # That it reports no utilization at all may be said of MIG and unified memory only.
    unknown = GPUReading(0, "unknown GPU", "GPU-00000000-0000-0000-0000-000000000000", reports_processes=False)
    assert reader.gpus() == (unknown,)


@pytest.mark.parametrize(
    ("call", "value"),
    [
        ("utilization", "utilization_percent"),
        ("temperature", "temperature_c"),
        ("power_draw", "power_draw_w"),
        ("power_limit", "power_limit_w"),
        ("ecc", "ecc_uncorrected_errors"),
        ("processes", "processes"),
    ],
)
def test_one_failing_call_costs_one_value(fake: FakeNVML, reader: ReaderProcess, call: str, value: str) -> None:
    fake.gpus[0].errors = {call: UNKNOWN}
    fake.write()
    assert reader.gpus() == (healthy(0, **{value: None}), healthy(1))


def test_memory_that_is_not_told_is_unknown(fake: FakeNVML, reader: ReaderProcess) -> None:
    fake.gpus[0].errors = {"memory": NO_PERMISSION}
    fake.write()
    unknown = healthy(0, memory_total_mb=None, memory_used_mb=None, memory_free_mb=None)
    assert reader.gpus() == (unknown, healthy(1))


def test_an_old_library_counts_reserved_memory_as_used(tmp_path: Path) -> None:
    newer = (
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetGraphicsRunningProcesses_v3",
        "nvmlDeviceGetFieldValues",
    )
    mig = ("nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex")
    old = FakeNVML(tmp_path, gpus=fake_gpus(1), without=newer + mig)
    old.gpus[0].recovery_action = 1  # which it cannot tell
    old.gpus[0].processes = [(2**22 + 1, 7)]  # a pid no process has
    old.gpus[0].graphics = [(2**22 + 2, 9)]
    old.write()
    process = ReaderProcess(old.env)
    seen = (ProcessReading(2**22 + 1, memory_used_mb=7),)
    drawing = (ProcessReading(2**22 + 2, memory_used_mb=9),)
    assert process.gpus() == (healthy(0, memory_used_mb=551, processes=seen, graphics=drawing),)
    process.end()


# --- processes ---


def test_processes_are_described(fake: FakeNVML, reader: ReaderProcess) -> None:
    no_process = 2**22 + 1
    fake.gpus[0].processes = [(os.getpid(), 1500), (no_process, None)]
    fake.write()
    first, second = reader.gpus()
    assert first.processes == (describe_process(os.getpid(), memory_used_mb=1500), ProcessReading(no_process))
    assert first.processes[0].user is not None
    assert first.processes[0].started_at is not None
    assert second.processes == ()


def test_processes_one_may_not_see_are_unknown_not_none(fake: FakeNVML, reader: ReaderProcess) -> None:
    fake.gpus[0].processes = [(os.getpid(), 1500)]
    fake.gpus[0].errors = {"processes": NO_PERMISSION}
    fake.write()
    assert reader.gpus() == (healthy(0, processes=None, reports_processes=False), healthy(1))


def test_a_query_of_processes_that_fails_once_does_not_mean_that_there_is_none(
    fake: FakeNVML, reader: ReaderProcess
) -> None:
    fake.gpus[0].errors = {"processes": UNKNOWN}
    fake.write()
    assert reader.gpus()[0] == healthy(0, processes=None, reports_processes=True)


def test_processes_that_only_draw_are_told_apart(fake: FakeNVML, reader: ReaderProcess) -> None:
    """One in both lists, as `nvidia-smi` shows with C+G, computes."""
    both, draws = 2**22 + 1, 2**22 + 2  # pids no process has
    fake.gpus[0].processes = [(both, 700)]
    fake.gpus[0].graphics = [(draws, 150), (both, 700), (draws + 1, None)]
    fake.gpus[1].graphics = None
    fake.write()
    first, second = reader.gpus()
    assert first.processes == (ProcessReading(both, memory_used_mb=700),)
    assert first.graphics == (ProcessReading(draws, memory_used_mb=150), ProcessReading(draws + 1))
    assert second.graphics is None


def test_a_library_that_cannot_list_graphics_leaves_them_unknown(tmp_path: Path) -> None:
    calls = ("nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v2")
    old = FakeNVML(tmp_path, gpus=fake_gpus(1), without=calls)
    process = ReaderProcess(old.env)
    assert process.gpus() == (healthy(0, graphics=None),)
    process.end()


# --- unified memory ---


def unified(fake: FakeNVML) -> None:
    """As on a GB10: the driver has no memory to report."""
    fake.gpus = fake_gpus(1)
    fake.gpus[0].memory_total_mb = None
    fake.write()


def test_where_memory_is_not_supported_the_host_s_stands_in(fake: FakeNVML, reader: ReaderProcess) -> None:
    unified(fake)
    (gpu,) = reader.gpus()
    host = read_host_memory()
    assert gpu.unified_memory
    assert gpu.fault is None
    assert gpu.reports_utilization
    assert gpu.memory_total_mb == host.total_mb
    assert gpu.memory_used_mb is not None
    assert gpu.memory_free_mb is not None
    assert gpu.memory_used_mb + gpu.memory_free_mb == host.total_mb
    fake.gpus[0].utilization_percent = None
    fake.write()
    assert not reader.gpus()[0].reports_utilization, "as on a Jetson"


@pytest.mark.parametrize("error", [UNKNOWN, NO_PERMISSION])
def test_memory_that_failed_is_not_unified(fake: FakeNVML, reader: ReaderProcess, error: int) -> None:
    fake.gpus[0].errors = {"memory": error}
    fake.write()
    first, _ = reader.gpus()
    assert (first.unified_memory, first.memory_total_mb) == (False, None)


def test_a_gpu_that_reported_memory_before_is_at_fault_for_as_long_as_it_does_not(
    fake: FakeNVML, reader: ReaderProcess
) -> None:
    assert reader.gpus() == (healthy(0), healthy(1))
    fake.gpus[0].errors = {"memory": NOT_SUPPORTED}
    fake.write()
    for _ in range(3):
        first, second = reader.gpus()
        assert (first.unified_memory, first.memory_total_mb) == (False, None)
        assert first.fault == "it no longer reports its memory: see `dmesg`"
        assert second == healthy(1)
    fake.gpus[0].errors = {}
    fake.write()
    assert reader.gpus() == (healthy(0), healthy(1))


def test_a_gpu_in_mig_mode_is_not_unified(fake: FakeNVML, reader: ReaderProcess) -> None:
    fake.gpus[0].mig_enabled, fake.gpus[0].memory_total_mb = True, None
    fake.write()
    first, _ = reader.gpus()
    assert (first.unified_memory, first.memory_total_mb, first.fault) == (False, None, None)


# --- GPUs that fail ---


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (GPU_IS_LOST, LOST),
        (RESET_REQUIRED, "the GPU needs a reset: end the processes on it, then run `nvidia-smi --gpu-reset -i 1`"),
        (GPU_NOT_FOUND, "the driver no longer finds the GPU: see `dmesg`, then reboot the host"),
    ],
)
def test_a_failed_gpu_stays_a_row(fake: FakeNVML, reader: ReaderProcess, error: int, fault: str) -> None:
    fake.gpus = fake_gpus(3)
    for call in ("handle", "uuid", "memory", "utilization", "processes"):
        fake.gpus[1].errors = {}
        fake.write()
        assert reader.gpus() == (healthy(0), healthy(1), healthy(2))
        fake.gpus[1].errors = {call: error}
        fake.write()
        assert reader.gpus() == (healthy(0), silent(1, fault), healthy(2)), call


def test_a_gpu_lost_from_the_start_has_no_name(fake: FakeNVML, reader: ReaderProcess) -> None:
    fake.gpus[1].errors = {"handle": GPU_IS_LOST}
    fake.write()
    assert reader.gpus() == (healthy(0), GPUReading(1, "unknown GPU", fault=LOST))


def test_a_gpu_that_may_not_be_used_is_a_row(fake: FakeNVML, reader: ReaderProcess) -> None:
    fake.gpus[1].errors = {"handle": NO_PERMISSION}
    fake.write()
    fault = "this user may not use the GPU: allow it to read and write /dev/nvidia1"
    assert reader.gpus() == (healthy(0), GPUReading(1, "unknown GPU", fault=fault))


def test_a_silent_gpu_does_not_take_the_name_of_one_that_answers(fake: FakeNVML, reader: ReaderProcess) -> None:
    reader.read()
    fake.gpus.reverse()
    fake.gpus[1].errors = {"handle": GPU_IS_LOST}
    fake.write()
    answering, silent_one = reader.gpus()
    assert answering.uuid == healthy(1).uuid
    assert silent_one == GPUReading(1, "unknown GPU", fault=LOST)


def test_an_index_that_was_gone_is_not_named_after_its_former_gpu(fake: FakeNVML, reader: ReaderProcess) -> None:
    reader.read()
    both = fake.gpus
    fake.gpus = both[:1]
    fake.write()
    reader.read()
    both[1].errors = {"handle": GPU_IS_LOST}
    fake.gpus = both
    fake.write()
    assert reader.gpus()[1] == GPUReading(1, "unknown GPU", fault=LOST)


@pytest.mark.parametrize("error", [UNKNOWN, NOT_SUPPORTED])
def test_a_gpu_whose_uuid_fails_does_not_become_another_one(fake: FakeNVML, reader: ReaderProcess, error: int) -> None:
    reader.read()
    fake.gpus[0].errors = {"uuid": error}
    fake.write()
    first = reader.gpus()[0]
    assert first.uuid == healthy(0).uuid
    assert first.fault is not None
    assert first.memory_total_mb is None


def test_a_gpu_whose_uuid_fails_from_the_start_is_not_used(fake: FakeNVML, reader: ReaderProcess) -> None:
    fake.gpus[0].errors = {"uuid": UNKNOWN}
    fake.write()
    assert reader.gpus() == (
        GPUReading(0, "unknown GPU", fault="the GPU does not answer (Unknown Error): see `dmesg`"),
        healthy(1),
    )


def test_a_uuid_of_garbage_spares_the_neighbour(fake: FakeNVML, reader: ReaderProcess) -> None:
    fake.gpus[0].uuid = "GPU-\udcff"  # a byte that is no text
    fake.write()
    garbled, neighbour = reader.gpus()
    assert (garbled.uuid, garbled.memory_total_mb) == (None, None)
    assert garbled.fault is not None
    assert neighbour == healthy(1)


def test_a_name_that_failed_once_is_asked_for_again(fake: FakeNVML, reader: ReaderProcess) -> None:
    fake.gpus[0].errors = {"name": UNKNOWN}
    fake.write()
    assert reader.gpus() == (healthy(0, name="unknown GPU"), healthy(1))
    fake.gpus[0].errors = {}
    fake.write()
    assert reader.gpus() == (healthy(0), healthy(1))


def test_a_gpu_that_never_had_a_uuid_is_as_good_as_others(fake: FakeNVML, reader: ReaderProcess) -> None:
    fake.gpus[0].uuid = None
    fake.write()
    assert reader.gpus() == (healthy(0, uuid=None), healthy(1))
    assert reader.gpus() == (healthy(0, uuid=None), healthy(1))


def test_memory_that_fails_is_a_fault(fake: FakeNVML, reader: ReaderProcess) -> None:
    fake.gpus[0].errors = {"memory": UNKNOWN}
    fake.write()
    fault = "its memory cannot be read (Unknown Error): see `dmesg`"
    bad = healthy(0, memory_total_mb=None, memory_used_mb=None, memory_free_mb=None, fault=fault)
    assert reader.gpus() == (bad, healthy(1))


@pytest.mark.parametrize(
    ("number", "action"),
    [(1, "Reset"), (2, "Reboot"), (3, "Drain P2P"), (4, "Drain and Reset"), (77, "action 77")],
)
def test_a_recovery_action_is_a_fault(fake: FakeNVML, reader: ReaderProcess, number: int, action: str) -> None:
    fake.gpus[0].recovery_action = number
    fake.write()
    fault = f"the driver asks for a recovery action: {action}"
    assert reader.gpus() == (healthy(0, recovery_action=action, fault=fault), healthy(1))


def test_impossible_numbers_are_faults_and_spare_the_neighbour(fake: FakeNVML, reader: ReaderProcess) -> None:
    fake.gpus = fake_gpus(4)
    fake.gpus[0].memory_used_mb = 90_000
    fake.gpus[1].utilization_percent = 250
    fake.gpus[2].memory_total_mb = fake.gpus[2].memory_reserved_mb = 0
    fake.write()
    too_full, too_busy, without_memory, neighbour = reader.gpus()
    assert (too_full.memory_used_mb, too_full.fault) == (None, "impossible reading: 90000 MB of 81559 MB used")
    assert (too_busy.utilization_percent, too_busy.fault) == (None, "impossible reading: utilization_percent is 250")
    assert (without_memory.memory_total_mb, without_memory.fault) == (
        None,
        "it reports a memory of 0 bytes: see `dmesg`",
    )
    assert neighbour == healthy(3)


# --- MIG ---


def test_mig_is_seen_when_switched_on_and_off(fake: FakeNVML, reader: ReaderProcess) -> None:
    assert reader.gpus() == (healthy(0), healthy(1))
    fake.gpus[0].mig_enabled = True
    fake.write()
    whole = {"utilization_percent": None, "reports_utilization": False, "mig_enabled": True}
    assert reader.gpus() == (healthy(0, **whole), healthy(1))

    fake.gpus[0].mig_devices = [
        FakeMIGDevice(uuid="MIG-1", memory_used_mb=300, processes=[(os.getpid(), 300)]),
        FakeMIGDevice(uuid="MIG-gone", errors={"handle": NOT_FOUND}),
        FakeMIGDevice(
            uuid="MIG-2",
            name="NVIDIA H100 80GB HBM3 MIG 1c.2g.20gb+me",
            memory_total_mb=20096,
            gpu_instance_id=5,
            compute_instance_id=2,
            errors={"processes": NO_PERMISSION},
        ),
    ]
    fake.write()
    own = (describe_process(os.getpid(), memory_used_mb=300),)
    devices = (
        MIGReading("MIG-1", "3g.40gb", 1, 0, 40448, 300, 40148, own, graphics=()),
        MIGReading("MIG-2", "1c.2g.20gb+me", 5, 2, 20096, 0, 20096, None, graphics=()),
    )
    assert reader.gpus() == (healthy(0, **whole, mig_devices=devices), healthy(1))

    fake.gpus[0].mig_enabled = False
    fake.gpus[0].mig_devices = []
    fake.write()
    assert reader.gpus() == (healthy(0), healthy(1))


def test_a_mig_device_made_anew_shows_its_new_profile(fake: FakeNVML, reader: ReaderProcess) -> None:
    fake.gpus[0].mig_enabled = True
    for profile in ("3g.40gb", "1g.10gb"):
        fake.gpus[0].mig_devices = [FakeMIGDevice(uuid="MIG-1", name=f"NVIDIA H100 MIG {profile}")]
        fake.write()
        assert [device.name for device in reader.gpus()[0].mig_devices] == [profile]


def test_mig_device_whose_memory_fails_has_the_fault_alone(fake: FakeNVML, reader: ReaderProcess) -> None:
    fake.gpus[0].mig_enabled = True
    fake.gpus[0].mig_devices = [FakeMIGDevice(uuid="MIG-1", errors={"memory": UNKNOWN}), FakeMIGDevice(uuid="MIG-2")]
    fake.write()
    gpu = reader.gpus()[0]
    assert gpu.fault is None
    assert [device.fault for device in gpu.mig_devices] == [
        "its memory cannot be read (Unknown Error): see `dmesg`",
        None,
    ]


# --- failures of the whole, and recovery from them ---


def test_without_a_library(fake: FakeNVML, reader: ReaderProcess) -> None:
    fake.uninstall()
    assert reader.failure().code == "nvml_not_found"
    fake.install()
    assert len(reader.gpus()) == 2


def test_a_library_that_is_no_library(fake: FakeNVML, reader: ReaderProcess) -> None:
    fake.library.write_bytes(b"")
    assert reader.failure().code == "nvml_not_found"


CODES = [
    (DRIVER_NOT_LOADED, "driver_not_loaded"),
    (VERSION_MISMATCH, "driver_version_mismatch"),
    (NO_PERMISSION, "permission_denied"),
    (UNKNOWN, "driver_error"),
]


@pytest.mark.parametrize(("error", "code"), CODES)
@pytest.mark.parametrize("call", ["init", "count"])
def test_failures_of_the_whole_have_codes_and_pass(
    fake: FakeNVML, reader: ReaderProcess, call: str, error: int, code: str
) -> None:
    fake.errors = {call: error}
    fake.write()
    assert reader.failure().code == code
    assert reader.failure().code == code
    fake.errors = {}
    fake.write()
    assert reader.gpus() == (healthy(0), healthy(1))


def test_a_library_replaced_on_disk_is_seen_after_it_could_not_start(fake: FakeNVML, reader: ReaderProcess) -> None:
    fake.install(init_fails=VERSION_MISMATCH)
    assert reader.failure().code == "driver_version_mismatch"
    fake.install()
    assert len(reader.gpus()) == 2


@pytest.mark.fault(29)
@pytest.mark.parametrize(
    ("call", "shutdown_fails_too"),
    [
        ("count", False),
        ("count", True),
        ("handle", False),
        ("uuid", True),
        ("memory", False),
        ("memory", True),
        ("temperature", False),
        ("recovery_action", False),
    ],
)
def test_a_library_replaced_on_disk_is_seen_after_it_failed(
    fake: FakeNVML, reader: ReaderProcess, call: str, shutdown_fails_too: bool
) -> None:
    reader.read()
    fake.errors = {call: UNINITIALIZED}
    if shutdown_fails_too:
        fake.errors["shutdown"] = UNINITIALIZED
    fake.write()
    fake.install(without=("nvmlDeviceGetTemperature",))
    assert reader.failure().code == "driver_error"
    del fake.errors[call]
    fake.write()
    assert reader.gpus() == (healthy(0, temperature_c=None), healthy(1, temperature_c=None))


def test_a_library_that_is_well_is_kept(fake: FakeNVML, reader: ReaderProcess) -> None:
    reader.read()
    fake.install(without=("nvmlDeviceGetTemperature",))
    fake.gpus[0].errors = {"handle": GPU_IS_LOST}
    fake.write()
    reader.read()
    assert reader.gpus() == (silent(0, LOST), healthy(1))


@pytest.mark.parametrize("call", ["handle", "memory"])
def test_when_every_gpu_fails_the_library_is_loaded_anew(fake: FakeNVML, reader: ReaderProcess, call: str) -> None:
    reader.read()
    fake.errors = {call: UNKNOWN}
    fake.write()
    assert all(gpu.fault and gpu.uuid for gpu in reader.gpus())
    fake.install(without=("nvmlDeviceGetTemperature",))
    fake.errors = {}
    fake.write()
    assert reader.gpus() == (healthy(0, temperature_c=None), healthy(1, temperature_c=None))


def test_the_names_of_silent_gpus_survive_loading_anew(fake: FakeNVML, reader: ReaderProcess) -> None:
    reader.read()
    fake.errors = {"handle": GPU_IS_LOST}
    fake.write()
    for _ in range(3):
        assert reader.gpus() == (silent(0, LOST), silent(1, LOST))


# --- letting go ---


def test_closed_is_unloaded_and_may_be_read_again(fake: FakeNVML, reader: ReaderProcess) -> None:
    is_mapped = "'libnvidia-ml' in open('/proc/self/maps').read()"
    reader.evaluate("reader.close()")
    assert len(reader.gpus()) == 2
    assert reader.evaluate(is_mapped) is True
    reader.evaluate("reader.close()")
    reader.evaluate("reader.close()")
    assert reader.evaluate(is_mapped) is False
    assert len(reader.gpus()) == 2


def test_others_who_use_pynvml_keep_their_library(fake: FakeNVML, reader: ReaderProcess) -> None:
    reader.evaluate("names.update(other=__import__('pynvml'))")
    reader.evaluate("other.nvmlInit()")
    reader.evaluate("names.update(handle=other.nvmlDeviceGetHandleByIndex(1))")
    reader.read()
    fake.errors = {"count": UNINITIALIZED}
    fake.write()
    reader.failure()
    reader.failure()
    reader.evaluate("reader.close()")
    fake.errors = {}
    fake.write()
    assert reader.evaluate("other.nvmlDeviceGetUUID(handle)") == healthy(1).uuid


# --- a driver that hangs ---


@pytest.mark.parametrize("call", ["init", "memory"])
def test_a_call_that_hangs_comes_back(fake: FakeNVML, reader: ReaderProcess, tmp_path: Path, call: str) -> None:
    hanging = tmp_path / "hanging"
    hanging.touch()
    fake.hangs = {call: hanging}
    fake.write()
    reader.send("reader.read()")
    assert not reader.answers_within(0.5)
    hanging.unlink()
    assert reader.receive().gpus == (healthy(0), healthy(1))


@pytest.mark.parametrize("call", ["init", "memory"])
def test_nothing_is_unloaded_under_a_call_that_hangs(
    fake: FakeNVML, reader: ReaderProcess, tmp_path: Path, call: str
) -> None:
    hanging = tmp_path / "hanging"
    hanging.touch()
    fake.hangs = {call: hanging}
    fake.is_logging = True
    fake.write()
    reader.evaluate("names.update(answers=[], run=lambda: answers.append(reader.read()))")
    reader.evaluate("names.update(thread=threading.Thread(target=run)) or thread.start()")
    deadline = time.monotonic() + 20
    while call not in fake.calls():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    # Neither the same reader nor another one waits for it, or takes its library away.
    reader.evaluate("reader.close()")
    fake.hangs = {}
    fake.errors = {"count": UNINITIALIZED}
    fake.write()
    reader.evaluate("names.update(second=NVMLReader())")
    assert isinstance(reader.evaluate("second.read()"), DriverError)
    assert isinstance(reader.evaluate("second.read()"), DriverError)
    reader.evaluate("second.close()")
    fake.errors = {}
    fake.write()
    hanging.unlink()
    reader.evaluate("thread.join()")
    assert [len(answer.gpus) for answer in reader.evaluate("answers")] == [2]
    # The close that came meanwhile was not forgotten.
    assert reader.evaluate("'libnvidia-ml' in open('/proc/self/maps').read()") is False
