"""Reads settings from environment variables: a bad value is reported, and the default is used.

The person who runs a program is not always the one who wrote it, so a typo in a profile must not stop it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeAlias, TypeVar

from gpu_worker_pool.config_file import from_file

logger: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")
N = TypeVar("N", bound=float)

#: Turns the text of the variable with this name into a value, or raises a `ValueError` that `refused` made.
Parser: TypeAlias = Callable[[str, str], T]

_BOOLEANS = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(("false", "0", "no", "off"), False)


class Environment:
    def __init__(
        self, variables: Mapping[str, str] | None = None, complain: Callable[[str], object] = logger.error
    ) -> None:
        self._variables = os.environ if variables is None else variables
        self._reads_file = variables is None
        self._complain = complain
        self._reported: set[str] = set()

    def text(self, name: str) -> str:
        """Empty where neither the variable nor the configuration file sets it.

        What is not UTF-8 is replaced: it could not be sent or printed.
        """
        text = printable(self._variables.get(name, "").strip())
        if not text and self._reads_file and (found := from_file(name)) is not None:
            return printable(found.value)
        return text

    def get(self, name: str, default: T, parse: Parser[T]) -> T:
        text = self.text(name)
        try:
            return parse(text, name) if text else default
        except ValueError as error:
            self.complain(f"{error}; " + ("ignoring it" if default is None else f"using the default {default!r}"))
            return default

    def complain(self, problem: str) -> None:
        """Once: a setting may be read often."""
        if problem not in self._reported:
            self._reported.add(problem)
            self._complain(problem)


def refused(name: str, expected: str, value: object) -> ValueError:
    # The value may be anything, also a file pasted by mistake.
    shown = f"{value[:40]}…" if isinstance(value, str) and len(value) > 40 else value
    return ValueError(f"{name} must be {expected}, not {shown!r}")


def printable(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def plain_text(text: str, _: str) -> str:
    return text


def parse_bool(text: str, name: str) -> bool:
    if (value := _BOOLEANS.get(text.lower())) is None:
        raise refused(name, "true or false", text)
    return value


def number(kind: type[N], lowest: float | None = None, highest: float | None = None) -> Parser[N]:
    """Finite; both limits are allowed values."""
    expected = "a whole number" if kind is int else "a number"
    if lowest is not None:
        expected += f" from {lowest} to {highest}"

    def parse(text: str, name: str) -> N:
        with suppress(ValueError):
            value = kind(text)
            low, high = (float("-inf"), float("inf")) if lowest is None or highest is None else (lowest, highest)
            if low <= value <= high and abs(value) != float("inf") and text.isascii() and "_" not in text:
                return value
        raise refused(name, expected, text)

    return parse


def one_of(choices: tuple[T, ...], value: object, name: str) -> T:
    for choice in choices:
        if value == choice:
            return choice
    raise refused(name, f"one of {', '.join(map(str, choices))}", value)
