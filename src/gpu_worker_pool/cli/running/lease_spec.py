"""The lease spec: what `run` and `wait` ask the lease process for, as plain values that load fast."""

from __future__ import annotations

import os
import re
from typing import Any, NamedTuple

from gpu_worker_pool.hardware.proc import user_name


class LeaseSpec(NamedTuple):
    #: Keyword arguments of the core's `Requirements`.
    requirement_options: dict[str, Any]
    endpoints: list[str]
    #: None: wait without limit.
    timeout_seconds: float | None
    #: Do not wait at all; this has its own exit status.
    is_no_wait: bool
    label: str | None
    #: None: from the environment, else 60 s.
    ttl_seconds: float | None
    worker_id: str = ""
    #: The program and the process that will use the GPU, for others to read.
    program: str | None = None
    pid: int | None = None
    #: The lease ends with this process; None: with the command of `run`.
    for_pid: int | None = None
    #: Use the ledger of this user alone.
    is_private: bool = False
    #: `--here`: the GPUs are this host's, whatever the endpoint's address.
    is_here: bool = False
    #: `--ssh`: where the command runs if its GPU is elsewhere; empty: the endpoint's own host; None: nowhere else.
    ssh_target: str | None = None


def worker_name(what: str, pid: int | None = None) -> str:
    """The holder as others see it: user, program and pid."""
    name = f"{user_name(os.getuid())}:{os.path.basename(what)}"  # noqa: PTH119
    return f"{re.sub(r'[^A-Za-z0-9._:-]+', '_', name)[:50]}:{pid or os.getpid()}"
