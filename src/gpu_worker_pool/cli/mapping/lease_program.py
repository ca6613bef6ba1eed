"""The program of the lease process of `map`: acquires one lease after the other, for as long as more are wanted.

One request at a time: a map that could use a hundred GPUs stands in the queue once, not a hundred times.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.cli.running.lease_end import (
    end_lease,
    first_of,
    leave_the_terminal,
    until_nothing_is_left,
)
from gpu_worker_pool.cli.running.lease_requests import LeaseRequests
from gpu_worker_pool.errors import GPUWorkerPoolError
from gpu_worker_pool.leases.engine import LeaseEngine
from gpu_worker_pool.leases.processes import processes_of_lease

if TYPE_CHECKING:
    from gpu_worker_pool.cli.running.lease_spec import LeaseSpec
    from gpu_worker_pool.leases.channel import Channel
    from gpu_worker_pool.leases.lease import HeldLease

CANCEL_SECONDS: Final = 1.0
REST_AFTER_SECONDS: Final = 2.0
#: For what is left of the jobs of a `map` that was killed, before their GPUs go into quarantine.
JOBS_SECONDS: Final = 5.0
LOOK_SECONDS: Final = 0.05
#: For the leases that end last; after that this process leaves its terminal.
END_SECONDS: Final = 1.0


class ManyLeases:
    def __init__(self, channel: Channel, spec: LeaseSpec) -> None:
        self._channel = channel
        self._wanted = spec.most_leases or 0
        self._variable = spec.job_variable
        #: By the number under which the front process knows them.
        self._held: dict[int, HeldLease] = {}
        self._numbers: dict[str, int] = {}
        self._engine = LeaseEngine(
            lambda lease, reason: self._channel.send("lost", text=reason, lease=self._number_of(lease)),
            lambda lease, text: self._channel.report("told", text=text, lease=self._number_of(lease)),
            is_overdue_final=False,
            cancel_seconds=CANCEL_SECONDS,
        )
        self._requests = LeaseRequests(channel, spec, self._engine)
        self._ending: set[asyncio.Task[None]] = set()
        #: Something was heard, or a lease has ended.
        self._changed = asyncio.Event()
        self._is_over = self._is_alone = False
        #: No more leases are acquired.
        self._is_ending = asyncio.Event()

    async def live(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._channel.fileno(), self._hear)
        try:
            await self._requests.prepare()
            await self._acquire_what_is_wanted()
        except (GPUWorkerPoolError, ValueError) as error:
            self._requests.fail(error)
        finally:
            self._is_ending.set()
            if self._is_alone:
                await self._end_jobs()
            for number in list(self._held):
                self._give_back(number, is_clean=True)
            if self._ending:
                _, late = await asyncio.wait(self._ending, timeout=END_SECONDS)
                if late:
                    self._leave()
                    await asyncio.wait(late)
            await self._engine.stop(CANCEL_SECONDS)

    def _hear(self) -> None:
        messages = self._channel.receive()
        if messages is None:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._is_alone = True
        for message in messages or ():
            match message["kind"]:
                case "want":
                    self._wanted = message["leases"]
                case "return":
                    self._give_back(message["lease"], is_clean=message["is_clean"])
                case "done" | "stop":
                    self._is_over = True
        self._changed.set()

    # --- acquiring ---

    @property
    def _is_wanting(self) -> bool:
        return not (self._is_over or self._is_alone) and self._wanted > len(self._held)

    async def _acquire_what_is_wanted(self) -> None:
        """Acquires leases until `gpu-pool` needs no more. Raises if none is held and none can be granted."""
        number = 0
        resting: asyncio.Task[None] | None = None
        while not (self._is_over or self._is_alone):
            if not self._is_wanting:
                resting = resting or asyncio.create_task(self._rest_soon())
                await self._until_changed()
                continue
            if resting is not None:
                resting.cancel()
                resting = None
            try:
                lease = await self._acquire(number + 1)
            except (GPUWorkerPoolError, ValueError) as error:
                if not self._held:
                    raise
                self._channel.report("told", text=f"no further GPU can be acquired: {error}", lease=None)
                await self._until_fewer_are_held()
                continue
            if lease is not None:
                number += 1
            elif number == 0 and self._is_wanting:
                return  # not in time, which was reported

    async def _acquire(self, number: int) -> HeldLease | None:
        """None if it is no longer wanted, or the first one was not granted in time."""
        acquiring = self._requests.begin(is_patient=number > 1)
        while self._is_wanting and not acquiring.task.done():
            await first_of(acquiring.task, self._until_changed())
        lease = await acquiring.result()
        if lease is None:
            return None
        self._numbers[lease.request.request_id] = number
        self._held[number] = lease
        try:
            place = await self._requests.place_of(lease)
        except ValueError:
            self._give_back(number, is_clean=True)
            raise
        self._requests.report_granted(lease, place, lease=number)
        return lease

    async def _until_changed(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    async def _until_fewer_are_held(self) -> None:
        most = len(self._held)
        while self._is_wanting and len(self._held) >= most:
            await self._until_changed()

    async def _rest_soon(self) -> None:
        """Not at once: many jobs are over in a moment."""
        await asyncio.sleep(REST_AFTER_SECONDS)
        for service in self._requests.services:
            await asyncio.shield(service.rest())

    # --- giving back ---

    def _give_back(self, number: int, *, is_clean: bool) -> None:
        lease = self._held.pop(number, None)
        if lease is not None:
            ending = asyncio.get_running_loop().create_task(self._end(lease, is_clean=is_clean))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def _end(self, lease: HeldLease, *, is_clean: bool) -> None:
        if not is_clean:
            # Renewed until nothing of it is left, or `gpu-pool` ends before that.
            nothing_left = asyncio.create_task(until_nothing_is_left(lease.lease_id, self._variable))
            await first_of(nothing_left, lease.wait(), self._is_ending.wait())
            is_clean = nothing_left.done()
            nothing_left.cancel()
        await end_lease(self._engine, lease, is_clean=is_clean, go_on_alone=lambda: None)

    async def _end_jobs(self) -> None:
        """`gpu-pool` was killed: its jobs must not keep running. Processes that have left its session are not killed.

        A GPU that is still in use after that goes into quarantine.
        """
        loop = asyncio.get_running_loop()
        deadline, looks_without_any = loop.time() + JOBS_SECONDS, 0
        # Twice: a job that was just being started is not there yet.
        while looks_without_any < 2 and loop.time() < deadline:
            found = [_kill_jobs(lease.lease_id, self._variable) for lease in self._held.values()]
            looks_without_any = 0 if any(found) else looks_without_any + 1
            await asyncio.sleep(LOOK_SECONDS)
        for number, lease in list(self._held.items()):
            self._give_back(number, is_clean=not processes_of_lease(lease.lease_id, self._variable))

    def _leave(self) -> None:
        leave_the_terminal()
        if not self._is_alone:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._channel.close()

    def _number_of(self, lease: HeldLease) -> int | None:
        return self._numbers.get(lease.request.request_id)


def _kill_jobs(lease_id: str, variable: str) -> bool:
    """Whether there were any."""
    session, found = os.getsid(0), False
    for pid in processes_of_lease(lease_id, variable):
        with suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == session:
                os.kill(pid, signal.SIGKILL)
                found = True
    return found
