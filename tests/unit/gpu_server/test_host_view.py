"""What the server shows of its host, how old it may be, and every kind of bad health."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from gpu_worker_pool.cli.views.cells import gpu_state
from gpu_worker_pool.core.readings import ProcessReading
from gpu_worker_pool.gpu_server.host_view import HostView
from gpu_worker_pool.hardware.sampler import LatestSamples
from gpu_worker_pool.hardware.samples import DriverAnswer, DriverFailure, GPUReading, HostSample, MIGReading


class Host:
    """A sampler and a clock that do as they are told."""

    def __init__(self, interval: float = 1.0, visible: str | None = None) -> None:
        self.now = 1000.0
        self.seen = LatestSamples()
        self.view = HostView(
            lambda: self.seen,
            visible_devices=visible,
            interval_seconds=interval,
            max_history=3,
            clock=lambda: self.now,
        )
        self.number = 0

    def sample(self, answer: DriverAnswer | DriverFailure | None = None) -> HostSample:
        self.number += 1
        answer = answer or DriverAnswer((GPUReading(0, "A"), GPUReading(1, "B")), "1.0", "test")
        sample = HostSample(self.number, 0, self.now, 0.1, "2026-01-01T00:00:00", answer)
        self.seen = LatestSamples(sample if isinstance(answer, DriverAnswer) else self.seen.good, sample)
        self.view.take(sample)
        return sample

    def status(self) -> tuple[int, str, str | None]:
        health = self.view.health()
        return self.view.answer("summary").status, health.status, health.code


def test_nothing_is_known_before_the_first_sample() -> None:
    host = Host()
    assert host.status() == (503, "unhealthy", "no_sample_yet")
    assert json.loads(host.view.answer("stats").body) == {
        "detail": "no sample was taken yet",
        "error": "no_sample_yet",
        "type": "urn:gpu-worker-pool:no_sample_yet",
        "title": "No sample yet",
        "status": 503,
    }


def test_a_driver_that_hangs_from_the_start() -> None:
    host = Host()
    host.seen = LatestSamples(probing_since=1000.0)
    assert host.status() == (503, "unhealthy", "no_sample_yet")
    host.now = 1004.5
    assert host.status() == (503, "unhealthy", "driver_hangs")
    assert host.view.health().cause == "the driver has not answered for 4.5 s"


@pytest.mark.parametrize("interval", [0.05, 1.0, 4.0, 5.0, 10.0, 60.0])
def test_healthy_late_old_in_this_order_whatever_the_interval(interval: float) -> None:
    host = Host(interval)
    host.sample()
    seen = []
    for _ in range(220):
        if host.status() not in seen:
            seen.append(host.status())
        host.now += max(15, 3 * interval) / 200
    assert seen[0] == (200, "healthy", None)
    assert seen[-1] == (503, "unhealthy", "sample_late")
    assert seen[1:-1] in ([(200, "degraded", "sample_late")], [])


def test_the_moment_of_becoming_too_old() -> None:
    host = Host()
    host.sample()
    host.now = 1015.0
    assert host.status() == (200, "degraded", "sample_late")
    host.now = 1015.01
    assert host.status() == (503, "unhealthy", "sample_late")


def test_a_failure_is_told_at_once_and_the_last_good_sample_for_a_while() -> None:
    host = Host()
    host.sample()
    host.now = 1001.0
    host.sample(DriverFailure("it broke", "broken"))
    assert host.status() == (200, "degraded", "broken")
    host.now = 1020.0
    host.sample(DriverFailure("it broke", "broken"))
    assert host.status() == (503, "unhealthy", "broken")
    assert json.loads(host.view.answer("count").body) == {
        "detail": "it broke",
        "error": "broken",
        "type": "urn:gpu-worker-pool:broken",
        "title": "Broken",
        "status": 503,
    }
    host.sample()
    assert host.status() == (200, "healthy", None)


def test_a_failure_and_then_a_hang_is_a_hang() -> None:
    host = Host()
    host.sample()
    host.sample(DriverFailure("it broke", "broken"))
    host.seen = LatestSamples(host.seen.good, host.seen.last, probing_since=1001.0)
    host.now = 1010.0
    assert host.status() == (200, "degraded", "driver_hangs")


def test_a_driver_that_always_takes_its_time_is_slow_and_not_late() -> None:
    host = Host()
    for _ in range(3):
        sample = host.sample()
        host.seen = LatestSamples(None, replace(sample, took_seconds=3.6), probing_since=host.now + 3.6)
        host.now += 7.2
        assert host.status() == (200, "healthy", None)
    host.now += 5
    assert host.status() == (200, "degraded", "driver_hangs")


def test_each_answer_has_the_present_age() -> None:
    host = Host()
    host.sample()
    for age in (0.0, 1.25, 14.0):
        host.now = 1000.0 + age
        assert json.loads(host.view.answer("stats").body)["sample_age_seconds"] == age


def test_a_body_is_built_once_a_sample() -> None:
    host = Host()
    host.sample()
    shown = host.view.usable()
    assert shown is not None
    assert shown._bodies == {}
    first = host.view.answer("stats").body
    built = shown._bodies["stats"]
    assert host.view.answer("stats").body == first
    assert shown._bodies["stats"] is built


def test_history_is_bounded_and_holds_what_told_something() -> None:
    host = Host()
    numbers = []
    for turn in range(8):
        host.now += 1
        if turn % 3:
            numbers.append(host.sample(DriverAnswer((GPUReading(0, "A", utilization_percent=turn),))).number)
        else:
            host.sample(DriverFailure("no", "no"))
    assert [json.loads(rows["gpu-0"])["utilization_percent"] for rows in host.view.history] == [4, 5, 7]


def test_the_filter_is_applied() -> None:
    host = Host(visible="1")
    host.sample()
    assert [row["gpu_id"] for row in json.loads(host.view.answer("stats").body)["gpus"]] == [1]


# --- what is promised ---


def held(lease_id: str) -> dict[str, object]:
    return {"lease_id": lease_id, "worker_id": "w", "label": None, "state": "held", "user": None}


def test_promises_are_shown_on_the_gpu_and_on_the_one_that_a_mig_device_is_part_of() -> None:
    host = Host()
    promises: dict[str, list[dict[str, object]]] = {}
    host.view = HostView(lambda: host.seen, clock=lambda: host.now, see_leases=lambda: promises)
    migs = (MIGReading("MIG-1", "1g"), MIGReading("MIG-2", "1g"))
    gpus = (GPUReading(0, "A", uuid="GPU-0"), GPUReading(1, "B", uuid="GPU-1", mig_devices=migs), GPUReading(2, "C"))
    host.sample(DriverAnswer(gpus, "1.0", "test"))

    def shown() -> tuple[list[bool], list[list[str]]]:
        summary, stats = (json.loads(host.view.answer(kind).body) for kind in ("summary", "stats"))
        return (
            [row["leased"] for row in summary["gpus_summary"]],
            [[lease["lease_id"] for lease in row["leases"]] for row in stats["gpus"]],
        )

    assert shown() == ([False, False, False], [[], [], []])
    promises |= {"GPU-0": [held("L1"), held("L2")], "MIG-1": [held("L3")], "MIG-2": [held("L3")], "gpu-2": [held("L4")]}
    assert shown()[0] == [False, False, False], "bodies are kept until something changes"
    host.view.promises_changed()
    assert shown() == ([True, True, True], [["L1", "L2"], ["L3"], ["L4"]])
    promises.clear()
    host.view.promises_changed()
    assert shown() == ([False, False, False], [[], [], []])


def test_without_a_ledger_nothing_is_known_to_be_promised() -> None:
    host = Host()
    host.view.promises_changed()
    host.sample()
    assert [row["leased"] for row in json.loads(host.view.answer("summary").body)["gpus_summary"]] == [False, False]
    rows = json.loads(host.view.answer("stats").body)["gpus"]
    assert [(row["leases"], row["obstacles"]) for row in rows] == [(None, None), (None, None)]


@pytest.mark.parametrize(
    ("shown", "leases", "state", "obstacles"),
    [
        ({}, [], "free", []),
        ({"graphics": (ProcessReading(1, name="Xorg"),), "memory_used_mb": 10.0}, [], "free", []),
        ({"processes": (ProcessReading(1, name="notebook"),), "memory_used_mb": 10.0}, [], "in use", []),
        ({"memory_used_mb": 98.0}, [], "busy", ["memory 98.0 % used, not below 80 %"]),
        ({"memory_used_mb": None}, [], "busy", ["does not report its memory usage"]),
        ({"utilization_percent": 95.0}, [], "busy", ["utilization 95.0 %, not below 90 %"]),
        ({"utilization_percent": None}, [], "busy", ["its utilization could not be read"]),
        ({"utilization_percent": 95.0}, [held("L1")], "held", ["held: w"]),
        ({"fault": "Xid 79"}, [], "fault: Xid 79", ["unhealthy: Xid 79"]),
    ],
)
def test_free_is_what_a_plain_request_would_get(
    shown: dict[str, Any], leases: list[dict[str, object]], state: str, obstacles: list[str]
) -> None:
    host = Host()
    host.view = HostView(lambda: host.seen, clock=lambda: host.now, see_leases=lambda: {"GPU-0": leases})
    idle = {"memory_total_mb": 100.0, "memory_used_mb": 0.0, "utilization_percent": 0.0}
    host.sample(DriverAnswer((GPUReading(0, "A", uuid="GPU-0", **{**idle, **shown}),), "1.0", "test"))
    (row,) = json.loads(host.view.answer("stats").body)["gpus"]
    assert row["obstacles"] == obstacles
    assert gpu_state(row, [{"share": False} for _ in leases]) == state


def test_of_a_split_card_the_best_device_counts() -> None:
    host = Host()
    promises = {"MIG-1": [held("L1")]}
    host.view = HostView(lambda: host.seen, clock=lambda: host.now, see_leases=lambda: promises)

    def obstacles(*devices: MIGReading) -> list[str]:
        host.sample(
            DriverAnswer((GPUReading(0, "A", uuid="GPU-0", mig_enabled=True, mig_devices=devices),), "", "test")
        )
        (row,) = json.loads(host.view.answer("stats").body)["gpus"]
        return list(row["obstacles"])

    taken, idle = (
        MIGReading(name, "1g", memory_total_mb=100.0, memory_used_mb=0.0, processes=()) for name in ("MIG-1", "MIG-2")
    )
    assert obstacles(taken, idle) == []
    assert obstacles(taken) == ["held: w"]
    assert obstacles() == ["MIG is enabled, but there is no MIG device"]


@pytest.mark.parametrize("unknown", [{}, {"obstacles": None}])
def test_what_is_not_known_is_not_called_free(unknown: dict[str, Any]) -> None:
    assert gpu_state({"utilization_percent": 0.0, "processes": [], **unknown}, []) == "unknown"
