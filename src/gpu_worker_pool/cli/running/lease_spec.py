"""The lease spec: what `run` and `wait` ask the lease process for, as plain values that load fast."""

from __future__ import annotations

import os
import re
from typing import Any, NamedTuple


class WaitLimit(NamedTuple):
    #: None: no limit.
    timeout_seconds: float | None = None
    #: Do not wait at all; this has its own exit status.
    is_no_wait: bool = False


class LeaseSpec(NamedTuple):
    #: Keyword arguments of the core's `Requirements`.
    requirement_options: dict[str, Any]
    wait_limit: WaitLimit
    endpoints: tuple[str, ...]
    worker_id: str
    label: str | None
    #: None: from the environment, else 60 s.
    ttl_seconds: float | None
    #: The lease ends with this process; None: with the command of `run`.
    for_pid: int | None = None

    def as_message(self) -> dict[str, Any]:
        return self._asdict() | {"wait_limit": self.wait_limit._asdict()}

    @classmethod
    def of_message(cls, message: dict[str, Any]) -> LeaseSpec:
        wait_limit, endpoints = WaitLimit(**message["wait_limit"]), tuple(message["endpoints"])
        return cls(**message | {"wait_limit": wait_limit, "endpoints": endpoints})


def worker_name(what: str, pid: int | None = None) -> str:
    """The holder as others see it: user, program and pid."""
    import pwd

    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = str(os.getuid())
    name = f"{user}:{os.path.basename(what)}"  # noqa: PTH119
    return f"{re.sub(r'[^A-Za-z0-9._:-]+', '_', name)[:50]}:{pid or os.getpid()}"
