"""The worker processes of a client: an executor for each kind of call, at the client's endpoints."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.config import LOCAL_ENDPOINT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from gpu_worker_pool.config import EndpointConfig, PoolConfig
    from gpu_worker_pool.workers.executor import GPUProcessPoolExecutor

#: Variables of the lease process that come from the client alone if it was given an environment.
_OURS = ("GPU_", "CUDA_VISIBLE_DEVICES")


class Processes:
    def __init__(
        self, config: PoolConfig, endpoints: Callable[[], Iterable[EndpointConfig]], environ: Mapping[str, str] | None
    ) -> None:
        """`endpoints`: as the client uses them now."""
        self._config = config
        self._endpoints = endpoints
        self._environ = environ
        self._executors: dict[str, GPUProcessPoolExecutor] = {}

    def executor(self, arguments: Mapping[str, Any]) -> GPUProcessPoolExecutor:
        """The one of calls with these arguments."""
        # Here: most clients have no worker processes.
        from gpu_worker_pool.workers.executor import GPUProcessPoolExecutor

        kind = repr(sorted(arguments.items()))
        for other, executor in self._executors.items():
            if other != kind:
                executor.release_idle()  # this call may need what they keep for others
        found = self._executors.get(kind)
        if found is None or found.is_broken:  # what broke it may be over: the next call tries again
            config = self._config
            own = {"lease_ttl": config.lease_ttl, "service_endpoints": self._urls(), "_variables": self._variables()}
            found = self._executors[kind] = GPUProcessPoolExecutor(**{**own, **arguments})
        return found

    async def stop(self) -> None:
        """Cancel the calls that have not begun, wait for the others, and give every GPU back."""
        executors, self._executors = self._executors, {}
        for executor in executors.values():
            executor.shutdown(wait=False, cancel_futures=True)
        for executor in executors.values():
            await asyncio.to_thread(executor.shutdown)

    def _urls(self) -> list[str]:
        found = self._endpoints()
        return [each.url if each.url == LOCAL_ENDPOINT else f"{each.endpoint_id}={each.url}" for each in found]

    def _variables(self) -> dict[str, str | None]:
        """The settings of the client, as its lease process reads them."""
        config = self._config
        environ: dict[str, str | None] = {} if self._environ is None else dict(self._environ)
        if self._environ is not None:
            # What this process has and the client was not given must not count.
            environ = dict.fromkeys((name for name in os.environ if name.startswith(_OURS)), None) | environ
        own = {
            "GPU_POOL_GPU_NAMES": config.gpu_names,
            "GPU_POOL_API_KEY": config.api_key or "",
            "GPU_POOL_ALLOW_INSECURE_KEY": "1" if config.allow_insecure_key else "",
            "GPU_ENDPOINT_TIMEOUT": f"{config.endpoint_timeout:g}",
            "GPU_MEMORY_THRESHOLD_PERCENT": f"{config.memory_threshold:g}",
            "GPU_UTILIZATION_THRESHOLD_PERCENT": f"{config.utilization_threshold:g}",
        }
        return environ | own
