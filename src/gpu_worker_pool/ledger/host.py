"""Opens the ledger file of this host, which its server and programs that use `local://` share."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.hardware.origin import host_name
from gpu_worker_pool.hardware.readers.choose import hardware_name
from gpu_worker_pool.ledger.policy_file import PolicyFile
from gpu_worker_pool.ledger.sqlite import SQLiteLedger
from gpu_worker_pool.ledger.tables import FORMAT
from gpu_worker_pool.state_directory import state_directory

if TYPE_CHECKING:
    from pathlib import Path

    from gpu_worker_pool.core.settings import PoolSettings
    from gpu_worker_pool.ledger import Ledger, OnCommit


def open_host_ledger(
    backend: str,
    settings: PoolSettings,
    on_commit: OnCommit,
    *,
    state_dir: str | None = None,
    is_server: bool = False,
    policy: str | None = None,
) -> Ledger:
    """Simulated GPUs have their own file. `policy`: the value of `GPU_POOL_POLICY`, which counts for a server.

    Raises `LedgerUnavailableError` or an `OSError`.
    """
    path = ledger_path(state_directory(state_dir), backend)
    policy_file = PolicyFile(path.parent, is_server=is_server, variable=policy, clock=boot_time)
    return SQLiteLedger(
        path, replace(settings, host=host_name(), tells_accounts_apart=True), on_commit, policy_file=policy_file
    )


def ledger_path(directory: Path, backend: str) -> Path:
    return directory / f"ledger-{hardware_name(backend)}-v{FORMAT}.db"
