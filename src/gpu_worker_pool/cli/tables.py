"""Prints tables: with rich on a terminal, as blocks of lines where that is narrow, as plain text elsewhere."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.cli.output import print_line, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, RenderableType
    from rich.text import Text


#: Columns of unlimited width, and how much of it they need to be readable.
_MAY_WRAP: Final = {
    **dict.fromkeys(("name", "label", "state", "check", "problem", "what"), 10),
    **dict.fromkeys(("holder", "who"), 16),
    **dict.fromkeys(("why", "why not"), 24),
}
#: Arguments of other commands: they are copied, so they are never broken or cut.
_IDS: Final = frozenset({"lease", "request"})
#: Columns that a narrow terminal leaves out, in this order.
_DISPENSABLE: Final = ("used", "promised", "since", "label", "load")
_GAP: Final = 2
#: Longer words are broken.
_LONGEST_WORD: Final = 24


def is_pretty() -> bool:
    """Whether stdout is a terminal that can show colours."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", nothing: str = "") -> None:
    if not rows:
        if nothing:
            print_line(nothing)
        return
    if is_pretty():
        console = make_console()
        table = make_table(columns, rows, title=title)
        # Soft: an id that is longer than a line is the terminal's to wrap, so that it can be copied.
        console.print(table, soft_wrap=not columns_that_fit(columns, rows, console.width)[0])
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


def make_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> RenderableType:
    """A table, or blocks where the terminal is too narrow for one."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    width = make_console().width
    shown, cells = columns_that_fit(columns, rows, width)
    if not shown:
        from textwrap import wrap

        heading = [Text(line, style="bold") for line in wrap(printable(title), width)]
        return Text("\n").join([*heading, *_blocks(columns, rows, width)])
    table = Table(
        box=box.SIMPLE_HEAD,
        title=Text(printable(title)) if title else None,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column, its_width in zip(shown, _widths(shown, cells, width), strict=True):
        table.add_column(column, overflow="fold", width=its_width)
    for row in cells:
        # As text: names and labels are not markup.
        table.add_row(*(Text(printable(cell), style=style_of(cell)) for cell in row))
    return table


def columns_that_fit(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int
) -> tuple[list[str], list[list[str]]]:
    """Leaves out columns for which a terminal of this width has no room; all of them if it is too narrow."""
    cells = {column: [row[number] for row in rows] for number, column in enumerate(columns)}

    def needed() -> int:
        return sum(_GAP + _least_width(name, below) for name, below in cells.items())

    for name in _DISPENSABLE:
        if needed() <= width:
            break
        cells.pop(name, None)
    if needed() > width:
        return [], []
    return list(cells), [list(row) for row in zip(*cells.values(), strict=True)]


def _widths(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Left to rich, a column with a long text takes the room of the others, and ids are cut."""
    below = list(zip(*rows, strict=True))
    widths = [_least_width(column, cells) for column, cells in zip(columns, below, strict=True)]
    missing = [
        max(map(len, (column, *cells))) - least for column, cells, least in zip(columns, below, widths, strict=True)
    ]
    left = width - sum(_GAP + each for each in widths)
    # Those that need little more get it; the others share the rest.
    order = sorted(range(len(widths)), key=missing.__getitem__)
    for position, number in enumerate(order):
        more = min(missing[number], left // (len(order) - position))
        widths[number] += more
        left -= more
    return widths


def _least_width(column: str, cells: Sequence[str]) -> int:
    width = max(map(len, (column, *cells)))
    if column not in _MAY_WRAP:
        return width
    longest_word = max(len(word) for cell in (column, *cells) for word in cell.split() or [""])
    return min(width, max(_MAY_WRAP[column], min(longest_word, _LONGEST_WORD)))


def _blocks(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[Text]:
    """For each row a few lines: `gpu 0  memory 2/24 GiB  load 5 %`, the next ones indented. Nothing is left out."""
    from rich.text import Text

    lines: list[Text] = []
    for row in rows:
        # A row whose first cell is empty continues the one before it.
        line = Text() if row[0] else Text("  ")
        lines.append(line)
        is_full = False
        for column, cell in zip(columns, map(printable, row), strict=True):
            if not cell:
                continue
            has_begun = bool(line.plain.strip())
            if has_begun and (is_full or len(line) + _GAP + len(column) + 1 + len(cell) > width):
                lines.append(line := Text("  "))
            elif has_begun:
                line.append(" " * _GAP)
            line.append(f"{column} " if column else "", style="dim")
            parts = _parts(cell, width, used=len(line), may_break=column not in _IDS)
            line.append(parts[0], style=style_of(cell))
            is_full = len(parts) > 1
            for part in parts[1:]:
                lines.append(line := Text("  " if column in _IDS else "    "))
                line.append(part, style=style_of(cell))
    return lines


def _parts(cell: str, width: int, *, used: int, may_break: bool) -> list[str]:
    """What follows on a line of which `used` is taken, then one part per further line."""
    if used + len(cell) <= width:
        return [cell]
    if not may_break:
        return ["", cell]
    from textwrap import wrap

    indent = " " * min(used, width // 2)
    first, *others = wrap(cell, max(width, 20), initial_indent=indent, subsequent_indent="    ") or [cell]
    return [first.strip(), *(other.strip() for other in others)]


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
        "in": "yellow",  # in use
        "warning": "yellow",
        "idle": "yellow",
        "offered": "yellow",
        "quarantined": "magenta",
        "quarantine": "magenta",
        "fault": "bold red",
        "wrong": "bold red",
    }.get(first, "")
