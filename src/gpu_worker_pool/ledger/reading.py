"""Reads the use of this host's GPUs without a server: from the usage files, and the leases that are still held."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker_pool.core.settings import PoolSettings
from gpu_worker_pool.ledger.host import open_host_ledger

if TYPE_CHECKING:
    from pathlib import Path

    from gpu_worker_pool.ledger.usage_files import UsageRead


async def read_host_usage(directory: Path, backend: str, begin: float) -> UsageRead:
    """What ended after `begin`, in seconds since 1970. Raises `LedgerUnavailableError` or an `OSError`."""
    ledger = open_host_ledger(backend, PoolSettings(), lambda _: None, state_dir=str(directory))
    try:
        return await ledger.usage(begin)
    finally:
        await ledger.close()
