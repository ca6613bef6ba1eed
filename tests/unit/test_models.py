"""The documented values: their fields, constructors and equality, and that nonsense is refused by name."""

import copy
import dataclasses
import gc
import math
import pickle
import weakref
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker_pool.models import (
    EndpointInfo,
    GlobalGPUAssignment,
    GlobalGPUInfo,
    GPUAssignment,
    GPUInfo,
    GPUStats,
    MultiEndpointPoolStatus,
    PoolStatus,
    WorkerInfo,
    make_global_gpu_id,
    split_global_gpu_id,
)

NOW = datetime.fromisoformat("2025-07-23T10:30:00")
LATER = NOW + timedelta(seconds=60)


def print_it(gpu_id: int) -> None:
    """A callback as a user would type it."""


#: The documented fields of every model, in order, with good values.
DOCUMENTED: dict[type, dict[str, Any]] = {
    GPUInfo: {"gpu_id": 0, "name": "NVIDIA A100", "memory_usage_percent": 20.0, "utilization_percent": 15},
    GPUStats: {
        "gpu_count": 2,
        "total_memory_mb": 20480,
        "total_used_memory_mb": 4096,
        "average_utilization_percent": 17.5,
        "gpus_summary": [GPUInfo(0, "A100", 20.0, 15.0), GPUInfo(1, "A100", 20.0, 20.0)],
        "total_memory_usage_percent": 20.0,
        "timestamp": "2025-07-23T10:30:00.123456",
    },
    WorkerInfo: {"id": "worker-1", "enqueued_at": NOW, "callback": print_it, "on_error": print},
    GPUAssignment: {"gpu_id": 0, "worker_id": "worker-123", "assigned_at": NOW},
    PoolStatus: {
        "total_gpus": 4,
        "available_gpus": 3,
        "active_workers": 1,
        "blocked_workers": 2,
        "gpu_assignments": {0: [WorkerInfo("worker-1", NOW)]},
    },
    GlobalGPUAssignment: {
        "global_gpu_id": "server1:2",
        "endpoint_id": "server1",
        "local_gpu_id": 2,
        "worker_id": "worker-123",
        "assigned_at": NOW,
    },
    MultiEndpointPoolStatus: {
        "total_gpus": 4,
        "available_gpus": 3,
        "active_workers": 1,
        "blocked_workers": 2,
        "gpu_assignments": {"server1:0": [WorkerInfo("worker-1", NOW)]},
        "total_endpoints": 2,
        "healthy_endpoints": 1,
        "endpoint_details": [{"endpoint_id": "server1", "available_gpus": 3}],
    },
    EndpointInfo: {
        "endpoint_id": "server1",
        "url": "http://gpu-server-1:8000",
        "is_healthy": True,
        "last_seen": NOW,
        "total_gpus": 4,
        "available_gpus": 3,
        "response_time_ms": 50.0,
    },
    GlobalGPUInfo: {
        "global_gpu_id": "server1:0",
        "endpoint_id": "server1",
        "local_gpu_id": 0,
        "name": "NVIDIA Tesla V100",
        "memory_usage_percent": 25.0,
        "utilization_percent": 30.0,
        "is_available": True,
    },
}

every_model = pytest.mark.parametrize("model", DOCUMENTED, ids=lambda model: model.__name__)


def make(model: type, **changes: Any) -> Any:
    return model(**{**DOCUMENTED[model], **changes})


@every_model
def test_is_made_from_the_documented_fields_by_keyword_and_by_position(model: type) -> None:
    documented = DOCUMENTED[model]
    by_keyword = model(**documented)
    assert by_keyword == model(*documented.values())
    for name, value in documented.items():
        assert getattr(by_keyword, name) == value


@every_model
def test_is_frozen(model: type) -> None:
    it = make(model)
    for name in DOCUMENTED[model]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(it, name, getattr(it, name))


@every_model
def test_survives_copy_and_pickle_and_replace(model: type) -> None:
    it = make(model)
    for again in (copy.deepcopy(it), pickle.loads(pickle.dumps(it)), dataclasses.replace(it)):  # noqa: S301 - our own bytes
        assert again == it
        assert type(again) is model


