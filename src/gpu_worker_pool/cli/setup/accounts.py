"""Users and groups of this host, changed by the system's own tools."""

from __future__ import annotations

import grp
import os
import pwd
import re
import subprocess
from pathlib import Path
from typing import Final, NamedTuple

from gpu_worker_pool.cli.exits import CommandError, Status

_TOOL_FOLDERS: Final = ("/usr/sbin", "/usr/bin", "/sbin", "/bin")
_TOOL_SECONDS: Final = 60.0
_NAME: Final = re.compile(r"[a-z_][a-z0-9_.-]{0,31}")


class Person(NamedTuple):
    """A user as the kernel sees a process of theirs after the next login."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]


def run_tool(name: str, *arguments: str) -> str:
    """Its output. Raises a `CommandError` where it is missing or fails."""
    path = next((path for folder in _TOOL_FOLDERS if (path := Path(folder, name)).exists()), None)
    if path is None:
        raise CommandError(f"{name} is not in {', '.join(_TOOL_FOLDERS)}: install it (Debian: passwd), then try again")
    try:
        done = subprocess.run(  # noqa: S603  # names are checked, and no shell reads them
            [path, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TOOL_SECONDS,
            env={"PATH": ":".join(_TOOL_FOLDERS), "LC_ALL": "C"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CommandError(f"{name} has not ended for {_TOOL_SECONDS:g} s") from None
    if done.returncode != 0:
        why = " ".join((done.stderr or done.stdout).split()) or f"status {done.returncode}"
        raise CommandError(f"{name} {' '.join(arguments)} failed: {why}")
    return done.stdout


def check_name(name: str, what: str) -> str:
    if not _NAME.fullmatch(name):
        raise CommandError(f"{name!r} is not the name of a {what}", Status.USAGE)
    return name


# --- groups ---


def gid_of(group: str) -> int | None:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        return None


def group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def members_of(group: str) -> list[str]:
    """Users whose group this is, first or further."""
    try:
        found = grp.getgrnam(group)
    except KeyError:
        return []
    first = [user.pw_name for user in pwd.getpwall() if user.pw_gid == found.gr_gid]
    return sorted({*found.gr_mem, *first})


def make_group(group: str) -> None:
    run_tool("groupadd", "--system", group)


def remove_group(group: str) -> None:
    run_tool("groupdel", group)


def add_to_group(user: str, group: str) -> None:
    run_tool("gpasswd", "--add", user, group)  # unlike usermod, also for users of a directory service


def remove_from_group(user: str, group: str) -> None:
    run_tool("gpasswd", "--delete", user, group)


# --- users ---


def user_exists(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def make_service_user(name: str, group: str) -> None:
    shell = next((path for path in ("/usr/sbin/nologin", "/sbin/nologin") if Path(path).exists()), "/bin/false")
    # fmt: off
    run_tool(
        "useradd", "--system", "--gid", group, "--no-create-home", "--home-dir", "/nonexistent",
        "--comment", "GPU server", "--shell", shell, name,
    )
    # fmt: on


def remove_user(name: str) -> None:
    run_tool("userdel", name)


def person(name: str) -> Person:
    """Raises a `CommandError` where there is no such user."""
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        raise CommandError(f"there is no user {name!r} on this host", Status.USAGE) from None
    return Person(name, found.pw_uid, found.pw_gid, tuple(os.getgrouplist(name, found.pw_gid)))
