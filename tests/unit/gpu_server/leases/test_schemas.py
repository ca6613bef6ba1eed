"""Which request bodies the lease API accepts; all others are refused with reasons."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_worker_pool.core.events import Origin
from gpu_worker_pool.core.requirements import ANY_GPU, Requirements
from gpu_worker_pool.gpu_server.leases.schemas import LeaseRequest, RequirementsBody, parse_body
from gpu_worker_pool.gpu_server.responses import Refusal
from gpu_worker_pool.hardware.origin import bounded


def requirements_of(**body: Any) -> Requirements:
    return parse_body(LeaseRequest, json.dumps(body).encode())[1]


def reasons(body: bytes | dict[str, Any]) -> list[str]:
    with pytest.raises(Refusal) as refused:
        parse_body(LeaseRequest, body if isinstance(body, bytes) else json.dumps(body).encode())
    reply = refused.value.reply
    answer = json.loads(reply.body)
    assert (reply.status, answer["error"]) == (422, "invalid")
    found: list[str] = answer["reasons"]
    assert all(reason in answer["detail"] for reason in found)
    return found


def test_nothing_is_needed() -> None:
    asked, requirements = parse_body(LeaseRequest, b"{}")
    assert requirements is ANY_GPU
    assert asked.request_id is None
    assert (asked.ttl_seconds, asked.wait_seconds, asked.may_keep) == (60.0, 0.0, True)


def test_a_request_without_requirements_accepts_any_gpu() -> None:
    body = {"request_id": "a", "worker_id": "w", "ttl_seconds": 5, "wait_seconds": 3, "label": "x", "may_keep": False}
    assert requirements_of(**body) is ANY_GPU


def test_the_body_has_the_fields_and_defaults_of_the_core() -> None:
    defaults = {each.name: each.default for each in fields(Requirements) if each.init}
    assert {name: field.default or defaults[name] for name, field in RequirementsBody.model_fields.items()} == defaults


def test_every_requirement_is_understood() -> None:
    requirement_options = {
        "count": 2,
        "memory_mb": 8192,
        "share": True,
        "min_free_memory_mb": 100.5,
        "gpu_model": "A100",
        "only": [0, "GPU-6ec5", "1"],
        "exclude": ["MIG-1", 7],
        "policy": "idle",
        "memory_threshold": 0,
        "utilization_threshold": 100,
        "priority": -5,
    }
    assert requirements_of(**requirement_options) == Requirements(
        count=2,
        memory_mb=8192,
        share=True,
        min_free_memory_mb=100.5,
        gpu_model="A100",
        only=("0", "GPU-6ec5", "1"),
        exclude=("MIG-1", "7"),
        policy="idle",
        memory_threshold=0,
        utilization_threshold=100,
        priority=-5,
    )
    assert requirement_options.keys() == {each.name for each in fields(Requirements) if each.init}, "all that there are"


@pytest.mark.parametrize("name", sorted(LeaseRequest.model_fields))
def test_null_is_as_good_as_left_out_where_nothing_is_the_default(name: str) -> None:
    is_optional = LeaseRequest.model_fields[name].default is None
    if is_optional:
        assert requirements_of(**{name: None}) == ANY_GPU
    else:
        assert reasons({name: None})


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("ttl_seconds", [2, 2.5, 3600], [1.999, 3600.1, 0, -1, "60", True]),
        ("wait_seconds", [0, 0.1, 30], [-0.1, 30.01, "1", False]),
        ("count", [1, 1024, 2.0], [0, -1, 1025, 1.5, "1", True, 10**30, 1e300]),
        ("memory_mb", [1, 1.5, 1e12], [0, 0.999, 1e-300, -1, 1e13, 1e308, "8GiB", True]),
        ("min_free_memory_mb", [0.5, 1e12], [0, -1, 1e13, True]),
        ("memory_threshold", [0, 50.5, 100], [-1, 100.1, True]),
        ("utilization_threshold", [0, 50.5, 100], [-1, 100.1, True]),
        ("priority", [-1000, 0, 1000], [-1001, 1001, 0.5, True, "high"]),
        ("policy", ["idle", "thresholds"], ["", "IDLE", 1, ["idle"]]),
        ("share", [False], [1, "true", 0]),
        ("may_keep", [True, False], [1, "true"]),
        ("request_id", ["a", "A-z_0.9:x", "x" * 64], ["", "x" * 65, "a b", "a\n", "a/b", "é", "\x00", 7]),
        ("worker_id", ["", "w-1", "x" * 64], ["x" * 65, "a b", "w\n", 7]),
        ("gpu_model", ["A100", " RTX 3090 ", "x" * 100], ["", " ", "x" * 101, "a\x1b[2J", "\u2003", 7]),
        (
            "only",
            [[0], [1.0], ["0"], ["GPU-1", 3]],
            [[], "0", 0, [-1], [True], [1.5], [""], [" "], ["x" * 81], [0] * 65],
        ),
        ("exclude", [[], [0], ["MIG-1"]], ["0", [None], [[0]], [2**31], ["\x00"], [0] * 65]),
        ("label", ["", "nightly run, 50 %", "é" * 200, "\U0001f600"], ["x" * 201, "a\x1b[31m", "a\nb", "\x7f", 7]),
    ],
)
def test_each_field_within_its_bounds(name: str, allowed: list[Any], refused: list[Any]) -> None:
    for value in allowed:
        parse_body(LeaseRequest, json.dumps({name: value}).encode())
    for value in refused:
        found = reasons({name: value})
        assert all(reason.startswith(name) for reason in found), value


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "9" * 400, "9" * 60_000])
@pytest.mark.parametrize("name", ["ttl_seconds", "wait_seconds", "count", "memory_mb", "memory_threshold", "priority"])
def test_numbers_that_json_or_the_core_cannot_use(name: str, number: str) -> None:
    assert reasons(f'{{"{name}": {number}}}'.encode())


def test_all_that_is_wrong_is_told_at_once() -> None:
    found = reasons({"count": 0, "ttl_seconds": "x", "colour": "red"})
    assert len(found) == 3
    assert "colour: there is no such field" in found


def test_a_bad_name_of_a_gpu_is_named_by_its_place() -> None:
    found = reasons({"only": [0, True]})
    assert [reason.partition(":")[0] for reason in found] == ["only.1", "only.1"]


def test_requirements_that_contradict_each_other() -> None:
    (reason,) = reasons({"share": True})
    assert "memory_mb" in reason


def test_a_thousand_mistakes_are_not_all_repeated() -> None:
    with pytest.raises(Refusal) as refused:
        parse_body(LeaseRequest, json.dumps({f"field{number}" * 20: 1 for number in range(1000)}).encode())
    assert len(str(refused.value)) < 5000


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"7",
        b"{",
        b"{} {}",
        b"{'count': 1}",
        b'{"count": 1,}',
        b"count=1",
        b'{"label": "\xff"}',
        b'{"label": "\\ud800"}',
        b"\xff\xfe{\x00}\x00",
        b"\x00",
        b"[" * 30_000,
        b'{"a":' * 10_000,
        b'{"only": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    ],
)
def test_what_is_no_json_or_no_object(body: bytes) -> None:
    assert reasons(body)


#: A machine that has other things to do is no reason to fail.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@PATIENT
@given(st.binary(max_size=200))
def test_any_bytes_are_answered(body: bytes) -> None:
    with contextlib.suppress(Refusal):
        parse_body(LeaseRequest, body)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@PATIENT
@given(st.dictionaries(st.sampled_from(sorted(LeaseRequest.model_fields)), _JSON, max_size=4))
def test_any_json_is_refused_or_usable(body: dict[str, Any]) -> None:
    try:
        asked, requirements = parse_body(LeaseRequest, json.dumps(body).encode())
    except Refusal as refusal:
        assert refusal.reply.status == 422  # noqa: PT017  # one of two good outcomes
    else:
        assert 2 <= asked.ttl_seconds <= 3600
        assert 0 <= asked.wait_seconds <= 30
        assert math.isfinite(requirements.needed_memory_mb)


# --- who requests it ---


def test_what_a_client_says_of_itself() -> None:
    said = {"user": "ada", "host": "lap-7", "pid": 4242, "program": "train 2.py"}
    body, requirements = parse_body(LeaseRequest, json.dumps({"holder": said}).encode())
    assert requirements is ANY_GPU
    assert body.holder is not None
    assert body.holder.origin() == Origin("ada", "lap-7", 4242, "train 2.py", is_verified=False)
    for holder in ({}, {"pid": 7.0}, {"user": None, "program": "jürgen.py"}, None):
        parse_body(LeaseRequest, json.dumps({"holder": holder}).encode())


@pytest.mark.parametrize(
    ("holder", "where"),
    [
        ({"user": "a\x1b[31m"}, "holder.user"),
        ({"user": "a\nb"}, "holder.user"),
        ({"program": "\x9b31m"}, "holder.program"),
        ({"program": "a\u202eb"}, "holder.program"),
        ({"program": "a\u2028b"}, "holder.program"),
        ({"host": "x" * 65}, "holder.host"),
        ({"host": ""}, "holder.host"),
        ({"user": " "}, "holder.user"),
        ({"user": 7}, "holder.user"),
        ({"user": ["ada"]}, "holder.user"),
        ({"pid": 0}, "holder.pid"),
        ({"pid": -1}, "holder.pid"),
        ({"pid": 2**31}, "holder.pid"),
        ({"pid": "4242"}, "holder.pid"),
        ({"pid": True}, "holder.pid"),
        ({"verified": True}, "holder.verified"),
        ("ada", "holder"),
        ([], "holder"),
    ],
)
def test_a_holder_that_cannot_be_shown_is_refused(holder: object, where: str) -> None:
    (reason,) = reasons({"holder": holder})
    assert reason.partition(": ")[0] == where


@given(st.text())
def test_every_name_that_a_client_sends_is_accepted(name: str) -> None:
    """A program may have any file name; it must not be refused a GPU for it."""
    program = bounded(name)
    parse_body(LeaseRequest, json.dumps({"holder": {"program": program}}).encode())
