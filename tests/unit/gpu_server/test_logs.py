"""`LOG_FORMAT=json`: every line is one JSON object with everything that was logged."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool.gpu_server.logs import JSONFormatter


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("not even this")


def logged(message: str = "hello %s", *args: object, **options: Any) -> dict[str, Any]:
    """The line of a record, as the formatter of a real logger writes it."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.setFormatter(JSONFormatter())
    handler.emit = lambda record: lines.append(handler.format(record))  # type: ignore[method-assign]
    logger = logging.Logger("test")  # not in the tree of loggers, so that no other handler has it
    logger.addHandler(handler)
    logger.error(message, *(args or ("you",)), **options)
    (line,) = lines
    assert "\n" not in line
    found: dict[str, Any] = json.loads(line, parse_constant=pytest.fail)
    return found


def test_extra_fields_are_kept() -> None:
    found = logged(extra={"event": "endpoint_down", "endpoint_id": "a", "seconds": 1.5, "gpus": [0, 2], "why": None})
    assert (
        found.items() >= {"level": "error", "logger": "test", "message": "hello you", "event": "endpoint_down"}.items()
    )
    assert (found["endpoint_id"], found["seconds"], found["gpus"], found["why"]) == ("a", 1.5, [0, 2], None)
    assert set(found) - {"time", "level", "logger", "message"} == {"event", "endpoint_id", "seconds", "gpus", "why"}


def test_fields_of_the_line_itself_and_colours_of_uvicorn_are_not_replaced_or_shown() -> None:
    found = logged(extra={"level": "mine", "time": 0, "logger": "mine", "color_message": "\x1b[1mhello"})
    assert (found["level"], found["logger"], found["message"]) == ("error", "test", "hello you")
    assert set(found) == {"time", "level", "logger", "message"}


def test_a_value_that_is_not_json_is_written_as_text() -> None:
    loop: list[Any] = []
    loop.append(loop)
    deep: list[Any] = []
    for _ in range(sys.getrecursionlimit()):
        deep = [deep]
    values = {
        "path": Path("/x"),
        "nan": float("nan"),
        "inf": [float("inf")],
        "loop": loop,
        "deep": deep,
        "keys": {(1, 2): "x"},
        "bytes": b"\xff",
        "broken": Broken(),
        "inside": [Broken()],
        "surrogate": "\udcff",
        "words": {"b"},
    }
    found = logged(extra=values)
    assert found["path"] == "/x"
    assert found["surrogate"] == "\udcff"
    assert all(isinstance(found[name], str) for name in values.keys() - {"inf", "inside"})
    assert "Broken" in found["broken"]
    assert {"level", "message"} <= found.keys()


def test_a_message_whose_arguments_do_not_fit_is_written_as_well_as_it_can_be() -> None:
    assert "%d GPUs" in logged("%d GPUs", "many")["message"]
    assert "many" in logged("%d GPUs", "many")["message"]
    assert logged("%s", Broken())["message"]


def test_an_exception_and_a_stack() -> None:
    try:
        int("first\nsecond")
    except ValueError:
        found = logged(exc_info=True, stack_info=True)
    assert found["exception"].startswith("Traceback")
    assert "\nValueError: " in found["exception"]
    assert found["stack"].startswith("Stack (most recent call last)")
