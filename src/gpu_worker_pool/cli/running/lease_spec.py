"""What `run` and `wait` ask the keeper for: plain values, made before anything heavy is loaded."""

from __future__ import annotations

import os
import re
from typing import Any, NamedTuple


class WaitLimit(NamedTuple):
    """How long to wait: None is for ever."""

    timeout_seconds: float | None = None
    #: Not at all, and that is no timeout.
    is_no_wait: bool = False


class LeaseSpec(NamedTuple):
    #: Keyword arguments of the core's `Requirements`.
    requirement_options: dict[str, Any]
    wait_limit: WaitLimit
    endpoints: tuple[str, ...]
    worker_id: str
    label: str | None
    #: None: as the environment says, else a minute.
    ttl_seconds: float | None
    #: Whose end is the lease's end; None for the command that is run here.
    for_pid: int | None = None

    def as_message(self) -> dict[str, Any]:
        return self._asdict() | {"wait_limit": self.wait_limit._asdict()}

    @classmethod
    def of_message(cls, message: dict[str, Any]) -> LeaseSpec:
        wait_limit, endpoints = WaitLimit(**message["wait_limit"]), tuple(message["endpoints"])
        return cls(**message | {"wait_limit": wait_limit, "endpoints": endpoints})


def worker_name(what: str, pid: int | None = None) -> str:
    """Who has the GPU, as others are told: who it is, what it does, and which process to look for."""
    import pwd

    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = str(os.getuid())
    name = f"{user}:{os.path.basename(what)}"  # noqa: PTH119
    return f"{re.sub(r'[^A-Za-z0-9._:-]+', '_', name)[:50]}:{pid or os.getpid()}"
