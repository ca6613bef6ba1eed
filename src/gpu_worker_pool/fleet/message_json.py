"""The messages of a fleet as JSON objects.

A message of another version may have fields that this one does not know, which are ignored, and may lack others, which
have defaults. Whatever is decoded is bounded, and of the declared types: otherwise `MessageError` is raised.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.core.saved import REQUEST_FIELDS, request_of, to_json
from gpu_worker_pool.fleet.messages import (
    Administer,
    Answer,
    Ask,
    AskAbandoned,
    Call,
    CallAnswer,
    Cancel,
    End,
    EndedRow,
    EpochRefused,
    GPURow,
    HostLease,
    HostOrder,
    HostWaiter,
    Join,
    Place,
    Placed,
    PlaceRefused,
    PollEnded,
    Query,
    Report,
    ReportWanted,
    TurnedAway,
    Welcome,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_worker_pool.core.events import Request
    from gpu_worker_pool.fleet.messages import Message

LONGEST_TEXT: Final = 4000
MOST_ROWS: Final = 10_000
#: What `body` and `arguments` may hold, counted in values.
MOST_VALUES: Final = 200_000


class MessageError(ValueError):
    """What a peer sent is not a valid message."""


_KINDS: Final[dict[str, type[Any]]] = {
    kind.__name__: kind
    for kind in (
        Join,
        Report,
        Placed,
        PlaceRefused,
        EpochRefused,
        Ask,
        AskAbandoned,
        Cancel,
        Query,
        Administer,
        Call,
        CallAnswer,
        Welcome,
        TurnedAway,
        Place,
        End,
        HostOrder,
        PollEnded,
        ReportWanted,
        Answer,
    )
}


def encode(message: Message) -> dict[str, Any]:
    """As a JSON object; `type` names the message. What has its default is left out."""
    row = _row(message)
    row["type"] = type(message).__name__
    return row


def decode(row: object) -> Message:
    """Raises `MessageError` for anything else."""
    if not isinstance(row, dict):
        raise MessageError("a message must be a JSON object")
    name = row.get("type")
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise MessageError(f"there is no message of the type {str(name)[:40]!r}")
    message: Message = _value(kind, row)
    return message


def _row(value: Any) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, write, _, default, has_default in _fields(type(value)):
        found = getattr(value, name)
        if not (has_default and found == default):
            row[name] = found if write is None else write(found)
    return row


def _value(kind: type[Any], row: object) -> Any:
    if not isinstance(row, dict):
        raise MessageError(f"{kind.__name__} must be an object")
    found: dict[str, Any] = {}
    for name, _, read, _, has_default in _fields(kind):
        if name in row:
            try:
                found[name] = read(row[name])
            except MessageError as error:
                raise MessageError(f"{kind.__name__}.{name}: {error}") from None
        elif not has_default:
            raise MessageError(f"{kind.__name__} has no {name}")
    return kind(**found)


def _fields(kind: type[Any]) -> tuple[_Field, ...]:
    known = _FIELDS.get(kind)
    if known is None:
        rows = []
        for each in fields(kind):
            write, read = _CODECS[str(each.type)]
            has_default = each.default is not MISSING or each.default_factory is not MISSING
            default = each.default
            if each.default_factory is not MISSING:
                default = each.default_factory()
            rows.append((each.name, write, read, default, has_default))
        known = _FIELDS[kind] = tuple(rows)
    return known


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > LONGEST_TEXT:
        raise MessageError(f"must be a text of at most {LONGEST_TEXT} characters")
    return value


def _integer(value: object) -> int:
    if type(value) is not int or not -(2**53) <= value <= 2**53:
        raise MessageError("must be a whole number")
    return value


def _number(value: object) -> float:
    try:
        found = float(value) if type(value) in (int, float) else math.nan  # type: ignore[arg-type]
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise MessageError("must be a number")
    return found


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise MessageError("must be true or false")
    return value


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict) or _size(value) > MOST_VALUES:
        raise MessageError(f"must be an object of at most {MOST_VALUES} values")
    return value


def _numbers(value: object) -> dict[str, int]:
    if not isinstance(value, dict) or len(value) > MOST_ROWS:
        raise MessageError(f"must be an object of at most {MOST_ROWS} numbers")
    return {_text(name): _integer(number) for name, number in value.items()}


def _size(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(_size, value.values()))
    return 1 + sum(map(_size, value)) if isinstance(value, list) else 1


def _request(value: object) -> Request:
    if not isinstance(value, dict):
        raise MessageError("must be a request")
    try:
        # Unknown fields of a newer version are ignored; an unknown requirement must not be, and is refused.
        request = request_of({name: each for name, each in value.items() if name in REQUEST_FIELDS})
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise MessageError(f"must be a request: {str(error)[:200]}") from None
    for each in (request.request_id, request.worker_id, request.owner, request.account, request.process):
        _text(each)
    for seconds in (request.ttl_seconds, request.expected_seconds, request.max_seconds):
        if seconds is not None:
            _number(seconds)
    return request


def _maybe(read: Callable[[object], Any]) -> Callable[[object], Any]:
    return lambda value: None if value is None else read(value)


def _many(read: Callable[[object], Any]) -> Callable[[object], Any]:
    def read_all(value: object) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) > MOST_ROWS:
            raise MessageError(f"must be a list of at most {MOST_ROWS}")
        return tuple([read(each) for each in value])

    return read_all


def _rows(kind: type[Any]) -> tuple[Callable[[Any], Any], Callable[[object], Any]]:
    return (lambda rows: [_row(each) for each in rows]), _many(lambda row: _value(kind, row))


_Field = tuple[str, "Callable[[Any], Any] | None", "Callable[[object], Any]", Any, bool]
_FIELDS: Final[dict[type[Any], tuple[_Field, ...]]] = {}
#: How a field of each declared type is written (None: as it is) and read.
_CODECS: Final[dict[str, tuple[Callable[[Any], Any] | None, Callable[[object], Any]]]] = {
    "str": (None, _text),
    "str | None": (None, _maybe(_text)),
    "int": (None, _integer),
    "int | None": (None, _maybe(_integer)),
    "float": (None, _number),
    "float | None": (None, _maybe(_number)),
    "bool": (None, _flag),
    "tuple[str, ...]": (list, _many(_text)),
    "tuple[int, ...]": (list, _many(_integer)),
    "Mapping[str, Any]": (dict, _object),
    "Mapping[str, int]": (dict, _numbers),
    "Request": (to_json, _request),
    "HostLease": (_row, lambda row: _value(HostLease, row)),
    "EndedRow | None": (
        lambda found: None if found is None else _row(found),
        _maybe(lambda row: _value(EndedRow, row)),
    ),
    "tuple[GPURow, ...]": _rows(GPURow),
    "tuple[HostLease, ...]": _rows(HostLease),
    "tuple[HostWaiter, ...]": _rows(HostWaiter),
    "tuple[EndedRow, ...]": _rows(EndedRow),
}
