"""Checks values that users and servers give: the error names the field and the value."""

import sys
from datetime import datetime

#: Made once: hundreds of GPUs are checked every few seconds.
NUMBERS = (int, float)


def check_text(name: str, value: object, *, may_be_empty: bool = False) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {value!r}")
    if not (value or may_be_empty):
        raise ValueError(f"{name} must not be empty")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")


def check_datetime(name: str, value: object) -> None:
    if not isinstance(value, datetime):
        raise TypeError(f"{name} must be a datetime, not {value!r}")


def check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {value!r}")
    if value < 0:
        raise ValueError(f"{name} must not be negative, but is {value!r}")


def check_number(name: str, value: object, *, may_be_unknown: bool = True, most: float = sys.float_info.max) -> None:
    if value is None and may_be_unknown:
        return
    if not isinstance(value, NUMBERS) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number{' or None' if may_be_unknown else ''}, not {value!r}")
    # False for NaN and infinity, and for integers that no float can hold.
    if not 0 <= value <= most:
        raise ValueError(
            f"{name} must be {'from 0 to 100' if most == 100 else 'finite and not negative'}, but is {value!r}"
        )


def check_percent(name: str, value: object) -> None:
    check_number(name, value, most=100)


def check_at_most(name: str, value: float | None, limit_name: str, limit: float | None) -> None:
    if value is not None and limit is not None and value > limit:
        raise ValueError(f"{name} must be at most {limit_name} {limit!r}, but is {value!r}")


def check_endpoint_id(name: str, value: object) -> None:
    check_text(name, value)
    if ":" in str(value):
        raise ValueError(f"{name} must not contain ':', which separates it from the GPU in a global id: {value!r}")
