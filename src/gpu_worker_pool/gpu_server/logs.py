"""Configures the server's log: a format of the standard library, or one JSON object per line."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_worker_pool.gpu_server.settings import ServerSettings


class JSONFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


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
