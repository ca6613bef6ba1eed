"""Places: one request at one endpoint that gives leases, from the first time it is asked until the grant or the end.

In the thread of the `LeaseThread`. A place asks, asks again, and gives back; who else is asked for the same request,
and what becomes of the answers, is decided in `race`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpu_worker_pool.core.backoff import backoff_seconds
from gpu_worker_pool.errors import (
    GPUWorkerPoolError,
    RequestCancelledError,
    RequestEndedError,
    RetryableError,
    TooManyWaitingError,
)
from gpu_worker_pool.leases.endpoint import Trouble
from gpu_worker_pool.leases.values import HeldLease

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_worker_pool.leases.endpoint import LeaseEndpoint
    from gpu_worker_pool.leases.values import LeaseAsk, StillWaiting

logger = logging.getLogger(__name__)

#: How often those ask for whom there is no connection to wait on: sooner than a grant that nobody listens for is taken
#: back.
ASK_SECONDS = 4.0
#: A place is given up with so many tries, and, where its server is away, for so long when that is back.
CANCEL_TRIES, CANCEL_SECONDS = 3, 120.0


@dataclass(frozen=True, slots=True)
class Failed:
    """It is not asked again: it can never grant this, refuses to be asked, or failed in a way that nobody expected."""

    error: Exception


class Place:
    """`tell` is called in the keeper's thread, with a `HeldLease`, `StillWaiting`, `Trouble` or `Failed`; not any more
    once it was withdrawn.
    """

    def __init__(
        self,
        endpoint: LeaseEndpoint,
        ask: LeaseAsk,
        tell: Callable[[Place, object], object],
        *,
        expects_to_wait: bool,
        first_wait_seconds: float = 0.0,
    ) -> None:
        """`first_wait_seconds`, which is short: for a GPU that only needs to be read once more, asking once will do."""
        self.endpoint = endpoint
        #: Whether GPUs may be kept free for it here (rule 4); counts from the next time it asks.
        self.may_reserve = False
        self._ask = ask
        self._tell = tell
        self._expects_to_wait = expects_to_wait
        self._first_wait_seconds = first_wait_seconds
        self._task: asyncio.Task[None] | None = None
        self._lease: HeldLease | None = None
        self._is_withdrawn = False
        #: Whether the server may know of the request, and whether it certainly does.
        self._was_sent = self._is_known = False
        self._is_first_under_way = False

    # --- for any thread: calls of the keeper come in order ---

    def begin(self) -> None:
        self.endpoint.thread.call(self._begin)

    def withdraw(self) -> None:
        """Give up the place, or give back what it was granted. Without waiting, and harmless if it is over."""
        self.endpoint.thread.call(self._withdraw)

    # --- in the keeper's thread ---

    def _begin(self) -> None:
        self._task = self.endpoint.thread.work_on(self._live())

    def _withdraw(self) -> None:
        if self._is_withdrawn:
            return
        self._is_withdrawn = True
        if self._lease is not None:
            self.endpoint.thread.work_on(self._give_back(self._lease))
        # The first time it is asked is over in a moment, and cutting it short would leave open whether it had begun.
        elif self._task is not None and not self._is_first_under_way:
            self._task.cancel()

    async def _live(self) -> None:
        endpoint = self.endpoint
        try:
            lease = await self._until_granted()
        except asyncio.CancelledError:
            if not self._is_withdrawn:
                raise
            lease = None
        except GPUWorkerPoolError as error:
            self._tell_unless_withdrawn(Failed(error))
            return
        except Exception as error:
            # A bug of ours: whoever waits here must hear of it, and its server not keep a place for nobody.
            logger.exception("asking %s for a lease failed", endpoint.endpoint_id)
            self._tell_unless_withdrawn(Failed(error))
            if self._was_sent:
                await self._give_up()
            return
        if self._is_withdrawn:
            if lease is not None:
                await self._give_back(lease)
            elif self._was_sent:
                await self._give_up()
            return
        assert lease is not None  # else it was withdrawn
        self._lease = lease
        endpoint.thread.hold(endpoint.service, lease)
        self._tell(self, lease)

    async def _until_granted(self) -> HeldLease | None:
        endpoint = self.endpoint
        is_in_turn = self._expects_to_wait or endpoint.waiting > 0
        async with endpoint.first_asks, endpoint.turn if is_in_turn else nullcontext():
            # Those in turn must not keep each other waiting.
            answer = await self._ask_until_answered(0.0 if is_in_turn else self._first_wait_seconds)
        endpoint.waiting += 1
        has_poll = False
        try:
            while not (self._is_withdrawn or isinstance(answer, HeldLease)):
                self._tell_unless_withdrawn(answer)
                has_poll = has_poll or endpoint.polls.take()
                if has_poll:
                    answer = await self._ask_until_answered(self._ask.poll_seconds)
                else:
                    await asyncio.sleep(ASK_SECONDS * (0.75 + random.random() / 2))  # noqa: S311
                    answer = await self._ask_until_answered(0.0)
        finally:
            endpoint.waiting -= 1
            if has_poll:
                endpoint.polls.give_back()
        return answer if isinstance(answer, HeldLease) else None

    async def _ask_until_answered(self, wait_seconds: float) -> HeldLease | StillWaiting:
        attempt = 0
        while True:
            await self.endpoint.until_it_may_be_asked(self._tell_unless_withdrawn)
            self._was_sent = True
            self._is_first_under_way = not self._is_known
            # Whether it is back must be known soon: the others wait for that.
            patience = 0.0 if self.endpoint.is_failing else wait_seconds
            try:
                answer = await self.endpoint.ask(self._ask, wait_seconds=patience, may_reserve=self.may_reserve)
            except RequestEndedError as error:
                self._begin_anew(error)
            except TooManyWaitingError as error:
                self._tell_unless_withdrawn(Trouble(error))
                await self._pause(attempt)
            except RetryableError as error:
                # When to ask again is for the endpoint to say.
                self._tell_unless_withdrawn(Trouble(error))
            else:
                self._is_known = True
                return answer
            finally:
                self._is_first_under_way = False
            if self._is_withdrawn:
                raise asyncio.CancelledError
            attempt += 1

    async def _pause(self, attempt: int) -> None:
        self._is_first_under_way = False
        await asyncio.sleep(0.2 + backoff_seconds(attempt, random.random(), longest=5.0))  # noqa: S311

    def _begin_anew(self, error: RequestEndedError) -> None:
        """We were away for too long, as when this process was stopped: it was given up, or granted and taken back."""
        if error.state == "cancelled":
            raise RequestCancelledError(
                f"somebody took the request out of the queue of {self.endpoint.endpoint_id}"
            ) from error
        logger.info("%s: asking anew, since %s", self.endpoint.endpoint_id, error)
        self._ask = self._ask.anew()
        self._is_known = False

    def _tell_unless_withdrawn(self, news: object) -> None:
        if not self._is_withdrawn:
            self._tell(self, news)

    # --- giving back ---

    async def _give_back(self, lease: HeldLease) -> None:
        try:
            await self.endpoint.thread.release(self.endpoint.service, lease)
        except GPUWorkerPoolError as error:
            logger.info("%s is not given back: %s", lease.shown, error)

    async def _give_up(self) -> None:
        for attempt in range(CANCEL_TRIES):
            if await self._is_given_up():
                return
            if self.endpoint.is_failing:
                break
            await asyncio.sleep(backoff_seconds(attempt, random.random()))  # noqa: S311
        self.endpoint.thread.attempt(self._give_up_later())

    async def _give_up_later(self) -> None:
        """A server that is away keeps the place for when it is back, and others wait behind it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_SECONDS):
                is_given_up = False
                while not is_given_up:
                    await self.endpoint.until_it_returns()
                    is_given_up = await self._is_given_up()

    async def _is_given_up(self) -> bool:
        try:
            await self.endpoint.service.cancel(self._ask)
        except RetryableError:
            return False
        except GPUWorkerPoolError as error:
            # It is not asked for again, and so given up there by itself; what it is granted is only offered.
            logger.info("%s: a place is left without saying so: %s", self.endpoint.endpoint_id, error)
        return True
