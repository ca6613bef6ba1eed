"""What others see of a fleet: its hosts, its queue, its leases, and why a request waits. Nothing here decides."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.api.lease_rows import explanation_body, request_row, shown_account
from gpu_worker_pool.core.explanation import explain, explain_requirements
from gpu_worker_pool.core.queue import Waiter
from gpu_worker_pool.core.requirements import Requirements
from gpu_worker_pool.fleet.hosts import gpu_id_at_host
from gpu_worker_pool.fleet.messages import CallAnswer, fleet_lease_id
from gpu_worker_pool.fleet.rows import request_in

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpu_worker_pool.core.explanation import Explanation
    from gpu_worker_pool.core.pool import Pool
    from gpu_worker_pool.fleet.dispatcher import Dispatcher
    from gpu_worker_pool.fleet.messages import Query

#: How many rows of the queue are shown, and for how many classes of equal requests the reasons are given.
MOST_SHOWN: Final = 1000
MOST_EXPLAINED: Final = 20
#: How many hosts the reasons for waiting list.
MOST_HOSTS: Final = 16
#: Above this many GPUs or waiting requests, answers may be this old.
LARGE: Final = 256
OUTDATED_SECONDS: Final = 1.0


class Views:
    """Caches answers for a moment, because a large fleet has many clients that ask the same."""

    def __init__(self) -> None:
        self._positions: dict[str, int] = {}
        self._positions_at = -math.inf
        self._reasons: dict[int, tuple[float, Explanation]] = {}

    def position(self, pool: Pool, waiter: Waiter, now: float) -> int:
        if pool.queue.waiting <= LARGE:
            return pool.queue.position(pool.queue.order(waiter), waiter.request.within)
        request_id = waiter.request.request_id
        if now - self._positions_at > OUTDATED_SECONDS or request_id not in self._positions:
            self._positions = {each.request.request_id: at for at, each in enumerate(pool.queue.in_order(), 1)}
            self._positions_at = now
        return self._positions[request_id]

    def explanation(self, pool: Pool, waiter: Waiter, now: float) -> Explanation | None:
        """In a large fleet: the explanation of its class."""
        if len(pool.allocator.gpus) <= LARGE and pool.queue.waiting <= LARGE:
            return explain(pool, waiter.request.request_id, now)
        key = id(waiter.request_class)
        known = self._reasons.get(key)
        if known is None or now - known[0] > OUTDATED_SECONDS:
            found = explain(pool, waiter.request.request_id, now)
            if found is None:
                return None
            if len(self._reasons) > MOST_EXPLAINED:
                self._reasons.clear()
            known = self._reasons[key] = now, found
        return known[1]


def place_of(dispatcher: Dispatcher, request_id: str, now: float) -> tuple[int, tuple[str, ...]]:
    """The position of a request, and why it waits: one sentence on the whole, then one for each host."""
    pool, waiter = dispatcher.pool, dispatcher.pool.requests.get(request_id)
    if not isinstance(waiter, Waiter):
        return 1, ("its GPUs are being granted",)
    position = dispatcher.views.position(pool, waiter, now)
    explanation = dispatcher.views.explanation(pool, waiter, now)
    if explanation is None:
        return position, ()
    return position, (explanation.summary_at(position), *_by_host(dispatcher, explanation)[:MOST_HOSTS])


def _by_host(dispatcher: Dispatcher, explanation: Explanation) -> list[str]:
    hosts: dict[str, Counter[str]] = {}
    for gpu in explanation.gpus:
        kind = gpu.obstacles[0].kind.name.lower().replace("_", " ") if gpu.obstacles else "could serve it"
        hosts.setdefault(gpu.endpoint_id, Counter())[kind] += 1
    # The GPUs of a host are unknown until it has reported to this dispatcher.
    unheard = [host.name for host in dispatcher.hosts.values() if host.name not in hosts and not host.is_heard]
    heard = [
        f"{host}: of {_gpus(sum(kinds.values()))}: {', '.join(f'{number} {kind}' for kind, number in kinds.items())}"
        for host, kinds in hosts.items()
    ]
    return heard + [f"{name}: unreachable" for name in unheard]


def _gpus(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs"


def answer(dispatcher: Dispatcher, query: Query, now: float) -> CallAnswer:
    call_id, arguments = query.call_id, query.arguments
    try:
        if query.what == "fleet":
            body = fleet_body(dispatcher, now)
        elif query.what == "queue":
            body = {"queue": queue_rows(dispatcher, now)}
        elif query.what == "leases":
            body = {"leases": lease_rows(dispatcher, now)}
        elif query.what == "explain":
            return _explained(dispatcher, call_id, dict(arguments), now)
        else:
            return CallAnswer(call_id, error="IllegalEventError", text=f"there is no view {query.what[:40]!r}")
    except (TypeError, ValueError) as error:
        return CallAnswer(call_id, error="IllegalEventError", text=str(error)[:300])
    return CallAnswer(call_id, body)


def fleet_body(dispatcher: Dispatcher, now: float) -> dict[str, Any]:
    """The answer of `GET /fleet`, without the state of the database, which the office knows."""
    endpoints = dispatcher.pool.allocator.endpoints
    hosts = []
    for host in sorted(dispatcher.hosts.values(), key=lambda each: each.name):
        endpoint = endpoints.get(host.name)
        is_fresh = endpoint is not None and dispatcher.pool.allocator.is_fresh(endpoint, now)
        hosts.append(
            {
                "host": host.name,
                "url": host.url,
                "state": host.state,
                "gpus": len(host.rows) if host.rows else len(host.numbers),
                "free": len(endpoint.free) if endpoint is not None and is_fresh and host.is_linked else 0,
                "seen_seconds_ago": None if host.seen_at == -math.inf else round(max(now - host.seen_at, 0.0), 3),
                "version": host.version or None,
                "is_candidate": host.is_candidate,
                "leases": len(host.leases),
            }
        )
    return {
        "fleet_id": dispatcher.fleet_id,
        "epoch": dispatcher.epoch,
        "dispatcher": {"host": dispatcher.name, "url": dispatcher.url},
        "is_hearing": dispatcher.is_hearing,
        "hosts": hosts,
        "waiting": dispatcher.pool.queue.waiting,
        "queue": queue_rows(dispatcher, now),
    }


def queue_rows(dispatcher: Dispatcher, now: float) -> list[dict[str, Any]]:
    """As `GET /queue` shows them; only the first of a long queue, and only the first classes are explained."""
    pool, rows = dispatcher.pool, []
    explained: dict[int, Explanation | None] = {}
    for position, waiter in enumerate(pool.queue.in_order()[:MOST_SHOWN], 1):
        key = id(waiter.request_class)
        if key not in explained and len(explained) < MOST_EXPLAINED:
            explained[key] = dispatcher.views.explanation(pool, waiter, now)
        found = explained.get(key)
        hosts = [] if found is None else _by_host(dispatcher, found)[:MOST_HOSTS]
        rows.append(
            {
                **request_row(waiter.request),
                "position": position,
                "waiting_seconds": round(max(now - waiter.enqueued_at, 0.0), 3),
                "reasons": [] if found is None else [found.summary_at(position), *hosts],
            }
        )
    return rows


def lease_rows(dispatcher: Dispatcher, now: float) -> list[dict[str, Any]]:
    """What the hosts reported, the oldest first."""
    rows = []
    of_pool = {
        pool_id: (host, lease_id) for host in dispatcher.hosts.values() for lease_id, pool_id in host.leases.items()
    }
    for lease in sorted(dispatcher.pool.leases, key=lambda each: each.granted_at)[:MOST_SHOWN]:
        if lease.lease_id not in of_pool:
            continue  # its host has not promised it yet
        host, lease_id = of_pool[lease.lease_id]
        names = [host.rows.get(gpu_id_at_host(gpu_id)) for gpu_id in lease.gpu_ids]
        rows.append(
            {
                **request_row(lease.request),
                "lease_id": fleet_lease_id(host.name, lease_id),
                "host": host.name,
                "endpoint_url": host.url,
                "state": lease.state.value if host.is_linked else "unreachable",
                "account": shown_account(lease.request),
                "held_seconds": round(max(now - lease.granted_at, 0.0), 3),
                "memory_mb": lease.request.requirements.memory_mb,
                "share": lease.request.requirements.share,
                "ttl_seconds": lease.request.ttl_seconds,
                "gpus": [
                    {
                        "gpu_id": None if row is None else row.index,
                        "global_id": host.numbers.get(gpu_id_at_host(gpu_id)),
                        "uuid": None if row is None else row.uuid,
                        "name": None if row is None else row.name,
                    }
                    for gpu_id, row in zip(lease.gpu_ids, names, strict=True)
                ],
            }
        )
    return rows + [_unheard_row(row) for row in dispatcher.unheard()[: MOST_SHOWN - len(rows)]]


def _unheard_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A lease of an earlier dispatcher, at a host that has not reported yet: what the database knows of it."""
    request = request_in(row)
    return {
        **request_row(request),
        "lease_id": fleet_lease_id(row["host"], row["lease_id"]),
        "host": row["host"],
        "endpoint_url": None,
        "state": "unreachable",
        "held_seconds": None,
        "memory_mb": request.requirements.memory_mb,
        "share": request.requirements.share,
        "ttl_seconds": request.ttl_seconds,
        "gpus": [],
    }


