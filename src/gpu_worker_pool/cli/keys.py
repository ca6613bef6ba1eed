"""Keys from the environment that the command line uses, and which variables are secret."""

from __future__ import annotations

from typing import Final

#: Variables that are never shown, and not passed on to other hosts.
SECRETS: Final = frozenset(
    {
        "GPU_POOL_API_KEY",
        "GPU_POOL_API_KEYS",
        "GPU_POOL_ADMIN_KEY",
        "GPU_POOL_ADMIN_KEYS",
        # It may hold a password.
        "GPU_POOL_FLEET_DATABASE",
    }
)
#: Those that a command of `run` does not get. It keeps its user's key, with which it may request more GPUs.
KEPT_FROM_COMMANDS: Final = SECRETS - {"GPU_POOL_API_KEY"}


def admin_key() -> str | None:
    from gpu_worker_pool.environment import Environment  # for those who need only the names

    return Environment().text("GPU_POOL_ADMIN_KEY") or None
