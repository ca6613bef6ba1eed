"""The checks of the state directory, its ledger, and with whom this user shares it."""

from __future__ import annotations

import grp
import os
import shutil
import stat
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.cli.checking import Finding
from gpu_worker_pool.core.accounts import uid_of
from gpu_worker_pool.errors import GPUWorkerPoolError, LedgerUnusableError, PolicyError
from gpu_worker_pool.hardware.proc import user_name
from gpu_worker_pool.leases.endpoint_choice import local_backend
from gpu_worker_pool.ledger.host import ledger_path
from gpu_worker_pool.ledger.policy_file import policy_path, read_text
from gpu_worker_pool.ledger.policy_text import parse_policy
from gpu_worker_pool.ledger.trial import try_ledger
from gpu_worker_pool.state_directory import locate, own_directory, privacy_notice, repair_command, state_directory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from gpu_worker_pool.ledger.trial import LedgerUse

LITTLE_SPACE_MB: Final = 50
#: As many users are named; of more, the number is enough.
MOST_NAMED: Final = 20
SHARING: Final = "shared with others"


def check_sharing() -> Iterator[Finding]:
    try:
        is_private = locate().is_private
        directory = state_directory()
    except LedgerUnusableError as error:
        yield Finding("wrong", "state directory", str(error))
        yield Finding("wrong", SHARING, "not with the users of that folder")
        return
    except OSError as error:
        yield Finding("wrong", "state directory", str(error), "set GPU_POOL_STATE_DIR to a folder on a local disk")
        return
    yield Finding("ok", "state directory", str(directory))
    free_mb = shutil.disk_usage(directory).free / 1e6
    if free_mb < LITTLE_SPACE_MB:
        yield Finding(
            "wrong", "disk", f"only {free_mb:.0f} MB free for {directory}", "free some: a full disk stops all grants"
        )
    try:
        ledger = ledger_path(directory, local_backend())
    except ValueError:
        yield Finding("warning", "ledger", "not checked, because GPU_BACKEND is not valid")
        return
    try:
        seen = try_ledger(ledger)
    except (GPUWorkerPoolError, OSError) as error:
        yield Finding("wrong", "ledger", str(error))
        return
    yield Finding("ok", "ledger", f"{ledger.name}: {seen.held} leases, {seen.waiting} waiting")
    yield from _policy(seen)
    if is_private:
        yield Finding("warning", SHARING, privacy_notice())
    else:
        yield Finding("ok", SHARING, f"ledger {ledger}; {_who(directory, seen)}")
        yield from check_folder(directory)
        yield from _left_behind(directory)


def _policy(seen: LedgerUse) -> Iterator[Finding]:
    """What limits the accounts: the host's file, else what a server has stored."""
    path = policy_path(None)
    if path is None:
        if seen.policy is not None:
            yield Finding("ok", "policy", f"{seen.policy}, as it was read last")
        return
    try:
        parse_policy(read_text(path), str(path))
    except PolicyError as error:
        stays = "no policy is in force" if seen.policy is None else "the previous policy is in force"
        yield Finding("wrong", "policy", f"{error}; {stays}", f"correct {path}: it is read again when it changes")
    else:
        yield Finding("ok", "policy", str(path))


def _who(directory: Path, seen: LedgerUse) -> str:
    uids = {uid for each in seen.accounts if (uid := uid_of(each)) is not None}
    others = [user_name(uid) for uid in uids if uid != os.getuid()]
    others += [f"callers of the server ({each})" for each in seen.accounts if uid_of(each) is None]
    text = f"users seen beside you: {listed(others)}"
    folder = directory.stat()
    if folder.st_mode & stat.S_IWOTH:
        return f"{text}; open to all users"
    if folder.st_mode & stat.S_IWGRP:
        try:
            group = grp.getgrgid(folder.st_gid)
        except KeyError:
            return f"{text}; group {folder.st_gid}, which has no name"
        return f"{text}; group {group.gr_name}: {listed(group.gr_mem)}"
    return f"{text}; only {user_name(folder.st_uid)} can write to it"


def listed(names: Iterable[str]) -> str:
    shown = sorted(set(names))
    return "none" if not shown else ", ".join(shown) if len(shown) <= MOST_NAMED else f"{len(shown)}"


def check_folder(directory: Path) -> Iterator[Finding]:
    """What keeps other users out although the folder lets them in."""
    folder = directory.stat()
    if not folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return
    repair = repair_command(directory)
    if folder.st_mode & stat.S_ISVTX:
        # Also where it works at the moment: the files that it concerns come and go.
        text = "the folder is sticky: users cannot open each other's files where fs.protected_regular is set"
        yield Finding("wrong", SHARING, text, repair)
    if folder.st_mode & stat.S_IWGRP and not folder.st_mode & (stat.S_ISGID | stat.S_IWOTH):
        yield Finding("warning", SHARING, "new files may get another group than the folder (no setgid)", repair)
    for file in sorted(directory.glob("ledger-*.db*")):
        found = file.lstat()
        is_open = (
            found.st_mode & 0o006 == 0o006
            if folder.st_mode & stat.S_IWOTH
            else (found.st_gid == folder.st_gid and found.st_mode & 0o060 == 0o060)
        )
        if not is_open and not file.name.endswith(".new"):
            yield Finding("wrong", SHARING, f"{file.name} is not open to the other users of the folder", repair)


def _left_behind(directory: Path) -> Iterator[Finding]:
    """Programs that were started before the folder was shared still use this user's own ledger."""
    try:
        own = own_directory()
        is_used = own != directory and any(own.glob("ledger-real-*.db-wal"))
    except (OSError, RuntimeError):
        return
    if is_used:
        yield Finding("warning", SHARING, f"programs of yours use {own}, which others do not see", "start them again")
