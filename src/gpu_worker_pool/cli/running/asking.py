"""One request at one or several services, with one outcome: the first grant wins, every other place is given up.

They are asked one after the other whether they have something now, then all are waited at. It differs from what a
client does for its workers in that it tells, at every poll, the place and the reasons; and that it needs no thread.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.core.backoff import backoff_seconds
from gpu_worker_pool.errors import (
    GPUWorkerPoolError,
    ImpossibleRequestError,
    LedgerUnavailableError,
    RequestCancelledError,
    RequestEndedError,
    RetryableError,
    ServiceRefusedError,
    ServiceUnavailableTimeoutError,
    TooManyWaitingError,
    WorkerTimeoutError,
)
from gpu_worker_pool.leases.values import HeldLease

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from gpu_worker_pool.cli.running.values import Service
    from gpu_worker_pool.leases.values import LeaseAsk, StillWaiting

#: So often those who wait are told their place and the reasons anew. A grant does not wait for it.
POLL_SECONDS: Final = 2.0
#: The first time, nothing is said before so long: a GPU that was released this moment is about to be read anew.
FIRST_SECONDS: Final = 0.3
#: A service that is silent for so long does not keep the next one from being asked.
HEDGE_SECONDS: Final = 1.0
#: So long whoever does not want to wait waits for what is said to that.
FIRST_ANSWER_SECONDS: Final = 5.0
#: So long, when the time is over, those are heard who have not said anything yet.
LAST_WORD_SECONDS: Final = 1.0
LONGEST_PAUSE_SECONDS: Final = 5.0
CANCEL_TRIES: Final = 3
#: So long places are given up; nobody waits longer for a service that is silent.
GIVE_UP_SECONDS: Final = 1.0


class _Place:
    def __init__(self, service: Service, ask: LeaseAsk) -> None:
        self.service = service
        self.ask = ask
        self.was_asked = False
        self.answered = asyncio.Event()
        self.is_waiting = False
        self.trouble: GPUWorkerPoolError | None = None
        self.error: GPUWorkerPoolError | None = None
        self.task: asyncio.Task[HeldLease] | None = None

    @property
    def has_won(self) -> bool:
        task = self.task
        return task is not None and task.done() and not task.cancelled() and task.exception() is None


class Asking:
    """`tell_waiting` and `tell_trouble` are called with what each service says."""

    def __init__(
        self,
        asks: Iterable[tuple[Service, LeaseAsk]],
        tell_waiting: Callable[[Service, StillWaiting], object],
        tell_trouble: Callable[[Service, GPUWorkerPoolError], object],
    ) -> None:
        self._places = [_Place(service, ask) for service, ask in asks]
        self._tell_waiting = tell_waiting
        self._tell_trouble = tell_trouble
        self._is_no_wait = False
        self._giving_up: asyncio.Task[None] | None = None

    async def lease(self, timeout_seconds: float | None, *, is_no_wait: bool) -> tuple[Service, HeldLease]:
        """Raises a `WorkerTimeoutError`, which is a `ServiceUnavailableError` too if nobody could be asked.

        What is granted is there at once, and must be kept from then on: `until_given_up` ends what is left of this.
        """
        self._is_no_wait = is_no_wait
        won: _Place | None = None
        starting = asyncio.create_task(self._begin_in_turn())
        winning = asyncio.create_task(self._first_to_win(starting))
        try:
            await asyncio.wait([winning], timeout=FIRST_ANSWER_SECONDS if is_no_wait else timeout_seconds)
            if not winning.done() and not is_no_wait:
                await self._hear_everybody(winning)
            if not winning.done():
                raise self._out_of_time()
            won = winning.result()
        finally:
            for task in (starting, winning):
                task.cancel()
            self._giving_up = asyncio.create_task(self._give_up_all_but(won))
            if won is None:
                await self.until_given_up()
        assert won.task is not None  # it has won
        return won.service, won.task.result()

    async def until_given_up(self) -> None:
        """Until the places that are not needed any more are given up; that never takes long."""
        if self._giving_up is not None:
            await self._giving_up

    async def _hear_everybody(self, winning: asyncio.Task[_Place]) -> None:
        """The time is over; but whoever has not said anything yet may be about to, and what it says is the reason."""
        unheard = [asyncio.create_task(place.answered.wait()) for place in self._places if not place.answered.is_set()]
        if unheard and not any(place.is_waiting for place in self._places):
            hearing = asyncio.create_task(asyncio.wait(unheard))
            watched: list[asyncio.Task[Any]] = [winning, hearing]
            await asyncio.wait(watched, timeout=LAST_WORD_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            hearing.cancel()
        for task in unheard:
            task.cancel()

    async def _begin_in_turn(self) -> None:
        for place in self._places:
            place.task = asyncio.create_task(self._until_granted(place))
            with suppress(TimeoutError):
                async with asyncio.timeout(HEDGE_SECONDS):
                    await place.answered.wait()
            if any(each.has_won for each in self._places):
                return

    async def _first_to_win(self, starting: asyncio.Task[None]) -> _Place:
        while True:
            tasks = [place.task for place in self._places if place.task is not None and not place.task.done()]
            watched: list[asyncio.Task[None] | asyncio.Task[HeldLease]] = [*tasks]
            if not starting.done():
                watched.append(starting)
            if watched:
                await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            for place in self._places:
                if place.task is not None and place.task.done():
                    if place.task.exception() is None:
                        return place
                    place.error = _known(place.task.exception())
            if starting.done() and all(place.error is not None for place in self._places):
                raise self._all_failed()

    async def _until_granted(self, place: _Place) -> HeldLease:
        place.was_asked = True
        attempt, wait_seconds = 0, FIRST_SECONDS / len(self._places)
        try:
            while True:
                # Rule 4: GPUs may be kept free for it in one place only; the first that can be asked.
                keeping_place = next(
                    (each for each in self._places if each.trouble is None and each.error is None), place
                )
                try:
                    answer = await place.service.acquire(
                        place.ask, wait_seconds=wait_seconds, may_reserve=keeping_place is place
                    )
                except RequestEndedError as error:
                    if error.state == "cancelled":
                        raise RequestCancelledError("somebody took the request out of the queue") from None
                    # We were away for too long, as when the machine slept.
                    place.ask = place.ask.anew()
                except (RetryableError, TooManyWaitingError, LedgerUnavailableError) as error:
                    place.trouble, place.is_waiting = error, False
                    place.answered.set()
                    if self._is_no_wait:
                        raise
                    self._tell_trouble(place.service, error)
                    pause = backoff_seconds(attempt, random.random(), base=0.3, longest=LONGEST_PAUSE_SECONDS)  # noqa: S311
                    attempt += 1
                    await asyncio.sleep(pause + 0.1)
                else:
                    attempt, place.trouble = 0, None
                    if isinstance(answer, HeldLease):
                        return answer
                    place.is_waiting = True
                    if self._is_no_wait:
                        raise WorkerTimeoutError(answer.reasons[0] if answer.reasons else "no reason was given")
                    self._tell_waiting(place.service, answer)
                    place.answered.set()
                    wait_seconds = POLL_SECONDS
        finally:
            place.answered.set()

    # --- how it ends without a lease ---

    def _out_of_time(self) -> GPUWorkerPoolError:
        if any(place.is_waiting for place in self._places):
            return WorkerTimeoutError("no GPU became free in time")
        told = "; ".join(
            f"{place.service.endpoint_id}: {place.error or place.trouble or 'has not answered'}"
            for place in self._places
        )
        return ServiceUnavailableTimeoutError(f"nobody could be asked for a GPU: {told}")

    def _all_failed(self) -> GPUWorkerPoolError:
        errors = [place.error for place in self._places if place.error is not None]
        if len(errors) == 1:
            return errors[0]
        told = "; ".join(f"{place.service.endpoint_id}: {place.error}" for place in self._places)
        if all(isinstance(error, ImpossibleRequestError) for error in errors):
            return ImpossibleRequestError(f"the request can never be granted: {told}")
        if any(isinstance(error, WorkerTimeoutError) for error in errors):
            return WorkerTimeoutError(told)
        return ServiceRefusedError(told)

    # --- places that are not needed any more ---

    async def _give_up_all_but(self, won: _Place | None) -> None:
        """What could not be given up by then is only offered to us, and runs out by itself."""
        with suppress(TimeoutError):
            async with asyncio.timeout(GIVE_UP_SECONDS):
                await asyncio.gather(*(self._give_up(place) for place in self._places if place is not won))

    async def _give_up(self, place: _Place) -> None:
        task = place.task
        if task is None:
            return
        task.cancel()
        await asyncio.wait([task])
        if not place.was_asked:
            return
        if task.cancelled() or task.exception() is not None:
            if place.error is None or isinstance(place.error, WorkerTimeoutError):
                await _try_often(lambda: place.service.cancel(place.ask))
        else:
            lease = task.result()
            await _try_often(lambda: place.service.release(lease))


async def _try_often(give_back: Callable[[], Awaitable[None]]) -> None:
    for attempt in range(CANCEL_TRIES):
        try:
            await give_back()
        except GPUWorkerPoolError as error:
            if not error.retryable:
                return
            await asyncio.sleep(backoff_seconds(attempt, random.random(), longest=1.0))  # noqa: S311
        else:
            return


def _known(error: BaseException | None) -> GPUWorkerPoolError:
    if isinstance(error, GPUWorkerPoolError):
        return error
    assert error is not None
    raise error
