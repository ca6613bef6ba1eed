"""The checks of `gpu-pool doctor`, each of which yields findings, and the list of `gpu-pool config`."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Finding(NamedTuple):
    status: Literal["ok", "warning", "wrong"]
    check: str
    what: str
    #: What to do about it.
    advice: str = ""

    @property
    def text(self) -> str:
        return f"{self.what} -> {self.advice}" if self.advice else self.what
