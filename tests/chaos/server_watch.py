"""Notes when a server answers nobody: it was killed, or the machine is too busy. No lease can be renewed then."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from http.client import HTTPException
from typing import Self

from tests.chaos.history import Span
from tests.server_process import ServerProcess

PAUSE_SECONDS = 0.1


class ServerWatch:
    """`with ServerWatch(server, 0.5) as watch: … watch.silences`: all that were longer than half a second."""

    def __init__(self, server: ServerProcess, longest_seconds: float) -> None:
        self.silences: list[Span] = []
        self._server, self._longest_seconds = server, longest_seconds
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        answered_at = time.monotonic()
        while not self._is_over.wait(PAUSE_SECONDS):
            with suppress(OSError, HTTPException):
                if self._server.get("/livez").status != 200:
                    continue
                now = time.monotonic()
                if now - answered_at > self._longest_seconds:
                    self.silences.append(Span(answered_at, now))
                answered_at = now
