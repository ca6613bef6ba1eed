"""`gpu-pool top`: redraws the overview at an interval; without a terminal it prints the overview again each time."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from datetime import datetime
from typing import TYPE_CHECKING

from gpu_worker_pool.cli.output import print_line, printable
from gpu_worker_pool.cli.tables import is_pretty, make_console, make_table
from gpu_worker_pool.cli.views import overview
from gpu_worker_pool.cli.views.queries import check_answers, open_hosts, query_hosts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import RenderableType

    from gpu_worker_pool.cli.views.queries import Host, HostAnswer, Unopened


def show_live(endpoints: Sequence[str], interval_seconds: float, count: int | None, *, as_json: bool = False) -> None:
    try:
        asyncio.run(_show(endpoints, interval_seconds, count, as_json=as_json))
    except KeyboardInterrupt:
        return  # the usual way to leave it


async def _show(endpoints: Sequence[str], interval_seconds: float, count: int | None, *, as_json: bool) -> None:
    async with open_hosts(endpoints) as hosts:
        if as_json or not is_pretty():
            await _repeat(hosts, interval_seconds, count, _print_json if as_json else _print_plain)
            return
        from rich.live import Live

        with Live(console=make_console(), screen=count is None, auto_refresh=False) as live:
            await _repeat(
                hosts,
                interval_seconds,
                count,
                lambda answers: live.update(rendered(overview.parts(answers)), refresh=True),
            )


async def _repeat(
    hosts: Sequence[Host | Unopened],
    interval_seconds: float,
    count: int | None,
    show: Callable[[list[HostAnswer]], object],
) -> None:
    number = 0
    while True:
        begun_at = time.monotonic()
        answers = await query_hosts(hosts, overview.everything_of)
        if number == 0:
            check_answers(answers)  # an endpoint that fails later may come back
        show(answers)
        number += 1
        if number == count:
            return
        await asyncio.sleep(max(interval_seconds - (time.monotonic() - begun_at), 0.05))


def rendered(parts: Sequence[overview.Part]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    shown: list[RenderableType] = [Text(f"gpu-pool top   {datetime.now():%H:%M:%S}   Ctrl-C to quit", style="dim")]
    for part in parts:
        if part.rows:
            shown.append(make_table(part.columns, part.rows, title=part.title))
        else:
            shown.append(Text(printable(" ".join(text for text in (part.title, part.nothing) if text))))
    return Group(*shown)


def _print_json(answers: list[HostAnswer]) -> None:
    """One line per update, so that a program knows where each one ends."""
    sys.stdout.write(json.dumps(overview.as_json(answers), allow_nan=False) + "\n")
    sys.stdout.flush()


def _print_plain(answers: list[HostAnswer]) -> None:
    print_line(f"{datetime.now():%H:%M:%S}")
    overview.print_parts(answers)
    print_line()
    sys.stdout.flush()
