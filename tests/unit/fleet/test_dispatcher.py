"""The dispatcher with hosts that a test plays: what it sends to whom, and what a fault changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import pytest

from gpu_worker_pool.core import Request, Requirements
from gpu_worker_pool.fleet.dispatcher import (
    Dispatcher,
    LinkLost,
    Received,
    Send,
    StepDown,
    StoreBack,
    Stored,
    StoreLost,
    TimePassed,
    fleet_settings,
)
from gpu_worker_pool.fleet.host_side import DoPlace, HostSide, RememberEpoch, SendToCandidate
from gpu_worker_pool.fleet.messages import (
    Administer,
    Answer,
    Ask,
    AskAbandoned,
    CallAnswer,
    Cancel,
    End,
    EndedRow,
    EpochRefused,
    GPURow,
    HostLease,
    Join,
    Place,
    Placed,
    PlaceRefused,
    PollEnded,
    Query,
    Report,
    ReportWanted,
    TurnedAway,
    Welcome,
)
from gpu_worker_pool.fleet.store import Delete, Put

M = TypeVar("M")
Rows = Mapping[str, Mapping[str, Mapping[str, Any]]]


class Drive:
    """A dispatcher, and what it has sent since the last look."""

    def __init__(self, rows: Rows | None = None, *, epoch: int = 1, now: float = 1000.0) -> None:
        self.now = now
        self.dispatcher = Dispatcher(
            "h1",
            "http://h1",
            fleet_id="f",
            epoch=epoch,
            secret="",
            rows=rows or {},
            settings=fleet_settings(),
            now=now,
        )
        self.sent: list[Send] = []
        self.stepped_down: list[StepDown] = []
        self.numbers: dict[str, int] = {}

    def apply(self, event: Any, *, after: float = 0.0) -> None:
        self.now += after
        for effect in self.dispatcher.apply(event, self.now):
            if isinstance(effect, Send):
                self.sent.append(effect)
            else:
                self.stepped_down.append(effect)

    def says(self, host: str, message: Any, *, after: float = 0.0) -> None:
        self.apply(Received(host, message), after=after)

    def all(self, kind: type[M]) -> list[tuple[str, M]]:
        """What was sent of this kind, which is forgotten then."""
        found: list[tuple[str, M]] = [(each.to, each.message) for each in self.sent if isinstance(each.message, kind)]
        self.sent = [each for each in self.sent if not isinstance(each.message, kind)]
        return found

    def one(self, kind: type[M]) -> tuple[str, M]:
        (found,) = self.all(kind)
        return found

    def host(self, name: str, gpus: int = 1, *, ledger: str = "", uuids: str = "", **more: Any) -> None:
        self.says(name, Join(name, ledger or f"ledger of {name}", f"http://{name}", "1", **more))
        self.report(name, gpus, is_whole=True, uuids=uuids or name)

    def report(self, name: str, gpus: int = 0, *, is_whole: bool = False, uuids: str = "", **more: Any) -> None:
        self.numbers[name] = self.numbers.get(name, 0) + 1
        rows = tuple(row(uuids or name, index) for index in range(gpus))
        self.says(name, Report(self.numbers[name], is_whole, 0.0, rows, **more))

    def ask(self, request_id: str, *, server: str = "h1", wait: float = 5.0, poll: str = "", **more: Any) -> Request:
        request = Request(request_id, Requirements(**more), owner=f"owner of {request_id}", ttl_seconds=30.0)
        self.says(server, Ask(poll or f"poll of {request_id}", request, wait))
        return request

    def promise(self, *, is_held: bool = True) -> tuple[str, Place]:
        """The host promises what was placed there."""
        host, place = self.one(Place)
        lease = lease_row(place.request, *place.gpu_ids, state="held" if is_held else "offered")
        self.says(host, Placed(place.number, place.request.request_id, lease, {"lease_id": lease.lease_id}, is_held))
        return host, place

    def store(self) -> list[Put | Delete]:
        batch, changes = self.dispatcher.take_changes()
        self.apply(Stored(batch))
        return list(changes)

    @property
    def waiting(self) -> list[str]:
        return [waiter.request.request_id for waiter in self.dispatcher.pool.queue.in_order()]


def row(host: str, index: int) -> GPURow:
    uuid = f"GPU-{host}-{index}"
    return GPURow(uuid, index, "H100", uuid, 80_000.0, 0.0, None, 0.0, foreign_processes=0)


def lease_row(request: Request, *gpu_ids: str, state: str = "held") -> HostLease:
    return HostLease(f"lease of {request.request_id}", request, gpu_ids, state, 1.0)


def ended(request_id: str, state: str = "released") -> EndedRow:
    return EndedRow(request_id, f"lease of {request_id}", state)


# --- a grant ---


def test_a_request_is_placed_promised_and_told() -> None:
    fleet = Drive()
    fleet.host("h1")
    fleet.ask("a", server="h2")
    host, place = fleet.promise()
    assert (host, place.epoch, place.dispatcher, place.gpu_ids, place.is_listening) == (
        "h1",
        1,
        "h1",
        ("GPU-h1-0",),
        True,
    )
    to, answer = fleet.one(Answer)
    assert (to, answer.state, answer.host, answer.url, answer.lease_id) == (
        "h2",
        "granted",
        "h1",
        "http://h1",
        "lease of a",
    )
    assert answer.global_ids == (0,)


def test_who_must_wait_is_told_the_place_after_it_is_stored_and_never_before() -> None:
    fleet = Drive()
    fleet.host("h1")
    fleet.ask("a")
    fleet.promise()
    fleet.all(Answer)
    fleet.ask("b", wait=1.0)
    fleet.apply(TimePassed(), after=2.0)
    assert fleet.all(Answer) == []
    assert any(isinstance(change, Put) and change.key == "b" for change in fleet.store())
    _, answer = fleet.one(Answer)
    assert (answer.state, answer.position) == ("waiting", 1)


def test_a_release_serves_the_next_on_its_host() -> None:
    fleet = Drive()
    fleet.host("h1")
    fleet.ask("a")
    fleet.promise()
    fleet.ask("b")
    fleet.ask("c")
    fleet.report("h1", ended=(ended("a"),))
    assert fleet.promise()[1].request.request_id == "b"
    assert fleet.waiting == ["c"]


def test_pack_fills_a_host_before_the_next_and_large_requests_find_whole_hosts() -> None:
    fleet = Drive()
    fleet.host("h1", gpus=4)
    fleet.host("h2", gpus=4)
    hosts = set()
    for number in range(3):
        fleet.ask(f"small{number}")
        hosts.add(fleet.promise()[0])
    assert len(hosts) == 1
    fleet.ask("large", count=4)
    assert {fleet.promise()[0]} | hosts == {"h1", "h2"}


def test_only_and_exclude_name_hosts_and_their_gpus() -> None:
    fleet = Drive()
    fleet.host("h1", gpus=2)
    fleet.host("h2", gpus=2)
    for name, chosen in (("h2", ("h2", "GPU-h2-0")), ("h2:1", ("h2", "GPU-h2-1")), ("1", ("h1", "GPU-h1-1"))):
        fleet.ask(f"only {name}", only=(name,))
        host, place = fleet.promise()
        assert (host, *place.gpu_ids) == chosen
    fleet.ask("not there", exclude=("h2",))
    assert fleet.promise()[0] == "h1"


def test_a_host_that_is_away_since_the_takeover_is_said_to_be_so() -> None:
    before = Drive()
    before.host("h1")
    before.host("h2")
    after = Drive(before.dispatcher.everything()[1], epoch=2)
    after.host("h1")
    after.apply(TimePassed(), after=3.0)
    after.ask("a", wait=0.0, only=("h2",))
    after.store()
    after.apply(TimePassed(), after=1.0)
    _, answer = after.one(Answer)
    assert (answer.state, answer.reasons[1:]) == ("waiting", ("h1: of 1 GPU: 1 not among only", "h2: unreachable"))
    after.says("h1", Query("q", "explain", {"requirements": {"only": ["h2"]}}))
    assert after.one(CallAnswer)[1].body["hosts"] == ["h1: of 1 GPU: 1 not among only", "h2: unreachable"]


def test_a_request_that_no_host_can_ever_serve_is_refused_at_once() -> None:
    fleet = Drive()
    fleet.host("h1", gpus=2)
    fleet.ask("a", count=3)
    _, answer = fleet.one(Answer)
    assert (answer.state, answer.error) == ("ended", "rejected")
    assert "h1: 3 GPUs requested, 2 of 2 could ever serve it" in answer.reasons[0]


# --- between two polls, cancelled, abandoned ---


def test_placed_between_two_polls_it_is_offered_and_told_once_the_host_holds_it() -> None:
    fleet = Drive()
    fleet.host("h1")
    fleet.ask("a")
    fleet.promise()
    fleet.ask("b", wait=0.0)
    fleet.store()
    fleet.all(Answer)
    fleet.report(
        "h1",
        ended=(ended("a"),),
    )
    fleet.apply(TimePassed(), after=1.0)
    assert fleet.promise(is_held=False)[1].is_listening is False
    assert fleet.all(Answer) == []
    fleet.ask("b", poll="again")
    _, place = fleet.promise()
    assert place.is_listening
    assert fleet.one(Answer)[1].poll_id == "again"


def test_a_client_that_hangs_up_while_it_is_placed_leaves_an_offer() -> None:
    fleet = Drive()
    fleet.host("h1")
    fleet.ask("a")
    fleet.says("h1", AskAbandoned("a", "poll of a"))
    _, end = fleet.one(PollEnded)
    assert (end.request_id, end.poll_id, end.is_gone) == ("a", "poll of a", True)
    fleet.promise()
    assert fleet.all(Answer) == []


def test_cancelling_ends_what_waits_and_what_is_held() -> None:
    fleet = Drive()
    fleet.host("h1")
    fleet.ask("a")
    fleet.promise()
    fleet.ask("b")
    fleet.all(Answer)
    fleet.says("h1", Cancel("c0", "b", "somebody else"))
    assert fleet.one(CallAnswer)[1].error == "NotYourLeaseError"
    fleet.says("h1", Cancel("c1", "b", "owner of b"))
    assert fleet.one(Answer)[1].error == "cancelled"
    fleet.says("h1", Cancel("c2", "a", "owner of a"))
    assert fleet.one(End)[1].request_id == "a"
    fleet.report("h1", ended=(ended("a", "withdrawn"),))
    assert len(fleet.dispatcher.pool.leases) == 0
    fleet.says("h1", Cancel("c3", "a", "owner of a"))
    assert [answer.error for _, answer in fleet.all(CallAnswer)] == ["", "", "UnknownRequest"]


# --- faults ---


@pytest.mark.fault(40)
def test_a_request_whose_lease_is_at_a_silent_host_is_not_granted_again() -> None:
    before = Drive()
    before.host("h1")
    before.ask("a")
    before.promise()
    before.store()
    after = Drive(before.dispatcher.everything()[1], epoch=2)
    after.apply(TimePassed(), after=3.0)
    after.host("h2")
    after.ask("a")
    assert after.all(Place) == []
    assert after.one(Answer)[1].error == "LedgerUnavailableError"
    # When its host is back, the same request gets the same lease.
    request = Request("a", owner="owner of a", ttl_seconds=30.0)
    after.says("h1", Join("h1", "ledger of h1", "http://h1", "1"))
    after.report("h1", 1, is_whole=True, leases=(lease_row(request, "GPU-h1-0"),))
    after.ask("a", poll="again")
    assert after.promise()[0] == "h1"
    assert after.one(Answer)[1].lease_id == "lease of a"


@pytest.mark.fault(41)
def test_without_the_database_those_who_wait_are_served_and_newcomers_at_once_or_not_at_all() -> None:
    fleet = Drive()
    fleet.host("h1")
    fleet.ask("a")
    fleet.promise()
    fleet.ask("b")
    fleet.store()
    fleet.all(Answer)
    fleet.apply(StoreLost("it is down"))
    fleet.ask("c")
    _, answer = fleet.one(Answer)
    assert (answer.state, answer.error) == ("refused", "LedgerUnavailableError")
    assert "it is down" in answer.text
    fleet.report("h1", ended=(ended("a"),))
    assert fleet.promise()[1].request.request_id == "b"
    fleet.report("h1", ended=(ended("b"),))
    fleet.ask("c")  # the same id, since nobody was told that it waits
    assert fleet.promise()[1].request.request_id == "c"
    fleet.apply(StoreBack())
    keys = {change.key for change in fleet.store()}
    assert {"b", "c"} <= keys


@pytest.mark.fault(43)
def test_a_dispatcher_that_wakes_up_steps_down_when_a_host_refuses_it() -> None:
    fleet = Drive()
    fleet.host("h1")
    fleet.ask("a")
    fleet.says("h1", EpochRefused(2, "h2"))
    assert fleet.stepped_down == [StepDown(2, "h2")]


@pytest.mark.fault(44)
def test_the_highest_epoch_of_a_host_wins_and_the_same_one_of_another_dispatcher() -> None:
    for epoch, owner in ((7, "h2"), (5, "h2")):
        fleet = Drive(epoch=5)
        fleet.says("h3", Join("h3", "ledger", "http://h3", "1", epoch=epoch, epoch_owner=owner))
        assert fleet.stepped_down == [StepDown(epoch, owner)]
        assert fleet.all(Welcome) == []
    fleet = Drive(epoch=5)
    fleet.says("h3", Join("h3", "ledger", "http://h3", "1", epoch=5, epoch_owner="h1"))
    assert fleet.one(Welcome)[1].epoch == 5


@pytest.mark.fault(45)
def test_the_next_dispatcher_waits_for_the_hosts_it_knows_and_finds_their_leases() -> None:
    before = Drive()
    before.host("h1")
    before.host("h2")
    before.ask("a")
    before.store()  # placed, and killed before the answer
    after = Drive(before.dispatcher.everything()[1], epoch=2)
    after.host("h2")
    after.ask("a", poll="again")
    assert after.all(Place) == []
    request = Request("a", owner="owner of a", ttl_seconds=30.0)
    after.says("h1", Join("h1", "ledger of h1", "http://h1", "1"))
    after.report("h1", 1, is_whole=True, leases=(lease_row(request, "GPU-h1-0", state="offered"),))
    assert after.promise()[0] == "h1"
    assert after.one(Answer)[1].lease_id == "lease of a"


@pytest.mark.fault(46)
def test_nothing_is_granted_on_old_readings_nor_at_a_host_without_a_link() -> None:
    fleet = Drive()
    fleet.host("h1")
    fleet.apply(TimePassed(), after=16.0)
    fleet.ask("a", wait=0.0)
    assert fleet.all(Place) == []
    fleet.report("h1")
    assert fleet.promise()[0] == "h1"
    fleet.report("h1", ended=(ended("a"),))
    fleet.apply(LinkLost("h1"))
    fleet.ask("b")
    assert fleet.all(Place) == []


@pytest.mark.fault(49)
def test_another_ledger_under_the_name_of_a_host_is_refused_with_a_reason() -> None:
    fleet = Drive()
    fleet.host("h1")
    fleet.all(Welcome)
    fleet.says("h1", Join("h1", "another ledger", "http://x", "1"))
    _, refusal = fleet.one(TurnedAway)
    assert "GPU_POOL_HOST_NAME" in refusal.reason
    assert "gpu-pool fleet remove h1" in refusal.reason
    assert fleet.all(Welcome) == []


@pytest.mark.fault(49)
def test_a_gpu_that_two_hosts_report_counts_once() -> None:
    fleet = Drive()
    fleet.host("h1")
    fleet.host("h2", uuids="h1")
    fleet.ask("a")
    fleet.promise()
    fleet.ask("b")
    assert fleet.all(Place) == []
    fleet.says("h1", Query("q", "explain", {"request_id": "b"}))
    body = fleet.one(CallAnswer)[1].body
    text = " ".join(each["text"] for gpu in body["gpus"] for each in gpu["obstacles"])
    assert "h1 has a GPU with the same UUID, and it is counted there" in text


@pytest.mark.fault(50)
def test_a_database_whose_clock_was_set_back_does_not_turn_the_time_back() -> None:
    before = Drive(now=50_000.0)
    before.host("h1")
    before.ask("a")
    before.promise()
    before.ask("b")
    before.store()
    after = Drive(before.dispatcher.everything()[1], epoch=2, now=100.0)
    after.apply(TimePassed(), after=3.0)
    assert after.waiting == ["b"]
    assert after.dispatcher.next_due() < 200.0
    after.apply(TimePassed(), after=35.0)  # nobody polled for it
    assert after.waiting == []


@pytest.mark.fault(52)
def test_a_newer_host_is_listed_and_nothing_is_granted_there() -> None:
    fleet = Drive()
    fleet.host("h1", format=99)
    fleet.ask("a")
    assert fleet.all(Place) == []
    fleet.says("h1", Query("q", "fleet"))
    (host,) = fleet.one(CallAnswer)[1].body["hosts"]
    assert host["state"] == "incompatible"


@pytest.mark.fault(53)
def test_a_refused_placement_keeps_its_place() -> None:
    fleet = Drive()
    fleet.host("h1")
    for name in ("a", "b"):
        fleet.ask(name)
    host, place = fleet.one(Place)
    fleet.says(host, PlaceRefused(place.number, "a", ("held by a local:// program",)))
    assert fleet.waiting == ["a", "b"]
    fleet.report("h1", leases=(lease_row(Request("local"), "GPU-h1-0"),))
    assert fleet.all(Place) == []
    fleet.apply(TimePassed(), after=0.1)
    fleet.report("h1", ended=(ended("local"),))
    assert fleet.promise()[1].request.request_id == "a"


@pytest.mark.fault(54)
def test_a_host_that_refuses_for_ever_is_skipped_until_it_reports() -> None:
    fleet = Drive()
    fleet.host("h1")
    fleet.host("h2")
    fleet.ask("a")
    host, place = fleet.one(Place)
    fleet.says(host, PlaceRefused(place.number, "a", ("no",)))
    other, _ = fleet.promise()
    assert {host, other} == {"h1", "h2"}
    assert fleet.one(Answer)[1].host == other


def test_a_host_that_does_not_answer_is_asked_again_and_then_left() -> None:
    fleet = Drive()
    fleet.host("h1")
    fleet.ask("a", wait=60.0)
    _, first = fleet.one(Place)
    fleet.apply(TimePassed(), after=2.5)
    _, again = fleet.one(Place)
    assert again.number > first.number
    fleet.host("h2")
    for _ in range(8):
        fleet.apply(TimePassed(), after=2.5)
        fleet.report("h2", 1)
    assert fleet.all(End)[0][0] == "h1"
    assert fleet.all(Place)[-1][0] == "h2"
    # Its lease at the first host, if there is one, ends.
    request = Request("a", owner="owner of a", ttl_seconds=30.0)
    fleet.report("h1", leases=(lease_row(request, "GPU-h1-0"),))
    assert fleet.one(End)[0] == "h1"


# --- hosts ---


@pytest.mark.fault(48)
def test_a_drained_host_gets_nothing_new_and_a_removed_one_is_forgotten() -> None:
    fleet = Drive()
    fleet.host("h1")
    fleet.says("h1", Administer("c1", "drain", "h1"))
    fleet.ask("a")
    assert fleet.all(Place) == []
    fleet.says("h1", Administer("c2", "remove", "h1"))
    fleet.says("h1", Administer("c3", "remove", "h9"))
    assert [answer.error for _, answer in fleet.all(CallAnswer)] == ["", "IllegalEventError", "UnknownHost"]
    fleet.says("h1", Administer("c4", "undrain", "h1"))
    fleet.promise()
    fleet.apply(LinkLost("h1"))
    fleet.says("h2", Administer("c5", "remove", "h1"))
    assert fleet.dispatcher.hosts == {}
    assert not [change for change in fleet.store() if isinstance(change, Put) and change.key == "h1"]
    fleet.host("h1", ledger="another one")
    assert fleet.all(TurnedAway) == []


def test_a_report_that_is_missing_is_asked_for() -> None:
    fleet = Drive()
    fleet.host("h1")
    fleet.numbers["h1"] += 1
    fleet.report("h1")
    assert fleet.one(ReportWanted)[1].is_whole


# --- the host's side ---


@pytest.mark.fault(43, 44)
def test_a_host_obeys_the_highest_epoch_and_nobody_else_with_it() -> None:
    side = HostSide("h1", "ledger", "http://h1", "1", epoch=3, epoch_owner="a")
    request = Request("r", Requirements(only=("h1",)))

    def place(epoch: int, owner: str, number: int = 1) -> list[Any]:
        return side.received(owner, Place(epoch, owner, number, request, ("g0",)), 0.0)

    assert place(2, "a") == [SendToCandidate("a", EpochRefused(3, "a"))]
    assert place(3, "b") == [SendToCandidate("b", EpochRefused(3, "a"))]
    (done,) = place(3, "a")
    assert isinstance(done, DoPlace)
    assert done.place.request.requirements.only == ("g0",)
    assert place(3, "a") == []  # it came twice
    stored, done = place(4, "b")
    assert stored == RememberEpoch(4, "b")
    assert isinstance(done, DoPlace)
    assert place(3, "a", 9) == [SendToCandidate("a", EpochRefused(4, "b"))]


def test_a_withdrawn_lease_is_not_reported_as_the_end_of_its_request() -> None:
    side = HostSide("h1", "ledger", "http://h1", "1")
    side.received("a", Welcome("f", 1, "a", "http://a", is_own=True), 0.0)
    side.received("a", End(1, "a", 1, "r"), 0.0)
    (report,) = side.observe((), (), (ended("r"), ended("other")), age_seconds=0.0)
    assert isinstance(report, SendToCandidate)
    assert isinstance(report.message, Report)
    assert [each.state for each in report.message.ended] == ["withdrawn", "released"]
