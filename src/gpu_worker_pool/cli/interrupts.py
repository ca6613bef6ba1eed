"""Exits the way Ctrl-C ends a program."""

from __future__ import annotations

import os
import signal

from gpu_worker_pool.cli.statuses import KILLED


def die_of_interrupt() -> int:
    """By the signal, not by a status: only then does a shell end its loop or script."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    os.kill(os.getpid(), signal.SIGINT)
    return KILLED + signal.SIGINT
