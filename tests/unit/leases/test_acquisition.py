"""One request at several endpoints: one outcome, nothing left behind, and GPUs reserved at one endpoint at most."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from tests.fakes.lease_service import FakeLeaseService, new_request

from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.errors import (
    ImpossibleRequestError,
    NetworkRetryableError,
    PoolStoppedError,
    RequestCancelledError,
    RequestEndedError,
    ServiceRefusedError,
    TooManyWaitingError,
)
from gpu_worker_pool.leases.acquisition import Acquisition, Candidate
from gpu_worker_pool.leases.endpoint import LeaseEndpoint, PollBudget
from gpu_worker_pool.leases.engine import LeaseEngine


class Track:
    """Endpoints `a`, `b`, `c`, and acquisitions from them."""

    def __init__(self) -> None:
        self.engine = LeaseEngine(lambda *_: None, lambda *_: None)
        self.services = {name: FakeLeaseService(name) for name in "abc"}
        self.endpoints = {name: self.engine.endpoint(service) for name, service in self.services.items()}
        self.ttl_seconds = 60.0

    def acquisition(self, *first: str, then: tuple[str, ...] = (), timeout_seconds: float = 10.0) -> Acquisition:
        return Acquisition(
            self.engine, map(self.candidate, first), map(self.candidate, then), timeout_seconds=timeout_seconds
        )

    def candidate(self, name: str) -> Candidate:
        return Candidate(self.endpoints[name], new_request(self.ttl_seconds), is_busy=True)

    def busy(self, *names: str) -> None:
        for name in names:
            self.services[name].granting = False

    def grant(self, name: str) -> None:
        service = self.services[name]
        service.granting = True
        service.wake()

    def asked(self) -> list[str]:
        return [name for name, service in self.services.items() if service.count("acquire")]

    async def is_clean(self, *but: str) -> None:
        """Nothing is held, and no request waits, but there."""
        await until(lambda: not [name for name, service in self.services.items() if service.held and name not in but])
        await until(lambda: all(endpoint.waiting == 0 for endpoint in self.endpoints.values()))


async def until(look: Callable[[], object], within_seconds: float = 5.0) -> None:
    async with asyncio.timeout(within_seconds):
        while not look():
            await asyncio.sleep(0.005)


@pytest.fixture
async def track() -> AsyncIterator[Track]:
    made = Track()
    yield made
    await made.engine.stop()


# --- who wins ---


async def test_the_best_is_asked_first_and_nobody_else_if_it_grants(track: Track) -> None:
    won = await track.acquisition("b", "a", then=("c",)).run()
    assert won is track.services["b"].held[won.request.request_id]
    assert track.asked() == ["b"]


async def test_the_next_is_asked_when_the_first_is_busy_which_is_then_given_up(track: Track) -> None:
    track.busy("a")
    won = await track.acquisition("a", "b", then=("c",)).run()
    assert won.endpoint_id == "b"
    assert track.asked() == ["a", "b"]
    await until(lambda: track.services["a"].count("cancel") == 1)
    await track.is_clean("b")


async def test_all_are_waited_at_and_the_first_grant_wins(track: Track) -> None:
    track.busy("a", "b", "c")
    running = asyncio.create_task(track.acquisition("a", then=("b", "c")).run())
    await until(lambda: all(endpoint.waiting for endpoint in track.endpoints.values()))
    assert all(service.polls[0][0] == 0.0 for service in track.services.values()), "first what is free now"
    await until(lambda: all(len(service.polls) >= 2 for service in track.services.values()))
    assert {service.polls[1][0] for service in track.services.values()} == {20.0}, "then a long poll"
    track.grant("c")
    assert (await running).endpoint_id == "c"
    await until(lambda: [service.count("cancel") for service in track.services.values()] == [1, 1, 0])
    await track.is_clean("c")


async def test_what_fails_as_nobody_expected_is_told_and_the_others_are_waited_at(
    track: Track, caplog: pytest.LogCaptureFixture
) -> None:
    track.services["a"].failing["acquire"] = ZeroDivisionError("oops")
    track.busy("b")
    running = asyncio.create_task(track.acquisition("a", "b").run())
    await until(lambda: track.endpoints["b"].waiting)
    track.grant("b")
    assert (await running).endpoint_id == "b"
    await until(lambda: track.services["a"].count("cancel") == 1)
    assert caplog.messages == ["the lease request to a failed"]
    with pytest.raises(ZeroDivisionError, match="oops"):
        await track.acquisition("a").run()


async def test_a_second_grant_is_given_back(track: Track) -> None:
    track.busy("a", "b", "c")
    for _ in range(10):
        running = asyncio.create_task(track.acquisition(then=("a", "b", "c")).run())
        await until(lambda: all(endpoint.waiting for endpoint in track.endpoints.values()))
        for name in "abc":
            track.grant(name)
        won = await running
        await track.is_clean(won.endpoint_id)
        track.services[won.endpoint_id].held.clear()
        track.busy("a", "b", "c")


async def test_a_silent_one_does_not_keep_the_next_from_being_asked(
    track: Track, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_worker_pool.leases.endpoint.SILENCE_SECONDS", 0.1)
    track.services["a"].delay_seconds = 1.0
    async with asyncio.timeout(0.8):
        won = await track.acquisition("a", "b").run()
    assert won.endpoint_id == "b"
    # What it says when it speaks at last is given back.
    await until(lambda: track.services["a"].count("acquire") == 1)
    await track.is_clean("b")


# --- who fails ---


async def test_what_one_can_never_give_is_asked_of_the_others(track: Track) -> None:
    track.services["a"].failing["acquire"] = ImpossibleRequestError(reasons=("too small",))
    assert (await track.acquisition("a", "b").run()).endpoint_id == "b"


async def test_what_nobody_can_ever_give_fails_with_all_reasons(track: Track) -> None:
    for name, service in track.services.items():
        service.failing["acquire"] = ImpossibleRequestError(reasons=(f"{name} is too small",))
    with pytest.raises(ImpossibleRequestError) as caught:
        await track.acquisition("a", then=("b", "c")).run()
    assert caught.value.reasons == ("a: a is too small", "b: b is too small", "c: c is too small")


async def test_alone_it_fails_with_its_own_error(track: Track) -> None:
    error = ServiceRefusedError("a key is needed", status=401)
    track.services["a"].failing["acquire"] = error
    with pytest.raises(ServiceRefusedError) as caught:
        await track.acquisition("a").run()
    assert caught.value is error


async def test_refused_by_all_says_so(track: Track) -> None:
    track.services["a"].failing["acquire"] = ServiceRefusedError("a key is needed", status=401)
    track.services["b"].failing["acquire"] = ImpossibleRequestError(reasons=("too small",))
    with pytest.raises(ServiceRefusedError, match=r"a: a key is needed; b: .*too small") as caught:
        await track.acquisition("a", "b").run()
    assert caught.value.status == 401


async def test_one_that_fails_while_others_are_waited_at(track: Track) -> None:
    track.busy("a", "b")
    running = asyncio.create_task(track.acquisition(then=("a", "b")).run())
    await until(lambda: all(track.endpoints[name].waiting for name in "ab"))
    track.services["a"].failing["acquire"] = NetworkRetryableError("connection refused")
    track.services["a"].wake()
    await asyncio.sleep(0.1)
    track.grant("b")
    assert (await running).endpoint_id == "b"
    await track.is_clean("b")


async def test_one_that_fails_is_asked_again_and_keeps_its_request(track: Track) -> None:
    track.services["a"].failing["acquire"] = NetworkRetryableError("connection refused")
    running = asyncio.create_task(track.acquisition("a").run())
    await until(lambda: track.services["a"].count("acquire") >= 2)
    track.services["a"].failing.clear()
    assert (await running).endpoint_id == "a"
    assert len({request_id for name, request_id in track.services["a"].calls if name == "acquire"}) == 1


async def test_one_probe_at_a_time_while_it_fails(track: Track) -> None:
    track.services["a"].failing["acquire"] = NetworkRetryableError("connection refused")
    running = [asyncio.create_task(track.acquisition("a").run()) for _ in range(50)]
    await asyncio.sleep(0.1)
    before = track.services["a"].count("acquire")
    await asyncio.sleep(1.5)
    assert track.services["a"].count("acquire") - before <= 4
    track.services["a"].failing.clear()
    track.endpoints["a"].returned()
    async with asyncio.timeout(5):
        assert {lease.endpoint_id for lease in await asyncio.gather(*running)} == {"a"}


async def test_those_who_wait_at_one_that_is_back_do_not_wait_for_each_other(track: Track) -> None:
    track.busy("a")
    running = [asyncio.create_task(track.acquisition("a").run()) for _ in range(5)]
    await until(lambda: track.endpoints["a"].waiting == 5)
    track.services["a"].failing["acquire"] = NetworkRetryableError("connection refused")
    track.services["a"].wake()
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
    running = [asyncio.create_task(track.acquisition("a").run()) for _ in range(5)]
    await until(lambda: sum(seconds > 0 for seconds, _ in service.polls) == 5)
    service.failing["acquire"] = NetworkRetryableError("the connection broke")
    failing = asyncio.create_task(track.acquisition("a").run())
    await until(lambda: track.endpoints["a"].is_failing)
    service.failing.clear()
    before = service.count("acquire")
    newcomer = asyncio.create_task(track.acquisition("a").run())
    await until(lambda: service.count("acquire") >= before + 4, within_seconds=3)
    track.grant("a")
    async with asyncio.timeout(5):
        await asyncio.gather(failing, newcomer, *running)


async def test_one_that_has_too_many_waiting_is_asked_again(track: Track) -> None:
    track.services["a"].failing["acquire"] = TooManyWaitingError("1000 of yours wait")
    running = asyncio.create_task(track.acquisition("a").run())
    await until(lambda: track.services["a"].count("acquire") >= 2)
    track.services["a"].failing.clear()
    assert (await running).endpoint_id == "a"


async def test_a_request_that_was_given_up_is_made_anew(track: Track) -> None:
    track.busy("a")
    running = asyncio.create_task(track.acquisition("a").run())
    await until(lambda: len(track.services["a"].polls) >= 2)
    track.services["a"].failing["acquire"] = RequestEndedError(state="given_up")
    track.services["a"].wake()
    await until(lambda: len({request_id for _, request_id in track.services["a"].calls}) >= 2)
    track.services["a"].failing.clear()
    track.grant("a")
    assert (await running).endpoint_id == "a"


async def test_a_request_that_somebody_cancelled_is_not(track: Track) -> None:
    track.busy("a")
    running = asyncio.create_task(track.acquisition("a").run())
    await until(lambda: len(track.services["a"].polls) >= 2)
    track.services["a"].failing["acquire"] = RequestEndedError(state="cancelled")
    track.services["a"].wake()
    with pytest.raises(RequestCancelledError):
        await running


async def test_a_place_at_a_server_that_is_away_is_given_up_when_it_is_back(track: Track) -> None:
    track.busy("a", "b")
    running = asyncio.create_task(track.acquisition(then=("a", "b")).run())
    await until(lambda: all(track.endpoints[name].waiting for name in "ab"))
    track.services["a"].failing |= {name: NetworkRetryableError("gone") for name in ("acquire", "cancel")}
    track.services["a"].wake()
    await until(lambda: track.endpoints["a"].is_failing)
    track.grant("b")
    await running
    await until(lambda: track.services["a"].count("cancel") == 1)
    await asyncio.sleep(0.2)
    assert track.services["a"].count("cancel") == 1, "it is left alone until there is a sign of life"
    track.services["a"].failing.clear()
    track.endpoints["a"].returned()
    await until(lambda: track.services["a"].count("cancel") == 2)


# --- one outcome ---


@pytest.mark.parametrize("steps", range(12))
async def test_cancelled_at_any_step_it_leaves_nothing_behind(track: Track, steps: int) -> None:
    for pause in (0.0, 0.001, 0.003):
        track.busy("a", "b")
        running = asyncio.create_task(track.acquisition("a", then=("b",)).run())
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
            await track.is_clean(outcome.endpoint_id)
            track.services[outcome.endpoint_id].held.clear()


async def test_a_timeout_that_races_the_grant_has_one_outcome(track: Track) -> None:
    outcomes = []
    for turn in range(30):
        track.busy("a")
        running = asyncio.create_task(track.acquisition("a", timeout_seconds=0.03).run())
        await asyncio.sleep(0.02 + turn / 1500)
        track.grant("a")
        try:
            won = await running
            outcomes.append("granted")
            await track.is_clean(won.endpoint_id)
            track.services["a"].held.clear()
        except TimeoutError:
            outcomes.append("timed out")
            await track.is_clean()
    assert len(outcomes) == 30


async def test_no_time_at_all_takes_what_is_free_now(track: Track) -> None:
    track.busy("a")
    assert (await track.acquisition("a", then=("b", "c"), timeout_seconds=0.0).run()).endpoint_id in ("b", "c")
    track.busy("b", "c")
    with pytest.raises(TimeoutError):
        await track.acquisition("a", then=("b", "c"), timeout_seconds=0.0).run()
    assert all(service.count("acquire") for service in track.services.values())


async def test_a_stop_ends_it(track: Track) -> None:
    track.busy("a", "b")
    acquisition = track.acquisition("a", then=("b",))
    running = asyncio.create_task(acquisition.run())
    await until(lambda: all(track.endpoints[name].waiting for name in "ab"))
    acquisition.withdraw()
    with pytest.raises(PoolStoppedError):
        await running
    await track.is_clean()


# --- those who come and go ---


async def test_one_that_joins_is_waited_at_too(track: Track) -> None:
    track.busy("a")
    acquisition = track.acquisition("a")
    running = asyncio.create_task(acquisition.run())
    await until(lambda: track.endpoints["a"].waiting)
    acquisition.join(track.candidate("b"))
    assert (await running).endpoint_id == "b"
    await track.is_clean("b")


async def test_one_that_leaves_is_given_up(track: Track) -> None:
    track.busy("a", "b")
    acquisition = track.acquisition("a", then=("b",))
    running = asyncio.create_task(acquisition.run())
    await until(lambda: all(track.endpoints[name].waiting for name in "ab"))
    acquisition.leave("a")
    await until(lambda: track.services["a"].count("cancel"))
    assert not running.done()
    track.grant("b")
    assert (await running).endpoint_id == "b"


# --- rule 4 ---


async def test_one_endpoint_at_a_time_may_keep_gpus_for_it(track: Track) -> None:
    track.busy("a", "b", "c")
    track.ttl_seconds = 0.3  # so that it asks again soon
    running = asyncio.create_task(track.acquisition("a", "b", then=("c",)).run())
    await until(lambda: all(len(service.polls) >= 3 for service in track.services.values()))

    def reserving() -> list[str]:
        return [name for name, service in track.services.items() if service.polls[-1][1]]

    assert reserving() == ["a"]
    track.services["a"].failing["acquire"] = NetworkRetryableError("gone")
    track.services["a"].wake()
    await until(lambda: reserving() in (["b"], ["a", "b"]))
    track.services["a"].failing.clear()
    before = len(track.services["a"].polls)
    await until(lambda: len(track.services["a"].polls) > before + 2)
    assert reserving() == ["b"]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


# --- very many ---


async def test_more_than_may_wait_for_an_answer_keep_their_places_by_asking(
    track: Track, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_worker_pool.leases.endpoint.SHORT_POLL_SECONDS", 0.2)
    endpoint = track.endpoints["a"] = LeaseEndpoint(track.services["a"], PollBudget(3))
    track.busy("a")
    running = [asyncio.create_task(track.acquisition("a").run()) for _ in range(10)]
    await until(lambda: endpoint.waiting == 10)
    await asyncio.sleep(0.5)
    long_polls = [seconds for seconds, _ in track.services["a"].polls if seconds]
    assert len(long_polls) == 3
    assert len(track.services["a"].polls) >= 10 + 3 + 7
    track.grant("a")
    async with asyncio.timeout(5):
        assert {lease.endpoint_id for lease in await asyncio.gather(*running)} == {"a"}
    assert endpoint.polls.take()


async def test_requests_reach_an_endpoint_in_the_order_in_which_they_were_made(track: Track) -> None:
    """Also on connections of which the later ones are quicker, and with other endpoints asked before."""
    track.busy("a", "b")
    service = track.services["a"]
    service.on_the_way_seconds = iter([0.02, 0.0, 0.01] * 10)
    candidates = [track.candidate("a") for _ in range(20)]
    running = [
        asyncio.create_task(Acquisition(track.engine, [track.candidate("b")] * (number % 2) + [candidate]).run())
        for number, candidate in enumerate(candidates)
    ]
    await until(lambda: track.endpoints["a"].waiting == 20)
    arrived = [request_id for name, request_id in service.calls if name == "acquire"]
    assert list(dict.fromkeys(arrived)) == [candidate.request.request_id for candidate in candidates]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await track.is_clean()


async def test_a_silent_endpoint_delays_one_request_and_not_each_of_them(
    track: Track, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_worker_pool.leases.endpoint.SILENCE_SECONDS", 0.2)
    track.services["a"].delay_seconds = 30.0
    async with asyncio.timeout(2.0):
        won = await asyncio.gather(*(track.acquisition("a", "b").run() for _ in range(20)))
    assert {lease.endpoint_id for lease in won} == {"b"}


async def test_a_first_poll_without_an_answer_does_not_keep_later_requests_back(
    track: Track, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_worker_pool.leases.endpoint.SILENCE_SECONDS", 0.1)
    track.services["a"].on_the_way_seconds = iter([3600.0])
    hanging = asyncio.create_task(track.acquisition("a").run())
    await until(track.endpoints["a"].first_polls.locked)
    hanging.cancel()
    async with asyncio.timeout(5):
        won = await asyncio.gather(*(track.acquisition("a").run() for _ in range(3)))
    assert len({lease.lease_id for lease in won}) == 3
    await track.engine.stop(0.1)


async def test_the_time_is_over_also_where_an_earlier_request_is_not_answered(
    track: Track, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_worker_pool.leases.endpoint.SILENCE_SECONDS", 3600.0)
    track.services["a"].on_the_way_seconds = iter([3600.0])
    earlier = asyncio.create_task(track.acquisition("a").run())
    await until(track.engine.turn.locked)
    for seconds in (0.0, 0.05):
        later = Acquisition(track.engine, [track.candidate("a")], timeout_seconds=seconds, first_answer_seconds=0.02)
        async with asyncio.timeout(5):
            with pytest.raises(TimeoutError):
                await later.run()
    assert not earlier.done()
    earlier.cancel()
    await track.engine.stop(0.1)


async def test_requests_keep_their_order_where_the_queue_is_full(track: Track, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_worker_pool.leases.endpoint.SILENCE_SECONDS", 0.05)
    service = track.services["a"]
    service.failing["acquire"] = TooManyWaitingError("the queue is full")
    candidates = [track.candidate("a") for _ in range(5)]
    running = [asyncio.create_task(Acquisition(track.engine, [each]).run()) for each in candidates]
    await until(lambda: service.count("acquire") >= 2)
    track.busy("a")
    service.failing.clear()
    await until(lambda: track.endpoints["a"].waiting == 5, 15)
    arrived = list(dict.fromkeys(request_id for name, request_id in service.calls if name == "acquire"))
    assert arrived == [each.request.request_id for each in candidates]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def test_a_request_that_is_sent_again_after_an_outage_can_be_withdrawn_at_once(track: Track) -> None:
    track.busy("a")
    service = track.services["a"]
    running = asyncio.create_task(track.acquisition("a").run())
    await until(lambda: len(service.polls) == 2)
    service.failing["acquire"] = RequestEndedError("it was dropped", state="abandoned")
    service.before = lambda _: service.failing.clear()
    service.wake()
    await until(lambda: len(service.polls) >= 4)
    assert [seconds for seconds, _ in service.polls[2:4]] == [0.0, 20.0]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await track.is_clean()


async def test_an_endpoint_that_returned_is_asked_also_by_a_request_that_does_not_wait(track: Track) -> None:
    track.services["a"].failing["acquire"] = NetworkRetryableError("connection refused")
    with pytest.raises(TimeoutError):
        await track.acquisition("a", timeout_seconds=0.0).run()
    track.services["a"].failing.clear()
    track.endpoints["a"].returned()
    lease = await track.acquisition("a", timeout_seconds=0.0).run()
    assert lease.endpoint_id == "a"


async def test_a_silent_endpoint_is_asked_also_by_a_request_that_does_not_wait(track: Track) -> None:
    track.endpoints["a"].is_silent = True
    lease = await track.acquisition("a", timeout_seconds=0.0).run()
    assert lease.endpoint_id == "a"
    assert not track.endpoints["a"].is_silent


async def test_a_stop_ends_the_requests_that_wait(track: Track) -> None:
    track.busy("a")
    running = asyncio.create_task(track.acquisition("a", timeout_seconds=1000.0).run())
    await until(lambda: track.endpoints["a"].waiting)
    await track.engine.stop()
    with pytest.raises(PoolStoppedError):
        await running
    assert track.services["a"].count("cancel") == 1


async def test_an_endpoint_that_leaves_after_the_grant_does_not_take_the_lease_along(track: Track) -> None:
    acquisition = track.acquisition("a")
    lease = await acquisition.run()
    acquisition.leave("a")
    await asyncio.sleep(0)
    assert not lease.has_ended
    assert track.services["a"].count("release") == 0


async def test_a_stop_gives_back_what_could_not_be_given_back_at_the_first_try(track: Track) -> None:
    service = track.services["a"]
    held = [await track.acquisition("a").run() for _ in range(2)]
    service.failing["release"] = NetworkRetryableError("was answered with 503")
    service.before = lambda method: service.failing.clear() if service.count(method) > 2 else None
    await track.engine.release(held[0])
    assert track.engine.is_releasing
    await track.engine.stop()
    assert service.held == {}


async def test_a_caller_that_goes_after_the_grant_leaves_nothing_held(track: Track) -> None:
    acquisition = track.acquisition("a")
    lease = await acquisition.run()
    acquisition.withdraw()
    await track.is_clean()
    assert lease.is_released


async def test_polls_wait_a_third_of_the_ttl_or_as_long_as_the_caller_wants_to_hear_of_it(track: Track) -> None:
    track.busy("a", "b")
    for ttl_seconds, poll_seconds, expected in [(2.0, None, 2 / 3), (3600.0, None, 30.0), (60.0, 2.0, 2.0)]:
        track.ttl_seconds, service = ttl_seconds, track.services["a"]
        news: list[str] = []
        acquisition = Acquisition(
            track.engine,
            [track.candidate("a")],
            poll_seconds=poll_seconds,
            on_news=lambda request, news=news: news.append(request.name),
        )
        running = asyncio.create_task(acquisition.run())
        await until(lambda service=service: service.polls and service.polls[-1][0] > 0)
        assert service.polls[-1][0] == pytest.approx(expected)
        assert news == ["a"]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        service.polls.clear()


async def test_a_stop_withdraws_a_request_to_a_silent_server_but_does_not_wait_for_it(track: Track) -> None:
    silent = track.services["a"]
    silent.on_the_way_seconds = iter([3600.0])
    running = asyncio.create_task(track.acquisition("a", timeout_seconds=0.05).run())
    await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    async with asyncio.timeout(5):
        await track.engine.stop(0.1)
    assert silent.count("cancel") == 1, "it may have arrived there all the same"


@pytest.mark.parametrize("seconds", [0.0, 0.05])
async def test_the_time_is_over_also_where_no_endpoint_answers(track: Track, seconds: float) -> None:
    silent = track.services["a"]
    silent.on_the_way_seconds = iter([3600.0])
    acquisition = Acquisition(track.engine, [track.candidate("a")], timeout_seconds=seconds, first_answer_seconds=0.1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5):
            await acquisition.run()
    assert not acquisition.requests["a"].has_answered
    await track.engine.stop(0.1)


async def test_a_lease_that_is_overdue_is_renewed_again_where_that_is_not_final() -> None:
    lost: list[str] = []
    troubles: list[str] = []
    engine = LeaseEngine(
        lambda _, reason: lost.append(reason), lambda _, text: troubles.append(text), is_overdue_final=False
    )
    service = FakeLeaseService(failing={"renew": NetworkRetryableError("connection refused")})
    lease = service.lease(new_request(0.6), boot_time())
    engine.hold(lease)
    await until(lambda: lost)
    assert lost == ["it could not be renewed for 0.6 s, its TTL"]
    assert troubles == ["renewal failed; retrying: connection refused"]
    service.failing.clear()
    await until(lambda: len(troubles) == 2)
    assert troubles[1] == "the lease is renewed again"
    assert not lease.has_ended
    await engine.release(lease)
    assert service.held == {}
    await engine.stop()
