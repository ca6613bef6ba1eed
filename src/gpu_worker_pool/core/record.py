"""How small values are declared: immutable to the type checker, and cheap to build and to load."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=False, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """A dataclass that must not be changed after it is built.

    The type checker enforces that, not the interpreter: a frozen dataclass takes four times as long to build, and
    several of these are built for every request. mypy --strict runs on the whole package in `make test`.
    """
    return _made(cls, is_frozen=False)


@dataclass_transform(frozen_default=True, kw_only_default=False, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """A dataclass that cannot be changed, and can be a key: for what is built seldom."""
    return _made(cls, is_frozen=True)


def _made(cls: type[T], *, is_frozen: bool) -> type[T]:
    """Comparison and repr are shared, not compiled for each class: every command loads all of these classes."""
    if cls.__doc__ is None:
        cls.__doc__ = cls.__name__  # a dataclass without one gets its signature, which takes longer than all the rest
    made: Any = dataclass(slots=True, eq=False, repr=False, frozen=is_frozen)(cls)
    fields = made.__dataclass_fields__.values()
    compared = tuple(one.name for one in fields if one.compare)
    if compared and "__eq__" not in vars(cls):
        values = attrgetter(*compared)

        def equals(self: Any, other: object) -> Any:
            return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

        def hashed(self: Any) -> int:
            return hash(values(self))

        made.__eq__ = equals
        made.__hash__ = hashed if is_frozen else None
    if "__repr__" not in vars(cls):
        shown = tuple(one.name for one in fields if one.repr)

        def show(self: Any) -> str:
            values = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
            return f"{type(self).__qualname__}({values})"

        made.__repr__ = show
    return made  # type: ignore[no-any-return]
