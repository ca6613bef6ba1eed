"""Draws schedules as one SVG picture: how many GPUs are used, and how many requests wait, over time."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from gpu_worker_pool.wording import spoken_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpu_worker_pool.simulation.cluster import Starts
    from gpu_worker_pool.simulation.workload import Job

WIDTH, HEIGHT = 960, 560
#: How many moments a line has.
POINTS = 600
_LEFT, _RIGHT, _TOP, _BETWEEN, _BOTTOM = 70, 20, 50, 60, 40
#: Distinguishable with colour blindness.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")


_LOOK = 'font-family="sans-serif" font-size="13" role="img" aria-label="GPUs in use and waiting requests over time"'


def draw(schedules: Mapping[str, tuple[Sequence[Job], Starts, int]]) -> str:
    """`schedules`: by name, the jobs, when they began, and how many GPUs there were."""
    last = max(
        (
            start.seconds + job.duration_seconds
            for jobs, starts, _ in schedules.values()
            for job, start in zip(jobs, starts, strict=True)
            if start is not None
        ),
        default=1.0,
    )
    lines = {name: _lines(*schedule, last) for name, schedule in schedules.items()}
    panel = (HEIGHT - _TOP - _BETWEEN - _BOTTOM) / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {_LOOK}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for place, (title, which) in enumerate((("GPUs in use", 0), ("requests that wait", 1))):
        top = _TOP + place * (panel + _BETWEEN)
        highest = max((max(line[which], default=0.0) for line in lines.values()), default=0.0) or 1.0
        if which == 0:
            highest = max(highest, *(gpus for _, _, gpus in schedules.values()))
        parts += _axes(title, top, panel, highest, last)
        for number, line in enumerate(lines.values()):
            points = " ".join(
                f"{_LEFT + x * (WIDTH - _LEFT - _RIGHT) / POINTS:.1f},{top + panel * (1 - value / highest):.1f}"
                for x, value in enumerate(line[which])
            )
            colour = _COLOURS[number % len(_COLOURS)]
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    for number, name in enumerate(lines):
        x = _LEFT + number * 220
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(f'<rect x="{x}" y="12" width="14" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 20}" y="18">{escape(name)}</text>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _axes(title: str, top: float, height: float, highest: float, last: float) -> list[str]:
    right, bottom = WIDTH - _RIGHT, top + height
    parts = [
        f'<text x="{_LEFT}" y="{top - 8:.1f}" font-weight="bold">{escape(title)}</text>',
        f'<path d="M{_LEFT},{top:.1f}V{bottom:.1f}H{right}" fill="none" stroke="#888"/>',
    ]
    for part in (0.0, 0.5, 1.0):
        y = bottom - part * height
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_number(highest * part)}</text>')
        parts.append(f'<path d="M{_LEFT},{y:.1f}H{right}" stroke="#ddd" stroke-width="0.5"/>')
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = _LEFT + part * (right - _LEFT)
        anchor = "end" if part == 1.0 else "middle"  # the last one must not leave the picture
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="{anchor}">{spoken_seconds(part * last)}</text>'
        )
    return parts


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}".removesuffix(".0")


def _lines(jobs: Sequence[Job], starts: Starts, _: int, last: float) -> tuple[list[float], list[float]]:
    """At each point, the mean number of GPUs in use and of requests that wait since the point before."""
    step = last / POINTS or 1.0
    used, waiting = [0.0] * (POINTS + 1), [0.0] * (POINTS + 1)
    for job, start in zip(jobs, starts, strict=True):
        if start is not None:
            _add(waiting, job.arrival_seconds, start.seconds, 1.0, step)
            _add(used, start.seconds, start.seconds + job.duration_seconds, float(job.gpus), step)
    return used, waiting


def _add(line: list[float], begin: float, end: float, value: float, step: float) -> None:
    place = int(begin / step)
    while place < len(line) and place * step < end:
        inside = min(end, (place + 1) * step) - max(begin, place * step)
        line[place] += value * max(inside, 0.0) / step
        place += 1
