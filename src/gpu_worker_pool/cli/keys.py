"""Keys from the environment that the command line uses, and which variables are secret."""

from __future__ import annotations

from typing import Final

#: Variables that are shown to nobody, and passed on to no other host.
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
#: Of these, what a command that `run` starts does not get: with the key of its user it may request more GPUs.
KEPT_FROM_COMMANDS: Final = SECRETS - {"GPU_POOL_API_KEY"}


def admin_key() -> str | None:
    from gpu_worker_pool.environment import Environment  # for those who need only the names

    return Environment().text("GPU_POOL_ADMIN_KEY") or None
