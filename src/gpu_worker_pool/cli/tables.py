"""Prints tables: with rich on a terminal, as plain text with the same columns elsewhere."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.cli.output import print_line, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table


#: Columns of unlimited width.
_MAY_WRAP: Final = frozenset(
    {"name", "holder", "who", "why", "why not", "label", "state", "request", "check", "problem", "what"}
)
#: Columns that a narrow terminal leaves out, in this order; the rest folds.
_DISPENSABLE: Final = ("used", "promised", "since", "label", "load")
#: A column that may wrap needs at least this width.
_NARROWEST: Final = 10
_GAP: Final = 2


def is_pretty() -> bool:
    """Whether stdout is a terminal that can show colours."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", nothing: str = "") -> None:
    if not rows:
        if nothing:
            print_line(nothing)
        return
    if is_pretty():
        make_console().print(make_table(columns, rows, title=title))
        return
    if title:
        print_line(title)
    for line in plain_table(columns, rows):
        print_line(line)


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(cell) for cell in cells) for cells in zip(columns, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in ([column.upper() for column in columns], *rows)
    ]


def make_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    columns, rows = columns_that_fit(columns, rows, make_console().width)
    table = Table(
        box=box.SIMPLE_HEAD,
        title=Text(printable(title)) if title else None,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column not in _MAY_WRAP)
    for row in rows:
        # As text: names and labels are not markup.
        table.add_row(*(Text(printable(cell), style=style_of(cell)) for cell in row))
    return table


def columns_that_fit(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int
) -> tuple[list[str], list[list[str]]]:
    """Leaves out columns for which a terminal of this width has no room."""
    cells = {column: [row[number] for row in rows] for number, column in enumerate(columns)}

    def needed() -> int:
        widths = {name: max(map(len, (name, *below))) for name, below in cells.items()}
        return sum(_GAP + (min(each, _NARROWEST) if name in _MAY_WRAP else each) for name, each in widths.items())

    for name in _DISPENSABLE:
        if needed() <= width:
            break
        cells.pop(name, None)
    return list(cells), [list(row) for row in zip(*cells.values(), strict=True)]


def make_console() -> Console:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)


def style_of(cell: str) -> str:
    """By the first word, so that all tables agree."""
    first = cell.partition(" ")[0].rstrip(":,")
    return {
        "free": "green",
        "ok": "green",
        "held": "cyan",
        "shared": "cyan",
        "busy": "yellow",
        "warning": "yellow",
        "idle": "yellow",
        "offered": "yellow",
        "quarantined": "magenta",
        "quarantine": "magenta",
        "fault": "bold red",
        "wrong": "bold red",
    }.get(first, "")
