"""The program of the lease process: acquires a GPU, holds it for a command or for another process, gives it back.

It exchanges messages with `gpu-pool`, and outlives it if need be.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import select
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.cli.endpoints import chosen_endpoints, is_endpoint_named
from gpu_worker_pool.cli.exits import Status, status_of
from gpu_worker_pool.cli.local_state import use_own_directory
from gpu_worker_pool.cli.logs import configure_logs
from gpu_worker_pool.cli.running.lease_process import FORWARDED
from gpu_worker_pool.cli.running.lease_spec import LeaseSpec
from gpu_worker_pool.cli.running.processes import processes_of_lease, until_gone
from gpu_worker_pool.cli.running.services import requests_for
from gpu_worker_pool.cli.running.whereabouts import check_places, place_of
from gpu_worker_pool.config import MultiEndpointConfigurationManager
from gpu_worker_pool.errors import GPUWorkerPoolError, StaleAssignmentError
from gpu_worker_pool.host_socket import socket_path
from gpu_worker_pool.leases.acquisition import FIRST_ANSWER_SECONDS, Acquisition, Candidate
from gpu_worker_pool.leases.engine import LeaseEngine

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from gpu_worker_pool.cli.running.channel import Channel
    from gpu_worker_pool.cli.running.remote_watch import RemoteWatch
    from gpu_worker_pool.config import EndpointConfig
    from gpu_worker_pool.leases.endpoint import EndpointRequest
    from gpu_worker_pool.leases.lease import HeldLease, LeaseService

#: A host with more GPUs is explained by its summary.
MOST_REASONS: Final = 32
#: The interval of progress reports; a grant does not wait for it.
POLL_SECONDS: Final = 2.0
#: With `--no-wait`: how long to wait for the first answers.
NO_WAIT_SECONDS: Final = 5.0
#: Time budget for cancelling the requests at other endpoints; what is left then expires.
CANCEL_SECONDS: Final = 1.0
REST_AFTER_SECONDS: Final = 2.0
#: Interval between checks for processes that a command inside a lease has left behind.
LEFT_SECONDS: Final = 0.5


def run_lease_program(channel: Channel, words: Sequence[str]) -> None:
    """Runs until its process ends. `words`: the command line, which `gpu-pool` parses meanwhile."""
    if not is_endpoint_named(words):  # what it needs is imported while the command line is being read
        if socket_path() is None:
            import gpu_worker_pool.leases.local
        else:
            import gpu_worker_pool.leases.unix_socket  # noqa: F401
    configure_logs()
    gc.freeze()  # what was loaded stays
    gc.enable()
    spec = _until_asked(channel)
    if spec is None:
        return
    if spec.is_private:
        use_own_directory()
    if spec.for_pid is not None:
        os.setsid()
    asyncio.run(_LeaseProgram(channel, spec).live())


def _until_asked(channel: Channel) -> LeaseSpec | None:
    select.select([channel], [], [])
    message = channel.receive_one()
    return None if message is None else LeaseSpec(**message["asked"])


class _LeaseProgram:
    def __init__(self, channel: Channel, spec: LeaseSpec) -> None:
        self._channel = channel
        self._spec = spec
        self._command_pid: int | None = None
        self._summary = ""
        self._endpoints: dict[str, EndpointConfig] = {}
        #: For a command on another host: the connection to it.
        self._watch: RemoteWatch | None = None
        self._engine = LeaseEngine(
            lambda _, reason: self._channel.send("lost", text=reason),
            lambda _, text: self._channel.report("told", text=text),
            is_overdue_final=False,
            cancel_seconds=CANCEL_SECONDS,
        )
        #: The GPU is not needed any more: `gpu-pool` said so, or its user interrupted it.
        self._is_over = asyncio.Event()
        #: `gpu-pool` itself has ended and said nothing.
        self._is_alone = asyncio.Event()
        #: The command has ended and left nothing behind; for a `wait`: its shell knows of the GPU.
        self._is_clean = self._is_taken = False
        #: Whether this process has left its terminal and `gpu-pool`.
        self._is_detached = False

    async def live(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._channel.fileno(), self._hear)
        # Every signal is blocked, so that Ctrl-Z and Ctrl-C do not reach us; but a `wait` has left the group.
        if self._spec.for_pid is not None:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._is_over.set)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        try:
            lease = await self._acquire()
        except GPUWorkerPoolError as error:  # of which some are a ValueError, too
            self._fail(error, status_of(error))
        except ValueError as error:
            self._fail(error, Status.USAGE)
        else:
            if lease is not None:
                await self._hold(lease)
        finally:
            await self._engine.stop(CANCEL_SECONDS)

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
                case "connect" | "signal" | "group" | "over" if self._watch is not None:
                    self._watch.on_message(message)
                case "taken":
                    self._is_taken = True
                case "done":
                    self._is_clean = message["is_clean"]
                    self._is_over.set()
                case "stop":
                    self._is_over.set()

    # --- acquiring ---

    async def _acquire(self) -> HeldLease | None:
        """None if it is not needed any more, or there is none in time, which was reported."""
        is_no_wait, timeout_seconds = self._spec.is_no_wait, self._spec.timeout_seconds
        endpoints = chosen_endpoints(self._spec.endpoints)
        await check_places(endpoints, self._spec)
        self._endpoints = {each.endpoint_id: each for each in endpoints}
        acquisition = Acquisition(
            self._engine,
            [
                Candidate(self._engine.endpoint(service), request)
                for service, request in requests_for(self._spec, endpoints)
            ],
            timeout_seconds=0.0 if is_no_wait else math.inf if timeout_seconds is None else timeout_seconds,
            first_answer_seconds=NO_WAIT_SECONDS if is_no_wait else FIRST_ANSWER_SECONDS,
            poll_seconds=POLL_SECONDS,
            on_news=self._report,
        )
        acquiring = asyncio.create_task(acquisition.run())
        await _first_of(acquiring, self._is_over.wait(), self._is_alone.wait())
        if not acquiring.done():
            acquisition.withdraw()
            with suppress(GPUWorkerPoolError):
                await acquiring
            return None
        try:
            return acquiring.result()
        except TimeoutError as error:
            if isinstance(error, GPUWorkerPoolError):
                raise
            self._fail_in_time(acquisition)
            return None

    def _report(self, request: EndpointRequest) -> None:
        if self._spec.is_no_wait:
            self._summary = next(iter(request.waiting.reasons), "") if request.waiting is not None else self._summary
        elif request.trouble is not None:
            self._channel.report("trouble", endpoint=request.name, text=str(request.trouble))
        elif request.waiting is not None and request.lease is None and request.error is None:
            summary, *reasons = request.waiting.reasons or ("waiting",)
            self._summary = summary
            self._channel.report(
                "waiting",
                endpoint=request.name,
                position=request.waiting.position,
                summary=summary,
                reasons=reasons[:MOST_REASONS],
            )

    def _fail_in_time(self, acquisition: Acquisition) -> None:
        timeout_seconds, requests = self._spec.timeout_seconds, acquisition.requests.values()
        if not any(request.waiting is not None and request.trouble is None for request in requests):
            details = "; ".join(
                f"{request.name}: {request.error or request.trouble or 'has not answered'}" for request in requests
            )
            self._fail(f"no endpoint answered the request: {details}", Status.UNAVAILABLE)
        elif self._spec.is_no_wait:
            self._fail(f"nothing is free now: {self._summary}", Status.NOT_NOW)
        else:
            why = f": {self._summary}" if self._summary else ""
            when = f"in {timeout_seconds:g} s" if timeout_seconds else "at once"
            self._fail(f"no GPU became free {when}{why}", Status.TIMED_OUT)

    def _fail(self, error: object, status: Status) -> None:
        self._channel.send("failed", status=int(status), text=str(error))

    # --- holding ---

    async def _hold(self, lease: HeldLease) -> None:
        endpoint = self._endpoints[lease.endpoint_id]
        try:
            place = await place_of(endpoint, self._spec)
        except ValueError as error:  # its name could not be resolved before
            await self._give_back(lease)
            self._fail(error, Status.USAGE)
            return
        if place.ssh_target is not None:
            from gpu_worker_pool.cli.running.remote_watch import RemoteWatch  # seldom needed

            self._watch = RemoteWatch(place.ssh_target, lease.ttl_seconds, self._channel)
        self._channel.send(
            "granted",
            lease_id=lease.lease_id,
            endpoint=lease.endpoint_id,
            gpus=[{"gpu_id": gpu.index, "uuid": gpu.uuid, "name": gpu.name} for gpu in lease.gpus],
            gpu_names=MultiEndpointConfigurationManager().get_gpu_names(),
            url=endpoint.url,
            ttl_seconds=lease.ttl_seconds,
            **place._asdict(),
            outer_leases=_outer_leases(lease),
        )
        resting = asyncio.create_task(_rest_soon(lease.service))
        if self._spec.for_pid is None:
            is_clean = await self._until_command_ended(lease)
        else:
            is_clean = await self._until_pid_ended(lease)
        resting.cancel()
        if self._watch is not None:
            self._watch.close()
        if is_clean or lease.is_inherited:
            await self._give_back(lease)
        elif lease.within is not None:
            # Readings do not show which part of the lease around it is in use: renew it until nothing of it is left.
            self._go_on_alone()
            await _first_of(_until_nothing_is_left(lease.lease_id), lease.wait())
            await self._give_back(lease)
        else:
            # What still runs may use the GPU, so it stays in quarantine until readings show nothing of that. Its owner,
            # who may know better, can still end it.
            self._engine.let_expire(lease)

    async def _until_command_ended(self, lease: HeldLease) -> bool:
        """Whether nothing of it is left."""
        await _first_of(self._is_over.wait(), self._is_alone.wait())
        if self._is_over.is_set():
            return self._is_clean or self._command_pid is None  # it was stopped before there was a command
        if self._watch is not None:
            return await self._watch.end_command()
        # It was killed, and the kernel kills the command; what that has started is not ours to kill.
        if self._command_pid is not None:
            await until_gone(self._command_pid)
        return not processes_of_lease(lease.lease_id)

    async def _until_pid_ended(self, lease: HeldLease) -> bool:
        """Of a `wait`: for as long as its shell lives, once that knows of the GPU, and the lease is held."""
        await self._is_alone.wait()
        if not self._is_taken:
            return True
        _leave_the_terminal()
        assert self._spec.for_pid is not None
        await _first_of(until_gone(self._spec.for_pid), self._is_over.wait(), lease.wait())
        return True

    async def _give_back(self, lease: HeldLease) -> None:
        with suppress(StaleAssignmentError):
            await self._engine.release(lease)
        if not self._engine.is_releasing:
            return
        # `gpu-pool` need not wait for a server that is down.
        self._go_on_alone()
        await self._engine.until_released(lease.ttl_seconds)

    def _go_on_alone(self) -> None:
        if not self._is_detached:
            self._is_detached = True
            _leave_the_terminal()
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._channel.close()


async def _until_nothing_is_left(lease_id: str) -> None:
    while processes_of_lease(lease_id):  # noqa: ASYNC110  # there is nothing to wait for
        await asyncio.sleep(LEFT_SECONDS)


def _outer_leases(lease: HeldLease) -> str:
    """The ids of the leases around it, for its programs; they are left behind in all of them."""
    if lease.within is None:
        return ""
    is_known = os.environ.get("GPU_POOL_LEASE_ID") == lease.within
    around = os.environ.get("GPU_POOL_OUTER_LEASES", "") if is_known else ""
    return f"{around},{lease.within}" if around else lease.within


async def _first_of(*ends: Awaitable[object]) -> None:
    await asyncio.wait([asyncio.ensure_future(each) for each in ends], return_when=asyncio.FIRST_COMPLETED)


def _signals_we_got() -> list[tuple[int, int]]:
    """Since we were last asked, with their senders: our whole process group got them, and so did the command."""
    got = []
    while (info := signal.sigtimedwait(FORWARDED, 0)) is not None:
        got.append((info.si_signo, info.si_pid))
    return got


async def _rest_soon(service: LeaseService) -> None:
    """Not at once: many commands are over in a moment."""
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
