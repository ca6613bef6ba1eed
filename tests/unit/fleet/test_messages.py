"""The messages of a fleet as JSON: both directions, what other versions send, and what nobody should."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpu_worker_pool.core import Request, Requirements
from gpu_worker_pool.fleet.message_json import LONGEST_TEXT, MessageError, decode, encode
from gpu_worker_pool.fleet.messages import (
    Answer,
    Ask,
    Call,
    EndedRow,
    GPURow,
    HostLease,
    Join,
    Message,
    Place,
    Placed,
    PlaceRefused,
    Report,
    Welcome,
    fleet_lease_id,
    host_and_lease,
)

REQUEST = Request("r", Requirements(count=2, only=("h1",)), owner="token:1", account="user:1", ttl_seconds=30.0)
LEASE = HostLease("lease-1", REQUEST, ("GPU-0", "GPU-1"), "held", 1.5)


@pytest.mark.parametrize(
    "message",
    [
        Join("h1", "ledger", "http://h1", "1", epoch=3, epoch_owner="h2"),
        Report(
            1, True, 0.5, (GPURow("GPU-0", 0, "H100"),), ("GPU-9",), (LEASE,), (EndedRow("q", "lease-0", "released"),)
        ),
        Placed(4, "r", LEASE, {"lease_id": "lease-1", "gpus": [{"gpu_id": 0}]}),
        PlaceRefused(4, "r", ("no",), EndedRow("r", "lease-1", "released")),
        PlaceRefused(4, "r", ("no",)),
        Ask("p", REQUEST, 5.0),
        Call("c", "h1", "renew", {"lease_id": "lease-1", "by": None}),
        Welcome("f", 3, "h1", "http://h1", ("http://h1",), secret="x"),  # noqa: S106
        Place(3, "h1", 7, REQUEST, ("GPU-0", "GPU-1")),
        Answer("p", "r", "granted", "h1", "http://h1", "lease-1", (0, 1), {"a": 1}),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_comes_back_as_it_was_sent(message: Message) -> None:
    assert decode(json.loads(json.dumps(encode(message)))) == message


def test_fields_of_a_newer_version_are_ignored_and_those_an_older_one_lacks_have_defaults() -> None:
    row: dict[str, Any] = {
        "type": "Join",
        "name": "h1",
        "ledger_id": "l",
        "url": "u",
        "version": "9",
        "colour": "green",
    }
    assert decode(row) == Join("h1", "l", "u", "9")
    row = {"type": "Ask", "poll_id": "p", "request": {"request_id": "r", "wishes": {}, "colour": "green"}}
    assert decode(row) == Ask("p", Request("r"))


@pytest.mark.parametrize(
    "row",
    [
        None,
        [],
        {},
        {"type": 3},
        {"type": "Nothing"},
        {"type": "Join", "name": "h1"},
        {"type": "Join", "name": 5, "ledger_id": "l", "url": "u", "version": "1"},
        {"type": "Join", "name": "h" * (LONGEST_TEXT + 1), "ledger_id": "l", "url": "u", "version": "1"},
        {"type": "Report", "number": 1.5},
        {"type": "Report", "number": True},
        {"type": "Report", "number": 1, "age_seconds": float("nan")},
        {"type": "Report", "number": 1, "age_seconds": 10**400},
        {"type": "Report", "number": 1, "gpus": {}},
        {"type": "Report", "number": 1, "missing": ["x"] * 20_000},
        {"type": "Ask", "poll_id": "p", "request": {}},
        {"type": "Ask", "poll_id": "p", "request": {"request_id": "r", "wishes": {"count": -1}}},
        {"type": "Ask", "poll_id": "p", "request": {"request_id": ["r"], "wishes": {}}},
        {"type": "Ask", "poll_id": "p", "request": {"request_id": "r", "wishes": {"colour": "green"}}},
        {"type": "Ask", "poll_id": "p", "request": {"request_id": "r", "wishes": {"memory_mb": 10**400}}},
        {"type": "Ask", "poll_id": "p", "request": {"request_id": "r", "wishes": {}, "ttl_seconds": 10**400}},
        {"type": "Call", "call_id": "c", "host": "h", "what": "renew", "arguments": []},
    ],
)
def test_what_is_no_message_is_refused(row: Any) -> None:
    with pytest.raises(MessageError):
        decode(row)


def test_the_id_of_a_lease_names_its_host() -> None:
    assert host_and_lease(fleet_lease_id("gpu-1.lab", "lease-12")) == ("gpu-1.lab", "lease-12")
    assert host_and_lease("lease-12") == ("", "lease-12")