Bad: TypeAlias = list[tuple[Any, type[Exception]]]

#: Bad values, with the error; each is tried in the fields that the next table names.
NOT_COUNTS: Bad = [(-1, ValueError), (1.0, TypeError), (True, TypeError), ("1", TypeError), (None, TypeError)]
NOT_NUMBERS: Bad = [
    (-0.1, ValueError),
    (math.nan, ValueError),
    (math.inf, ValueError),
    (-math.inf, ValueError),
    (10**400, ValueError),
    (True, TypeError),
    ("20", TypeError),
]
NOT_PERCENTS: Bad = [*NOT_NUMBERS, (100.1, ValueError), (250, ValueError)]
NOT_TEXTS: Bad = [(1, TypeError), (b"x", TypeError)]
NOT_FLAGS: Bad = [(0, TypeError), (1, TypeError), ("false", TypeError), (None, TypeError)]
NOT_TIMES: Bad = [("2025-07-23", TypeError), (0.0, TypeError)]
EMPTY, NONE = ("", ValueError), (None, TypeError)
NOT_ENDPOINTS: Bad = [*NOT_TEXTS, NONE, EMPTY, ("::1", ValueError)]

REFUSED: dict[type, dict[str, Bad]] = {
    GPUInfo: {
        "gpu_id": NOT_COUNTS,
        "name": [*NOT_TEXTS, NONE],
        "memory_usage_percent": NOT_PERCENTS,
        "utilization_percent": NOT_PERCENTS,
        "uuid": [*NOT_TEXTS, EMPTY],
        "memory_total_mb": NOT_NUMBERS,
        "memory_used_mb": NOT_NUMBERS,
        "fault": [*NOT_TEXTS, EMPTY],
        "leased": NOT_FLAGS,
        "reports_utilization": NOT_FLAGS,
    },
    GPUStats: {
        "gpu_count": NOT_COUNTS,
        "total_memory_mb": NOT_NUMBERS,
        "total_used_memory_mb": NOT_NUMBERS,
        "average_utilization_percent": NOT_PERCENTS,
        "total_memory_usage_percent": NOT_PERCENTS,
        "timestamp": [*NOT_TEXTS, NONE],
        "sample_age_seconds": [*NOT_NUMBERS, NONE],
    },
    WorkerInfo: {
        "id": [*NOT_TEXTS, NONE, EMPTY],
        "enqueued_at": [*NOT_TIMES, NONE],
        "callback": [(None, TypeError)],
        "on_error": [(None, TypeError)],
    },
    GPUAssignment: {
        "gpu_id": [*NOT_COUNTS, ("server1:2", TypeError)],
        "worker_id": [*NOT_TEXTS, NONE, EMPTY],
        "assigned_at": [*NOT_TIMES, NONE],
        "lease_id": [*NOT_TEXTS, EMPTY],
        "fence": NOT_COUNTS[:-1],
        "expires_at": NOT_TIMES,
    },
    GlobalGPUAssignment: {
        "global_gpu_id": [("server1:1", ValueError), ("server1:02", ValueError), (2, ValueError)],
        "endpoint_id": NOT_ENDPOINTS,
        "local_gpu_id": NOT_COUNTS,
        "worker_id": [*NOT_TEXTS, NONE, EMPTY],
        "assigned_at": [*NOT_TIMES, NONE],
    },
    PoolStatus: {
        "total_gpus": NOT_COUNTS,
        "available_gpus": NOT_COUNTS,
        "active_workers": NOT_COUNTS,
        "blocked_workers": NOT_COUNTS,
    },
    MultiEndpointPoolStatus: {
        "total_gpus": NOT_COUNTS,
        "available_gpus": NOT_COUNTS,
        "active_workers": NOT_COUNTS,
        "blocked_workers": NOT_COUNTS,
        "total_endpoints": NOT_COUNTS,
        "healthy_endpoints": NOT_COUNTS,
    },
    EndpointInfo: {
        "endpoint_id": NOT_ENDPOINTS,
        "url": [*NOT_TEXTS, NONE, EMPTY],
        "is_healthy": NOT_FLAGS,
        "last_seen": NOT_TIMES,
        "total_gpus": NOT_COUNTS,
        "available_gpus": NOT_COUNTS,
        "response_time_ms": NOT_NUMBERS,
    },
    GlobalGPUInfo: {
        "global_gpu_id": [("server1:1", ValueError), ("server2:0", ValueError)],
        "endpoint_id": NOT_ENDPOINTS,
        "local_gpu_id": NOT_COUNTS,
        "name": [*NOT_TEXTS, NONE],
        "memory_usage_percent": NOT_PERCENTS,
        "utilization_percent": NOT_PERCENTS,
        "is_available": NOT_FLAGS,
    },
}


