"""The GPU server of a host: run `python -m gpu_worker_pool.gpu_server`, or give `app` to any ASGI server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker_pool.gpu_server.settings import ServerSettings, get_bool_env, get_float_env, get_int_env

if TYPE_CHECKING:
    from fastapi import FastAPI

    app: FastAPI

__all__ = ["ServerSettings", "app", "create_app", "get_bool_env", "get_float_env", "get_int_env"]


def create_app(settings: ServerSettings | None = None) -> FastAPI:
    """Builds an application; without `settings` it reads the environment."""
    from gpu_worker_pool.gpu_server.application import create_app as create  # see `__getattr__`

    return create(settings)


def __getattr__(name: str) -> FastAPI:
    """Builds `app` on first use, so that importing a helper from here does not import FastAPI."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()["app"] = made = create_app()
    return made
