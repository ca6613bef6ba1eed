"""Keeps a forked child from using what belongs to its parent.

A fork copies the program's memory but shares its connections. A child that used one would speak in its parent's name,
and a child that collected one as garbage would remove it from its parent's event loop, which it shares, too.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, NoReturn, Protocol
from weakref import WeakSet

from gpu_worker_pool.errors import NotStartedError

if TYPE_CHECKING:
    from gpu_worker_pool.models import GPUAssignment


class Forkable(Protocol):
    def _forked(self) -> None:
        """Called in the child, before anything else runs there."""


def watch(thing: Forkable) -> None:
    _watched.add(thing)


def leave_alone(*things: object) -> None:
    """Keep them, and all they refer to, from being collected as garbage, even when the interpreter ends."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


class Forked:
    """Replaces the parent's pool in the child: every call says why it cannot work there."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    async def acquire(self, *_: object) -> NoReturn:
        raise NotStartedError(
            f"the client was started in process {self._pid}, of which this one, {os.getpid()}, is a fork: "
            "make a new client in this process"
        )

    async def release_gpu(self, assignment: GPUAssignment) -> NoReturn:
        raise NotStartedError(
            f"{assignment.worker_id} was assigned in process {self._pid} before this one, {os.getpid()}, was forked "
            "from it: the parent has the GPU, and releases it"
        )


_watched: WeakSet[Forkable] = WeakSet()


def _in_child() -> None:
    for thing in list(_watched):
        thing._forked()  # noqa: SLF001  # only for this module
    _watched.clear()


os.register_at_fork(after_in_child=_in_child)
