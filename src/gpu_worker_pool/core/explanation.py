"""Rule 12: explains why a request waits: its place in the queue, and for every GPU why it cannot have it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.core.accounts import account_name
from gpu_worker_pool.core.events import Request
from gpu_worker_pool.core.fleet_order import follows_fleet, position_in_fleet
from gpu_worker_pool.core.inside import enclosure_of, holds_back_later, obstacles_inside
from gpu_worker_pool.core.limits import never_allowed, only_on, why_kept_back
from gpu_worker_pool.core.obstacles import Obstacle, ObstacleKind, obstacles
from gpu_worker_pool.core.origins import name_of, own_process
from gpu_worker_pool.core.queue import Waiter
from gpu_worker_pool.core.record import record
from gpu_worker_pool.core.reservation import gpus_to_await
from gpu_worker_pool.wording import spoken_gpu_seconds

if TYPE_CHECKING:
    from gpu_worker_pool.core.inside import Enclosure
    from gpu_worker_pool.core.pool import Pool
    from gpu_worker_pool.core.requirements import Requirements

#: How many outsiders a summary names.
MOST_NAMED = 2
ITS_FLEET_DECIDES = "its turn comes in the order of this host's fleet"


@record
class GPUExplanation:
    gpu_id: str
    endpoint_id: str
    #: None while the GPU has never been read.
    name: str | None
    #: Why the request cannot have it; empty if it can.
    obstacles: tuple[Obstacle, ...]

    def __str__(self) -> str:
        return f"GPU {self.gpu_id}: {'; '.join(map(str, self.obstacles)) or 'could serve it'}"


@record
class Explanation:
    requirements: Requirements
    #: 1 is next; for requirements without a request, the place it would have.
    position: int
    waiting_seconds: float
    gpus: tuple[GPUExplanation, ...]
    #: Why no GPU can ever serve it; such a request is rejected at once.
    impossible: tuple[str, ...]
    #: What it waits for, or what would happen to it.
    verdict: str
    #: Whether its place in the queue matters.
    is_queued: bool
    #: The lease inside which it runs; its place is that among the requests inside it.
    within: str | None = None
    #: Why another account comes first, although it asked later; empty if none does.
    fairness: str = ""

    @property
    def summary(self) -> str:
        """One sentence."""
        return self.summary_at(self.position)

    def summary_at(self, position: int) -> str:
        """The summary for an equal request at another place."""
        place = ""
        if self.is_queued:
            place = "next in line; " if position == 1 else f"number {position} in line; "
        where = "" if self.within is None else f", inside {self.within}"
        fairness = f"; {self.fairness}" if self.fairness and self.is_queued and position > 1 else ""
        return f"{self.requirements}{where}: {place}{self.verdict}{fairness}"

    def __str__(self) -> str:
        return "\n".join([self.summary, *(f"  {gpu}" for gpu in self.gpus)])


def explain(pool: Pool, request_id: str, now: float) -> Explanation | None:
    """Why this request waits; None if it does not."""
    waiter = pool.requests.get(request_id)
    if not isinstance(waiter, Waiter):
        return None
    request = waiter.request
    return _explain(pool, request.requirements, request.within, waiter, request, max(now, pool.now))


def explain_requirements(
    pool: Pool, requirements: Requirements, now: float, request: Request | None = None, within: str | None = None
) -> Explanation:
    """Why a request with these requirements would wait now.

    `request` says which process would make it; `within`: the lease inside which it would run.
    """
    return _explain(pool, requirements, within, None, request, max(now, pool.now))


def _explain(
    pool: Pool,
    requirements: Requirements,
    within: str | None,
    waiter: Waiter | None,
    request: Request | None,
    now: float,
) -> Explanation:
    order = pool.queue.order(waiter or Waiter(_as_if(requirements, within, request), pool.ticket + 1, pool.now))
    in_fleet = pool.fleet_order if within is None and follows_fleet(pool, now) else None
    request_id = "" if waiter is None else waiter.request.request_id
    position = position_in_fleet(pool, request_id, now) or pool.queue.position(order, within)
    waiting_seconds = 0.0 if waiter is None else now - waiter.enqueued_at
    around = None if within is None else enclosure_of(pool.leases, within)
    if in_fleet is not None:
        is_its_own = request_id == in_fleet.reserved_for
        reserved_for = f"{in_fleet.reserved_name}, which has waited longer in the fleet"
        withheld = {} if is_its_own else dict.fromkeys(in_fleet.reserved, reserved_for)
        candidates = list(pool.allocator.gpus.values())
    elif within is None:
        withheld, candidates = _withheld(pool, order, now), list(pool.allocator.gpus.values())
    else:
        candidates = [] if around is None else pool.leases.gpus_of(around.lease)
        withheld = {} if around is None else _withheld_inside(pool, around, order, now)

    # In a fleet, the policy of its dispatcher counts.
    limited = None if in_fleet is not None else request
    allowed = None if limited is None else only_on(pool, limited)
    gpus = []
    for gpu in candidates:
        if (gpu.is_gone or gpu.last_seen is None) and not gpu.leases:
            continue  # not seen since this process began, and without a lease
        found = list(
            obstacles(gpu, requirements, pool.settings, now, request)
            if around is None
            else obstacles_inside(gpu, requirements, around, pool.settings, now, request)
        )
        if allowed is not None and gpu.gpu_id not in allowed:
            text = why_kept_back(pool, limited) if limited is not None else None
            found.append(Obstacle(ObstacleKind.LIMIT, text or "its account holds as many GPUs as it may"))
        if gpu.gpu_id in withheld:
            found.append(Obstacle(ObstacleKind.RESERVED, f"reserved for {withheld[gpu.gpu_id]}"))
        name = gpu.last_seen.name if gpu.last_seen is not None else None
        gpus.append(GPUExplanation(gpu.gpu_id, gpu.endpoint.endpoint_id, name, tuple(found)))
    refused = () if request is None else never_allowed(pool, request)
    impossible = refused or pool.impossible(requirements, within)
    kept_back = None if limited is None else why_kept_back(pool, limited)
    verdict, is_queued = _verdict(pool, requirements, gpus, impossible)
    if kept_back is not None and not impossible:
        verdict, is_queued = f"kept back by the policy: {kept_back}", True
    if in_fleet is not None and not impossible and gpus:
        why = in_fleet.note or ITS_FLEET_DECIDES
        verdict, is_queued = f"{why}; {verdict}" if is_queued else why, True
    own = sum(any(obstacle.is_own for obstacle in gpu.obstacles) for gpu in gpus)
    if own and is_queued and request is not None:
        what = "it" if len(gpus) == 1 else f"{own} of them"
        verdict += f"; {own_process(request)} holds {what}: release {'it' if own == 1 else 'them'} first"
    is_ordered_here = within is None and in_fleet is None
    fairness = _fairness(pool, waiter) if waiter is not None and is_ordered_here else ""
    return Explanation(
        requirements, position, waiting_seconds, tuple(gpus), impossible, verdict, is_queued, within, fairness
    )


def _as_if(requirements: Requirements, within: str | None, request: Request | None) -> Request:
    """Such a request of the same account, or of none."""
    return Request("", requirements, within=within, account="" if request is None else request.account)


def _fairness(pool: Pool, waiter: Waiter) -> str:
    """Which account comes before this one's because it used less."""
    fair_share, order = pool.fair_share, pool.queue.order(waiter)
    if fair_share is None:
        return ""
    later = [
        first
        for _, first in pool.queue.heads()
        if first.ticket > waiter.ticket
        and first.request.within is None
        and first.request.account != waiter.request.account
        and first.request.requirements.priority == waiter.request.requirements.priority
        and pool.queue.order(first) < order
    ]
    if not later:
        return ""
    request = later[0].request
    name = account_name(request.account, request.origin)
    theirs = spoken_gpu_seconds(fair_share.used(request.account, fair_share.now))
    ours = spoken_gpu_seconds(fair_share.used(waiter.request.account, fair_share.now))
    return f"account {name} is ahead of yours: it used {theirs} lately, yours {ours}"


