"""Builds the metrics and the recovery summary of a client; it never changes anything."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.client import pool_metrics

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gpu_worker_pool.client.coordination import Coordinator
    from gpu_worker_pool.client.endpoints import Endpoint
    from gpu_worker_pool.config import PoolConfig
    from gpu_worker_pool.models import EndpointInfo, PoolStatus


def as_dict(info: EndpointInfo) -> dict[str, Any]:
    """Ready for JSON, which has no datetime."""
    return {**asdict(info), "last_seen": None if info.last_seen is None else info.last_seen.isoformat()}


def detailed_metrics(
    config: PoolConfig,
    status: PoolStatus,
    coordinator: Coordinator,
    endpoints: Sequence[tuple[EndpointInfo, Endpoint]],
    grants: Mapping[str, int],
    now: float,
) -> dict[str, Any]:
    """The documented result of `get_detailed_metrics`; `grants` counts by endpoint."""
    pools = coordinator.pools
    metrics: dict[str, Any] = {
        "timestamp": datetime.now().isoformat(),
        "is_running": True,
        "total_gpus": status.total_gpus,
        "available_gpus": status.available_gpus,
        "active_workers": status.active_workers,
        "blocked_workers": status.blocked_workers,
        "thresholds": {
            "memory_threshold_percent": config.memory_threshold,
            "utilization_threshold_percent": config.utilization_threshold,
        },
        "gpu_metrics": [row for pool in pools for row in pool_metrics.gpu_metrics(pool, now)],
        "assignment_metrics": pool_metrics.assignment_metrics(pools, now),
        "queue_metrics": pool_metrics.queue_metrics(coordinator.waiting, now),
    }
    if config.multi_endpoint:
        total = sum(grants.values())
        metrics["endpoints"] = [
            {**as_dict(info), **endpoint.metrics(), "grants": grants.get(info.endpoint_id, 0)}
            for info, endpoint in endpoints
        ]
        metrics["load_balancer"] = {
            "strategy": config.load_balancing_strategy,
            "total_grants": total,
            "share_of_grants": {
                info.endpoint_id: grants.get(info.endpoint_id, 0) / total if total else 0.0 for info, _ in endpoints
            },
        }
    return metrics


def recovery_summary(status: Mapping[str, Any], endpoints: Iterable[Endpoint]) -> str:
    degradation, breakers = status["degradation_manager"], status["circuit_breaker_stats"]
    counts = f"{len(degradation['healthy_endpoints'])}/{degradation['total_endpoints']} endpoints healthy"
    lines = ["=== Error Recovery Status ===", f"Degradation Status: {degradation['status'].capitalize()} ({counts})"]
    for endpoint in endpoints:
        breaker = breakers[endpoint.endpoint_id]
        retry = breaker["retry_in_seconds"]
        lines.append(
            f"  {endpoint.endpoint_id}: {'healthy' if endpoint.is_healthy else 'degraded'}"
            f", circuit breaker {breaker['state']}"
            + (f", next attempt in {retry:.0f} s" if retry is not None else "")
            + (f": {endpoint.last_error}" if endpoint.last_error else "")
        )
    lines.append(f"Queued requests: {status['recovery_orchestrator']['queued_requests']}")
    return "\n".join(lines)
