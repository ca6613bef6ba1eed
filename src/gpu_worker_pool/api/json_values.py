"""Parses hostile JSON and reads single values out of it.

A reader never invents a value: what is missing or wrong becomes None (or a stated default), and what is wrong is noted.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from math import inf
from typing import Any, Final

from gpu_worker_pool.errors import ServiceRetryableError

LARGEST_BODY_BYTES: Final = 8 * 1024 * 1024
#: Refuses infinity, and integers that no float can hold.
LARGEST_NUMBER: Final = sys.float_info.max
LONGEST_SENTENCE: Final = 300
#: A UUID may end up in `CUDA_VISIBLE_DEVICES`, where a comma or a space would mean another GPU.
UUID_PATTERN: Final = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
#: Values in a body, at most. Small ones such as `[]` become 30 times their own size in memory.
_MOST_VALUES: Final = 500_000

#: Takes a value, its name, and the list of problems to which it adds a sentence if the value is bad.
FieldReader = Callable[[object, str, list[str]], Any]


class _Marker:
    """Stands where JSON has no usable value; no reader accepts it as one."""

    def __init__(self, words: str) -> None:
        self._words = words

    def __str__(self) -> str:
        return self._words


MISSING: Final = _Marker("missing")
_GIVEN_TWICE: Final = _Marker("given twice")


# --- readers ---


def number(largest: float = LARGEST_NUMBER, least: float = 0.0) -> FieldReader:
    return _reader(lambda value: is_number(value, largest, least))


def whole_number(largest: int = 2**53 - 1) -> FieldReader:
    return _reader(lambda value: type(value) is int and 0 <= value <= largest)


def matching(pattern: re.Pattern[str]) -> FieldReader:
    return _reader(lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None)


def seconds() -> FieldReader:
    """How long something has lasted: a hundred years are more than any host has been up."""
    return number(100 * 366 * 86_400)


def flag(default: bool) -> FieldReader:
    """The one value that may be left out, but not be null."""
    return _reader(lambda value: value is True or value is False, default=default, null_is_known=False)


def text(longest: int = LONGEST_SENTENCE, default: str | None = None) -> FieldReader:
    return _reader(lambda value: isinstance(value, str), lambda value: cleaned(value, longest), default)


def record(fields: Mapping[str, FieldReader], key: str | None = None) -> FieldReader:
    """An object of these fields and no others; None, too, where `key` is missing or bad."""
    read = _reader(lambda value: isinstance(value, dict))

    def read_record(value: object, name: str, problems: list[str]) -> dict[str, Any] | None:
        found = read(value, name, problems)
        if found is None:
            return None
        prefix = f"{name}." if name else ""
        row = {field: reader(found.get(field, MISSING), prefix + field, problems) for field, reader in fields.items()}
        return None if key is not None and row[key] is None else row

    return read_record


def listed(reader: FieldReader, most: int, default: Callable[[], list[Any] | None] = lambda: None) -> FieldReader:
    """The first `most` of a list, without those that cannot be used."""
    read = _reader(lambda value: isinstance(value, list))

    def read_list(value: object, name: str, problems: list[str]) -> list[Any] | None:
        found = read(value, name, problems)
        if found is None:
            return default()
        rows = [reader(each, f"{name}[{index}]", problems) for index, each in enumerate(found[:most])]
        if None in rows:
            problems.append(f"{name} has a row that cannot be used")
        return [row for row in rows if row is not None]

    return read_list


def _reader(
    is_good: Callable[[Any], bool],
    convert: Callable[[Any], Any] | None = None,
    default: object = None,
    *,
    null_is_known: bool = True,
) -> FieldReader:
    def read(value: object, name: str, problems: list[str]) -> Any:
        if value is MISSING or (value is None and null_is_known):
            return default
        if is_good(value):
            return value if convert is None else convert(value)
        problems.append(f"{name} is {shown(value)}")
        return default

    return read


def is_number(value: object, largest: float = LARGEST_NUMBER, least: float = 0.0) -> bool:
    # By exact type: a bool is an int, and nothing else that JSON has is a subclass. NaN fails the comparison.
    return (type(value) is float or type(value) is int) and least <= value <= largest


def cleaned(text: str, longest: int) -> str:
    """Safe to log and to show: one line, no control characters, no direction marks, not too long."""
    if len(text) <= longest and text.isprintable():
        return text
    shown = "".join(letter for letter in text[:longest] if letter.isprintable()).strip()
    return f"{shown}…" if len(text) > longest else shown


def shown(value: object) -> str:
    """The value for a message: short, whatever it is."""
    match value:
        case list():
            return "a list"
        case dict():
            return "an object"
        case str():
            return repr(cleaned(value, 40))
        case None:
            return "missing"
        case bool():
            return str(value).lower()
        case _:
            return cleaned(str(value), 40)


# --- JSON ---


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        for key, times in Counter(key for key, _ in pairs).items():
            if times > 1:
                found[key] = _GIVEN_TWICE
    return found


def _integer(digits: str) -> float:
    # Python refuses to read integers of thousands of digits; that must spoil their field, not the reply.
    return int(digits) if len(digits) < 300 else inf


_QUICK: Final = json.JSONDecoder()
#: Three times as slow. It notices keys that are given twice, and survives huge integers.
_THOROUGH: Final = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer)


def parse_json(body: bytes, has_every_key: Callable[[object, str], bool] | None = None) -> object:
    """Raises a `ServiceRetryableError` for a body that is not JSON, or too large.

    `has_every_key(value, text)` allows the quick parser: it says whether that one cannot have dropped a repeated key.
    """
    if len(body) > LARGEST_BODY_BYTES:
        raise ServiceRetryableError(f"the reply has {len(body)} bytes; at most {LARGEST_BODY_BYTES} are read")
    # Every value takes a byte at least, and every one but the first begins behind one of these.
    if len(body) > _MOST_VALUES and body.count(b",") + body.count(b"[") + body.count(b"{") > _MOST_VALUES:
        raise ServiceRetryableError(f"the reply has more than {_MOST_VALUES} values")
    try:
        text = body.decode("utf-8")
        if has_every_key is not None:
            try:
                reply: object = _QUICK.decode(text)
            except json.JSONDecodeError:
                raise
            except ValueError:  # an integer of thousands of digits
                return _THOROUGH.decode(text)
            if has_every_key(reply, text):
                return reply
        return _THOROUGH.decode(text)
    except UnicodeDecodeError as error:
        raise ServiceRetryableError(f"the reply is not UTF-8: {error.reason} (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise ServiceRetryableError(f"the reply is not JSON: {error.msg} (character {error.pos})") from None
    except RecursionError:
        raise ServiceRetryableError("the reply is nested too deeply") from None


# --- envelopes ---


def json_object(body: bytes, has_every_key: Callable[[object, str], bool] | None = None) -> dict[str, Any]:
    reply = parse_json(body, has_every_key)
    if not isinstance(reply, dict):
        raise ServiceRetryableError(f"the reply must be a JSON object, not {shown(reply)}")
    return reply


def envelope(body: bytes, name: str, has_every_key: Callable[[object, str], bool] | None = None) -> dict[str, Any]:
    reply = json_object(body, has_every_key)
    if not isinstance(reply.get(name), list):
        raise ServiceRetryableError(f"the reply must have a list {name}, not {shown(reply.get(name))}")
    return reply