def _withheld(pool: Pool, order: tuple[Any, ...], now: float) -> dict[str, str]:
    """The GPUs that are withheld from this place in the order, and for which earlier waiter."""
    withheld = {}
    for request_class, earlier in pool.queue.heads(pool.reserved_for):
        if pool.queue.order(earlier) >= order:
            break
        if request_class.within is not None or only_on(pool, earlier.request) is not None:
            continue
        name = name_of(earlier.request, pool.settings.host)
        for gpu_id in gpus_to_await(pool.allocator, request_class.requirements, now):
            withheld[gpu_id] = f"{name}, which is ahead of you, until it is read again"
        if earlier is pool.reserved_for:
            for gpu_id in earlier.reserved:
                withheld[gpu_id] = f"{name}, which has waited longer"
    return withheld


def _withheld_inside(pool: Pool, around: Enclosure, order: tuple[Any, ...], now: float) -> dict[str, str]:
    """The same for a request inside a lease: all its GPUs, once an earlier one inside it has waited long enough."""
    gpus = pool.leases.gpus_of(around.lease)
    for earlier in pool.queue.inside(around.lease.lease_id):
        if pool.queue.order(earlier) >= order:
            break
        if holds_back_later(gpus, earlier, around, pool.settings, now):
            return {gpu.gpu_id: f"{earlier.worker}, which has waited longer" for gpu in gpus}
    return {}


def _verdict(
    pool: Pool, requirements: Requirements, gpus: list[GPUExplanation], impossible: tuple[str, ...]
) -> tuple[str, bool]:
    if impossible:
        return f"can never be granted. {'; '.join(impossible)}", False
    if not gpus:
        silent = [endpoint.endpoint_id for endpoint in pool.allocator.endpoints.values() if endpoint.endpoint_id]
        return "no GPU is known yet" + (f", {', '.join(silent)} did not answer" if silent else ""), False
    free: Counter[str] = Counter(gpu.endpoint_id for gpu in gpus if not gpu.obstacles)
    most = max(free.values(), default=0)
    if most >= requirements.count:
        return "could be granted now", False
    first = [gpu.obstacles[0] for gpu in gpus if gpu.obstacles]
    why = Counter(obstacle.kind for obstacle in first)
    reasons = ", ".join(f"{number} {_kind_in_words(kind, first)}" for kind, number in why.most_common())
    together = " on one endpoint" if len(pool.allocator.endpoints) > 1 else ""
    lacking = f"{most} of {requirements.count} free{together}; " if requirements.count > 1 else ""
    return f"{lacking}of {len(gpus)} {'GPU' if len(gpus) == 1 else 'GPUs'}: {reasons}", True


def _kind_in_words(kind: ObstacleKind, found: list[Obstacle]) -> str:
    """Outsiders are named, because a person may want to talk to them."""
    if kind is ObstacleKind.UNEXPLAINED_MEMORY:
        return "in use by no visible process"
    names = list(dict.fromkeys(each.process for each in found if each.kind is kind and each.process is not None))
    if not names:
        return kind.name.lower().replace("_", " ")
    return f"in use by {', '.join(names[:MOST_NAMED])}{' and others' if len(names) > MOST_NAMED else ''}"
