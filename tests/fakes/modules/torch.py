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


class Tensor:
    def __init__(self, values: list[float]) -> None:
        self._values = values

    def sum(self) -> float:
        return sum(self._values)


def ones(size: int, *, device: str) -> Tensor:
    return Tensor([1.0] * size)
