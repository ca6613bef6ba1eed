"""What `run` and `wait` ask the keeper for: plain values, made before anything heavy is loaded."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Wished:
    """What was asked for on the command line; `wishes_of` makes of it what the core goes by."""

    count: int = 1
    memory_mb: float | None = None
    share: bool = False
    min_free_memory_mb: float | None = None
    gpu_model: str | None = None
    only: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    priority: int = 0
    idle: bool = False
    memory_threshold: float | None = None
    utilization_threshold: float | None = None


class Patience(NamedTuple):
    """How long to wait: None is for ever."""

    timeout_seconds: float | None = None
    #: Not at all, and that is no timeout.
    is_none: bool = False


class Asked(NamedTuple):
    wished: Wished
    patience: Patience
    endpoints: tuple[str, ...]
    worker_id: str
    label: str | None
    #: None: as the environment says, else a minute.
    ttl_seconds: float | None
    #: Whose end is the lease's end; None for the command that is run here.
    for_pid: int | None = None

    def as_message(self) -> dict[str, Any]:
        return self._asdict() | {"wished": asdict(self.wished), "patience": self.patience._asdict()}

    @classmethod
    def of_message(cls, message: dict[str, Any]) -> Asked:
        wished = message["wished"]
        only = None if wished["only"] is None else tuple(wished["only"])
        return cls(
            **message
            | {
                "wished": Wished(**wished | {"only": only, "exclude": tuple(wished["exclude"])}),
                "patience": Patience(**message["patience"]),
                "endpoints": tuple(message["endpoints"]),
            }
        )


def worker_name(what: str, pid: int | None = None) -> str:
    """Who has the GPU, as others are told: who it is, what it does, and which process to look for."""
    import pwd

    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = str(os.getuid())
    name = f"{user}:{os.path.basename(what)}"  # noqa: PTH119
    return f"{re.sub(r'[^A-Za-z0-9._:-]+', '_', name)[:50]}:{pid or os.getpid()}"
