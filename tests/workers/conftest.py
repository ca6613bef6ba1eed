"""A host with four simulated GPUs and a ledger of its own, which the tests of a module share."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpu_worker_pool.broker.broker import LeaseBroker
from gpu_worker_pool.broker.local import LocalBroker
from gpu_worker_pool.core import Lease, LeaseState

GPUS = 4


class Host:
    """Every test gives back what it has: the next one begins with `is_clean`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables = {"GPU_BACKEND": f"simulated:{GPUS}", "GPU_POOL_STATE_DIR": str(folder)}

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | self.variables

    def leases(self) -> list[Lease]:
        """Held and quarantined ones, from the ledger. Looking also ends those whose holders and traces are gone."""
        return asyncio.run(self._leases())

    async def _leases(self) -> list[Lease]:
        async with self.broker() as broker:
            return await broker.held()

    @asynccontextmanager
    async def broker(self) -> AsyncIterator[LeaseBroker]:
        local = LocalBroker(self.variables["GPU_BACKEND"], state_dir=str(self.folder))
        await local.start()
        try:
            await local.sample()
            yield local.broker
        finally:
            await local.stop()

    def look_until_clean(self) -> None:
        """For those whose lease process is gone: any program that uses the ledger ends their leases."""

        async def look() -> None:
            async with self.broker() as broker, asyncio.timeout(30):
                while await broker.held():
                    await asyncio.sleep(0.05)

        asyncio.run(look())

    def tally(self) -> dict[LeaseState, int]:
        """How many leases have ended, and how."""

        async def look() -> dict[LeaseState, int]:
            async with self.broker() as broker:
                await broker.held()
                return {state: count for state, count in broker.tally.items() if isinstance(state, LeaseState)}

        return asyncio.run(look())

    def is_given_back(self) -> bool:
        """Nothing is held. Its end may have been noticed before its release; then it is in quarantine for a moment."""
        held = [lease for lease in self.leases() if lease.is_live]
        assert held == []
        return True

    def is_clean(self) -> bool:
        leases = self.leases()
        assert leases == []
        return True


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    made = Host(tmp_path_factory.mktemp("state"))
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("GPU_", "CUDA_")):
                patch.delenv(name)
        for name, value in made.variables.items():
            patch.setenv(name, value)
        yield made