@pytest.mark.parametrize(
    ("model", "name", "value", "error"),
    [
        pytest.param(model, name, value, error, id=f"{model.__name__}-{name}-{str(value)[:20]}")
        for model, checks in REFUSED.items()
        for name, bad in checks.items()
        for value, error in bad
    ],
)
def test_refuses_nonsense_and_names_it(model: type, name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        make(model, **{name: value})
    assert type(caught.value) is error
    assert str(caught.value).startswith(f"{name} must ")
    assert value == "" or repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("model", "name", "value", "message"),
    [
        (GPUInfo, "memory_total_mb", "20", "memory_total_mb must be a number or None, not '20'"),
        (GPUInfo, "memory_total_mb", -1, "memory_total_mb must be finite and not negative, but is -1"),
        (GPUInfo, "utilization_percent", 250, "utilization_percent must be from 0 to 100, but is 250"),
        (GPUInfo, "leased", "false", "leased must be True or False, not 'false'"),
        (GPUStats, "sample_age_seconds", None, "sample_age_seconds must be a number, not None"),
        (WorkerInfo, "enqueued_at", 0, "enqueued_at must be a datetime, not 0"),
        (WorkerInfo, "callback", None, "callback must be callable, not None"),
    ],
)
def test_says_what_was_expected(model: type, name: str, value: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        make(model, **{name: value})
    assert str(caught.value) == message


TWINS = [GPUInfo(1, "A100", 1.0, 1.0), GPUInfo(1, "A100", 2.0, 2.0)]


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (GPUStats, {"gpu_count": 1}, "gpu_count must be 2, the length of gpus_summary, not 1"),
        (GPUStats, {"gpus_summary": TWINS}, "gpus_summary lists a GPU twice: [1, 1]"),
        (
            GPUStats,
            {"total_memory_mb": 4095},
            "total_used_memory_mb must be at most total_memory_mb 4095, but is 4096",
        ),
        (PoolStatus, {"available_gpus": 5}, "available_gpus must be at most total_gpus 4, but is 5"),
        (
            MultiEndpointPoolStatus,
            {"available_gpus": 5},
            "available_gpus must be at most total_gpus 4, but is 5",
        ),
        (
            MultiEndpointPoolStatus,
            {"healthy_endpoints": 3},
            "healthy_endpoints must be at most total_endpoints 2, but is 3",
        ),
        (EndpointInfo, {"available_gpus": 5}, "available_gpus must be at most total_gpus 4, but is 5"),
        (GPUAssignment, {"gpu_ids": (1, 0)}, "gpu_ids must begin with gpu_id 0, not (1, 0)"),
        (GPUAssignment, {"gpu_ids": (0, -1)}, "gpu_ids must not be negative, but is -1"),
        (GPUAssignment, {"gpu_ids": (0, "1")}, "gpu_ids must be an int, not '1'"),
        (GPUAssignment, {"gpu_ids": (0.0,)}, "gpu_ids must be an int, not 0.0"),
        (
            GPUAssignment,
            {"gpu_uuids": ("a", "b")},
            "gpu_uuids must be one per entry of gpu_ids (0,), not ('a', 'b')",
        ),
        (
            GPUAssignment,
            {"gpu_ids": (0, 1), "gpu_uuids": ("a",)},
            "gpu_uuids must be one per entry of gpu_ids (0, 1), not ('a',)",
        ),
        (GPUAssignment, {"gpu_uuids": (1,)}, "gpu_uuids must be a str, not 1"),
        (GPUAssignment, {"gpu_uuids": ("",)}, "gpu_uuids must not be empty"),
        (
            GlobalGPUAssignment,
            {"endpoint_id": "server2"},
            "global_gpu_id must be 'server2:2', not 'server1:2'",
        ),
        (GlobalGPUAssignment, {"local_gpu_id": 3}, "global_gpu_id must be 'server1:3', not 'server1:2'"),
        (
            GlobalGPUAssignment,
            {"gpu_ids": ("server1:3", "server1:2")},
            "gpu_ids must begin with gpu_id 'server1:2', not ('server1:3', 'server1:2')",
        ),
        (
            GlobalGPUAssignment,
            {"gpu_ids": ("server1:2", "server2:3")},
            "gpu_ids must all be on endpoint 'server1', not 'server2:3'",
        ),
        (GlobalGPUAssignment, {"gpu_ids": ("server1:2", 3)}, "gpu_ids must be a str, not 3"),
        (GlobalGPUInfo, {"local_gpu_id": 1}, "global_gpu_id must be 'server1:1', not 'server1:0'"),
    ],
)
def test_refuses_what_does_not_fit_together(model: type, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        make(model, **changes)
    assert str(caught.value) == message


@pytest.mark.parametrize("value", [0, 0.0, 100, 100.0])
def test_percents_include_both_ends(value: float) -> None:
    assert GPUInfo(0, "A100", value, value).memory_usage_percent == value


def test_what_could_not_be_read_is_none() -> None:
    lost = GPUInfo(3, "unknown GPU", None, None, fault="GPU is lost")
    assert (lost.memory_usage_percent, lost.utilization_percent) == (None, None)
    stats = GPUStats(1, None, None, None, [lost], None, "", sample_age_seconds=2.5)
    assert stats.total_memory_mb is None
    assert GlobalGPUInfo("a:0", "a", 0, "A100", None, None, False).utilization_percent is None
    assert EndpointInfo("a", "http://a", False, None, 0, 0, None).last_seen is None


def test_gpu_info_has_quiet_defaults() -> None:
    gpu = GPUInfo(0, "A100", 1.0, 2.0)
    assert (gpu.uuid, gpu.memory_total_mb, gpu.memory_used_mb, gpu.fault) == (None, None, None, None)
    assert (gpu.leased, gpu.reports_utilization) == (False, True)
    assert GPUStats(0, 0, 0, 0.0, [], 0.0, "").sample_age_seconds == 0.0


def test_used_memory_is_at_most_all_memory() -> None:
    assert GPUInfo(0, "A100", 1.0, 2.0, memory_total_mb=10, memory_used_mb=10).memory_used_mb == 10
    with pytest.raises(ValueError, match=r"memory_used_mb must be at most memory_total_mb 10, but is 10\.5"):
        GPUInfo(0, "A100", 1.0, 2.0, memory_total_mb=10, memory_used_mb=10.5)


# --- assignments ---


def test_an_assignment_of_one_gpu() -> None:
    assignment = GPUAssignment(3, "worker-1", NOW)
    assert assignment.gpu_ids == (3,)
    assert assignment.local_gpu_ids == (3,)
    assert assignment.gpu_uuids == ()
    assert (assignment.lease_id, assignment.fence, assignment.expires_at) == (None, None, None)
    assert assignment.env == {"CUDA_VISIBLE_DEVICES": "3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_an_assignment_of_several_gpus_with_a_lease() -> None:
    assignment = GPUAssignment(
        3,
        "worker-1",
        NOW,
        gpu_ids=[3, 1],
        gpu_uuids=["GPU-c", "GPU-a"],
        lease_id="lease-1",
        fence=7,
        expires_at=LATER,
    )
    assert assignment.gpu_ids == (3, 1)
    assert assignment.gpu_uuids == ("GPU-c", "GPU-a")
    assert (assignment.lease_id, assignment.fence, assignment.expires_at) == ("lease-1", 7, LATER)
    assert assignment.env["CUDA_VISIBLE_DEVICES"] == "3,1"
    assert {assignment} == {dataclasses.replace(assignment)}


def test_a_mig_device_is_shown_by_uuid() -> None:
    assignment = GPUAssignment(0, "worker-1", NOW, gpu_uuids=("MIG-1234",))
    assert assignment.env == {"CUDA_VISIBLE_DEVICES": "MIG-1234", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_a_global_assignment_is_an_assignment_whose_gpu_id_is_global() -> None:
    assignment = make(GlobalGPUAssignment)
    assert issubclass(GlobalGPUAssignment, GPUAssignment)
    assert assignment.gpu_id == assignment.global_gpu_id == "server1:2"
    assert assignment.gpu_ids == ("server1:2",)
    assert assignment.local_gpu_ids == (2,)
    assert assignment.env["CUDA_VISIBLE_DEVICES"] == "2"


def test_a_global_assignment_of_several_gpus() -> None:
    assignment = make(
        GlobalGPUAssignment,
        gpu_ids=("server1:2", "server1:0"),
        gpu_uuids=("GPU-c", "GPU-a"),
        lease_id="lease-1",
        fence=7,
        expires_at=LATER,
    )
    assert assignment.gpu_ids == ("server1:2", "server1:0")
    assert assignment.local_gpu_ids == (2, 0)
    assert assignment.env["CUDA_VISIBLE_DEVICES"] == "2,0"
    assert dataclasses.replace(assignment, fence=8) != assignment
    assert dataclasses.replace(assignment, fence=7) == assignment
    assert (assignment.lease_id, assignment.fence, assignment.expires_at) == ("lease-1", 7, LATER)


@pytest.mark.parametrize("assignment", [make(GPUAssignment), make(GlobalGPUAssignment)], ids=type)
def test_one_pattern_matches_both_kinds_of_assignment(assignment: GPUAssignment) -> None:
    match assignment:
        case GPUAssignment(gpu_id, worker_id, assigned_at):
            assert (gpu_id, worker_id, assigned_at) == (assignment.gpu_id, "worker-123", NOW)
        case _:
            pytest.fail("no match")


def test_a_pattern_of_a_global_assignment_reads_like_its_constructor() -> None:
    match make(GlobalGPUAssignment):
        case GlobalGPUAssignment(global_gpu_id, endpoint_id, local_gpu_id, worker_id, assigned_at):
            found = [global_gpu_id, endpoint_id, local_gpu_id, worker_id, assigned_at]
            assert found == list(DOCUMENTED[GlobalGPUAssignment].values())
        case _:
            pytest.fail("no match")


@pytest.mark.parametrize("model", [GPUAssignment, GlobalGPUAssignment])
@pytest.mark.parametrize(
    "changes",
    [
        {"worker_id": "other"},
        {"assigned_at": LATER},
        {"gpu_uuids": ("GPU-a",)},
        {"lease_id": "lease-1"},
        {"fence": 1},
        {"expires_at": LATER},
    ],
    ids=str,
)
def test_assignments_are_equal_by_value(model: type, changes: dict[str, Any]) -> None:
    assert make(model) == make(model)
    assert hash(make(model)) == hash(make(model))
    assert make(model, **changes) != make(model)
    assert make(model, **changes) == make(model, **changes)


@pytest.mark.parametrize("model", [GPUAssignment, GlobalGPUAssignment])
def test_assignments_can_be_watched_without_being_kept(model: type) -> None:
    assignment = make(model)
    watched = weakref.ref(assignment)
    assert watched() is assignment
    del assignment
    gc.collect()
    assert watched() is None


def test_an_assignment_shows_itself() -> None:
    assert repr(GPUAssignment(0, "w", NOW)).startswith("GPUAssignment(gpu_id=0, worker_id='w', assigned_at=")
    shown = repr(make(GlobalGPUAssignment))
    assert "global_gpu_id='server1:2'" in shown
    assert "(gpu_id=" not in shown


# --- workers and status ---


def test_a_worker_for_display_needs_no_callbacks() -> None:
    worker = WorkerInfo("worker-1", NOW)
    worker.callback(0)
    worker.on_error(ValueError())
    assert worker == WorkerInfo("worker-1", NOW, print_it, print)
    assert hash(worker) == hash(WorkerInfo("worker-1", NOW, print_it, print))
    assert "callback" not in repr(worker)
    assert "on_error" not in repr(worker)


def test_the_callbacks_are_called_as_given() -> None:
    called: list[object] = []
    worker = WorkerInfo("worker-1", NOW, callback=called.append, on_error=called.append)
    error = ValueError()
    worker.callback(3)
    worker.on_error(error)
    assert called == [3, error]


def test_a_multi_endpoint_status_is_a_pool_status() -> None:
    assert isinstance(make(MultiEndpointPoolStatus), PoolStatus)


def multi_status(**details: Any) -> MultiEndpointPoolStatus:
    """In the order of the design document, by keyword."""
    return MultiEndpointPoolStatus(
        total_endpoints=2,
        healthy_endpoints=1,
        total_gpus=4,
        available_gpus=3,
        active_workers=0,
        blocked_workers=0,
        gpu_assignments={},
        **details,
    )


def test_a_multi_endpoint_status_is_made_from_endpoints_or_from_details() -> None:
    endpoints = [make(EndpointInfo), make(EndpointInfo, endpoint_id="server2", last_seen=None)]
    status = multi_status(endpoints=endpoints)
    assert status.endpoints == endpoints
    assert status.endpoint_details == [
        DOCUMENTED[EndpointInfo],
        {**DOCUMENTED[EndpointInfo], "endpoint_id": "server2", "last_seen": None},
    ]
    assert multi_status(endpoint_details=status.endpoint_details) == status
    assert multi_status(endpoints=[]).endpoints == []
    assert multi_status(endpoint_details=[]).endpoints == []


def test_endpoint_details_may_say_more_or_less_than_an_endpoint_info() -> None:
    more = multi_status(endpoint_details=[{**DOCUMENTED[EndpointInfo], "breaker": "open"}])
    assert more.endpoints == [make(EndpointInfo)]
    assert more.endpoint_details[0]["breaker"] == "open"
    less = multi_status(endpoint_details=[{"endpoint_id": "server1"}])
    assert less.endpoint_details == [{"endpoint_id": "server1"}]
    with pytest.raises(TypeError, match="url must be a str, not None"):
        _ = less.endpoints


@pytest.mark.parametrize("details", [{}, {"endpoints": [], "endpoint_details": []}], ids=["neither", "both"])
def test_a_multi_endpoint_status_wants_exactly_one_of_them(details: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="either endpoint_details or endpoints"):
        multi_status(**details)


# --- global ids ---


@given(st.text(min_size=1).filter(lambda text: ":" not in text), st.integers(min_value=0, max_value=10**6))
def test_global_ids_come_apart_as_they_were_put_together(endpoint_id: str, local_gpu_id: int) -> None:
    global_gpu_id = make_global_gpu_id(endpoint_id, local_gpu_id)
    assert split_global_gpu_id(global_gpu_id) == (endpoint_id, local_gpu_id)
    assert int(global_gpu_id.split(":")[1]) == local_gpu_id  # as the migration guide does it


@given(st.text() | st.from_regex(r"\w*:\w*", fullmatch=True))
def test_a_text_is_a_global_id_or_a_value_error(text: str) -> None:
    try:
        endpoint_id, local_gpu_id = split_global_gpu_id(text)
    except ValueError:
        return
    assert make_global_gpu_id(endpoint_id, local_gpu_id) == text


@pytest.mark.parametrize("text", ["", "server1", "server1:", ":0", "a:b:0", "a:-1", "a:01", "a: 1", "a:²", "a:1.0"])
def test_what_is_no_global_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="global_gpu_id must"):
        split_global_gpu_id(text)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: split_global_gpu_id(0), TypeError),  # type: ignore[arg-type]
        (lambda: make_global_gpu_id("", 0), ValueError),
        (lambda: make_global_gpu_id("fe80::1", 0), ValueError),
        (lambda: make_global_gpu_id("server1", -1), ValueError),
        (lambda: make_global_gpu_id("server1", "0"), TypeError),  # type: ignore[arg-type]
    ],
)
def test_bad_parts_of_a_global_id_are_refused(call: Callable[[], object], error: type[Exception]) -> None:
    with pytest.raises(error):
        call()
