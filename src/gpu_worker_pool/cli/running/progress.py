"""Prints on stderr while a request waits: its place, the reason and the time.

A terminal gets one line that is updated in place, anything else one line per change.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any, Final

from gpu_worker_pool.cli.output import printable
from gpu_worker_pool.wording import spoken_seconds

#: Narrower terminals get a shorter line.
NARROW_COLUMNS: Final = 60


class Progress:
    """Without `is_wanted` it prints errors only."""

    def __init__(self, *, is_wanted: bool = True, with_reasons: bool = False) -> None:
        self._is_wanted = is_wanted
        self._with_reasons = with_reasons
        self._is_live = is_wanted and _is_live_terminal()
        self._begun_at = time.monotonic()
        #: The last message of each endpoint.
        self._heard: dict[str, dict[str, Any]] = {}
        self._said = ""
        self._reasons_said: list[str] = []
        self._is_line_open = False

    @property
    def wants_ticks(self) -> bool:
        """Whether a line with the waiting time is open."""
        return self._is_line_open

    @property
    def has_spoken(self) -> bool:
        return bool(self._said)

    @property
    def waited_seconds(self) -> float:
        return time.monotonic() - self._begun_at

    def hear(self, message: dict[str, Any]) -> None:
        self._heard[message["endpoint"]] = message
        if not self._is_wanted:
            return
        text = self._text()
        is_new = text != self._said
        self._said = text
        if self._with_reasons and is_new:
            self._say_reasons(message)
        if self._is_live:
            self.tick()
        elif is_new:
            self.say(f"waiting {spoken_seconds(self.waited_seconds)}: {text}")

    def tick(self) -> None:
        if not (self._is_live and self._said):
            return
        import shutil  # for a terminal alone

        columns = shutil.get_terminal_size().columns
        waited = spoken_seconds(self.waited_seconds)
        line = printable(f"gpu-pool: waiting {waited}: {self._said}")
        if len(line) >= columns and columns < NARROW_COLUMNS:
            line = printable(f"{waited}: {self._said}")
        if len(line) >= columns:
            line = f"{line[: max(columns - 2, 0)]}…"
        _write(f"\r{line}\x1b[K")
        self._is_line_open = True

    def pause(self) -> None:
        """Clear the line, so that others can write."""
        if self._is_line_open:
            _write("\r\x1b[K")
            self._is_line_open = False

    def say(self, text: str) -> None:
        self.pause()
        _write(f"gpu-pool: {printable(text)}\n")

    def _text(self) -> str:
        """The endpoint where we are first in the queue; errors only if no endpoint has queued us."""
        waiting = [message for message in self._heard.values() if message["kind"] == "waiting"]
        if waiting:
            best = min(waiting, key=lambda message: message["position"] or sys.maxsize)
            where = f"{best['endpoint']}: " if len(self._heard) > 1 else ""
            return f"{where}{best['summary']}"
        return "; ".join(f"{message['endpoint']}: {message['text']}" for message in self._heard.values())

    def _say_reasons(self, message: dict[str, Any]) -> None:
        reasons = message.get("reasons", [])
        if reasons and reasons != self._reasons_said:
            self._reasons_said = reasons
            for reason in reasons:
                self.say(f"  {reason}")


def _is_live_terminal() -> bool:
    """Whether a line can be rewritten. A background job must not: it would overwrite what its user types."""
    if not sys.stderr.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return False
    try:
        return os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    except OSError:
        return False


def _write(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        # The terminal is gone, but the command may still want its GPU.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123
