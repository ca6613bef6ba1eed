"""The lease spec: what `run` and `wait` ask the lease process for, as plain values that load fast."""

from __future__ import annotations

from typing import Any, NamedTuple


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
    #: `--ask`: holders in the way are asked to give their GPUs back.
    asks: bool = False
    #: `--ssh`: where the command runs if its GPU is elsewhere; empty: the endpoint's own host; None: nowhere else.
    ssh_target: str | None = None
    expected_seconds: float | None = None
    max_seconds: float | None = None
    #: How long before its time limit the command is ended.
    grace_seconds: float = 30.0
    #: Of `map`: how many leases to acquire, one after the other; None: one lease.
    most_leases: int | None = None
    #: Of `map`: a variable that only its jobs have, `NAME=VALUE`.
    job_variable: str = ""
