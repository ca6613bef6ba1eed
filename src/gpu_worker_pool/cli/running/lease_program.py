"""The program of the lease process: acquires a GPU, holds it for a command or for another process, gives it back.

It exchanges messages with `gpu-pool`, and outlives it if need be.
"""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.cli.endpoints import is_endpoint_named
from gpu_worker_pool.cli.local_state import use_own_directory
from gpu_worker_pool.cli.logs import configure_logs
from gpu_worker_pool.cli.running.lease_end import end_lease, first_of, leave_the_terminal
from gpu_worker_pool.cli.running.lease_process import FORWARDED
from gpu_worker_pool.cli.running.lease_requests import LeaseRequests
from gpu_worker_pool.cli.running.lease_spec import LeaseSpec
from gpu_worker_pool.errors import GPUWorkerPoolError
from gpu_worker_pool.host_socket import socket_path
from gpu_worker_pool.leases.engine import LeaseEngine
from gpu_worker_pool.leases.processes import processes_of_lease, until_gone

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_worker_pool.cli.running.remote_watch import RemoteWatch
    from gpu_worker_pool.leases.channel import Channel
    from gpu_worker_pool.leases.lease import HeldLease, LeaseService

#: Time budget for cancelling the requests at other endpoints; what is left then expires.
CANCEL_SECONDS: Final = 1.0
REST_AFTER_SECONDS: Final = 2.0


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
    if spec.most_leases is not None:
        from gpu_worker_pool.cli.mapping.lease_program import ManyLeases  # of `map` alone

        asyncio.run(ManyLeases(channel, spec).live())
    else:
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
        #: For a command on another host: the connection to it.
        self._watch: RemoteWatch | None = None
        self._engine = LeaseEngine(
            lambda _, reason: self._channel.send("lost", text=reason),
            lambda _, text: self._channel.report("told", text=text),
            on_ending=lambda _, seconds: self._channel.send("ending", seconds=seconds),
            on_yield_asked=lambda _, notice: self._channel.send(
                "yield", text=notice.sentence, is_forced=notice.ends_in_seconds is not None
            ),
            grace_seconds=spec.grace_seconds,
            is_overdue_final=False,
            cancel_seconds=CANCEL_SECONDS,
        )
        self._requests = LeaseRequests(channel, spec, self._engine)
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
        except (GPUWorkerPoolError, ValueError) as error:
            self._requests.fail(error)
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
        await self._requests.prepare()
        acquiring = self._requests.begin()
        await first_of(acquiring.task, self._is_over.wait(), self._is_alone.wait())
        return await acquiring.result()

    # --- holding ---

    async def _hold(self, lease: HeldLease) -> None:
        try:
            place = await self._requests.place_of(lease)
        except ValueError as error:  # its name could not be resolved before
            await end_lease(self._engine, lease, is_clean=True, go_on_alone=self._go_on_alone)
            self._requests.fail(error)
            return
        if place.ssh_target is not None:
            from gpu_worker_pool.cli.running.remote_watch import RemoteWatch  # seldom needed

            self._watch = RemoteWatch(place.ssh_target, lease.ttl_seconds, self._channel)
        self._requests.report_granted(lease, place)
        resting = asyncio.create_task(_rest_soon(lease.service))
        if self._spec.for_pid is None:
            is_clean = await self._until_command_ended(lease)
        else:
            is_clean = await self._until_pid_ended(lease)
        resting.cancel()
        if self._watch is not None:
            self._watch.close()
        await end_lease(self._engine, lease, is_clean=is_clean, go_on_alone=self._go_on_alone)

    async def _until_command_ended(self, lease: HeldLease) -> bool:
        """Whether nothing of it is left."""
        await first_of(self._is_over.wait(), self._is_alone.wait())
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
        leave_the_terminal()
        assert self._spec.for_pid is not None
        await first_of(until_gone(self._spec.for_pid), self._is_over.wait(), lease.wait())
        return True

    def _go_on_alone(self) -> None:
        if not self._is_detached:
            self._is_detached = True
            leave_the_terminal()
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._channel.close()


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
