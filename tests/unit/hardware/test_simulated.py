"""Simulated GPUs: the same every time, idle unless somebody holds them."""

from __future__ import annotations

import pytest

from gpu_worker_pool.environment import Environment
from gpu_worker_pool.hardware.readers.choose import complete_backend, read_outsiders
from gpu_worker_pool.hardware.readers.simulated import (
    DEFAULT_LOAD_MB,
    MEMORY_TOTAL_MB,
    SimulatedHolder,
    SimulatedHost,
    SimulatedReader,
    simulated_uuid,
    with_outsiders,
)


class Host:
    """A simulated host whose time and holders a test sets."""

    def __init__(self, text: str = "simulated:2") -> None:
        self.now = 1000.0
        self.holders: list[SimulatedHolder] = []
        self.reader = SimulatedReader(SimulatedHost.parse(text), clock=lambda: self.now, holders=lambda: self.holders)

    def used_mb(self, index: int = 0) -> float | None:
        return self.reader.read().gpus[index].memory_used_mb


def test_they_are_idle_and_the_same_every_time() -> None:
    first, second = Host("simulated:3").reader.read(), Host("simulated:3").reader.read()
    assert first == second
    assert len({gpu.uuid for gpu in first.gpus}) == 3
    for gpu in first.gpus:
        assert (gpu.memory_used_mb, gpu.utilization_percent, gpu.processes, gpu.fault) == (0, 0, (), None)


def test_load_comes_a_moment_after_the_grant_and_goes_with_the_holder() -> None:
    host = Host()
    host.holders = [SimulatedHolder(simulated_uuid(1), since=1000.0, memory_mb=5000, pid=77, name="train")]
    host.now = 1000.19
    assert host.used_mb(1) == 0
    host.now = 1000.2
    gpu = host.reader.read().gpus[1]
    assert gpu.processes is not None
    assert (gpu.memory_used_mb, gpu.utilization_percent) == (5000, 95)
    assert [(process.pid, process.name, process.memory_used_mb) for process in gpu.processes] == [(77, "train", 5000)]
    assert host.used_mb(0) == 0
    host.holders = []
    assert host.used_mb(1) == 0


def test_who_declared_nothing_takes_most_of_it_and_nobody_more_than_there_is() -> None:
    host = Host()
    host.holders = [SimulatedHolder(simulated_uuid(0), since=0.0)]
    assert host.used_mb() == DEFAULT_LOAD_MB
    host.holders *= 2
    assert host.used_mb() == MEMORY_TOTAL_MB


def test_memory_lingers_only_where_asked_for() -> None:
    ended = SimulatedHolder(simulated_uuid(0), since=0.0, until=1000.0, memory_mb=4000)
    host = Host("simulated:1")
    host.holders = [ended]
    assert host.used_mb() == 0
    host = Host("simulated:1,linger=2.5")
    host.holders = [ended]
    gpu = host.reader.read().gpus[0]
    assert (gpu.memory_used_mb, gpu.processes, gpu.utilization_percent) == (4000, (), 0)
    host.now += 2.5
    assert host.used_mb() == 0
    host.holders = [SimulatedHolder(simulated_uuid(0), since=1002.4, until=1002.45, memory_mb=4000)]
    host.now = 1002.5
    assert host.used_mb() == 0, "who never loaded anything leaves nothing behind"


def test_a_script_is_the_same_in_every_process_and_another_for_another_seed() -> None:
    def play(text: str) -> list[float | None]:
        host = Host(text)
        found = []
        for _ in range(50):
            host.now += 5
            found.append(host.used_mb())
        return found

    assert play("simulated:1,seed=7") == play("simulated:1,seed=7")
    assert play("simulated:1,seed=7") != play("simulated:1,seed=8")
    assert 0 in play("simulated:1,seed=7")
    assert any(play("simulated:1,seed=7"))


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("simulated", SimulatedHost(4)),
        ("simulated:0", SimulatedHost(0)),
        ("simulated:8,seed=3", SimulatedHost(8, 3)),
        ("simulated,linger=1", SimulatedHost(4, None, 1.0)),
    ],
)
def test_how_they_are_asked_for(text: str, host: SimulatedHost) -> None:
    assert SimulatedHost.parse(text) == host


def test_hosts_that_differ_have_different_names() -> None:
    texts = ["simulated:4", "simulated:5", "simulated:4,seed=1", "simulated:4,linger=1", "simulated:4,seed=1,linger=1"]
    assert len({SimulatedHost.parse(text).name for text in texts}) == len(texts)


# --- outsiders that sit idle with memory loaded ---


def test_an_idle_outsider_computes_nothing_and_is_a_process_with_a_user() -> None:
    host = Host(with_outsiders("simulated:3", "0:15GiB, 2:4GB"))
    first, second, third = host.reader.read().gpus
    assert (first.memory_used_mb, first.utilization_percent) == (15 * 1024, 0)
    assert first.processes is not None
    assert [(each.name, each.user, each.memory_used_mb) for each in first.processes] == [
        ("notebook", "outsider", 15 * 1024.0)
    ]
    assert (second.memory_used_mb, second.processes) == (0, ())
    assert third.memory_used_mb == 4000
    host.now += 100
    assert host.reader.read().gpus[0].processes == first.processes, "the same one"
    host.holders = [SimulatedHolder(simulated_uuid(0), since=0.0, memory_mb=5000)]
    gpu = host.reader.read().gpus[0]
    assert (gpu.memory_used_mb, gpu.utilization_percent, len(gpu.processes or ())) == (15 * 1024 + 5000, 95, 2)


def test_hosts_with_different_outsiders_have_different_names() -> None:
    texts = ["0:15GiB", "0:15GB", "1:15GiB", "0:15GiB,1:1GiB"]
    names = {SimulatedHost.parse(with_outsiders("simulated:4", text)).name for text in texts}
    assert len(names | {SimulatedHost.parse("simulated:4").name}) == 5
    same = {with_outsiders("simulated:4", text) for text in ("1:1GiB,0:2GiB", "0:2g 1:1024mib")}
    assert len(same) == 1, "written otherwise, but the same host"


@pytest.mark.parametrize(
    "text",
    ["", "0", "0:", "0:15", "0:15XB", "4:1GiB", "-1:1GiB", "0:0GiB", "0:25GiB", "0:1GiB,0:2GiB", "0:1GiB;1:1GiB"],
)
def test_outsiders_that_do_not_fit_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"GPU_SIMULATED_OUTSIDERS must be GPU:SIZE, such as 0:15GiB,2:4GiB, .* not "):
        with_outsiders("simulated:4", text)


def test_the_variable_counts_for_simulated_gpus_only() -> None:
    problems: list[str] = []
    environment = Environment({"GPU_SIMULATED_OUTSIDERS": "7:1GiB"}, problems.append)
    assert read_outsiders("nvml", environment) is None
    assert problems == []
    assert read_outsiders("simulated:8", environment) == "7:1GiB"
    assert read_outsiders("simulated:4", environment) is None
    (problem,) = problems
    assert problem.endswith("not '7:1GiB'; ignoring it")
    assert complete_backend("simulated:8", "7:1GiB") == "simulated:8,outsiders=7:1024"
