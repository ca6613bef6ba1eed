"""What an executor asks its lease process for, as plain values that can be sent as JSON."""

from __future__ import annotations

from typing import Any, NamedTuple


class WorkerSpec(NamedTuple):
    """The same for every worker of an executor."""

    #: Keyword arguments of the core's `Requirements`.
    requirement_options: dict[str, Any]
    #: As they were given; none: as the environment says.
    endpoints: list[str]
    label: str | None
    #: None: from the environment, else 60 s.
    ttl_seconds: float | None
    #: The program of the executor, for others to read.
    program: str
    #: The executor's process: when it ends, so do the workers.
    pid: int
    #: How a worker is started, up to the number of its descriptor.
    command: list[str]
