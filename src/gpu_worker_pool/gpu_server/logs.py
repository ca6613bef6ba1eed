"""Configures the server's log: a format of the standard library, or one JSON object per line."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from gpu_worker_pool.gpu_server.settings import ServerSettings


#: What every record has, and uvicorn's colours for terminals; all else was passed as `extra=`.
_NOT_EXTRA: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class JSONFormatter(logging.Formatter):
    """Never fails: a line that cannot be written would hide what it is about."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            entry["stack"] = self.formatStack(record.stack_info)
        extra = {name: value for name, value in vars(record).items() if name not in _NOT_EXTRA and name not in entry}
        try:
            return _as_json(entry | extra)
        except Exception:  # whatever the code of a value raises
            return _as_json(entry | {name: _written(value) for name, value in extra.items()})


def _as_json(value: object) -> str:
    return json.dumps(value, allow_nan=False, default=str)


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # as above, or arguments that do not fit the text
        return f"{_shown(record.msg)} {_shown(record.args)}"


def _written(value: object) -> object:
    """The value where JSON has such a one, else a text."""
    try:
        return json.loads(_as_json(value))
    except Exception:
        return _shown(value)


def _shown(value: object) -> str:
    try:
        return str(value)
    except Exception:
        return f"<a {type(value).__name__} that cannot be shown>"


def _formatter(log_format: str) -> dict[str, Any]:
    return {"()": JSONFormatter} if log_format == "json" else {"format": log_format}


def logging_config(settings: ServerSettings) -> dict[str, Any]:
    """For `logging.config.dictConfig`: all messages, also uvicorn's, in one format on standard error."""
    level = settings.log_level.upper()
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": _formatter(settings.log_format)},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "plain"}},
        "root": {"handlers": ["stderr"], "level": "WARNING"},
        "loggers": {
            "gpu_worker_pool": {"level": level},
            "uvicorn": {"level": level},
            "uvicorn.access": {"level": level if settings.access_log else "CRITICAL"},
        },
    }


def log_like_a_server(settings: ServerSettings) -> None:
    """For a server that was started with `uvicorn`, which configures only its own loggers."""
    ours = logging.getLogger("gpu_worker_pool")
    if ours.hasHandlers():
        return
    handler = logging.StreamHandler()
    is_json = settings.log_format == "json"
    handler.setFormatter(JSONFormatter() if is_json else logging.Formatter(settings.log_format))
    ours.addHandler(handler)
    ours.setLevel(settings.log_level.upper())
