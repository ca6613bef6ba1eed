"""Requests that wait in the ledger of a host (`local://`): their place in the fleet, and what may happen to them."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_worker_pool.core import Request, Requirements
from gpu_worker_pool.core.policy import Limits, Policy
from gpu_worker_pool.fleet.dispatcher import LinkLost, NewPolicy, TimePassed
from gpu_worker_pool.fleet.host_side import DoEnd, DoPlace, FollowFleet, HostSide, SendToCandidate
from gpu_worker_pool.fleet.messages import (
    Administer,
    Answer,
    Ask,
    CallAnswer,
    Cancel,
    End,
    HostOrder,
    HostWaiter,
    Join,
    Place,
    PlaceRefused,
    PollEnded,
    Query,
    Report,
    Welcome,
)
from tests.unit.fleet.test_dispatcher import Drive, ended, lease_row

JOIN = Join("h1", "ledger of h1", "http://h1", "1")


def program(name: str, **requirements: Any) -> HostWaiter:
    return HostWaiter(Request(name, Requirements(**requirements), owner="uid:0", account="uid:0", process="1"))


def busy_fleet(*hosts: str) -> Drive:
    """One with a GPU per host, which all are held."""
    fleet = Drive()
    for host in hosts or ("h1",):
        fleet.host(host)
        fleet.ask(f"holds {host}", only=(host,))
        fleet.promise()
    fleet.store()
    fleet.sent.clear()
    return fleet


def frees(fleet: Drive, host: str, *names: str) -> None:
    fleet.report(host, ended=tuple(ended(name) for name in names or (f"holds {host}",)))


def test_it_has_a_place_in_the_order_of_the_fleet_and_only_its_host_serves_it() -> None:
    fleet = busy_fleet("h1", "h2")
    fleet.ask("first", only=("h1",))
    fleet.report("h1", waiting=(program("local"),))
    fleet.ask("last")
    assert fleet.waiting == ["first", "local", "last"]
    frees(fleet, "h2")
    assert fleet.promise()[1].request.request_id == "last"
    frees(fleet, "h1")
    assert fleet.promise()[1].request.request_id == "first"
    frees(fleet, "h1", "first")
    host, place = fleet.promise()
    assert (host, place.request.request_id, place.waits_there) == ("h1", "local", True)
    # Its host reports what it has placed.
    fleet.report("h1", not_waiting=("local",), leases=(lease_row(place.request, "GPU-h1-0"),))
    assert fleet.waiting == []
    frees(fleet, "h1", "local")
    assert not fleet.dispatcher._asked.keys() & {"local", "first"}


def test_the_gpus_it_names_are_those_of_its_host() -> None:
    fleet = Drive()
    fleet.host("h1", gpus=2)
    fleet.host("h2", gpus=2)
    waiting = (program("a", only=("1",)), program("b", exclude=("0", "GPU-h2-1")), program("c", only=("GPU-h2-0",)))
    fleet.report("h2", waiting=waiting)
    assert [(to, place.request.request_id, place.gpu_ids) for to, place in fleet.all(Place)] == [
        ("h2", "a", ("GPU-h2-1",)),
        ("h2", "c", ("GPU-h2-0",)),
    ]
    assert fleet.waiting == []  # no GPU is left for b, ever
    ((host, end),) = fleet.all(End)
    assert (host, end.request_id) == ("h2", "b")
    assert "could ever serve it" in end.refused[0]


@pytest.mark.fault(45)
def test_the_next_dispatcher_knows_its_place() -> None:
    fleet = busy_fleet()
    fleet.report("h1", waiting=(program("local"),))
    fleet.ask("later")
    fleet.store()
    _, rows = fleet.dispatcher.everything()
    again = Drive(rows, epoch=2)
    again.says("h1", JOIN)
    held = (lease_row(Request("holds h1", owner="owner of holds h1"), "GPU-h1-0"),)
    again.report("h1", 1, is_whole=True, leases=held, waiting=(program("local"),))
    again.apply(TimePassed(), after=40.0)  # longer than a client may be silent: the later one was
    again.report("h1", 1)
    assert again.waiting == ["local"]
    frees(again, "h1")
    assert again.promise()[1].waits_there
    # One that its host does not have any more was given up.
    third = Drive(rows, epoch=2)
    third.says("h1", JOIN)
    third.report("h1", 1, is_whole=True)
    assert third.promise()[1].request.request_id == "later"


@pytest.mark.fault(46)
def test_it_keeps_its_place_while_its_host_has_no_link_for_a_moment() -> None:
    fleet = busy_fleet()
    fleet.report("h1", waiting=(program("local"),))
    fleet.ask("later", server="h2", wait=200.0)
    fleet.apply(LinkLost("h1"))
    fleet.apply(TimePassed(), after=20.0)  # not yet as long as a client may be silent
    held = (lease_row(Request("holds h1", owner="owner of holds h1"), "GPU-h1-0"),)
    fleet.says("h1", JOIN)
    fleet.report("h1", 1, is_whole=True, leases=held, waiting=(program("local"),))
    assert fleet.waiting == ["local", "later"]
    fleet.apply(TimePassed(), after=30.0)
    assert fleet.waiting == ["local", "later"]
    # If it is away for longer, it serves its programs itself; those that wait when it is back are new.
    fleet.apply(LinkLost("h1"))
    fleet.apply(TimePassed(), after=31.0)
    assert fleet.waiting == ["later"]
    fleet.says("h1", JOIN)
    fleet.report("h1", 1, is_whole=True, leases=held, waiting=(program("local"),))
    assert fleet.waiting == ["later", "local"]


def test_a_host_that_was_silent_after_a_placement_keeps_what_it_granted() -> None:
    fleet = Drive()
    fleet.host("h1")
    fleet.report("h1", waiting=(program("local"),))
    _, place = fleet.one(Place)
    fleet.apply(LinkLost("h1"))
    for _ in range(8):
        fleet.apply(TimePassed(), after=2.5)
    fleet.host("h1")
    fleet.report("h1", 1, is_whole=True, leases=(lease_row(place.request, "GPU-h1-0"),))
    assert fleet.all(End) == []
    assert fleet.waiting == []
    assert [lease.request.request_id for lease in fleet.dispatcher.pool.leases] == ["local"]


def test_one_that_its_host_does_not_report_any_more_is_out_of_the_queue() -> None:
    fleet = busy_fleet()
    fleet.report("h1", waiting=(program("local"), program("other")))
    fleet.report("h1", not_waiting=("local",))
    assert fleet.waiting == ["other"]
    frees(fleet, "h1")
    host, place = fleet.one(Place)
    fleet.ask("next")
    # It is gone just while it is placed.
    fleet.report("h1", not_waiting=("other",))
    fleet.says(host, PlaceRefused(place.number, "other", ("it does not wait here any more",)))
    fleet.report("h1", 1)
    assert fleet.promise()[1].request.request_id == "next"
    assert fleet.waiting == []


def test_a_refused_placement_of_it_keeps_its_place() -> None:
    fleet = Drive()
    fleet.host("h1")
    fleet.report("h1", waiting=(program("local"),))
    host, place = fleet.one(Place)
    fleet.ask("later")
    fleet.says(host, PlaceRefused(place.number, "local", ("GPU 0: in use by an outsider",)))
    assert fleet.waiting == ["local", "later"]
    fleet.apply(TimePassed(), after=0.1)
    fleet.report("h1", 1)
    assert fleet.promise()[1].request.request_id == "local"


def test_the_policy_of_the_fleet_refuses_it_with_a_reason() -> None:
    fleet = Drive()
    fleet.host("h1", gpus=4)
    fleet.apply(NewPolicy(Policy(everyone=Limits(most_gpus=2))))
    fleet.report("h1", waiting=(program("local", count=3),))
    _, end = fleet.one(End)
    assert end.refused
    # The message was lost, and the host reports it again.
    fleet.report("h1", 4, is_whole=True, waiting=(program("local", count=3),))
    assert fleet.one(End)[1].refused == end.refused
    assert fleet.waiting == []


def test_an_administrator_cancels_it_at_any_server() -> None:
    fleet = busy_fleet()
    fleet.report("h1", waiting=(program("local"),))
    fleet.says("h2", Cancel("c", "local"))
    assert fleet.one(CallAnswer)[1].body == {"request_id": "local", "cancelled": True}
    assert (fleet.one(End)[1].refused, fleet.waiting) == ((), [])


def test_its_host_is_told_its_place_once_it_is_stored_and_what_is_reserved() -> None:
    fleet = busy_fleet()
    fleet.ask("first", wait=200.0)
    fleet.report("h1", waiting=(program("local"),))
    assert fleet.all(HostOrder) == []
    fleet.store()
    fleet.apply(TimePassed(), after=1.0)
    assert fleet.one(HostOrder) == ("h1", HostOrder(1, "h1", {"local": 2}))
    fleet.apply(TimePassed(), after=1.0)
    assert fleet.all(HostOrder) == []
    fleet.apply(TimePassed(), after=61.0)
    fleet.report("h1", 1)
    fleet.ask("large", count=1, memory_mb=1000.0)
    fleet.apply(TimePassed(), after=1.0)
    _, order = fleet.one(HostOrder)
    assert (order.reserved, order.reserved_for) == (("GPU-h1-0",), "first")
    fleet.says("h1", Administer("c", "drain", "h1"))
    fleet.apply(TimePassed(), after=1.0)
    assert fleet.all(HostOrder)[-1][1].note == "h1 is being drained, and grants nothing"
    fleet.report("h1", not_waiting=("local",))
    fleet.apply(TimePassed(), after=1.0)
    assert fleet.all(HostOrder)[-1][1] == HostOrder(1, "h1")


def test_a_removed_host_takes_its_requests_with_it() -> None:
    fleet = busy_fleet("h1", "h2")
    fleet.report("h2", waiting=(program("local"),))
    fleet.apply(LinkLost("h2"))
    fleet.says("h1", Administer("c", "remove", "h2"))
    assert fleet.waiting == []
    fleet.host("h2", ledger="another one")
    fleet.sent.clear()
    fleet.report("h2", waiting=(program("local"),))  # it can come again
    assert fleet.one(Place)[0] == "h2"


def test_one_that_waited_before_its_server_joined_can_be_asked_of_the_fleet() -> None:
    fleet = busy_fleet()
    request = Request("r", owner="token", ttl_seconds=30.0)
    fleet.report("h1", waiting=(HostWaiter(request),))
    fleet.says("h1", Ask("poll", request, 5.0))
    assert fleet.all(Answer) == []
    assert fleet.waiting == ["r"]
    frees(fleet, "h1")
    assert not fleet.promise()[1].waits_there
    assert fleet.one(Answer)[1].state == "granted"


def test_the_queue_shows_it() -> None:
    fleet = busy_fleet("h1", "h2")
    fleet.report("h2", waiting=(program("local"),))
    fleet.says("h1", Query("q", "queue"))
    (row,) = fleet.one(CallAnswer)[1].body["queue"]
    assert row["request_id"] == "local"
    assert "only h2" in row["reasons"][0]
    assert fleet.all(PollEnded) == []


# --- the host's side ---


def told(effects: Any) -> list[Report]:
    return [each.message for each in effects if isinstance(each, SendToCandidate) and isinstance(each.message, Report)]


def test_a_host_reports_who_waits_and_who_does_not_any_more() -> None:
    side = HostSide("h1", "ledger", "http://h1", "1")
    effects = side.received("a", Welcome("f", 1, "a", "http://a", is_own=True, serves_hosts=True), 0.0)
    assert FollowFleet(HostOrder(1, "a")) in effects
    a, b = program("a"), program("b")
    (whole,) = told(side.observe((), (), (), (a, b), age_seconds=0.0))
    assert (whole.is_whole, whole.waiting, whole.not_waiting) == (True, (a, b), ())
    assert told(side.observe(None, (), (), (a, b), age_seconds=None)) == []
    (report,) = told(side.observe(None, (), (), (b,), age_seconds=None))
    assert (report.waiting, report.not_waiting) == ((), ("a",))
    changed = HostWaiter(b.request, may_reserve=False)
    (report,) = told(side.observe(None, (), (), (changed,), age_seconds=None))
    assert (report.waiting, report.not_waiting) == ((changed,), ())
    order = HostOrder(1, "a", {"b": 4})
    assert side.received("a", order, 1.0) == [FollowFleet(order)]
    assert side.order == order
    (done,) = side.received("a", End(1, "a", 1, "b", "no", ("no",)), 1.0)
    assert done == DoEnd("b", "no", ("no",))
    (placed,) = side.received("a", Place(1, "a", 2, b.request, ("g0",), waits_there=True), 1.0)
    assert isinstance(placed, DoPlace)
    assert placed.place.waits_there
    side.link_lost("a")
    assert side.order is None  # what the ledger was told lasts for a while


@pytest.mark.fault(52)
def test_with_a_dispatcher_of_the_version_before_a_host_serves_its_programs_itself() -> None:
    side = HostSide("h1", "ledger", "http://h1", "1")
    side.received("a", Welcome("f", 1, "a", "http://a", is_own=True, serves_hosts=True), 0.0)
    effects = side.received("b", Welcome("f", 2, "b", "http://b", is_own=True), 0.0)
    assert FollowFleet(None) in effects
    assert side.order is None
    assert side.received("b", HostOrder(2, "b"), 0.0) == []
