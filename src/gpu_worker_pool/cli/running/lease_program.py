"""The keeper's own program: asks for a GPU, holds it for a command or for another process, and gives it back.

It talks to `gpu-pool` by messages, and outlives it if need be.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import select
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.cli.endpoints import is_endpoint_named
from gpu_worker_pool.cli.logs import configure_logs
from gpu_worker_pool.cli.running.asking import Asking
from gpu_worker_pool.cli.running.holding import LOST, Holding
from gpu_worker_pool.cli.running.lease_process import PASSED_ON
from gpu_worker_pool.cli.running.lease_spec import LeaseSpec
from gpu_worker_pool.cli.running.processes import processes_of_lease, until_gone
from gpu_worker_pool.cli.running.services import asks_for, load_local
from gpu_worker_pool.cli.statuses import Status, status_of
from gpu_worker_pool.core.backoff import backoff_seconds
from gpu_worker_pool.errors import GPUWorkerPoolError, ServiceUnavailableError, WorkerTimeoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_worker_pool.cli.running.channel import Channel
    from gpu_worker_pool.cli.running.values import Service
    from gpu_worker_pool.leases.values import HeldLease, StillWaiting

#: So many reasons are told at most; a host with more GPUs is explained by its summary.
MOST_REASONS: Final = 32
REST_AFTER_SECONDS: Final = 2.0
#: A server that does not take a lease back in this time is away: nobody waits for it any longer.
RELEASE_SECONDS: Final = 4.0


def run_lease_program(channel: Channel, words: Sequence[str]) -> None:
    """In a process of its own, which it ends with. `words`: the command line, which others are reading meanwhile."""
    if not is_endpoint_named(words):
        load_local()  # while the command line is being read
    configure_logs()
    gc.freeze()  # what was loaded stays; nobody need look at it again
    gc.enable()
    asked = _until_asked(channel)
    if asked is None:
        return
    if asked.for_pid is not None:
        os.setsid()
    asyncio.run(_LeaseProgram(channel, asked).live())


def _until_asked(channel: Channel) -> LeaseSpec | None:
    select.select([channel], [], [])
    message = channel.receive_one()
    return None if message is None else LeaseSpec.of_message(message["asked"])


class _LeaseProgram:
    def __init__(self, channel: Channel, asked: LeaseSpec) -> None:
        self._channel = channel
        self._asked = asked
        self._command_pid: int | None = None
        self._summary = ""
        self._services: list[Service] = []
        self._asking: Asking | None = None
        #: Nobody wants the GPU any more: it was said so, or whoever could has gone.
        self._is_over = asyncio.Event()
        #: `gpu-pool` itself has gone, without saying anything.
        self._is_alone = asyncio.Event()
        #: The command has ended and has left nothing behind; of a `wait`: its shell knows of the GPU.
        self._is_clean = self._is_taken = False

    async def live(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._channel.fileno(), self._hear)
        # Every signal is blocked, so that Ctrl-Z and Ctrl-C do not reach us; but a `wait` has left the group.
        if self._asked.for_pid is not None:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._is_over.set)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        try:
            found = await self._ask()
        except WorkerTimeoutError as error:
            self._fail_in_time(error)
        except GPUWorkerPoolError as error:  # of which some are a ValueError, too
            self._fail(error, status_of(error))
        except ValueError as error:
            self._fail(error, Status.USAGE)
        else:
            if found is not None:
                await self._hold(*found)
        finally:
            if self._asking is not None:
                await self._asking.until_given_up()
            for service in self._services:
                service.forget()

    # --- what is heard ---

    def _hear(self) -> None:
        messages = self._channel.receive()
        if messages is None:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._is_alone.set()
            return
        for message in messages:
            match message["kind"]:
                case "signals":
                    self._channel.send("signals", got=_signals_we_got())
                case "child":
                    self._command_pid = message["pid"]
                case "taken":
                    self._is_taken = True
                case "done":
                    self._is_clean = message["is_clean"]
                    self._is_over.set()
                case "stop":
                    self._is_over.set()

    # --- asking ---

    async def _ask(self) -> tuple[Service, HeldLease] | None:
        """None if nobody wants it any more."""
        wait_limit = self._asked.wait_limit
        asks = asks_for(self._asked)
        self._services = [service for service, _ in asks]
        self._asking = Asking(asks, self._tell_waiting, self._tell_trouble)
        asking = asyncio.create_task(
            self._asking.lease(wait_limit.timeout_seconds, is_no_wait=wait_limit.is_no_wait),
        )
        ends = [asyncio.create_task(event.wait()) for event in (self._is_over, self._is_alone)]
        await asyncio.wait([asking, *ends], return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            asking.cancel()
            with suppress(asyncio.CancelledError, GPUWorkerPoolError):
                await asking
            return None
        return asking.result()

    def _tell_waiting(self, service: Service, waiting: StillWaiting) -> None:
        summary, *reasons = waiting.reasons or ("waiting",)
        self._summary = summary
        self._channel.send(
            "waiting",
            endpoint=service.endpoint_id,
            position=waiting.position,
            summary=summary,
            reasons=reasons[:MOST_REASONS],
        )

    def _tell_trouble(self, service: Service, error: GPUWorkerPoolError) -> None:
        self._channel.send("trouble", endpoint=service.endpoint_id, text=str(error))

    def _fail_in_time(self, error: WorkerTimeoutError) -> None:
        wait_limit = self._asked.wait_limit
        if isinstance(error, ServiceUnavailableError):
            self._fail(error, Status.UNAVAILABLE)
        elif wait_limit.is_no_wait:
            self._fail(f"nothing is free now: {error}", Status.NOT_NOW)
        else:
            why = f": {self._summary}" if self._summary else ""
            when = f"in {wait_limit.timeout_seconds:g} s" if wait_limit.timeout_seconds else "at once"
            self._fail(f"no GPU became free {when}{why}", Status.TIMED_OUT)

    def _fail(self, error: object, status: Status) -> None:
        self._channel.send("failed", status=int(status), text=str(error))

    # --- holding ---

    async def _hold(self, service: Service, lease: HeldLease) -> None:
        self._channel.send(
            "granted",
            lease_id=lease.lease_id,
            endpoint=lease.endpoint_id,
            gpus=[{"gpu_id": gpu.index, "uuid": gpu.uuid, "name": gpu.name} for gpu in lease.gpus],
            is_inherited=lease.is_inherited,
        )
        resting = asyncio.create_task(_rest_soon(service))
        holding = Holding(service, lease, self._tell, self._tell_lost)
        keeping = None if lease.is_inherited else asyncio.create_task(holding.keep())
        if self._asked.for_pid is None:
            is_clean = await self._until_command_ended(lease)
        else:
            is_clean = await self._until_pid_ended(keeping)
        resting.cancel()
        if keeping is not None:
            keeping.cancel()
            await asyncio.wait([keeping])
            if is_clean:
                await self._give_back(service, lease)
            else:
                # It is left to expire: its GPU is in quarantine then, until nothing is seen of what still runs. Until
                # then its owner may still end it, who may know better.
                self._services.remove(service)

    def _tell(self, text: str) -> None:
        self._channel.send("told", text=text)

    def _tell_lost(self, text: str) -> None:
        self._channel.send("lost", text=text)

    async def _until_command_ended(self, lease: HeldLease) -> bool:
        """Whether nothing of it is left."""
        ends = [asyncio.create_task(event.wait()) for event in (self._is_over, self._is_alone)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if self._is_over.is_set():
            return self._is_clean
        # It was killed, and the kernel kills the command; what that has started is not ours to kill.
        if self._command_pid is not None:
            await until_gone(self._command_pid)
        return not processes_of_lease(lease.lease_id)

    async def _until_pid_ended(self, keeping: asyncio.Task[None] | None) -> bool:
        """Of a `wait`: for as long as its shell lives, once that knows of the GPU, and there is a lease to keep."""
        await self._is_alone.wait()
        if not self._is_taken:
            return True
        _leave_the_terminal()
        assert self._asked.for_pid is not None
        ends: list[asyncio.Task[Any]] = [
            asyncio.create_task(until_gone(self._asked.for_pid)),
            asyncio.create_task(self._is_over.wait()),
        ]
        if keeping is not None:
            ends.append(keeping)
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return True

    async def _give_back(self, service: Service, lease: HeldLease) -> None:
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                await service.release(lease)
        except LOST:
            return
        except (GPUWorkerPoolError, TimeoutError) as error:
            self._tell(f"the lease cannot be given back yet, and is tried on: {str(error) or 'no answer in time'}")
        else:
            return
        # Nobody waits for a server that is away: we go on alone.
        _leave_the_terminal()
        asyncio.get_running_loop().remove_reader(self._channel.fileno())
        self._channel.close()
        attempt = 0
        with suppress(TimeoutError, *LOST):
            async with asyncio.timeout(lease.ask.ttl_seconds):
                while True:
                    await asyncio.sleep(backoff_seconds(attempt, random.random(), longest=5.0) + 0.2)  # noqa: S311
                    attempt += 1
                    with suppress(GPUWorkerPoolError):
                        await service.release(lease)
                        return


def _signals_we_got() -> list[tuple[int, int]]:
    """Since we were last asked, with their senders: our whole process group got them, and so did the command."""
    got = []
    while (info := signal.sigtimedwait(PASSED_ON, 0)) is not None:
        got.append((info.si_signo, info.si_pid))
    return got


async def _rest_soon(service: Service) -> None:
    """Not at once: many a command is over in a moment."""
    await asyncio.sleep(REST_AFTER_SECONDS)
    await service.rest()


def _leave_the_terminal() -> None:
    """Whoever reads what we could write must not wait for our end; nor should a closed terminal end us."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 2)
    os.close(nothing)
    with suppress(OSError):  # it is one already
        os.setsid()
    os.chdir("/")
