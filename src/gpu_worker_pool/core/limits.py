"""The limits of a policy: what an account can never have, and which of its requests wait until it holds less.

Requests that wait because of a limit are passed by all others, and no GPU is reserved for them. Inside a lease nothing
is limited: the lease around it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker_pool.core.accounts import account_name
from gpu_worker_pool.core.policy import NO_LIMITS
from gpu_worker_pool.errors import PolicyLimitError
from gpu_worker_pool.wording import spoken_gpus, spoken_seconds

if TYPE_CHECKING:
    from collections.abc import Collection

    from gpu_worker_pool.core.events import Request
    from gpu_worker_pool.core.policy import Limits
    from gpu_worker_pool.core.pool import Pool


def limits_of(pool: Pool, request: Request) -> Limits:
    if not pool.has_limits or not request.account or request.within is not None:
        return NO_LIMITS
    return pool.policy.limits_of(request.account, request.groups or ())


def never_allowed(pool: Pool, request: Request) -> tuple[str, ...]:
    """Why the policy can never allow this request; it is refused at once."""
    limits, requirements = limits_of(pool, request), request.requirements
    if limits is NO_LIMITS:
        return ()
    reasons = []
    most, highest = limits.most_gpus, limits.highest_priority
    if most is not None and requirements.count > most:
        more = f" at most, not {requirements.count}" if most else ""
        reasons.append(f"{_who(request)} may hold {spoken_gpus(most)}{more}")
    if highest is not None and requirements.priority > highest:
        reasons.append(f"{_who(request)} may ask for priority {highest} at most, not {requirements.priority}")
    longest, wanted = limits.longest_seconds, request.max_seconds
    if longest is not None and wanted is not None and wanted > longest:
        reasons.append(f"{_who(request)} may hold GPUs for {spoken_seconds(longest)}, not {spoken_seconds(wanted)}")
    return tuple(reasons)


def why_kept_back(pool: Pool, request: Request) -> str | None:
    """The limit that keeps this request waiting now; None: there is none, or it excludes only some GPUs."""
    most = limits_of(pool, request).most_gpus
    if most is None:
        return None
    held, count = pool.leases.held_by(request.account), request.requirements.count
    if len(held) + count <= most or _fits_on(held, request):
        return None
    if len(held) >= most:
        return f"{_who(request)} holds {spoken_gpus(len(held))}, its limit"
    return f"{_who(request)} holds {spoken_gpus(len(held))} of the {most} it may hold"


def only_on(pool: Pool, request: Request) -> Collection[str] | None:
    """The GPUs that its limit still allows: those on which the account already holds a share; None: any."""
    most = limits_of(pool, request).most_gpus
    if most is None:
        return None
    held = pool.leases.held_by(request.account)
    return None if len(held) + request.requirements.count <= most else held if _fits_on(held, request) else ()


def _fits_on(held: Collection[str], request: Request) -> bool:
    return request.requirements.share and len(held) >= request.requirements.count


def check_waiting(pool: Pool, request: Request) -> None:
    """Raises a `PolicyLimitError` if the account already has as many waiting requests as it may."""
    most = limits_of(pool, request).most_waiting
    if most is not None and pool.queue.of_account(request.account) >= most:
        raise PolicyLimitError(f"{_who(request)} may have {_waiting(most)} at most: wait for one of them, or cancel it")


def _who(request: Request) -> str:
    name = account_name(request.account, request.origin)
    return f"the account of {name}" if " " in name else f"account {name}"


def _waiting(most: int) -> str:
    return "one waiting request" if most == 1 else f"{most} waiting requests"
