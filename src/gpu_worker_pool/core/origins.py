"""How others see holders and waiters: the user, the program and the process; and whether two are the same process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gpu_worker_pool.core.accounts import key_name
from gpu_worker_pool.core.events import Origin

if TYPE_CHECKING:
    from gpu_worker_pool.core.events import Request


#: In every reason that says so, for programs that only read reasons.
OWN_PROCESS: Final = "this very process"


def vouched(said: Origin | None, *, user: str | None, host: str | None, pid: int | None) -> Origin:
    """What the kernel knows of a process, with the program that it says itself."""
    return Origin(user, host, pid, None if said is None else said.program, is_verified=True)


def name_of(request: Request, here: str = "") -> str:
    """A holder or waiter in a sentence: "ada's train.py (pid 4242)". `here`: the host that need not be named."""
    key, worker = key_name(request.account), request.worker
    if key is not None:  # what the key says is sure; a client need not say who it is
        worker = f"{key}'s {request.worker_id}" if request.worker_id else key
    return worker if request.origin is None else described(request.origin, worker, here, of="'s ")


def described(origin: Origin, worker: str, here: str = "", *, of: str = " ") -> str:
    """The same with another word between user and program; `worker`: its name where it has said neither."""
    who = of.join(name for name in (origin.user, origin.program) if name) or worker
    pid = "" if origin.pid is None else f"pid {origin.pid}"
    host = f"on {origin.host}" if origin.host and origin.host != here else ""
    facts = (" ".join(filter(None, (pid, host))), "" if origin.is_verified else "unverified")
    return f"{who} ({', '.join(filter(None, facts))})" if any(facts) else who


def is_same_process(one: Request, other: Request) -> bool:
    """Whether both are surely of one process; for those that servers know it is what the clients say."""
    if one.process and other.process:
        if one.process == other.process:
            return True
        # `gpu-pool wait` holds for a shell from a process of its own. In another namespace a pid is another process.
        if _pids(one.process) != _pids(other.process):
            return False
    return _said(one) is not None and _said(one) == _said(other)


def process_names(request: Request) -> tuple[object, ...]:
    """Requests of one process have one of these in common; those of different processes hardly ever."""
    return tuple(filter(None, (request.process, _said(request))))


def _said(request: Request) -> tuple[str, str, int] | None:
    """The process as its origin names it; None if that is incomplete."""
    origin = request.origin
    if origin is None or origin.user is None or origin.host is None or origin.pid is None:
        return None
    return origin.user, origin.host, origin.pid


def own_process(request: Request) -> str:
    """What holds a GPU that the same process requests, to that process."""
    pid = None if request.origin is None else request.origin.pid
    return OWN_PROCESS if pid is None else f"{OWN_PROCESS} (pid {pid})"


def _pids(process: str) -> list[str]:
    """The boot and the namespace in which its pid counts."""
    return process.split("/")[:2]
