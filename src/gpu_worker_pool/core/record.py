"""How the core's small values are declared: immutable to the type checker, cheap to build."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=False, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """A dataclass that must not be changed after it is built.

    The type checker enforces that, not the interpreter: a frozen dataclass takes four times as long to build, and
    several of these are built for every request. mypy --strict runs on the whole package in `make test`.
    """
    return dataclass(slots=True)(cls)
