"""Opens the ledger file of this host, which its server and programs that use `local://` share."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpu_worker_pool.hardware.origin import host_name
from gpu_worker_pool.hardware.readers.choose import hardware_name
from gpu_worker_pool.ledger.sqlite import SQLiteLedger
from gpu_worker_pool.ledger.tables import FORMAT
from gpu_worker_pool.state_directory import state_directory

if TYPE_CHECKING:
    from pathlib import Path

    from gpu_worker_pool.core.settings import PoolSettings
    from gpu_worker_pool.ledger import Ledger, OnCommit


def open_host_ledger(
    backend: str, settings: PoolSettings, on_commit: OnCommit, *, state_dir: str | None = None
) -> Ledger:
    """Simulated GPUs have their own file. Raises `LedgerUnavailableError` or an `OSError`."""
    path = ledger_path(state_directory(state_dir), backend)
    return SQLiteLedger(path, replace(settings, host=host_name()), on_commit)


def ledger_path(directory: Path, backend: str) -> Path:
    return directory / f"ledger-{hardware_name(backend)}-v{FORMAT}.db"
