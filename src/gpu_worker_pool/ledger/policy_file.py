"""Finds the policy of a ledger, follows its file, and keeps the last good one: one ledger has one policy.

`/etc/gpu-pool/policy.toml` wins over `GPU_POOL_POLICY`, which only a server reads: a user cannot choose a policy. The
last policy that could be read is stored in the ledger: a file with a mistake leaves it in force, and programs that do
not see the file, such as those in a container, follow it too.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from gpu_worker_pool.core.policy import NO_POLICY, Policy
from gpu_worker_pool.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_worker_pool.ledger.policy_text import NamedPolicy

logger: logging.Logger = logging.getLogger(__name__)

VARIABLE: Final = "GPU_POOL_POLICY"
#: The policy file of the host.
HOST_FILE: Final = Path("/etc/gpu-pool/policy.toml")
#: How often to check whether it has changed.
LOOK_SECONDS: Final = 1.0
#: Policies are written by hand: a larger file is not one.
MOST_BYTES: Final = 256 * 1024


class StoredPolicy(NamedTuple):
    """What a ledger remembers of its policy."""

    source: str
    text: str


class PolicyInForce(NamedTuple):
    policy: Policy = NO_POLICY
    #: The file it comes from; None: there is no policy.
    source: str | None = None
    #: Why the file could not be used as it is now.
    problem: str | None = None


class PolicyFile:
    """Belongs to the thread of its ledger; `in_force` may be read by any."""

    def __init__(
        self,
        folder: Path,
        *,
        is_server: bool = False,
        variable: str | None = None,
        host_file: Path | None = None,
        clock: Callable[[], float],
    ) -> None:
        """`folder`: of the ledger. `variable`: the value of `GPU_POOL_POLICY`, which counts for a server.

        `host_file`: instead of this host's, for tests.
        """
        self._folder = folder
        self._is_server = is_server
        self._variable = variable if is_server else None
        self._host_file = host_file or HOST_FILE
        self._clock = clock
        self._look_at = -math.inf
        #: The state of the file at the last check: its path, and what changes when it is written.
        self._seen: tuple[object, ...] | None = None
        self._has_changed = False
        #: The last one that this process has read from a file.
        self._own: StoredPolicy | None = None
        self.in_force: PolicyInForce = PolicyInForce()
        self._complaint: str | None = None

    def has_changed(self) -> bool:
        """Whether the file differs from what `update` has read; looks at most once per second."""
        if not self._has_changed and self._clock() >= self._look_at:
            self._look_at = self._clock() + LOOK_SECONDS
            self._has_changed = self._look() != self._seen
        return self._has_changed

    def update(self, stored: StoredPolicy | None) -> StoredPolicy | None:
        """Read it again; returns what the ledger is to remember from now on."""
        self._look_at = self._clock() + LOOK_SECONDS
        self._seen, self._has_changed = self._look(), False
        path, refused = self._path()
        if path is None:
            if stored is not None and self._may_forget(stored):
                stored = None
            self._use(stored, refused)
            return stored
        try:
            text = read_text(path)
            _parse(text, str(path))
        except PolicyError as error:
            self._use(stored, f"{error}; {'the previous policy' if stored else 'no policy'} is in force")
            return stored
        stored = self._own = StoredPolicy(str(path), text)
        self._use(stored, None)
        return stored

    def _use(self, stored: StoredPolicy | None, problem: str | None) -> None:
        try:
            if stored is None:
                self.in_force = PolicyInForce(problem=problem)
            else:
                named = _parse(stored.text, stored.source)
                if stored != self._own:
                    # Any user who can write to the ledger may have set them, and a server would sign and send them.
                    named = replace(named, webhooks=())
                self.in_force = PolicyInForce(named.policy(accounts_named), stored.source, problem)
        except PolicyError as error:  # written by a newer version
            self.in_force = PolicyInForce(self.in_force.policy, self.in_force.source, str(error))
        problem = self.in_force.problem
        if problem is not None and problem != self._complaint:
            logger.error("policy: %s", problem)
        self._complaint = problem

    def _path(self) -> tuple[Path | None, str | None]:
        """The file that counts, and why another one does not."""
        if os.path.lexists(self._host_file):
            return self._host_file, None
        if self._variable is None:
            return None, None
        if not is_trusted(self._folder):
            owner = f"root or the owner of {self._folder}"
            return None, f"{VARIABLE} is ignored: only {owner} may choose the policy of this ledger"
        return Path(self._variable).expanduser().absolute(), None

    def _may_forget(self, stored: StoredPolicy) -> bool:
        """Whether the administrator has removed it, rather than this program not seeing it."""
        return is_trusted(self._folder) and (self._is_server or stored.source == str(self._host_file))

    def _look(self) -> tuple[object, ...]:
        path, refused = self._path()
        if path is None:
            return None, refused
        try:
            found = path.stat()
        except OSError as error:
            return path, error.errno
        return path, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _parse(text: str, source: str) -> NamedPolicy:
    from gpu_worker_pool.ledger.policy_text import parse_policy  # seldom needed: few ledgers have a policy

    return parse_policy(text, source)


def policy_path(variable: str | None, host_file: Path | None = None) -> Path | None:
    """The file that a server with this variable would read."""
    host_file = host_file or HOST_FILE
    if os.path.lexists(host_file):
        return host_file
    return None if variable is None else Path(variable).expanduser().absolute()


def read_text(path: Path) -> str:
    """Raises a `PolicyError`."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise PolicyError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > MOST_BYTES:
        raise PolicyError(f"{path} is larger than {MOST_BYTES // 1024} KiB, too large for a policy")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise PolicyError(f"{path}, line {line}: this is not UTF-8", line=line) from None


def is_trusted(folder: Path) -> bool:
    """Whether this process may choose the policy of a ledger in this folder: root and the owner of the folder may."""
    uid = os.geteuid()
    # The root of a user namespace does not own the root of the file system.
    return folder.stat().st_uid == uid or (uid == 0 and Path("/").stat().st_uid == 0)


def accounts_named(name: str) -> tuple[str, ...]:
    """The accounts that a policy means by this name: of a user, of a key, or an account as it is stored."""
    if name == "loopback" or name.startswith(("user:", "key:", "key-")):
        return (name,)
    uid = _uid_of(name)
    return (f"key:{name}",) if uid is None else (f"key:{name}", f"user:{uid}")


def _uid_of(name: str) -> int | None:
    import pwd

    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        return None


def groups_of(account: str, policy: Policy) -> tuple[str, ...] | None:
    """The groups of a user that the policy names; None if there are none.

    From the system's database, because a process can drop its groups.
    """
    kind, _, number = account.partition(":")
    if kind != "user" or not policy.groups or not number.isdecimal():
        return None
    named = tuple(sorted(policy.groups.keys() & _groups_of_user(int(number), int(_now() // GROUPS_SECONDS))))
    return named or None


#: How long the groups of a user are remembered.
GROUPS_SECONDS: Final = 60.0


def _now() -> float:
    import time

    return time.monotonic()


@lru_cache(maxsize=1024)
def _groups_of_user(uid: int, _period: int) -> frozenset[str]:
    import grp
    import pwd

    try:
        user = pwd.getpwuid(uid)
        gids = os.getgrouplist(user.pw_name, user.pw_gid)
    except (KeyError, OSError):
        return frozenset()
    names = set()
    for gid in gids:
        try:
            names.add(grp.getgrgid(gid).gr_name)
        except KeyError:
            continue
    return frozenset(names)
