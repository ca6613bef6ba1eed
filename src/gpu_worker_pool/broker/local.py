"""The broker of this host without a server, for programs that use `local://`: its GPU samples and its ledger."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.broker.broker import LeaseBroker
from gpu_worker_pool.broker.simulated_load import SimulatedLoad
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.core.accounts import account_of_user
from gpu_worker_pool.core.settings import host_settings
from gpu_worker_pool.errors import ServiceRefusedError, ServiceRetryableError
from gpu_worker_pool.hardware.processes import is_holder_gone
from gpu_worker_pool.hardware.sampler import host_sampler
from gpu_worker_pool.hardware.samples import DriverFailure
from gpu_worker_pool.ledger.host import open_host_ledger

if TYPE_CHECKING:
    from gpu_worker_pool.core.settings import PoolSettings
    from gpu_worker_pool.hardware.readers import Reader
    from gpu_worker_pool.hardware.samples import HostSample


INTERVAL_SECONDS: Final = 1.0
#: How long the driver has for its first answer.
FIRST_SAMPLE_SECONDS: Final = 3.0
#: An older sample is stale (rule 1).
SAMPLE_MAX_AGE_SECONDS: Final = 15.0
#: Codes of a `DriverError` where no driver is installed: trying again does not help.
NO_DRIVER: Final = frozenset({"nvidia_smi_not_found", "nvml_not_found", "amd_smi_not_found", "reader_not_found"})
#: How long a one-time caller waits until the leases of holders that have just died are ended.
DEAD_HOLDER_SECONDS: Final = 1.0
#: How often to check for an up-to-date sample: an old one from another process may arrive first.
_CHECK_SECONDS: Final = 0.01


def local_user() -> str:
    """The account and owner of leases that this user takes without a server."""
    return account_of_user(os.getuid())


class LocalBroker:
    """`broker` is open between `start` and `stop`; meanwhile this or another process samples the host's GPUs."""

    def __init__(
        self,
        backend: str = "auto",
        *,
        settings: PoolSettings | None = None,
        state_dir: str | None = None,
        reader: Reader | None = None,
    ) -> None:
        """`reader` replaces the one that `backend` names."""
        self._loop = asyncio.get_running_loop()
        self._sampled = asyncio.Event()
        #: The last sample that the broker was given, and the last one without a `DriverFailure`.
        self._last: HostSample | None = None
        self._good: HostSample | None = None
        settings = settings or host_settings(poll_seconds=INTERVAL_SECONDS)
        load = SimulatedLoad.of(backend)
        self._sampler = host_sampler(
            backend,
            interval_seconds=INTERVAL_SECONDS,
            keep=1,
            on_sample=self._hand_over,
            state_dir=state_dir,
            reader=reader,
            holders=tuple if load is None else load.holders,
        )
        self.broker: LeaseBroker = LeaseBroker(
            lambda on_commit: open_host_ledger(backend, settings, on_commit, state_dir=state_dir),
            self._sampler.want_fresh,
            on_leases=None if load is None else load.take,
        )

    async def start(self) -> None:
        """Raises `LedgerUnusableError` where the ledger cannot be opened and trying again cannot help."""
        await self.broker.start(is_unusable_final=True)
        self._sampler.start()

    async def stop(self) -> None:
        await asyncio.to_thread(self._sampler.stop)
        await self.broker.stop()

    async def sample(self, timeout_seconds: float = FIRST_SAMPLE_SECONDS) -> HostSample:
        """The newest sample with a `DriverAnswer`, at most 15 s old, once the ledger was given it.

        Waits `timeout_seconds` for the first one. Raises a `ServiceRefusedError` where no driver is installed, and a
        `ServiceRetryableError` where the driver fails or does not answer.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._sampled.wait()
                is_up_to_date = False
                while self._fresh() is None and not is_up_to_date:
                    is_up_to_date = self._sampler.wait_until_up_to_date(0)
                    # `sleep(0)` lets the loop take the samples that have already been handed over.
                    await asyncio.sleep(0 if is_up_to_date else _CHECK_SECONDS)
        if (fresh := self._fresh()) is not None:
            # `take` has left it to a task: with its first step the ledger is given it, before any question about it.
            await asyncio.sleep(0)
            return fresh
        if self._last is not None and isinstance(failure := self._last.answer, DriverFailure):
            if failure.code in NO_DRIVER:
                raise ServiceRefusedError(failure.message)
            raise ServiceRetryableError(failure.message)
        silent = timeout_seconds if self._good is None else boot_time() - self._good.begun_at
        raise ServiceRetryableError(f"the driver has not answered for {silent:.0f} s")

    async def until_dead_holders_are_noticed(self, *, and_their_gpus_seen: bool = False) -> None:
        """For one-time callers: the last process to serve the ledger may have been killed together with a holder.

        `and_their_gpus_seen`: also until their quarantine has ended, if that takes no longer than a reading.
        """
        deadline = boot_time() + DEAD_HOLDER_SECONDS
        while any(
            is_holder_gone(lease.request)
            for lease in await self.broker.held()
            if lease.request.process and (lease.is_live or and_their_gpus_seen)
        ):
            if boot_time() > deadline:
                return
            await asyncio.sleep(0.02)

    def _fresh(self) -> HostSample | None:
        good = self._good
        return good if good is not None and boot_time() - good.begun_at <= SAMPLE_MAX_AGE_SECONDS else None

    def _hand_over(self, sample: HostSample) -> None:
        """The only crossing from the sampler's thread to the event loop's."""
        with suppress(RuntimeError):  # the loop is closed: a program that has failed does not stop its broker
            self._loop.call_soon_threadsafe(self._take, sample)

    def _take(self, sample: HostSample) -> None:
        self._last = sample
        if not isinstance(sample.answer, DriverFailure):
            self._good = sample
        self.broker.take(sample)
        self._sampled.set()
