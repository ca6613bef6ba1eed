"""Hosts that come back to a fleet: after a takeover, and after they were removed."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from gpu_worker_pool.core import ANY_GPU, Request
from gpu_worker_pool.fleet.dispatcher import Dispatcher, Effect, LinkLost, Received, Send, fleet_settings
from gpu_worker_pool.fleet.host_side import DoPlace, HostSide
from gpu_worker_pool.fleet.hosts import KnownHost
from gpu_worker_pool.fleet.message_json import decode, encode
from gpu_worker_pool.fleet.messages import (
    Administer,
    Ask,
    Cancel,
    End,
    GPURow,
    HostLease,
    Join,
    Place,
    PlaceRefused,
    Report,
)
from gpu_worker_pool.fleet.rows import outcome_document


def request(name: str) -> Request:
    return Request(name, ANY_GPU, "worker", "o" * 64, account="a")


def gpu_of(host: str) -> tuple[GPURow, ...]:
    return (GPURow(f"{host}-0", 0, "H100", f"{host}-0", 80_000.0, 1.0, 0.0, 0.0, foreign_processes=0),)


def sent(effects: Iterable[Effect], kind: type) -> list[tuple[str, object]]:
    return [(each.to, each.message) for each in effects if isinstance(each, Send) and isinstance(each.message, kind)]


@pytest.mark.fault(45)
@pytest.mark.parametrize("order", ["AB", "BA"])
def test_of_two_leases_of_a_request_the_one_that_was_told_stays(order: str) -> None:
    rows = {
        "hosts": {host: KnownHost(host, f"ledger-{host}", f"http://{host}").document() for host in "AB"},
        "outcomes": {"r": outcome_document(request("r"), "held", 1.0, (), "A", "lease-1")},
    }
    dispatcher = Dispatcher(
        "c", "http://c", fleet_id="f", epoch=2, secret="", rows=rows, settings=fleet_settings(), now=10.0
    )
    effects: list[Effect] = []
    for host in order:
        effects += dispatcher.apply(Received(host, Join(host, f"ledger-{host}", f"http://{host}", "1")), 10.0)
    for host in order:
        lease = HostLease({"A": "lease-1", "B": "lease-2"}[host], request("r"), (f"{host}-0",), "held", 20.0)
        effects += dispatcher.apply(Received(host, Report(1, True, 0.1, gpu_of(host), (), (lease,))), 10.1)
    assert [to for to, _ in sent(effects, End)] == ["B"]


@pytest.mark.fault(48)
def test_a_host_that_was_removed_and_joins_again_obeys() -> None:
    dispatcher = Dispatcher(
        "c",
        "http://c",
        fleet_id="f",
        epoch=2,
        secret="",
        rows={},
        settings=fleet_settings(),
        now=0.0,
        hear_seconds=0.01,
    )
    host, now = HostSide("A", "ledger", "http://A", "1"), 1.0

    def deliver(effects: Iterable[Effect]) -> list[object]:
        return [
            done
            for each in effects
            if isinstance(each, Send) and each.to == "A"
            for done in host.received("link", decode(encode(each.message)), now)
        ]

    def join() -> None:
        deliver(dispatcher.apply(Received("A", host.join()), now))
        deliver(dispatcher.apply(Received("A", Report(1, True, 0.0, gpu_of("A"))), now))

    join()
    for number in range(3):
        now += 0.1
        ask = Ask(f"poll-{number}", request(f"q{number}"), 1.0)
        effects = dispatcher.apply(Received("A", ask), now)
        deliver(effects)
        for _, place in sent(effects, Place):
            assert isinstance(place, Place)
            dispatcher.apply(Received("A", PlaceRefused(place.number, f"q{number}", ("no",))), now)
        dispatcher.apply(Received("A", Cancel("c", f"q{number}", None)), now)
        dispatcher.apply(Received("A", Report(number + 2, False, 0.0, ())), now)
    dispatcher.apply(LinkLost("A"), now)
    host.link_lost("link")
    dispatcher.apply(Received("x", Administer("c", "remove", "A")), now)
    now += 1.0
    join()
    placed = deliver(dispatcher.apply(Received("A", Ask("last", request("last"), 30.0)), now))
    assert any(isinstance(each, DoPlace) for each in placed)
