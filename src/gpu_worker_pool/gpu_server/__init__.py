"""The GPU statistics server, one a host: `python -m gpu_worker_pool.gpu_server`, or any ASGI server with `app`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker_pool.gpu_server.settings import ServerSettings, get_bool_env, get_float_env, get_int_env

if TYPE_CHECKING:
    from fastapi import FastAPI

    app: FastAPI

__all__ = ["ServerSettings", "app", "create_app", "get_bool_env", "get_float_env", "get_int_env"]


def create_app(settings: ServerSettings | None = None) -> FastAPI:
    """An application of its own; without `settings` it goes by the environment."""
    from gpu_worker_pool.gpu_server.application import create_app as create  # see `__getattr__`

    return create(settings)


def __getattr__(name: str) -> FastAPI:
    """`app` is made when it is first asked for: whoever needs only a helper from here waits for no FastAPI."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()["app"] = made = create_app()
    return made
