"""The steps of `gpu-pool setup --undo`: takes back what the record says that setup made, and nothing else."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_worker_pool.cli.exits import CommandError
from gpu_worker_pool.cli.setup import service
from gpu_worker_pool.cli.setup.accounts import (
    gid_of,
    members_of,
    remove_from_group,
    remove_group,
    remove_user,
    run_tool,
    user_exists,
)
from gpu_worker_pool.cli.setup.folder import open_folder
from gpu_worker_pool.cli.setup.record import load_record, record_path
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.core.settings import PoolSettings
from gpu_worker_pool.errors import LedgerUnavailableError
from gpu_worker_pool.hardware.processes import is_gone, is_holder_gone
from gpu_worker_pool.ledger.sqlite import SQLiteLedger

if TYPE_CHECKING:
    from gpu_worker_pool.cli.setup import Options, Places, Steps
    from gpu_worker_pool.cli.setup.folder import Folder
    from gpu_worker_pool.cli.setup.record import Record
    from gpu_worker_pool.core import Lease, Pool, Waiter


def undo(options: Options, places: Places, steps: Steps) -> None:
    """Raises a `CommandError` where it must not: then nothing was changed."""
    directory = options.directory
    record = load_record(directory)
    if record is None:
        steps.say(f"nothing to take back: there is no record {record_path(directory)}")
        return
    with open_folder(directory) as folder:
        if folder is not None:
            _close_and_check(folder, record, is_dry=steps.is_dry)
        _take_back_service(record, places, steps)
        if folder is not None:
            _take_back_folder(folder, record, steps)
    _take_back_accounts(record, steps)
    steps.do("remove", str(record_path(directory)), lambda: record_path(directory).unlink())
    if steps.is_dry:
        steps.say("this was a dry run: nothing was changed")


# --- may it be? ---


def _close_and_check(folder: Folder, record: Record, *, is_dry: bool) -> None:
    """From now on no other user's program can begin to use the ledgers; not if this is refused."""
    mode = stat.S_IMODE(folder.found.st_mode)
    if not is_dry:
        os.fchmod(folder.descriptor, 0o700)
    try:
        _check(folder, record)
    except BaseException:
        os.fchmod(folder.descriptor, mode)
        raise


def _check(folder: Folder, record: Record) -> None:
    folder.check()
    if record.folder_before is None:
        foreign = [name for name in folder.ledgers() if folder.identity(name) != record.ledgers.get(name)]
        if foreign := [*foreign, *folder.others()]:
            raise CommandError(
                f"{folder.path} has files that gpu-pool setup did not make: {', '.join(foreign)}; if they are not "
                "needed, remove them, then try again"
            )
    in_use = [use for name in folder.ledgers() for use in asyncio.run(_uses(folder.path / name))]
    if in_use:
        raise CommandError(f"GPUs are in use: {'; '.join(in_use)}; end these first (gpu-pool leases, gpu-pool queue)")


async def _uses(path: Path) -> list[str]:
    try:
        ledger = SQLiteLedger(path, PoolSettings(), lambda _: None)
    except LedgerUnavailableError as error:
        raise CommandError(f"cannot see whether GPUs are in use: {error}") from None
    try:
        return await ledger.look(lambda pool, _: _in_use(pool))
    finally:
        await ledger.close()


def _in_use(pool: Pool) -> list[str]:
    now = boot_time()
    leases = [f"{lease.lease_id} ({lease.worker})" for lease in pool.leases if _lives(lease, now)]
    waiters: list[Waiter] = pool.queue.in_order()
    waiting = [waiter.request.request_id for waiter in waiters if not is_gone(waiter.request.process)]
    return [*leases, *waiting]


def _lives(lease: Lease, now: float) -> bool:
    if not lease.is_live or (lease.request.process and is_holder_gone(lease.request)):
        return False
    return lease.expires_at is None or lease.expires_at > now


# --- taking back ---


def _take_back_service(record: Record, places: Places, steps: Steps) -> None:
    unit = places.units / service.UNIT
    if str(unit) in record.files and unit.exists() and places.systemd.exists():
        steps.do("stop", f"service {service.UNIT}", service.stop_service)
    for name, written in record.files.items():
        path = Path(name)
        if not path.is_file() or path.is_symlink():
            continue
        if service.hash_of(path.read_text(errors="replace")) != written:
            steps.say(f"kept {path}: it was changed after setup wrote it")
        else:
            steps.do("remove", name, path.unlink)
    if str(unit) in record.files and places.systemd.exists() and not steps.is_dry:
        run_tool("systemctl", "daemon-reload")
    for name in record.folders:
        path = Path(name)
        if path.is_dir() and not path.is_symlink():
            _remove_runtime(path, steps)


def _remove_runtime(path: Path, steps: Steps) -> None:
    left = [each.name for each in path.iterdir() if each.name != service.SOCKET_NAME]
    if left:
        steps.say(f"kept {path}: it has other files ({', '.join(sorted(left))})")
        return

    def remove() -> None:
        (path / service.SOCKET_NAME).unlink(missing_ok=True)
        path.rmdir()

    steps.do("remove", f"folder {path}", remove)


def _take_back_folder(folder: Folder, record: Record, steps: Steps) -> None:
    for name, identity in record.ledgers.items():
        if name in folder.names() and folder.identity(name) == identity:
            steps.do("remove", f"ledger {name}, which setup made", lambda name=name: folder.remove(name))  # type: ignore[misc]
    if record.folder_before is not None:
        uid, gid, mode = record.folder_before
        folder.fit(steps, uid=uid, gid=gid, mode=mode)
        return

    def remove() -> None:
        for name in folder.own_names():  # readings, which are worth nothing without their processes
            folder.remove(name)
        folder.path.rmdir()

    steps.do("remove", f"folder {folder.path}", remove)


def _take_back_accounts(record: Record, steps: Steps) -> None:
    group = record.group
    for name in record.members_added:
        if name in members_of(group) and name != record.user_made:
            steps.do("remove", f"{name} from group {group}", lambda name=name: remove_from_group(name, group))  # type: ignore[misc]
    if record.user_made is not None and user_exists(record.user_made):
        name = record.user_made
        steps.do("remove", f"user {name}", lambda: remove_user(name))
    if record.has_made_group and gid_of(group) is not None:
        left = [name for name in members_of(group) if name not in (*record.members_added, record.user_made)]
        if left:
            steps.say(f"kept group {group}: {', '.join(left)} joined it otherwise")
        else:
            steps.do("remove", f"group {group}", lambda: remove_group(group))
