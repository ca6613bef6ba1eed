"""The program of an executor's lease process: acquires a lease for each worker, starts it, and gives the lease back.

It is the parent of the workers, and outlives the executor if need be: when that is killed, it ends the workers, and
gives a GPU back only when the worker that used it is gone. If it is killed itself, the kernel ends the workers.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import socket
import sys
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.config import MultiEndpointConfigurationManager
from gpu_worker_pool.core.events import Request
from gpu_worker_pool.errors import GPUWorkerPoolError, StaleAssignmentError
from gpu_worker_pool.hardware.linux import adopt_orphans
from gpu_worker_pool.hardware.origin import origin, worker_name
from gpu_worker_pool.hardware.proc import children_of, descendants
from gpu_worker_pool.hardware.processes import name_of_process
from gpu_worker_pool.leases.acquisition import Acquisition
from gpu_worker_pool.leases.channel import Channel
from gpu_worker_pool.leases.engine import LeaseEngine
from gpu_worker_pool.leases.handed_over import variables_of
from gpu_worker_pool.leases.places import LeasePlace, candidates_at, checked, complete_requirements, places_here
from gpu_worker_pool.leases.processes import processes_of_lease, until_gone
from gpu_worker_pool.workers.stub import CANNOT_START, Stub
from gpu_worker_pool.workers.worker_spec import WorkerSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_worker_pool.leases.endpoint import EndpointRequest
    from gpu_worker_pool.leases.lease import HeldLease

#: The interval of reports on a request that waits; a grant does not wait for it.
POLL_SECONDS: Final = 2.0
#: Time budget for cancelling requests at the end.
CANCEL_SECONDS: Final = 1.0
#: How long a worker has between SIGTERM and SIGKILL, when its executor or its lease is gone.
TERMINATE_SECONDS: Final = 5.0
#: How long after the last request to stop reading GPUs: a holder does not need readings.
REST_AFTER_SECONDS: Final = 2.0
#: How long processes that a worker has started may outlive it before they count as left behind.
LEFT_BEHIND_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 0.1


def main(descriptor: int) -> None:
    adopt_orphans()
    os.set_inheritable(descriptor, False)
    channel = Channel(socket.socket(fileno=descriptor))
    os.set_blocking(descriptor, True)
    asked = channel.receive_one()
    os.set_blocking(descriptor, False)
    if asked is None:
        return
    _forward_logs(channel)
    # Resources that a finished worker leaves open are not worth a warning on the user's terminal.
    warnings.simplefilter("ignore", ResourceWarning)
    asyncio.run(LeaseProgram(channel, WorkerSpec(**asked["asked"]), asked["signal_mask"]).live())


def _forward_logs(channel: Channel) -> None:
    """To the loggers of the executor's process, which its program has configured."""

    class Forwarder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            channel.report("log", name=record.name, level=record.levelno, text=record.getMessage()[:2000])

    logger = logging.getLogger("gpu_worker_pool")
    logger.addHandler(Forwarder(logging.INFO))
    logger.setLevel(logging.INFO)
    logger.propagate = False


class _Worker:
    def __init__(self, number: int, stub: Stub) -> None:
        self.number = number
        self.stub = stub
        self.lease: HeldLease | None = None
        #: Set if it is no longer needed before it has started.
        self.is_unwanted = asyncio.Event()
        self.is_ending = asyncio.Event()

    def send_signal(self, which: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.stub.pid, which)


