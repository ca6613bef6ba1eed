"""How the demonstration is shown: live on a terminal, as plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from gpu_worker_pool.cli.printable import printable
from gpu_worker_pool.cli.tables import make_console, print_line, style_of
from gpu_worker_pool.cli.views.cells import gpu_state, holder, leases_on, load_cell, memory_cell

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from rich.console import RenderableType
    from rich.live import Live
    from rich.text import Text

    from gpu_worker_pool.cli.views.queries import HostAnswer

BAR_WIDTH = 40
MEMORY_WIDTH = 16
MOST_WAITING = 6
LINES = 12


class Show(Protocol):
    def __enter__(self) -> Show: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def say(self, text: str) -> None:
        """What has just happened."""

    def see(self, seen: Sequence[HostAnswer], finished: int, total: int) -> None:
        """How things are at this moment."""


class PlainShow:
    def __init__(self) -> None:
        self._begun_at = time.monotonic()

    def __enter__(self) -> PlainShow:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, text: str) -> None:
        print_line(f"{time.monotonic() - self._begun_at:5.1f} s  {text}")
        sys.stdout.flush()

    def see(self, seen: Sequence[HostAnswer], finished: int, total: int) -> None:
        pass


class LiveShow:
    def __init__(self) -> None:
        from rich.live import Live

        self._begun_at = time.monotonic()
        self._lines: deque[str] = deque(maxlen=LINES)
        self._seen: Sequence[Any] = ()
        self._finished, self._total = 0, 1
        self._live: Live = Live(console=make_console(), auto_refresh=False, transient=False)

    def __enter__(self) -> LiveShow:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, traceback)

    def say(self, text: str) -> None:
        self._lines.append(f"{time.monotonic() - self._begun_at:5.1f} s  {text}")
        self._draw()

    def see(self, seen: Sequence[HostAnswer], finished: int, total: int) -> None:
        self._seen, self._finished, self._total = seen, finished, total
        self._draw()

    def _draw(self) -> None:
        self._live.update(self._picture(), refresh=True)

    def _picture(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        filled = round(BAR_WIDTH * self._finished / self._total)
        bar = _bar(filled, BAR_WIDTH, "green")
        lines = [Text.assemble(bar, f"  {self._finished} of {self._total} workers are done"), Text()]
        for each in self._seen:
            lines += _gpu_lines(each.body)
            lines += [Text(), *_waiting_lines(each.body)]
        lines.append(Text())
        room = max(self._live.console.size.height - len(lines) - 1, 3)
        lines += [Text(printable(line), style="dim") for line in list(self._lines)[-room:]]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return Group(*lines)


def _bar(filled: int, width: int, style: str) -> Text:
    from rich.text import Text

    return Text("━" * filled, style=style) + Text("━" * (width - filled), style="dim")


def _gpu_lines(body: dict[str, Any]) -> list[Text]:
    from rich.text import Text

    lines = []
    for gpu in body["gpus"]:
        on_it = leases_on(gpu, body["leases"] or ())
        state = gpu_state(gpu, on_it)
        style = style_of(state)
        who = ", ".join(f"{lease['label'] or holder(lease)} for {lease['held_seconds']:.0f} s" for lease in on_it)
        used = round(MEMORY_WIDTH * (gpu["memory"]["usage_percent"] or 0) / 100)
        facts = f"  {memory_cell(gpu):<12} {load_cell(gpu):>5}  "
        shown = (printable(who or state), style)
        lines.append(Text.assemble(f"GPU {gpu['gpu_id']:<3}", _bar(used, MEMORY_WIDTH, style), facts, shown))
    return lines


def _waiting_lines(body: dict[str, Any]) -> list[Text]:
    from rich.text import Text

    lines = []
    for row in (body["queue"] or [])[:MOST_WAITING]:
        reason = row["reasons"][0] if row["reasons"] else ""
        lines.append(Text(printable(f"{row['position']:>3}. {row['label'] or row['worker_id']} waits: {reason}")))
    # As many lines whoever waits, so that the picture stands still.
    return lines + [Text()] * (MOST_WAITING - len(lines))
