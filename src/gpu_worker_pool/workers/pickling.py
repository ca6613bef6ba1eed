"""Pickles tasks, results and exceptions, so that what cannot be pickled is an error of its task alone."""

from __future__ import annotations

import pickle
import sys
import traceback
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class RemoteTracebackError(Exception):
    """The cause of an exception that was raised in a worker: it shows the traceback there."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


def dumps(value: object) -> bytes:
    """As `multiprocessing` does it, with what libraries have registered there."""
    return bytes(ForkingPickler.dumps(value))


def pickled_task(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Raises a `TypeError` that says what to do about a function that a worker cannot get."""
    name = name_of(function)
    module = getattr(function, "__module__", None)
    task = (function, args, kwargs)
    is_homeless = module == "__main__" and not _is_main_importable()
    if is_homeless and (by_value := _cloudpickle()) is not None:
        return by_value(task)
    if is_homeless:
        raise TypeError(
            f"{name} is defined in an interactive session, which worker processes cannot import: put it into a module "
            "and import it from there, or `pip install cloudpickle`"
        )
    try:
        return dumps(task)
    except Exception as error:
        what, advice = f"an argument of {name}", "pass what a worker can make it from, such as a path"
        if not _can_be_pickled(function):
            is_inner = "<lambda>" in name or "<locals>" in name
            what = f"{name}, which is not defined at the top level of a module," if is_inner else name
            advice = "define the function at the top level of a module"
        raise TypeError(
            f"{what} cannot be pickled, and so cannot be sent to a worker process "
            f"({type(error).__name__}: {error}): {advice}"
        ) from error


def _can_be_pickled(value: object) -> bool:
    try:
        dumps(value)
    except Exception:
        return False
    return True


def pickled_value(value: object, name: str) -> bytes:
    try:
        return dumps(value)
    except Exception as error:
        raise TypeError(
            f"the result of {name} cannot be pickled, and so cannot be sent back ({type(error).__name__}: {error})"
        ) from error


def pickled_exception(error: BaseException) -> bytes:
    """With its traceback; an exception that cannot be pickled, or read again, becomes a `RuntimeError`."""
    text = "".join(traceback.format_exception(error))
    for name in ("__traceback__", "__cause__", "__context__"):  # they are in the text
        object.__setattr__(error, name, None)  # also where the class allows no changes, as a frozen dataclass
    with suppress(Exception):
        pickled = dumps((error, text))
        found, _ = pickle.loads(pickled)  # noqa: S301  # our own
        if isinstance(found, BaseException):
            return pickled
    return dumps((RuntimeError(f"{_said(error)} (this exception cannot be pickled)"), text))


def unpickled_value(payload: bytes, name: str) -> Any:
    """Of a worker, which runs the code of this program."""
    try:
        return pickle.loads(payload)  # noqa: S301
    except BaseException as error:  # whatever its own code raises, it is an error of this task alone
        raise RuntimeError(f"the result of {name} cannot be unpickled here ({_said(error)})") from error


def unpickled_exception(payload: bytes) -> BaseException:
    try:
        error, text = pickle.loads(payload)  # noqa: S301
        if not isinstance(error, BaseException):
            raise TypeError(f"it is not an exception, but {type(error).__name__}")  # noqa: TRY301
        object.__setattr__(error, "__cause__", RemoteTracebackError(text))
    except BaseException as failure:  # as above
        return RuntimeError(f"the task raised an exception that cannot be unpickled here ({_said(failure)})")
    return error


def _said(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # its text is made by the user's code, too
        return type(error).__name__


def name_of(function: Callable[..., Any]) -> str:
    inner = getattr(function, "func", None)  # a partial
    if callable(inner):
        return name_of(inner)
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _is_main_importable() -> bool:
    main = sys.modules.get("__main__")
    return getattr(main, "__spec__", None) is not None or getattr(main, "__file__", None) is not None


@lru_cache(maxsize=1)
def _cloudpickle() -> Callable[[object], bytes] | None:
    """It pickles functions by value; it is not needed for those that can be imported."""
    try:
        found: Callable[[object], bytes] = import_module("cloudpickle").dumps
    except ImportError:
        return None
    return found
