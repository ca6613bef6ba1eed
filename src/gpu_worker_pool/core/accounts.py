"""Accounts: for whom a request is made, according to the kernel or a key. Use is added up per account.

`user:1000` is a user of this host, `key:physics` a named key, `key-1f0c…` a key without a name, and `loopback` all
programs that ask a server on their own host over TCP without a key. Within one process requests have no account: "".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gpu_worker_pool.core.events import Origin

#: Callers on the server's host without a key. They cannot be told apart, so all of them share one account.
LOOPBACK: Final = "loopback"

_USER, _KEY, _UNNAMED_KEY = "user:", "key:", "key-"


def account_of_user(uid: int | None) -> str:
    """The user with this number; None if it is not known."""
    return f"{_USER}{uid}"


def account_of_key(name: str | None, digest: str) -> str:
    """`digest`: of the key; never the key itself, because accounts are stored."""
    return f"{_UNNAMED_KEY}{digest[:12]}" if name is None else f"{_KEY}{name}"


def uid_of(account: str) -> int | None:
    """None for an account that is no user of this host."""
    number = account.removeprefix(_USER)
    return int(number) if number != account and number.isdecimal() else None


def key_name(account: str) -> str | None:
    """The name of a key; None for an account that has none to be shown."""
    name = account.removeprefix(_KEY)
    return name if name != account else None


def account_name(account: str, origin: Origin | None = None, user: str | None = None) -> str:
    """The name that others see. `origin`: of one of its requests; `user`: the user's name, if it was looked up."""
    uid = uid_of(account)
    if uid is not None:
        known = origin.user if origin is not None and origin.is_verified else None
        return user or known or f"user {uid}"
    if account.startswith(_UNNAMED_KEY):
        return "a key without a name"  # its digest might help to guess it
    if account == LOOPBACK:
        return "programs on this host without a key"
    return account.removeprefix(_KEY)