class LeaseProgram:
    def __init__(self, channel: Channel, spec: WorkerSpec, signal_mask: list[int]) -> None:
        self._channel = channel
        self._spec = spec
        self._signal_mask = signal_mask
        self._environment = MultiEndpointConfigurationManager()
        self._engine = LeaseEngine(self._on_lost, self._on_trouble, cancel_seconds=CANCEL_SECONDS)
        #: Made with the first worker.
        self._places: list[LeasePlace] | None = None
        #: By number.
        self._workers: dict[int, _Worker] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._resting: asyncio.TimerHandle | None = None
        #: The executor needs no more workers, or its process has ended.
        self._is_over = asyncio.Event()

    async def live(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._channel.fileno(), self._hear)
        # Also by its pid: a fork of the executor's process has a copy of its end of the channel.
        gone = asyncio.create_task(until_gone(self._spec.pid))
        gone.add_done_callback(lambda _: self._is_over.set())
        if os.getppid() != self._spec.pid:
            self._is_over.set()
        await self._is_over.wait()
        loop.remove_reader(self._channel.fileno())
        for worker in self._workers.values():
            worker.is_unwanted.set()
            worker.is_ending.set()
        while self._tasks:
            await asyncio.wait(self._tasks)
        gone.cancel()
        if self._resting is not None:
            self._resting.cancel()
        if self._engine.is_releasing:
            _leave_the_terminal()  # a server is down, and the user's program does not wait for it
            self._channel.close()
            await self._engine.until_released(self._environment.get_lease_ttl())
        await self._engine.stop(CANCEL_SECONDS)
        for place in self._places or ():
            with suppress(Exception):
                await place.endpoint.service.close()

    # --- what is heard ---

    def _hear(self) -> None:
        messages = self._channel.receive()
        if messages is None:
            self._is_over.set()
            return
        for message in messages:
            worker = self._workers.get(message.get("worker", -1))
            match message["kind"]:
                case "start":
                    self._start(message["worker"], message.get("descriptors", ()))
                case "unwanted" if worker is not None:
                    worker.is_unwanted.set()
                    if worker.lease is not None:  # it was granted at the same moment
                        worker.send_signal(signal.SIGTERM)
                case "signal" if worker is not None and worker.lease is not None:
                    worker.send_signal(message["signal"])
                case "over":
                    self._is_over.set()

    def _on_lost(self, lease: HeldLease, reason: str) -> None:
        worker = next((each for each in self._workers.values() if each.lease is lease), None)
        if worker is not None:
            self._channel.send("lost", worker=worker.number, text=reason)
            worker.is_ending.set()

    def _on_trouble(self, lease: HeldLease, text: str) -> None:
        self._channel.report("log", name=__name__, level=logging.WARNING, text=f"{lease.shown}: {text}")

    # --- a worker, from its stub to its end ---

    def _start(self, number: int, descriptors: Sequence[int]) -> None:
        try:
            end, environment = descriptors
            stub = Stub(self._spec.command, end, environment, self._signal_mask)
        except (OSError, ValueError) as error:  # too many open files, or too many processes
            text = f"no worker process can be started: {error}"
            self._channel.send("failed", worker=number, error="GPUWorkerPoolError", text=text, reasons=[])
            self._channel.send("ended", worker=number, code=CANNOT_START)
            return
        worker = _Worker(number, stub)
        self._workers[number] = worker
        task = asyncio.create_task(self._look_after(worker))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _look_after(self, worker: _Worker) -> None:
        gone = asyncio.create_task(until_gone(worker.stub.pid))
        try:
            worker.lease = await self._acquire(worker, gone)
            if worker.lease is not None:
                self._begin(worker, worker.lease)
                await self._until_it_has_ended(worker, gone)
        except (GPUWorkerPoolError, ValueError) as error:
            reasons = getattr(error, "reasons", ())
            self._channel.send(
                "failed", worker=worker.number, error=type(error).__name__, text=str(error), reasons=list(reasons)
            )
        except Exception as error:
            logging.getLogger(__name__).exception("the lease process failed")
            self._channel.send("failed", worker=worker.number, error="GPUWorkerPoolError", text=repr(error), reasons=[])
        if not gone.done():
            worker.stub.kill()
            await gone
        code = worker.stub.reap()
        if worker.lease is not None:
            await self._give_back(worker.lease)
        del self._workers[worker.number]
        self._channel.send("ended", worker=worker.number, code=code)

    async def _acquire(self, worker: _Worker, gone: asyncio.Task[None]) -> HeldLease | None:
        """None if it is not needed any more, or was killed before it was granted a GPU."""
        if self._resting is not None:
            self._resting.cancel()
        if self._places is None:
            self._places = await places_here(self._engine, self._spec.endpoints, self._environment)
        pid = worker.stub.pid
        request = Request(
            "",
            complete_requirements(self._spec.requirement_options, self._environment),
            worker_name(self._spec.program, pid),
            label=self._spec.label,
            ttl_seconds=self._spec.ttl_seconds or self._environment.get_lease_ttl(),
            process=name_of_process(pid),
            origin=origin(self._spec.program, pid),
        )
        acquisition = Acquisition(
            self._engine,
            candidates_at(self._places, request),
            poll_seconds=POLL_SECONDS,
            on_news=lambda news: self._report(worker, news),
        )
        acquiring = asyncio.create_task(acquisition.run())
        unwanted = asyncio.create_task(worker.is_unwanted.wait())
        await asyncio.wait([acquiring, unwanted, gone], return_when=asyncio.FIRST_COMPLETED)
        unwanted.cancel()
        if not acquiring.done():
            acquisition.withdraw()
            with suppress(GPUWorkerPoolError):
                await acquiring
            return None
        return await checked(acquiring.result(), self._places, self._engine)

    def _report(self, worker: _Worker, news: EndpointRequest) -> None:
        if news.trouble is not None:
            self._channel.report("waiting", worker=worker.number, text=f"{news.name}: {news.trouble}"[:2000])
        elif news.waiting is not None and news.lease is None and news.error is None:
            summary = next(iter(news.waiting.reasons), "")
            place = f"number {news.waiting.position} in line" if news.waiting.position else ""
            self._channel.report("waiting", worker=worker.number, text="; ".join(filter(None, (place, summary)))[:2000])

    def _begin(self, worker: _Worker, lease: HeldLease) -> None:
        variables = variables_of(lease, self._places or (), self._environment.get_gpu_names())
        worker.stub.start(variables, lease.share_mb, [gpu.memory_total_mb for gpu in lease.gpus])
        indices = [gpu.index for gpu in lease.gpus]
        self._channel.send("granted", worker=worker.number, pid=worker.stub.pid, gpus=indices, lease_id=lease.lease_id)
        self._rest_soon()

    async def _until_it_has_ended(self, worker: _Worker, gone: asyncio.Task[None]) -> None:
        """Its lease is renewed meanwhile. It is ended here if its lease or its executor is lost."""
        ending = asyncio.create_task(worker.is_ending.wait())
        await asyncio.wait([gone, ending], return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        if not gone.done():
            worker.send_signal(signal.SIGTERM)
            worker.send_signal(signal.SIGCONT)  # one that is stopped does not hear the other one
            await asyncio.wait([gone], timeout=TERMINATE_SECONDS)

    async def _give_back(self, lease: HeldLease) -> None:
        """The worker has ended; processes that it has started may still use the GPU."""
        if lease.is_inherited or await self._is_nothing_left(lease, LEFT_BEHIND_SECONDS):
            with suppress(StaleAssignmentError):  # others have noticed its end, or it was lost before
                await self._engine.release(lease)
        elif lease.within is not None:
            # Readings do not show which part of the lease around it is in use: renew it until nothing of it is left.
            self._engine.attempt(self._give_back_later(lease))
        else:
            # It stays in quarantine until the processes that still run have left the GPU.
            self._engine.let_expire(lease)

    async def _give_back_later(self, lease: HeldLease) -> None:
        await self._is_nothing_left(lease, math.inf)
        with suppress(StaleAssignmentError):
            await self._engine.release(lease)

    async def _is_nothing_left(self, lease: HeldLease, within_seconds: float) -> bool:
        """Whether no process of the lease is left; those that are about to end are waited for."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_seconds
        while self._has_orphans() and _ours(processes_of_lease(lease.lease_id)):
            if loop.time() > deadline:
                return False
            await asyncio.sleep(_LOOK_SECONDS)
        return True

    def _has_orphans(self) -> bool:
        """What a worker leaves behind becomes a child of this process, which also collects it when it has ended."""
        known = {worker.stub.pid for worker in self._workers.values()}
        orphans = [pid for pid in children_of(os.getpid()) if pid not in known]
        for pid in orphans:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        return bool(orphans)

    def _rest_soon(self) -> None:
        """Not at once: another worker may be wanted."""
        if self._resting is not None:
            self._resting.cancel()
        self._resting = asyncio.get_running_loop().call_later(REST_AFTER_SECONDS, self._rest)

    def _rest(self) -> None:
        if all(worker.lease is not None for worker in self._workers.values()):
            for place in self._places or ():
                self._engine.attempt(place.endpoint.service.rest())


def _ours(pids: list[int]) -> list[int]:
    """Another ledger may have a lease of the same id."""
    return [pid for pid in pids if pid in descendants(os.getpid())] if pids else []


def _leave_the_terminal() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    with suppress(OSError):
        os.setsid()
    os.chdir("/")


if __name__ == "__main__":
    main(int(sys.argv[1]))
