"""Draws utilization and waiting over time as an SVG file, by hand: no library for pictures is needed."""

from __future__ import annotations

from datetime import datetime
from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_worker_pool.ledger.report import Course, Span

WIDTH: Final = 960
_LEFT, _RIGHT, _TOP, _HEIGHT, _GAP = 60, 20, 44, 170, 64
HOLDING, WAITING, GRID, TEXT = "#2f7d4f", "#b8601d", "#d8dcdf", "#33393d"
#: How many moments are written below.
_TICKS: Final = 6


def draw(course: Course, title: str) -> str:
    inner = WIDTH - _LEFT - _RIGHT
    below = _TOP + _HEIGHT + _GAP
    height = below + _HEIGHT + 40
    most_held = max(course.gpus, max(course.gpus_held, default=0.0), 1.0)
    most_waiting = max(max(course.waiting, default=0.0), 1.0)
    held = f"GPUs held, of {course.gpus}" if course.gpus else "GPUs held"
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="18" font-size="14" font-weight="600" fill="{TEXT}">{escape(title)}</text>',
        *_panel(course.gpus_held, most_held, _TOP, inner, HOLDING, held),
        *_panel(course.waiting, most_waiting, below, inner, WAITING, "requests waiting"),
        *_moments(course.span, below + _HEIGHT, inner),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _panel(values: Sequence[float], most: float, top: int, inner: int, colour: str, name: str) -> list[str]:
    bottom = top + _HEIGHT
    parts = [f'<text x="{_LEFT}" y="{top - 6}" fill="{TEXT}">{escape(name)}</text>']
    step = _step(most)
    scale = _HEIGHT / (most * 1.05)
    value = 0.0
    while value <= most * 1.001:
        y = bottom - value * scale
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + inner}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="{TEXT}">{value:g}</text>')
        value += step
    width = inner / max(len(values), 1)
    # Steps, not slopes: each value is the average over its step.
    points = [f"M{_LEFT},{bottom}"]
    for number, each in enumerate(values):
        y = bottom - each * scale
        points.append(f"L{_LEFT + number * width:.1f},{y:.1f}L{_LEFT + (number + 1) * width:.1f},{y:.1f}")
    points.append(f"L{_LEFT + inner},{bottom}Z")
    parts.append(f'<path d="{"".join(points)}" fill="{colour}" fill-opacity="0.25" stroke="{colour}"/>')
    return parts


def _step(most: float) -> float:
    """A round number that gives at most six lines."""
    size = 1.0
    while True:
        for factor in (1, 2, 5):
            if most / (size * factor) <= 5:
                return size * factor
        size *= 10


def _moments(span: Span, y: int, inner: int) -> list[str]:
    seconds = span.end - span.begin
    form = "%H:%M" if seconds <= 2 * 86_400 else "%d %b" if seconds <= 300 * 86_400 else "%b %Y"
    parts = []
    for number in range(_TICKS + 1):
        x = _LEFT + inner * number / _TICKS
        at = datetime.fromtimestamp(span.begin + seconds * number / _TICKS).astimezone()
        anchor = "start" if number == 0 else "end" if number == _TICKS else "middle"
        parts.append(f'<text x="{x:.1f}" y="{y + 18}" text-anchor="{anchor}" fill="{TEXT}">{at:{form}}</text>')
    return parts
