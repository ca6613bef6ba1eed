"""Rules 1 to 3 and 5: which GPUs a request could have now, which is best, and whether any ever could serve it.

It keeps the readings. Requests for any GPU are answered from an index of free GPUs.
"""

from __future__ import annotations

import math
from dataclasses import replace
from heapq import nsmallest
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.core.balancing import balancer_for
from gpu_worker_pool.core.free_hosts import FreeHosts
from gpu_worker_pool.core.gpus import EndpointState, GPUResourceState
from gpu_worker_pool.core.inside import obstacles_inside
from gpu_worker_pool.core.obstacles import by_index, lasting_obstacles, obstacles, reading_obstacles
from gpu_worker_pool.core.requirements import ANY_GPU
from gpu_worker_pool.core.topology import best_linked

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from gpu_worker_pool.core.assignments import HeldGPU
    from gpu_worker_pool.core.inside import Enclosure
    from gpu_worker_pool.core.readings import Reading
    from gpu_worker_pool.core.requirements import Requirements
    from gpu_worker_pool.core.settings import PoolSettings


class GPUAllocator:
    """Belongs to one thread."""

    def __init__(self, settings: PoolSettings) -> None:
        self.settings = settings
        self.endpoints: dict[str, EndpointState] = {}
        self.gpus: dict[str, GPUResourceState] = {}
        #: GPUs that were released and not granted since, while fresh readings of them are wanted (rule 8).
        self.freed: dict[str, GPUResourceState] = {}
        #: When the newest of all readings began.
        self.read_at: float = -math.inf
        self._balancer = balancer_for(settings.strategy)
        self._reading_max_age_seconds = settings.reading_max_age_seconds
        #: Whether a request for any GPU is surely possible, so that `impossible` need not look.
        self._is_any_gpu_possible = min(settings.memory_threshold_percent, settings.utilization_threshold_percent) > 0
        #: The endpoints with a free GPU, as the balancing strategy ranks them; unused while there is only one.
        self._free_hosts = FreeHosts()
        self._only_endpoint: EndpointState | None = None

    # Readings

    def observe(self, endpoint_id: str, readings: Iterable[Reading], begun_at: float) -> bool:
        """Store the readings of an endpoint; False if newer ones are known already."""
        endpoint = self.endpoint(endpoint_id)
        if not begun_at >= endpoint.begun_at:
            return False
        endpoint.begun_at = begun_at
        self.read_at = max(self.read_at, begun_at)
        endpoint.is_answering = True
        endpoint.is_removed = False
        seen = set()
        for reading in readings:
            gpu = self.gpu(reading.gpu_id, endpoint_id)
            # A GPU that is listed twice counts once, and belongs to the endpoint that showed it first.
            if gpu.endpoint is endpoint and gpu.gpu_id not in seen:
                seen.add(gpu.gpu_id)
                self._set_reading(gpu, reading, begun_at)
        endpoint.present = len(seen)
        for gpu in endpoint.gpus.values():
            if gpu.gpu_id not in seen:
                self._set_reading(gpu, None)
            self._index(gpu)
        self._rank(endpoint)
        return True

    def forget_readings(self, endpoint_id: str) -> None:
        """The endpoint does not answer; its last readings no longer count."""
        endpoint = self.endpoint(endpoint_id)
        endpoint.present = 0
        endpoint.is_answering = False
        for gpu in endpoint.gpus.values():
            self._set_reading(gpu, None)
            endpoint.free.discard(gpu)
        self._rank(endpoint)

    def remove(self, endpoint_id: str) -> None:
        """The endpoint is no longer used. Its GPUs are remembered for the leases on them, and if it is used again."""
        endpoint = self.endpoint(endpoint_id)
        endpoint.is_removed = True
        for gpu in endpoint.gpus.values():
            gpu.is_gone = True

    def mark_gone(self, gpu: GPUResourceState) -> None:
        endpoint = gpu.endpoint
        if gpu.reading is not None:
            endpoint.present -= 1
            self._set_reading(gpu, None)
            endpoint.free.discard(gpu)
            self._rank(endpoint)
        gpu.is_gone = True

    def endpoint(self, endpoint_id: str) -> EndpointState:
        endpoint = self.endpoints.get(endpoint_id)
        if endpoint is None:
            endpoint = self.endpoints[endpoint_id] = EndpointState(endpoint_id, len(self.endpoints))
            self._only_endpoint = endpoint if len(self.endpoints) == 1 else None
            if len(self.endpoints) == 2:
                for known in self.endpoints.values():
                    self._rank(known)
        return endpoint

    def gpu(self, gpu_id: str, endpoint_id: str) -> GPUResourceState:
        gpu = self.gpus.get(gpu_id)
        if gpu is None:
            endpoint = self.endpoint(endpoint_id)
            gpu = self.gpus[gpu_id] = endpoint.gpus[gpu_id] = GPUResourceState(gpu_id, endpoint)
        return gpu

    # Rule 1: eligible

    def is_eligible(
        self, gpu: GPUResourceState, requirements: Requirements, now: float, around: Enclosure | None = None
    ) -> bool:
        """`around`: the lease inside which the request runs, to which the GPU belongs."""
        if around is not None:
            return next(obstacles_inside(gpu, requirements, around, self.settings, now), None) is None
        return next(obstacles(gpu, requirements, self.settings, now), None) is None

    def is_any_gpu(self, requirements: Requirements) -> bool:
        """Whether any free GPU meets these requirements: they name a number, or only what all GPUs have in common."""
        if requirements is ANY_GPU:
            return True
        settings = self.settings
        if requirements.memory_threshold == settings.memory_threshold_percent:
            requirements = replace(requirements, memory_threshold=None)
        if requirements.utilization_threshold == settings.utilization_threshold_percent:
            requirements = replace(requirements, utilization_threshold=None)
        return replace(requirements, count=1, priority=0) == ANY_GPU

    def is_fresh(self, endpoint: EndpointState, now: float) -> bool:
        return now - endpoint.begun_at <= self._reading_max_age_seconds

    def available(self, now: float) -> int:
        """How many GPUs a request for any GPU could have."""
        return sum(len(endpoint.free) for endpoint in self.endpoints.values() if self.is_fresh(endpoint, now))

    # Rule 3: the best

    def best_free(self, count: int, reserved: Collection[str], now: float) -> tuple[GPUResourceState, ...] | None:
        """The best GPUs of the index, for a request that only says how many."""
        endpoint = self._only_endpoint
        if endpoint is None:
            endpoint = self._free_hosts.first(
                count, self._balancer.rank, lambda endpoint: self.number_free(endpoint, count, reserved, now) >= count
            )
            if endpoint is None:
                return None
        elif now - endpoint.begun_at > self._reading_max_age_seconds:
            return None
        if count == 1 and not reserved:
            gpu = endpoint.free.best()
            return None if gpu is None else (gpu,)
        may_be_mig = count == 1
        is_choosing = count > 1 and endpoint.has_distances
        found = endpoint.free.best_of(
            len(endpoint.free) if is_choosing else count,
            lambda gpu: gpu.gpu_id not in reserved and (may_be_mig or not gpu.is_mig_device),
        )
        if len(found) < count:
            return None
        return best_linked(found, count) if is_choosing else tuple(found)

    def number_free(self, endpoint: EndpointState, count: int, reserved: Collection[str], now: float) -> int:
        """How many GPUs of its index a request for `count` of them could choose from."""
        if now - endpoint.begun_at > self._reading_max_age_seconds:
            return 0
        free = len(endpoint.free)
        if count > 1 and endpoint.has_mig_devices:
            return sum(not gpu.is_mig_device and gpu.gpu_id not in reserved for gpu in endpoint.free)
        return free - sum(gpu_id in endpoint.gpus and endpoint.gpus[gpu_id] in endpoint.free for gpu_id in reserved)

    def best(
        self,
        requirements: Requirements,
        candidates: Iterable[GPUResourceState],
        reserved: Collection[str],
        now: float,
        around: Enclosure | None = None,
    ) -> tuple[GPUResourceState, ...] | None:
        """The best GPUs for any requirements, all of one endpoint; None if there are too few."""
        eligible: dict[EndpointState, list[GPUResourceState]] = {}
        for gpu in candidates:
            if gpu.gpu_id not in reserved and self.is_eligible(gpu, requirements, now, around):
                eligible.setdefault(gpu.endpoint, []).append(gpu)
        able = [endpoint for endpoint, gpus in eligible.items() if len(gpus) >= requirements.count]
        if not able:
            return None
        rank = _rank_for_share if requirements.share else _rank_for_one
        if requirements.share and self.settings.strategy == "pack":
            # The fullest cards that are enough, wherever they are.
            endpoint = min(able, key=lambda endpoint: min(map(rank, eligible[endpoint])))
        else:
            endpoint = min(able, key=self._balancer.rank)
        count = requirements.count
        if count > 1 and endpoint.has_distances and not requirements.share:  # shares go to the fullest cards
            return best_linked(sorted(eligible[endpoint], key=rank), count)
        return tuple(nsmallest(count, eligible[endpoint], key=rank))

    # Grants and releases

    def granted(self, gpus: Sequence[GPUResourceState], fence: int) -> None:
        endpoint = gpus[0].endpoint
        for gpu in gpus:
            gpu.last_fence = fence
            gpu.rank = (gpu.usage_percent, fence, gpu.index, gpu.gpu_id, gpu)
            endpoint.free.discard(gpu)
            self.freed.pop(gpu.gpu_id, None)
        endpoint.last_fence = fence
        if self._only_endpoint is None:
            self._balancer.chosen(endpoint)
            self._rank(endpoint)

    def ended(self, held: Iterable[HeldGPU], now: float, read_after: float | None) -> None:
        """A lease on these ended; readings begun before `read_after` do not show whether they are free."""
        for before in held:
            gpu = self.gpus[before.gpu_id]
            gpu.freed_at, gpu.readings_wanted = now, 0
            self.freed[gpu.gpu_id] = gpu
            if read_after is not None:
                gpu.read_after = max(gpu.read_after, read_after)
            if not gpu.leases:
                # Until it is read again: the last reading shows the holder's load.
                gpu.baseline = before
            self._index(gpu)
            if self._only_endpoint is None:
                self._rank(gpu.endpoint)

    def reindex(self, gpus: Iterable[GPUResourceState]) -> None:
        """Leases on these were replicated."""
        for gpu in gpus:
            gpu.rank = (gpu.usage_percent, gpu.last_fence, gpu.index, gpu.gpu_id, gpu)
            gpu.endpoint.last_fence = max(gpu.endpoint.last_fence, gpu.last_fence)
            self._index(gpu)
            self._rank(gpu.endpoint)

    # Rule 5: impossible

    def impossible(self, requirements: Requirements) -> tuple[str, ...]:
        """Why no endpoint can ever serve this; empty while one could, or might once it answers."""
        if requirements is ANY_GPU and self._is_any_gpu_possible:
            return ()
        reasons = []
        for endpoint in self.endpoints.values():
            if endpoint.is_removed:
                continue
            reason = self._shortfall(endpoint, requirements) if endpoint.present else None
            if reason is None:
                return ()
            reasons.append(reason)
        return tuple(reasons)

    def _shortfall(self, endpoint: EndpointState, requirements: Requirements) -> str | None:
        """Why this endpoint can never serve it, or None. A GPU that is only missing for now counts."""
        known = [gpu.last_seen for gpu in endpoint.gpus.values() if gpu.last_seen is not None and not gpu.is_gone]
        possible = 0
        why_not: dict[str, list[int]] = {}
        for reading in known:
            lasting = next(lasting_obstacles(reading, requirements, self.settings), None)
            if lasting is not None:
                why_not.setdefault(lasting.text, []).append(reading.index)
                continue
            possible += 1
            if possible == requirements.count:
                return None
        where = f"{endpoint.endpoint_id}: " if endpoint.endpoint_id else ""
        requested = f"{requirements.count} GPUs requested, " if requirements.count > 1 else ""
        why = by_index(why_not)
        return f"{where}{requested}{possible} of {len(known)} could ever serve it{f' ({why})' if why else ''}"

    # Inside

    def _set_reading(self, gpu: GPUResourceState, reading: Reading | None, begun_at: float = 0.0) -> None:
        if reading is None:
            gpu.reading = None
            gpu.is_usable = False
            return
        if begun_at > gpu.freed_at or gpu.leases or gpu.last_seen is None:
            gpu.baseline = gpu.baseline_of(reading)
        if reading == gpu.reading:
            return
        gpu.reading = gpu.last_seen = reading
        gpu.is_gone = False
        if reading.has_unified_memory and not reading.reports_processes:
            self._is_any_gpu_possible = False  # nothing may ever show that this one is free
        gpu.index, gpu.is_mig_device = reading.index, reading.is_mig_device
        gpu.endpoint.has_mig_devices |= reading.is_mig_device
        gpu.endpoint.has_distances |= bool(reading.distances)
        memory, utilization = reading.memory_usage_percent, reading.utilization_percent
        gpu.usage_percent = (100.0 if memory is None else memory) + (100.0 if utilization is None else utilization)
        gpu.rank = (gpu.usage_percent, gpu.last_fence, gpu.index, gpu.gpu_id, gpu)
        # Leases are looked at in `_index`: they change between readings.
        gpu.is_usable = (
            not reading.is_leased_elsewhere
            and next(lasting_obstacles(reading, ANY_GPU, self.settings), None) is None
            and next(reading_obstacles(reading, ANY_GPU, self.settings), None) is None
        )

    def _index(self, gpu: GPUResourceState) -> None:
        """Put the GPU into the index of free GPUs, or remove it."""
        endpoint = gpu.endpoint
        if gpu.is_usable and not gpu.leases and gpu.read_after < endpoint.begun_at:
            endpoint.free.put(gpu.rank)
        else:
            endpoint.free.discard(gpu)

    def _rank(self, endpoint: EndpointState) -> None:
        if self._only_endpoint is None:
            self._free_hosts.put(endpoint, self._balancer.rank(endpoint))


def _rank_for_one(gpu: GPUResourceState) -> tuple[Any, ...]:
    return gpu.rank


def _rank_for_share(gpu: GPUResourceState) -> tuple[Any, ...]:
    """Rule 3 for shares: fill the GPU with the least memory left, and leave GPUs that no request shares to the last."""
    left_mb = gpu.memory_left_mb() if gpu.leases else math.inf
    return (math.inf if left_mb is None else left_mb, *gpu.rank)
