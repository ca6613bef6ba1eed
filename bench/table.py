"""Prints the table of ratios of a benchmark: our cost, the other's cost, and whether the target is reached."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class Row:
    what: str
    #: Both in the same unit; only their ratio matters.
    ours: float
    other: float
    #: The target for the ratio: a speed must be at least this, a cost at most this.
    target: float
    is_speed: bool

    @property
    def ratio(self) -> float:
        return self.other / self.ours if self.is_speed else self.ours / self.other

    @property
    def is_reached(self) -> bool:
        return self.ratio >= self.target if self.is_speed else self.ratio <= self.target

    def __str__(self) -> str:
        sign = "≥" if self.is_speed else "≤"
        verdict = "reached" if self.is_reached else "MISSED"
        numbers = f"{self.ours:>9.2f} {self.other:>9.2f} {self.ratio:>7.3f}"
        return f"{self.what:<66} {numbers}  {sign} {self.target:<5} {verdict}"


def print_table(rows: Iterable[Row], unit: str) -> bool:
    """Whether all targets are reached."""
    rows = list(rows)
    print(f"{'':<66} {f'ours {unit}':>9} {f'other {unit}':>9} {'ratio':>7}  target")
    for row in rows:
        print(row)
    return all(row.is_reached for row in rows)
