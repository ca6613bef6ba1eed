"""A dict that tracks which entries were set, so that only changes need to be written and reported."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class ChangeTracker(dict[K, V]):
    def __init__(self) -> None:
        super().__init__()
        self._changed: dict[K, V] = {}

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self._changed[key] = value

    def take_changes(self) -> dict[K, V]:
        """The entries set since the last call; one that was removed again, as it was before."""
        noted, self._changed = self._changed, {}
        return noted

    def forget_change(self, key: K) -> None:
        self._changed.pop(key, None)
