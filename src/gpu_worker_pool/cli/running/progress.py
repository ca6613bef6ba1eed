"""What is said on stderr while a request waits: its place, the reason and the time, and only when something changed.

A terminal gets one line that is kept up to date, anything else a line for every change.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import Any, Final

from gpu_worker_pool.cli.printable import printable
from gpu_worker_pool.cli.quantities import spoken_seconds

#: A terminal that has fewer has room for what matters only.
NARROW_COLUMNS: Final = 60


class Progress:
    """`is_wanted` is False for those who want silence; errors are told all the same."""

    def __init__(self, *, is_wanted: bool = True, with_reasons: bool = False) -> None:
        self._is_wanted = is_wanted
        self._with_reasons = with_reasons
        self._is_live = is_wanted and _is_live_terminal()
        self._begun_at = time.monotonic()
        #: By endpoint, the last that was heard of each.
        self._heard: dict[str, dict[str, Any]] = {}
        self._said = ""
        self._reasons_said: list[str] = []
        self._is_line_open = False

    @property
    def wants_ticks(self) -> bool:
        """Whether a line is shown that tells the time."""
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
        """Leave the terminal to others."""
        if self._is_line_open:
            _write("\r\x1b[K")
            self._is_line_open = False

    def say(self, text: str) -> None:
        self.pause()
        _write(f"gpu-pool: {printable(text)}\n")

    def _text(self) -> str:
        """Of several places that one which is nearest to its turn; what fails counts while nothing else is heard."""
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
    """Whether it can be written over, and is ours: a job in the background would write over its owner's typing."""
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
        # The terminal has gone. Whoever waits may still want its GPU.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123
