"""One request at several places: one outcome, nothing left behind, and at most one endpoint that keeps GPUs for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import datetime

import pytest
from tests.fakes.lease_service import FakeLeaseService, ask_for

from gpu_worker_pool.client.lease_thread import LeaseThread
from gpu_worker_pool.errors import (
    ImpossibleRequestError,
    NetworkRetryableError,
    PoolStoppedError,
    RequestCancelledError,
    RequestEndedError,
    ServiceRefusedError,
    TooManyWaitingError,
    WorkerTimeoutError,
)
from gpu_worker_pool.leases.acquisition import Race
from gpu_worker_pool.leases.endpoint import LeaseEndpoint, Polls
from gpu_worker_pool.leases.endpoint_request import Place
from gpu_worker_pool.models import GPUAssignment


class Track:
    """Endpoints `a`, `b`, `c`, and races over them."""

    def __init__(self, thread: LeaseThread) -> None:
        self.thread = thread
        polls = Polls(1000)
        self.services = {name: FakeLeaseService(name) for name in "abc"}
        self.endpoints = {name: LeaseEndpoint(thread, service, polls) for name, service in self.services.items()}
        self.released_in_process: list[GPUAssignment] = []
        self.taken_back_in_process = 0
        self.in_process: asyncio.Future[GPUAssignment] = asyncio.get_running_loop().create_future()
        self.ttl_seconds = 60.0

    def race(self, *first: str | None, then: tuple[str | None, ...] = (), timeout_seconds: float = 10.0) -> Race:
        race = Race(self.place, self.ask_in_process, self.released_in_process.append, timeout_seconds=timeout_seconds)
        race.line_up(first, then)
        return race

    def place(self, name: str, tell: Callable[[Place, object], object]) -> Place:
        return Place(self.endpoints[name], ask_for(self.ttl_seconds), tell, expects_to_wait=False)

    def ask_in_process(self) -> asyncio.Task[GPUAssignment]:
        async def ask() -> GPUAssignment:
            try:
                return await self.in_process
            except asyncio.CancelledError:
                self.taken_back_in_process += 1  # as the pool does
                raise

        return asyncio.create_task(ask())

    def busy(self, *names: str) -> None:
        for name in names:
            self.services[name].granting = False

    def grant(self, name: str) -> None:
        service = self.services[name]
        service.granting = True
        self.thread.call(service.wake)

    def asked(self) -> list[str]:
        return [name for name, service in self.services.items() if service.count("acquire")]

    async def is_clean(self, *but: str) -> None:
        """Nobody holds anything, or waits, but there."""
        await until(lambda: not [name for name, service in self.services.items() if service.held and name not in but])
        await until(lambda: all(endpoint.waiting == 0 for endpoint in self.endpoints.values()))


async def until(look: Callable[[], object], within_seconds: float = 5.0) -> None:
    async with asyncio.timeout(within_seconds):
        while not look():
            await asyncio.sleep(0.005)


@pytest.fixture
async def track() -> AsyncIterator[Track]:
    thread = LeaseThread(lambda _: None)
    thread.start()
    yield Track(thread)
    await asyncio.wrap_future(thread.want_stop())
    thread.join()


def assignment() -> GPUAssignment:
    return GPUAssignment(0, "worker-1", datetime.now())


# --- who wins ---


async def test_the_best_is_asked_first_and_nobody_else_if_it_grants(track: Track) -> None:
    won = await track.race("b", "a", then=("c",)).run()
    assert won.won is track.services["b"].held[won.won.ask.request_id]  # type: ignore[union-attr]
    assert track.asked() == ["b"]


async def test_the_next_is_asked_when_the_first_is_busy_which_is_then_given_up(track: Track) -> None:
    track.busy("a")
    won = await track.race("a", "b", then=("c",)).run()
    assert won.name == "b"
    assert track.asked() == ["a", "b"]
    await until(lambda: track.services["a"].count("cancel") == 1)
    await track.is_clean("b")


async def test_all_are_waited_at_and_the_first_grant_wins(track: Track) -> None:
    track.busy("a", "b", "c")
    running = asyncio.create_task(track.race("a", then=("b", "c")).run())
    await until(lambda: all(endpoint.waiting for endpoint in track.endpoints.values()))
    assert all(service.polls[0][0] == 0.0 for service in track.services.values()), "first what is free now"
    await until(lambda: all(len(service.polls) >= 2 for service in track.services.values()))
    assert {service.polls[1][0] for service in track.services.values()} == {20.0}, "then a long poll"
    track.grant("c")
    assert (await running).name == "c"
    await until(lambda: [service.count("cancel") for service in track.services.values()] == [1, 1, 0])
    await track.is_clean("c")


async def test_what_fails_as_nobody_expected_is_told_and_the_others_are_waited_at(
    track: Track, caplog: pytest.LogCaptureFixture
) -> None:
    track.services["a"].failing["acquire"] = ZeroDivisionError("oops")
    track.busy("b")
    running = asyncio.create_task(track.race("a", "b").run())
    await until(lambda: track.endpoints["b"].waiting)
    track.grant("b")
    assert (await running).name == "b"
    await until(lambda: track.services["a"].count("cancel") == 1)
    assert caplog.messages == ["asking a for a lease failed"]
    with pytest.raises(ZeroDivisionError, match="oops"):
        await track.race("a").run()


async def test_a_second_grant_is_given_back(track: Track) -> None:
    track.busy("a", "b", "c")
    for _ in range(10):
        running = asyncio.create_task(track.race(then=("a", "b", "c")).run())
        await until(lambda: all(endpoint.waiting for endpoint in track.endpoints.values()))
        for name in "abc":
            track.grant(name)
        won = await running
        await track.is_clean(won.name)
        track.services[won.name].held.clear()
        track.busy("a", "b", "c")


async def test_a_silent_one_does_not_keep_the_next_from_being_asked(
    track: Track, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_worker_pool.leases.acquisition.HEDGE_SECONDS", 0.1)
    track.services["a"].delay_seconds = 1.0
    async with asyncio.timeout(0.8):
        won = await track.race("a", "b").run()
    assert won.name == "b"
    # What it says when it speaks at last is given back.
    await until(lambda: track.services["a"].count("acquire") == 1)
    await track.is_clean("b")


async def test_this_process_is_a_place_like_any_other(track: Track) -> None:
    track.busy("a")
    running = asyncio.create_task(track.race("a", None).run())
    await until(lambda: track.endpoints["a"].waiting)
    track.in_process.set_result(assignment())
    won = await running
    assert won.task is not None
    assert won.task.result().worker_id == "worker-1"
    await track.is_clean()
    assert track.released_in_process == []


async def test_what_this_process_grants_in_the_same_moment_is_given_back(track: Track) -> None:
    track.busy("a")
    running = asyncio.create_task(track.race("a", None).run())
    await until(lambda: track.endpoints["a"].waiting)
    # Both are known before the race looks: the first place in line has it.
    track.grant("a")
    await asyncio.sleep(0)
    track.in_process.set_result(assignment())
    won = await running
    if won.won is not None:
        await until(lambda: len(track.released_in_process) + track.taken_back_in_process == 1)
    else:
        await track.is_clean()


# --- who fails ---


async def test_what_one_can_never_give_is_asked_of_the_others(track: Track) -> None:
    track.services["a"].failing["acquire"] = ImpossibleRequestError(reasons=("too small",))
    assert (await track.race("a", "b").run()).name == "b"


async def test_what_nobody_can_ever_give_fails_with_all_reasons(track: Track) -> None:
    for name, service in track.services.items():
        service.failing["acquire"] = ImpossibleRequestError(reasons=(f"{name} is too small",))
    with pytest.raises(ImpossibleRequestError) as caught:
        await track.race("a", then=("b", "c")).run()
    assert caught.value.reasons == ("a: a is too small", "b: b is too small", "c: c is too small")


async def test_alone_it_fails_with_its_own_error(track: Track) -> None:
    error = ServiceRefusedError("a key is needed", status=401)
    track.services["a"].failing["acquire"] = error
    with pytest.raises(ServiceRefusedError) as caught:
        await track.race("a").run()
    assert caught.value is error


async def test_refused_by_all_says_so(track: Track) -> None:
    track.services["a"].failing["acquire"] = ServiceRefusedError("a key is needed", status=401)
    track.services["b"].failing["acquire"] = ImpossibleRequestError(reasons=("too small",))
    with pytest.raises(ServiceRefusedError, match=r"a: a key is needed; b: .*too small") as caught:
        await track.race("a", "b").run()
    assert caught.value.status == 401


async def test_one_that_fails_while_others_are_waited_at(track: Track) -> None:
    track.busy("a", "b")
    running = asyncio.create_task(track.race(then=("a", "b")).run())
    await until(lambda: all(track.endpoints[name].waiting for name in "ab"))
    track.services["a"].failing["acquire"] = NetworkRetryableError("connection refused")
    track.thread.call(track.services["a"].wake)
    await asyncio.sleep(0.1)
    track.grant("b")
    assert (await running).name == "b"
    await track.is_clean("b")


async def test_one_that_fails_is_asked_again_and_keeps_its_request(track: Track) -> None:
    track.services["a"].failing["acquire"] = NetworkRetryableError("connection refused")
    running = asyncio.create_task(track.race("a").run())
    await until(lambda: track.services["a"].count("acquire") >= 2)
    track.services["a"].failing.clear()
    assert (await running).name == "a"
    assert len({request_id for name, request_id in track.services["a"].calls if name == "acquire"}) == 1


async def test_one_probe_at_a_time_while_it_fails(track: Track) -> None:
    track.services["a"].failing["acquire"] = NetworkRetryableError("connection refused")
    running = [asyncio.create_task(track.race("a").run()) for _ in range(50)]
    await asyncio.sleep(0.1)
    before = track.services["a"].count("acquire")
    await asyncio.sleep(1.5)
    assert track.services["a"].count("acquire") - before <= 4
    track.services["a"].failing.clear()
    track.thread.call(track.endpoints["a"].is_back)
    async with asyncio.timeout(5):
        assert {entry.name for entry in await asyncio.gather(*running)} == {"a"}


async def test_those_who_wait_at_one_that_is_back_do_not_wait_for_each_other(track: Track) -> None:
    track.busy("a")
    running = [asyncio.create_task(track.race("a").run()) for _ in range(5)]
    await until(lambda: track.endpoints["a"].waiting == 5)
    track.services["a"].failing["acquire"] = NetworkRetryableError("connection refused")
    track.thread.call(track.services["a"].wake)
    await until(lambda: track.endpoints["a"].is_failing)
    track.services["a"].failing.clear()
    before = len(track.services["a"].polls)
    # All are back in their long polls within moments, though the first one to ask is not granted anything.
    await until(lambda: sum(seconds > 0 for seconds, _ in track.services["a"].polls[before:]) >= 5, within_seconds=3)
    track.grant("a")
    async with asyncio.timeout(5):
        await asyncio.gather(*running)


async def test_a_connection_that_breaks_holds_up_nobody_but_its_own(track: Track) -> None:
    """However many others wait for an answer meanwhile."""
    service = track.services["a"]
    track.busy("a")
    running = [asyncio.create_task(track.race("a").run()) for _ in range(5)]
    await until(lambda: sum(seconds > 0 for seconds, _ in service.polls) == 5)
    service.failing["acquire"] = NetworkRetryableError("the connection broke")
    failing = asyncio.create_task(track.race("a").run())
    await until(lambda: track.endpoints["a"].is_failing)
    service.failing.clear()
    before = service.count("acquire")
    newcomer = asyncio.create_task(track.race("a").run())
    await until(lambda: service.count("acquire") >= before + 4, within_seconds=3)
    track.grant("a")
    async with asyncio.timeout(5):
        await asyncio.gather(failing, newcomer, *running)


async def test_one_that_has_too_many_waiting_is_asked_again(track: Track) -> None:
    track.services["a"].failing["acquire"] = TooManyWaitingError("1000 of yours wait")
    running = asyncio.create_task(track.race("a").run())
    await until(lambda: track.services["a"].count("acquire") >= 2)
    track.services["a"].failing.clear()
    assert (await running).name == "a"


async def test_a_request_that_was_given_up_is_made_anew(track: Track) -> None:
    track.busy("a")
    running = asyncio.create_task(track.race("a").run())
    await until(lambda: len(track.services["a"].polls) >= 2)
    track.services["a"].failing["acquire"] = RequestEndedError(state="given_up")
    track.thread.call(track.services["a"].wake)
    await until(lambda: len({request_id for _, request_id in track.services["a"].calls}) >= 2)
    track.services["a"].failing.clear()
    track.grant("a")
    assert (await running).name == "a"


async def test_a_request_that_somebody_cancelled_is_not(track: Track) -> None:
    track.busy("a")
    running = asyncio.create_task(track.race("a").run())
    await until(lambda: len(track.services["a"].polls) >= 2)
    track.services["a"].failing["acquire"] = RequestEndedError(state="cancelled")
    track.thread.call(track.services["a"].wake)
    with pytest.raises(RequestCancelledError):
        await running


async def test_a_place_at_a_server_that_is_away_is_given_up_when_it_is_back(track: Track) -> None:
    track.busy("a", "b")
    running = asyncio.create_task(track.race(then=("a", "b")).run())
    await until(lambda: all(track.endpoints[name].waiting for name in "ab"))
    track.services["a"].failing |= {name: NetworkRetryableError("gone") for name in ("acquire", "cancel")}
    track.thread.call(track.services["a"].wake)
    await until(lambda: track.endpoints["a"].is_failing)
    track.grant("b")
    await running
    await until(lambda: track.services["a"].count("cancel") == 1)
    await asyncio.sleep(0.2)
    assert track.services["a"].count("cancel") == 1, "it is left alone until there is a sign of life"
    track.services["a"].failing.clear()
    track.thread.call(track.endpoints["a"].is_back)
    await until(lambda: track.services["a"].count("cancel") == 2)


# --- one outcome ---


@pytest.mark.parametrize("steps", range(12))
async def test_cancelled_at_any_step_it_leaves_nothing_behind(track: Track, steps: int) -> None:
    for pause in (0.0, 0.001, 0.003):
        track.busy("a", "b")
        running = asyncio.create_task(track.race("a", then=("b",)).run())
        for _ in range(steps):
            await asyncio.sleep(pause)
        track.grant("a")
        track.grant("b")
        await asyncio.sleep(pause)
        running.cancel()
        outcome = (await asyncio.gather(running, return_exceptions=True))[0]
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, asyncio.CancelledError)
            await track.is_clean()
        else:
            await track.is_clean(outcome.name)
            track.services[outcome.name].held.clear()


async def test_a_timeout_that_races_the_grant_has_one_outcome(track: Track) -> None:
    outcomes = []
    for turn in range(30):
        track.busy("a")
        running = asyncio.create_task(track.race("a", timeout_seconds=0.03).run())
        await asyncio.sleep(0.02 + turn / 1500)
        track.grant("a")
        try:
            won = await running
            outcomes.append("granted")
            await track.is_clean(won.name)
            track.services["a"].held.clear()
        except TimeoutError:
            outcomes.append("timed out")
            await track.is_clean()
    assert len(outcomes) == 30


async def test_no_time_at_all_takes_what_is_free_now(track: Track) -> None:
    track.busy("a")
    assert (await track.race("a", then=("b", "c"), timeout_seconds=0.0).run()).name in ("b", "c")
    track.busy("b", "c")
    with pytest.raises(TimeoutError):
        await track.race("a", then=("b", "c"), timeout_seconds=0.0).run()
    assert all(service.count("acquire") for service in track.services.values())


async def test_a_stop_ends_it(track: Track) -> None:
    track.busy("a", "b")
    race = track.race("a", then=("b",))
    running = asyncio.create_task(race.run())
    await until(lambda: all(track.endpoints[name].waiting for name in "ab"))
    race.stop()
    with pytest.raises(PoolStoppedError):
        await running
    await track.is_clean()


async def test_who_waits_in_process_only_is_told_there(track: Track) -> None:
    running = asyncio.create_task(track.race(None, timeout_seconds=0.05).run())
    await asyncio.sleep(0.2)
    assert not running.done()
    error = WorkerTimeoutError("GPU by GPU")
    track.in_process.set_exception(error)
    with pytest.raises(WorkerTimeoutError, match="GPU by GPU"):
        await running


# --- those who come and go ---


async def test_one_that_joins_is_waited_at_too(track: Track) -> None:
    track.busy("a")
    race = track.race("a")
    running = asyncio.create_task(race.run())
    await until(lambda: track.endpoints["a"].waiting)
    race.join("b")
    assert (await running).name == "b"
    await track.is_clean("b")


async def test_one_that_leaves_is_given_up(track: Track) -> None:
    track.busy("a", "b")
    race = track.race("a", then=("b",))
    running = asyncio.create_task(race.run())
    await until(lambda: all(track.endpoints[name].waiting for name in "ab"))
    race.leave("a")
    await until(lambda: track.services["a"].count("cancel"))
    assert not running.done()
    track.grant("b")
    assert (await running).name == "b"


async def test_this_process_leaves_when_it_turns_out_that_there_are_leases(track: Track) -> None:
    race = track.race(None)
    running = asyncio.create_task(race.run())
    await asyncio.sleep(0.02)
    assert race.is_in_process
    race.join("a")
    race.leave(None)
    assert (await running).name == "a"
    assert not race.is_in_process


# --- rule 4 ---


async def test_one_endpoint_at_a_time_may_keep_gpus_for_it(track: Track) -> None:
    track.busy("a", "b", "c")
    track.ttl_seconds = 0.3  # so that it asks again soon
    running = asyncio.create_task(track.race("a", "b", then=("c",)).run())
    await until(lambda: all(len(service.polls) >= 3 for service in track.services.values()))

    def keepers() -> list[str]:
        return [name for name, service in track.services.items() if service.polls[-1][1]]

    assert keepers() == ["a"]
    track.services["a"].failing["acquire"] = NetworkRetryableError("gone")
    track.thread.call(track.services["a"].wake)
    await until(lambda: keepers() in (["b"], ["a", "b"]))
    track.services["a"].failing.clear()
    before = len(track.services["a"].polls)
    await until(lambda: len(track.services["a"].polls) > before + 2)
    assert keepers() == ["b"]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


# --- very many ---


async def test_more_than_may_wait_for_an_answer_keep_their_places_by_asking(
    track: Track, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_worker_pool.leases.endpoint_request.ASK_SECONDS", 0.2)
    endpoint = track.endpoints["a"] = LeaseEndpoint(track.thread, track.services["a"], Polls(3))
    track.busy("a")
    running = [asyncio.create_task(track.race("a").run()) for _ in range(10)]
    await until(lambda: endpoint.waiting == 10)
    await asyncio.sleep(0.5)
    long_polls = [seconds for seconds, _ in track.services["a"].polls if seconds]
    assert len(long_polls) == 3
    assert len(track.services["a"].polls) >= 10 + 3 + 7
    track.grant("a")
    async with asyncio.timeout(5):
        assert {entry.name for entry in await asyncio.gather(*running)} == {"a"}
    assert endpoint.polls.take()


async def test_those_who_expect_to_wait_arrive_in_order(track: Track) -> None:
    track.busy("a")
    service, endpoint = track.services["a"], track.endpoints["a"]
    asks = [ask_for() for _ in range(20)]
    places = [Place(endpoint, ask, lambda *_: None, expects_to_wait=True) for ask in asks]
    service.on_the_way_seconds = iter([0.02, 0.0, 0.01] * 10)
    for place in places:
        place.begin()
    await until(lambda: endpoint.waiting == 20)
    arrived = [request_id for name, request_id in service.calls if name == "acquire"]
    assert list(dict.fromkeys(arrived)) == [ask.request_id for ask in asks]
    for place in places:
        place.withdraw()
    await track.is_clean()
