"""What `gpu-pool setup` does as root: the shared folder, its group, a service; and how it is taken back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

#: By the word of the announcement: the word once it is done.
_DONE: Final = {
    "make": "made",
    "add": "added",
    "change": "changed",
    "repair": "repaired",
    "remove": "removed",
    "restore": "restored",
    "start": "started",
    "stop": "stopped",
    "write": "wrote",
}


class Options(NamedTuple):
    directory: Path
    #: None: the folder's own group if it has one, else `gpu-pool`.
    group: str | None = None
    add: tuple[str, ...] = ()
    with_service: bool = False
    is_server_only: bool = False


class Places(NamedTuple):
    """What is outside the state directory; tests use other ones."""

    service_user: str = "gpu-pool"
    units: Path = Path("/etc/systemd/system")
    environment: Path = Path("/etc/gpu-pool.env")
    runtime: Path = Path("/run/gpu-pool")
    #: Is there where systemd runs this host.
    systemd: Path = Path("/run/systemd/system")


class Steps:
    """Performs each step and says so; a dry run only says what it would do."""

    def __init__(self, say: Callable[[str], object], *, is_dry: bool = False) -> None:
        self.say = say
        self.is_dry = is_dry
        self.count: int = 0

    def do(self, verb: str, what: str, action: Callable[[], object]) -> None:
        self.count += 1
        if not self.is_dry:
            action()
        self.say(f"would {verb} {what}" if self.is_dry else f"{_DONE[verb]} {what}")
