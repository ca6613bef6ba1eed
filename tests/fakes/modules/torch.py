"""Stands in for PyTorch in the blocks of our pages: the few names that they use, on a machine without a GPU."""

from __future__ import annotations

from typing import Any


class cuda:  # noqa: N801  # its name there
    @staticmethod
    def is_available() -> bool:
        return False


class nn:  # noqa: N801
    class Linear:
        def __init__(self, *_: Any) -> None:
            pass

        def to(self, device: str) -> Any:
            self.device = device
            return self


def device(name: str) -> str:
    return name
