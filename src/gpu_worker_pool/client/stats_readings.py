"""Converts the answer of a GPU statistics server to readings for the core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker_pool.core import Reading
from gpu_worker_pool.models import gpu_id_in_pool

if TYPE_CHECKING:
    from gpu_worker_pool.models import GPUStats


def readings_from_stats(stats: GPUStats, endpoint_id: str = "") -> list[Reading]:
    return [
        Reading(
            gpu_id=gpu_id_in_pool(endpoint_id, info.gpu_id),
            index=info.gpu_id,
            name=info.name,
            uuid=info.uuid,
            memory_total_mb=info.memory_total_mb,
            memory_used_mb=info.memory_used_mb,
            memory_usage_percent=info.memory_usage_percent,
            utilization_percent=info.utilization_percent,
            reports_utilization=info.reports_utilization,
            fault=info.fault,
            # A count identifies the processes only when it is zero.
            processes=() if info.process_count == 0 else None,
            unnamed_processes=info.process_count or 0,
            has_unified_memory=info.unified_memory,
            is_leased_elsewhere=info.leased,
        )
        for info in stats.gpus_summary
    ]