def _explained(dispatcher: Dispatcher, call_id: str, arguments: dict[str, Any], now: float) -> CallAnswer:
    pool = dispatcher.pool
    request_id = str(arguments.get("request_id") or "")
    if request_id:
        found = explain(pool, request_id, now)
        if found is None:
            text = f"no waiting request has the id {request_id[:64]!r}; GET /queue lists them"
            return CallAnswer(call_id, error="UnknownRequest", text=text)
    else:
        requirements = Requirements(**dict(arguments.get("requirements") or {}))
        found = explain_requirements(pool, requirements, now)
    shown = replace(found, gpus=found.gpus[:MOST_SHOWN])  # a frame has an end
    body = explanation_body(request_id, shown, lambda gpu_id: _number(dispatcher, gpu_id))
    for row, gpu in zip(body["gpus"], shown.gpus, strict=True):
        row["host"], row["global_id"] = gpu.endpoint_id, row["gpu_id"]
        at_host = dispatcher.hosts[gpu.endpoint_id].rows.get(gpu_id_at_host(gpu.gpu_id))
        row["gpu_id"] = None if at_host is None else at_host.index
        seen = pool.allocator.gpus[gpu.gpu_id].last_seen
        row["uuid"] = None if seen is None else seen.uuid
    body["hosts"] = _by_host(dispatcher, found)
    return CallAnswer(call_id, body)


def _number(dispatcher: Dispatcher, gpu_id: str) -> int | None:
    host = dispatcher.hosts.get(gpu_id.partition("/")[0])
    return None if host is None else host.numbers.get(gpu_id_at_host(gpu_id))
