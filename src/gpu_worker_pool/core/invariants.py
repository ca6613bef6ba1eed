"""Checks what must always be true of a pool. Slow, and independent of the shortcuts it checks; for tests."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gpu_worker_pool.core.fleet_order import follows_fleet
from gpu_worker_pool.core.inside import enclosure_of, holds_back_later
from gpu_worker_pool.core.limits import only_on
from gpu_worker_pool.core.moves import LeaseState, RequestState
from gpu_worker_pool.core.requirements import ANY_GPU
from gpu_worker_pool.core.reservation import gpus_to_await, lending_window

if TYPE_CHECKING:
    from gpu_worker_pool.core.pool import Pool


def must(is_so: object, otherwise: str) -> None:
    # Not an assert statement: `python -O` would remove every check in this file.
    if not is_so:
        raise AssertionError(otherwise)


def check_invariants(pool: Pool) -> None:
    """Raises AssertionError for the first invariant that is violated."""
    _check_leases(pool)
    _check_inner_leases(pool)
    _check_requests(pool)
    _check_queue(pool)
    _check_index(pool)
    _check_use(pool)
    _check_timers(pool)
    _check_nothing_forgotten(pool)


def _check_leases(pool: Pool) -> None:
    """No GPU is granted twice."""
    for gpu in pool.allocator.gpus.values():
        for lease in (*gpu.leases.values(), *gpu.inner_leases.values()):
            must(pool.leases.lookup(lease.lease_id) is lease, f"{gpu} and the pool disagree about {lease.lease_id}")
        is_shared_by_all = all(lease.is_shareable for lease in gpu.leases.values())
        if (known := gpu.known_holders) is not None:
            gpu.known_holders = None
            must(gpu.holders() == known, f"{gpu} remembers other holders than it has")
        must(len(gpu.leases) <= 1 or is_shared_by_all, f"{gpu} is granted twice")
    fences = [lease.fence for lease in pool.leases]
    must(len(set(fences)) == len(fences), "two leases have the same fence")
    must(max(fences, default=0) <= pool.fence, "a lease has a fence that was never issued")
    for lease in pool.leases:
        must(len(set(lease.gpu_ids)) == lease.request.requirements.count, f"{lease} has the wrong number of GPUs")
        gpus = [pool.allocator.gpus[gpu_id] for gpu_id in lease.gpu_ids]
        must(lease.gpu_ids == tuple(held.gpu_id for held in lease.held), f"{lease} names other GPUs than it has")
        is_inner = pool.leases.enclosing(lease) is not None
        on_them = [gpu.inner_leases if is_inner else gpu.leases for gpu in gpus]
        must(all(on_it.get(lease.lease_id) is lease for on_it in on_them), f"{lease} is not on its GPU")
        must({gpu.endpoint.endpoint_id for gpu in gpus} == {lease.endpoint_id}, f"{lease} spans endpoints")
        if lease.ends_at is not None and lease.state is LeaseState.HELD:
            is_limited = lease.expires_at is not None and lease.expires_at <= lease.ends_at + 1e-6
            must(is_limited, f"{lease} outlives its time limit")
    on_gpus = {lease_id for gpu in pool.allocator.gpus.values() for lease_id in (*gpu.leases, *gpu.inner_leases)}
    held_by: dict[str, set[str]] = {}
    for lease in pool.leases:
        if lease.request.account and lease.within is None:
            held_by.setdefault(lease.request.account, set()).update(lease.gpu_ids)
    accounts = {lease.request.account for lease in pool.leases} | set(held_by)
    must(
        all(set(pool.leases.held_by(account)) == held_by.get(account, set()) for account in accounts if account),
        "what an account holds is counted wrongly",
    )
    must(on_gpus == {lease.lease_id for lease in pool.leases}, "a GPU has a lease that has ended")


def _check_inner_leases(pool: Pool) -> None:
    """No GPU of a lease is granted twice inside it."""
    for inner in pool.leases:
        around = pool.leases.enclosing(inner)
        if around is None:
            continue
        must(set(inner.gpu_ids) <= set(around.gpu_ids), f"{inner} has GPUs that the lease around it has not")
        must(around.state is not LeaseState.OFFERED, f"{inner} is inside a lease that its client does not know")
        must(inner in pool.leases.inside(around.lease_id), f"{around} does not know {inner}")
        for gpu in pool.leases.gpus_of(inner):
            beside = [each for each in gpu.inner_leases.values() if each.within == inner.within]
            must(len(beside) == 1 or all(each.is_shareable for each in beside), f"{gpu} is granted twice inside")
    for waiter in pool.queue.in_order():
        within = waiter.request.within
        must(within is None or enclosure_of(pool.leases, within), f"{waiter} waits inside a lease that is not held")


def _check_requests(pool: Pool) -> None:
    """Every request is in exactly one place."""
    waiting = {waiter.request.request_id: waiter for waiter in pool.queue.in_order()}
    holding = {lease.request.request_id: lease for lease in pool.leases}
    remembered = {outcome.request.request_id: outcome for outcome in pool.outcomes}
    must(pool.requests == {**waiting, **holding, **remembered}, "the index of requests is wrong")
    must(len(pool.requests) == len(waiting) + len(holding) + len(remembered), "a request is in two places")
    tally, grants = pool.tally, pool.fence - pool.first_fence
    ended = sum(tally[state] for state in RequestState)
    must(pool.ticket == len(waiting) + ended + grants, "a request ended twice, or never")
    over = sum(tally[state] for state in LeaseState)
    must(grants == len(holding) + over, "a lease is neither held nor ended, or both")


def _check_queue(pool: Pool) -> None:
    for request_class in pool.queue.request_classes():
        must(request_class.waiters, "an empty request class was left behind")
        tickets = [waiter.ticket for waiter in request_class.waiters.values()]
        must(tickets == sorted(tickets), "a request class is out of order")
        must(
            all(
                (waiter.request.requirements, waiter.request.within)
                == (request_class.requirements, request_class.within)
                and request_class.account in ("", waiter.request.account)
                for waiter in request_class.waiters.values()
            ),
            "a waiter is in the wrong request class",
        )
        must(
            request_class.is_any_gpu
            == (request_class.within is None and pool.allocator.is_any_gpu(request_class.requirements)),
            f"{request_class.requirements} are not what their request class says",
        )
    must(
        sum(len(request_class.waiters) for request_class in pool.queue.request_classes()) == len(pool.queue),
        "the request classes and the queue disagree",
    )
    reserved_for = pool.reserved_for
    if reserved_for is not None:
        must(pool.requests.get(reserved_for.request.request_id) is reserved_for, "GPUs are reserved for a non-waiter")
        must(
            len(reserved_for.reserved) == reserved_for.request.requirements.count,
            "more or fewer GPUs are reserved than were requested",
        )
    must(not pool.improved and not pool.has_new_class, "a waiter was not tried")
    for waiter in pool.queue.in_order():
        must(
            waiter.request_class is pool.queue.class_of(waiter.request) and waiter.state is RequestState.WAITING,
            f"{waiter} has ended and still waits",
        )
        must(waiter is reserved_for or not waiter.reserved, "GPUs are reserved for two waiters")


def _check_index(pool: Pool) -> None:
    """The index of free GPUs says what the rules say."""
    allocator = pool.allocator
    for endpoint in allocator.endpoints.values():
        seen = sum(gpu.reading is not None for gpu in endpoint.gpus.values())
        must(endpoint.present == seen, f"{endpoint} has a wrong GPU count")
        if allocator.is_fresh(endpoint, pool.now):
            for gpu in endpoint.gpus.values():
                is_eligible = allocator.is_eligible(gpu, ANY_GPU, pool.now)
                must((gpu in endpoint.free) == is_eligible, f"{gpu} is indexed wrongly")


def _check_use(pool: Pool) -> None:
    """Exactly the leases that are held or offered count, each for its account."""
    fair_share = pool.fair_share
    if fair_share is None:
        return
    expected: dict[str, float] = {}
    for lease in pool.leases:
        account = lease.request.account
        if lease.is_live and account and lease.request.within is None:
            weight = fair_share.weights.get(lease.lease_id, 0.0)
            must(0 < weight <= len(lease.gpu_ids), f"{lease} counts as {weight} GPUs")
            must(lease.is_shareable or weight == len(lease.gpu_ids), f"{lease} counts as {weight} GPUs")
            expected[account] = expected.get(account, 0.0) + weight
    for account in {use.account for use in fair_share.uses()}:
        rate = fair_share.gpus_of(account)
        must(abs(rate - expected.get(account, 0.0)) < 1e-6, f"{account} counts as using {rate} GPUs")


def _check_timers(pool: Pool) -> None:
    expected = set()
    for waiter in pool.queue.in_order():
        if waiter.deadline is not None or waiter.gives_up_at is not None:
            expected.add(("waiter", waiter.request.request_id))
    for lease in pool.leases:
        must((lease.quarantine is not None) == (lease.state is LeaseState.QUARANTINED), f"{lease} contradicts itself")
        if pool.now < lease.quarantine.until if lease.quarantine is not None else lease.expires_at is not None:
            expected.add(("lease", lease.lease_id))
    if follows_fleet(pool, pool.now):
        expected.add(("fleet", ""))
    running = {(kind, name) for _, kind, name in pool.timers.items() if kind != "reading"}
    must(running == expected, f"timers {running ^ expected} are missing or left over")
    earliest = min((at for at, _, _ in pool.timers.items()), default=math.inf)
    must(pool.timers.not_before <= earliest, "a timer may be missed")
    must(pool.timers.next_at() > pool.now, "a timer that was due has not run")


def _check_nothing_forgotten(pool: Pool) -> None:
    """No lost wake-up: no request waits that could be served."""
    allocator, reserved_for = pool.allocator, pool.reserved_for
    in_fleet = follows_fleet(pool, pool.now)
    must(not in_fleet or reserved_for is None, "GPUs are reserved here, and the fleet's dispatcher does not know it")
    withheld: set[str] = set()
    held_back: set[str] = set()
    lent: tuple[float, set[str]] | None = None
    for waiter in pool.queue.in_order():
        requirements, within = waiter.request.requirements, waiter.request.within
        if within is not None:
            around = enclosure_of(pool.leases, within)
            if around is not None and within not in held_back:
                gpus = pool.leases.gpus_of(around.lease)
                found = allocator.best(requirements, gpus, (), pool.now, around)
                must(found is None, f"{waiter.request.request_id} waits although it could have {found} inside {within}")
                if holds_back_later(gpus, waiter, around, pool.settings, pool.now):
                    held_back.add(within)
            continue
        if in_fleet:
            continue  # its dispatcher says when it is served
        allowed = only_on(pool, waiter.request)
        if allowed is not None:
            # A limit keeps it back: it blocks nobody, and nothing is reserved for it.
            must(waiter is not reserved_for, f"GPUs are reserved for {waiter}, which a limit keeps back")
            gpus = [allocator.gpus[gpu_id] for gpu_id in allowed]
            found = allocator.best(requirements, gpus, withheld, pool.now)
            must(found is None, f"{waiter.request.request_id} waits although its limit leaves it {found}")
            continue
        found = allocator.best(requirements, allocator.gpus.values(), withheld, pool.now)
        must(found is None, f"{waiter.request.request_id} waits although it could have {found}")
        declared = waiter.request.declared_seconds
        if lent is not None and declared is not None and declared <= lent[0]:
            found = allocator.best(requirements, allocator.gpus.values(), withheld - lent[1], pool.now)
            must(found is None, f"{waiter.request.request_id} waits although {found} could be lent to it")
        if waiter is reserved_for:
            lent = lending_window(pool, waiter, pool.now)
        withheld.update(gpus_to_await(allocator, requirements, pool.now))
        withheld.update(waiter.reserved if waiter is reserved_for else ())
