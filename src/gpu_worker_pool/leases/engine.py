"""The lease engine: acquires leases from services, renews them while they are held, and gives them back.

Plain asyncio in one event loop, which nothing else may block: the client runs it in its lease thread, `gpu-pool run`
in its lease process.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from typing import TYPE_CHECKING, Any, TypeVar

from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.core.backoff import backoff_seconds
from gpu_worker_pool.errors import (
    GPUWorkerPoolError,
    LeaseEndedError,
    NotYourLeaseError,
    ServiceRetryableError,
    StaleAssignmentError,
    UnknownLeaseError,
)
from gpu_worker_pool.leases.endpoint import LeaseEndpoint, PollBudget
from gpu_worker_pool.leases.lease import LeaseEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from gpu_worker_pool.leases.acquisition import Acquisition
    from gpu_worker_pool.leases.lease import HeldLease, LeaseService, YieldNotice

T = TypeVar("T")

logger: logging.Logger = logging.getLogger(__name__)

#: Time limit of `stop` for giving back leases and withdrawing requests; leases left after that expire.
STOP_SECONDS = 5.0
#: The part of it for releases that failed at the first try: `stop` must not wait long for a server that is down.
RETRIES_AT_STOP_SECONDS = 2.0
#: After that, the time limit for cancelled tasks to end.
CANCELLED_TASKS_SECONDS = 0.5
#: Timers do not count the time in which the machine sleeps, so they are short.
LONGEST_SLEEP_SECONDS = 5.0
LONGEST_RENEWAL_SECONDS = 10.0
LONGEST_PAUSE_SECONDS = 5.0
#: How long a holder waits for its release; after that the release is retried in the background.
RELEASE_SECONDS = 4.0
#: A shorter outage is not worth a report.
UNREPORTED_SECONDS = 5.0

#: How long before its time limit the holder of a lease is warned.
GRACE_SECONDS = 30.0

#: Errors by which the ledger says that the lease is not ours any more.
LOST = (UnknownLeaseError, NotYourLeaseError, LeaseEndedError)


class LeaseEngine:
    def __init__(
        self,
        on_lost: Callable[[HeldLease, str], object],
        on_trouble: Callable[[HeldLease, str], object],
        *,
        on_ending: Callable[[HeldLease, float], object] | None = None,
        on_yield_asked: Callable[[HeldLease, YieldNotice], object] | None = None,
        grace_seconds: float = GRACE_SECONDS,
        is_overdue_final: bool = True,
        cancel_seconds: float = 120.0,
    ) -> None:
        """`on_lost` is called with each lost lease and the reason, `on_trouble` with messages for a lease's holder.

        `on_ending` is called `grace_seconds` before a lease reaches its time limit, with the time that is left.
        `on_yield_asked` is called once when the holder of a lease is asked to give it back.
        `is_overdue_final`: whether a lease that was not renewed in time stays lost. True for holders in Python, whose
        assignment already says so. False for a command, which keeps running: renewals are retried for as long as the
        server may still have the lease.
        `cancel_seconds`: how long to remember requests at servers that are down, to cancel them when they return.
        """
        self._on_lost = on_lost
        self._on_trouble = on_trouble
        self._on_ending = on_ending
        self._on_yield_asked = on_yield_asked
        #: By request id: the yield request that was last reported to the holder.
        self._notices: dict[str, str] = {}
        self._grace_seconds = grace_seconds
        self._is_overdue_final = is_overdue_final
        self.cancel_seconds = cancel_seconds
        #: First come, first served: one acquisition after the other sends its first polls.
        self.turn: asyncio.Lock = asyncio.Lock()
        self._polls = PollBudget.for_process()
        #: Those under way, which a stop withdraws.
        self.acquisitions: set[Acquisition] = set()
        #: Each lease and the task that renews it. By request id: two servers can use the same lease id.
        self._held: dict[str, tuple[HeldLease, asyncio.Task[None]]] = {}
        #: What a stop waits for: requests under way, requests withdrawn, leases given back.
        self._work: set[asyncio.Task[Any]] = set()
        #: Leases that could not be given back at the first try.
        self._releases: set[asyncio.Task[Any]] = set()
        #: What else is retried for a while, and dropped by a stop.
        self._attempts: set[asyncio.Task[Any]] = set()
        self._is_closing = False

    def endpoint(self, service: LeaseService) -> LeaseEndpoint:
        """The state that all requests at this service share."""
        return LeaseEndpoint(service, self._polls)

    def work_on(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that `stop` waits for."""
        task = _start(work, self._work)
        if self._is_closing:
            task.cancel()
        return task

    def attempt(self, work: Coroutine[Any, Any, object]) -> None:
        """Start a task that `stop` cancels."""
        _start(work, self._attempts)

    async def until_released(self, timeout_seconds: float) -> None:
        """Wait until no release is left to retry."""
        if self._releases:
            await asyncio.wait(self._releases, timeout=timeout_seconds)

    @property
    def is_releasing(self) -> bool:
        """Whether a release failed and is being retried."""
        return bool(self._releases)

    # --- renewing ---

    def hold(self, lease: HeldLease) -> None:
        """Renew it from now on, until it is released or lost."""
        if lease.assignment is None:
            renewing = asyncio.get_running_loop().create_task(self._keep_renewing(lease))
            self._held[lease.request.request_id] = (lease, renewing)
            if self._on_ending is not None and lease.ends_at < math.inf:
                self.attempt(self._warn(lease, self._on_ending))

    async def _warn(self, lease: HeldLease, on_ending: Callable[[HeldLease, float], object]) -> None:
        """Tell the holder shortly before the time limit; half of a very short limit is enough."""
        before = min(self._grace_seconds, (lease.request.max_seconds or lease.ends_at - boot_time()) / 2)
        while (due_in := lease.ends_at - before - boot_time()) > 0:
            if lease.has_ended:
                return
            await asyncio.sleep(min(due_in, LONGEST_SLEEP_SECONDS))
        if not lease.has_ended:
            on_ending(lease, max(lease.ends_at - boot_time(), 0.0))

    async def _keep_renewing(self, lease: HeldLease) -> None:
        while True:
            # Due a third of the TTL after the last successful poll or renewal was sent.
            interval = min(lease.ttl_seconds / 3, lease.service.longest_silence_seconds)
            if lease.held_until >= lease.ends_at:
                due_in = lease.ends_at - boot_time()  # no renewal extends it further
            else:
                due_in = lease.held_until - lease.ttl_seconds + interval - boot_time()
            if due_in > 0:
                await asyncio.sleep(min(due_in, LONGEST_SLEEP_SECONDS))
            elif not await self._renew(lease):
                break
        self._held.pop(lease.request.request_id, None)

    async def _renew(self, lease: HeldLease) -> bool:
        """Retry until it is renewed, or (False) lost for good."""
        attempt, failing_since, is_reported, is_reported_lost, bug = 0, boot_time(), False, False, ""
        while True:
            if lease.has_ended or (self._is_overdue_final and lease.is_lost):
                self._report_lost(lease, lease.reason)
                return False
            sent_at = boot_time()
            seconds = min(max(lease.ttl_seconds / 6, 0.5), LONGEST_RENEWAL_SECONDS)
            if self._is_overdue_final:
                seconds = max(min(seconds, lease.held_until - sent_at), 0.01)
            error: Exception
            try:
                async with asyncio.timeout(seconds + 1.0):
                    notice = await lease.service.renew(lease, timeout_seconds=seconds)
            except LOST as lost:
                lease.end(LeaseEnd.LOST, str(lost))
                continue
            except (GPUWorkerPoolError, TimeoutError) as failure:
                error = failure
                if isinstance(error, ServiceRetryableError) and error.is_lease_held:
                    lease.renewed(sent_at)  # no process can write the ledger, so none can end the lease either
            except Exception as failure:
                # A bug in this program must not end the renewals silently, nor be logged at every attempt.
                error = failure
                if repr(error) != bug:
                    bug = repr(error)
                    logger.exception("renewing %s failed", lease.shown)
            else:
                lease.renewed(sent_at)
                self._notice(lease, notice)
                if is_reported:
                    self._on_trouble(lease, "the lease is renewed again")
                return True
            if not is_reported and boot_time() - failing_since >= min(UNREPORTED_SECONDS, lease.ttl_seconds / 3):
                is_reported = True
                self._on_trouble(lease, f"renewal failed; retrying: {str(error) or 'no answer in time'}")
            if not (is_reported_lost or self._is_overdue_final) and lease.is_overdue:
                is_reported = is_reported_lost = True
                self._report_lost(lease, lease.overdue_reason)
            longest = min(LONGEST_PAUSE_SECONDS, lease.ttl_seconds / 10)
            pause = backoff_seconds(attempt, random.random(), base=0.1, longest=longest) + 0.02  # noqa: S311
            attempt += 1
            await asyncio.sleep(
                min(pause, max(lease.held_until - boot_time(), 0.0)) if self._is_overdue_final else pause
            )

    def _notice(self, lease: HeldLease, notice: YieldNotice | None) -> None:
        name = lease.request.request_id
        if notice is None:
            self._notices.pop(name, None)
        elif self._notices.get(name) != notice.reason and self._on_yield_asked is not None:
            self._notices[name] = notice.reason
            try:
                self._on_yield_asked(lease, notice)
            except Exception:
                logger.exception("telling the holder of %s that it is asked for failed", lease.shown)

    def _report_lost(self, lease: HeldLease, reason: str) -> None:
        try:
            self._on_lost(lease, reason)
        except Exception:
            logger.exception("reporting the loss of %s failed", lease.shown)

    # --- giving back ---

    async def release(self, lease: HeldLease) -> None:
        """Release it for its holder; doing so twice is harmless. `StaleAssignmentError` if it was lost before."""
        if lease.is_released:
            return
        if lease.has_ended or (self._is_overdue_final and lease.is_lost):
            raise StaleAssignmentError(f"{lease.request.worker_id} lost {lease.shown}: {lease.reason}")
        lease.end(LeaseEnd.RELEASED)
        await self._send_release(lease)

    def let_expire(self, lease: HeldLease) -> None:
        """Stop renewing a lease that cannot be released but may be in use: its GPU goes into quarantine."""
        lease.end(LeaseEnd.LOST, "its assignment was dropped without release_gpu()")
        self._stop_renewing(lease)

    async def _send_release(self, lease: HeldLease) -> None:
        self._stop_renewing(lease)
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                await lease.service.release(lease)
        except LOST as error:
            raise StaleAssignmentError(f"{lease.request.worker_id} lost {lease.shown}: {error}") from None
        except (GPUWorkerPoolError, TimeoutError) as error:
            # The holder is done with it in any case, and need not wait for a server that is down.
            self._on_trouble(lease, f"the lease could not be given back; retrying: {str(error) or 'no answer in time'}")
            _start(self._release_later(lease), self._releases)

    async def _release_later(self, lease: HeldLease) -> None:
        """Retry for as long as the server may have it."""
        attempt = 0
        while not lease.is_overdue:
            await asyncio.sleep(backoff_seconds(attempt, random.random(), longest=5.0) + 0.1)  # noqa: S311
            attempt += 1
            try:
                await lease.service.release(lease)
            except LOST:
                return
            except GPUWorkerPoolError:
                continue
            return

    def _stop_renewing(self, lease: HeldLease) -> None:
        self._notices.pop(lease.request.request_id, None)
        held = self._held.pop(lease.request.request_id, None)
        if held is not None:
            held[1].cancel()

    # --- the end ---

    async def stop(self, timeout_seconds: float = STOP_SECONDS) -> None:
        """Withdraw every request and give back every lease. The owner of the services closes them."""
        for acquisition in self.acquisitions:
            acquisition.withdraw()
        for task in self._attempts:
            task.cancel()
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._give_back_everything()
                while self._work:
                    await asyncio.wait(self._work)
                await self.until_released(RETRIES_AT_STOP_SECONDS)
        except TimeoutError:
            logger.warning("some leases could not be given back within %g s; they will expire", timeout_seconds)
        self._is_closing = True
        left: set[asyncio.Task[Any]] = {
            *self._work,
            *self._attempts,
            *self._releases,
            *(task for _, task in self._held.values()),
        }
        # Twice: a withdrawn request reacts to the first one by cancelling at its server, and no time is left for that.
        for _ in range(2):
            for task in left:
                task.cancel()
            if left:
                _, left = await asyncio.wait(left, timeout=CANCELLED_TASKS_SECONDS)

    async def _give_back_everything(self) -> None:
        leases = [lease for lease, _ in self._held.values()]
        for lease in leases:
            # All before the first release: a renewal that is answered meanwhile must not report a loss.
            self._stop_renewing(lease)
            lease.end(LeaseEnd.LOST, "the client was stopped and gave it back")
        await asyncio.gather(*map(self._send_release, leases), return_exceptions=True)


def _start(work: Coroutine[Any, Any, T], tasks: set[asyncio.Task[Any]]) -> asyncio.Task[T]:
    """It is among `tasks` until it ends."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task
