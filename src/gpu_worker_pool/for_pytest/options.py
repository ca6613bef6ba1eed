"""What the marker and the options of pytest ask for."""

from __future__ import annotations

from typing import Any, Final, NoReturn

import pytest

from gpu_worker_pool.cli.quantities import Duration, MemorySize
from gpu_worker_pool.core.requirements import Requirements

#: What the marker may say, and what the request calls it.
_ARGUMENTS: Final = {
    "count": "count",
    "memory": "memory_mb",
    "share": "share",
    "min_free_memory": "min_free_memory_mb",
    "model": "gpu_model",
    "only": "only",
    "exclude": "exclude",
    "policy": "policy",
    "priority": "priority",
}


def options_of(item: pytest.Item) -> dict[str, Any]:
    marker = item.get_closest_marker("gpu_pool")
    if marker is None:
        return {"count": 1}
    unknown = [name for name in marker.kwargs if name not in _ARGUMENTS]
    if marker.args or unknown:
        what = f"has no argument {unknown[0]!r}" if unknown else "takes only keyword arguments"
        fail(f"@pytest.mark.gpu_pool {what}; it has {', '.join(_ARGUMENTS)}")
    options: dict[str, Any] = {"count": 1}
    problem = ""
    try:
        for name, value in marker.kwargs.items():
            is_size = name in ("memory", "min_free_memory") and isinstance(value, str)
            options[_ARGUMENTS[name]] = MemorySize().convert(value, None, None) if is_size else value
        Requirements(**options)
    except Exception as error:
        problem = str(getattr(error, "message", error))
    if problem:
        fail(f"@pytest.mark.gpu_pool: {problem}")
    return options


def seconds_of(text: str) -> float:
    try:
        return Duration().convert(f"{text}s" if text.replace(".", "", 1).isdecimal() else text, None, None)
    except Exception as error:
        raise pytest.UsageError(f"--gpu-pool-timeout: {getattr(error, 'message', error)}") from None


def fail(text: str) -> NoReturn:
    pytest.fail(text, pytrace=False)
