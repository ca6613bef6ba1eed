"""The handlers of the lease API: check the request, ask the broker, and turn what it says into a reply.

The broker's errors are turned into refusals by `FastPathAPI`. Answers that are open to everyone hold no token.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.api.lease_rows import (
    explanation_body,
    granted_body,
    lease_body,
    lease_row,
    queue_row,
    waiting_body,
)
from gpu_worker_pool.broker.broker import owner_of
from gpu_worker_pool.core.assignments import Lease
from gpu_worker_pool.core.events import Request
from gpu_worker_pool.core.requirements import names_gpu
from gpu_worker_pool.errors import LedgerUnavailableError, NotYourLeaseError, PoolStoppedError
from gpu_worker_pool.gpu_server.disconnect import CallerGoneError, DisconnectWatch, is_gone, read_body
from gpu_worker_pool.gpu_server.leases.schemas import (
    ID_PATTERN,
    TOKEN_PATTERN,
    LeaseRequest,
    RequirementsBody,
    invalid,
    parse_body,
)
from gpu_worker_pool.gpu_server.responses import RETRY_AFTER, Refusal, json_reply
from gpu_worker_pool.gpu_server.security import check_content_type
from gpu_worker_pool.hardware.leasable import readings_of

if TYPE_CHECKING:
    from gpu_worker_pool.broker.broker import Waiting
    from gpu_worker_pool.core.requirements import Requirements
    from gpu_worker_pool.gpu_server.fast_path import RequestContext
    from gpu_worker_pool.gpu_server.leases.schemas import Body
    from gpu_worker_pool.gpu_server.responses import Reply

_ID: Final = re.compile(ID_PATTERN)
_TOKEN: Final = re.compile(TOKEN_PATTERN)

# --- requests ---


async def acquire(context: RequestContext) -> Reply:
    """Request GPUs: 201 with a lease, or after `wait_seconds` 202 with the position in the queue.

    Repeat the request with the same `request_id` to get the same lease, or to keep the position and wait on. A request
    that is not repeated for half a minute loses its position. With an `X-Lease-Token` that you chose yourself, nobody
    else can repeat the request.
    """
    body, requirements = await _read(LeaseRequest, context)
    request_id = body.request_id or secrets.token_hex(16)
    requirements = await _within_visible_gpus(context, requirements, request_id)
    token = _token_for(context, request_id)
    if not _TOKEN.match(token):
        raise invalid("X-Lease-Token: must be 16 to 200 ASCII characters without blanks")
    request = Request(
        request_id,
        requirements,
        body.worker_id or "",
        owner_of(token),
        body.label,
        body.ttl_seconds,
        context.caller.account,
    )
    found = await _poll(context, request, body)
    if isinstance(found, Lease):
        return json_reply(201, granted_body(found, token))
    return json_reply(202, waiting_body(found, token))


async def cancel(context: RequestContext) -> Reply:
    """Cancel a request. If it was granted at the same moment, the lease is released."""
    broker, request_id, is_admin = context.parts.broker, context.identifier, context.caller.is_admin
    if not _ID.match(request_id):
        raise _unknown_request(request_id)
    has_token = context.headers.x_lease_token is not None
    if not has_token and not is_admin and broker.held_by(request_id) is not None:
        raise _token_needed("releasing the lease that it was granted")
    try:
        is_found = await broker.cancel(request_id, None if is_admin else owner_of(_token_for(context, request_id)))
    except NotYourLeaseError:
        if not has_token:
            raise _token_needed("cancelling it") from None
        raise
    if not is_found:
        raise _unknown_request(request_id)
    return json_reply(200, {"request_id": request_id, "cancelled": True})


async def _read(shape: type[Body], context: RequestContext) -> tuple[Body, Requirements]:
    check_content_type(context.headers, is_needed=True)
    return parse_body(shape, await read_body(context.receive, context.headers.content_length))


async def _within_visible_gpus(
    context: RequestContext, requirements: Requirements, request_id: str = ""
) -> Requirements:
    """Limits them to the GPUs that the server's `CUDA_VISIBLE_DEVICES` shows.

    The pool keeps the hidden GPUs: other programs that share the ledger may use them.
    """
    view = context.parts.view
    if view.filter.value is None:
        return requirements
    first = await context.parts.broker.requirements_of(request_id)
    if first is not None and replace(first, only=None) == replace(requirements, only=None):
        # A repeated request must stay the same, although GPUs may have come and gone.
        return first
    if view.shown is None:
        raise Refusal(503, "no_sample_yet", "the GPUs of this server are not known yet", headers=RETRY_AFTER)
    visibility = view.shown.visibility
    if not visibility.is_filtering:
        return requirements
    only = requirements.only
    allowed = sorted(
        reading.gpu_id
        for reading in readings_of(visibility.gpus)
        if only is None or any(names_gpu(name, reading) for name in only)
    )
    if not allowed:
        reason = "this server's CUDA_VISIBLE_DEVICES hides all GPUs that the request allows"
        raise Refusal(409, "impossible", f"the request can never be granted: {reason}", (reason,))
    return replace(requirements, only=tuple(allowed))


def _token_for(context: RequestContext, request_id: str) -> str:
    """The token that was sent, or one that is the same whenever this caller repeats the request."""
    sent = context.headers.x_lease_token
    if sent is not None:
        return sent.decode("latin-1")
    return context.parts.broker.token_for(f"{context.caller.account}/{request_id}")


async def _poll(context: RequestContext, request: Request, body: LeaseRequest) -> Lease | Waiting:
    """Waits for the broker's answer, and tells the broker if the caller does not get it."""
    broker, poll_id = context.parts.broker, secrets.token_hex(8)
    try:
        with DisconnectWatch(context.receive):
            found = await broker.acquire(
                request, wait_seconds=body.wait_seconds, may_reserve=body.may_keep, poll_id=poll_id
            )
    except CallerGoneError:
        await broker.poll_abandoned(request.request_id, poll_id)
        raise
    except PoolStoppedError:
        await broker.poll_abandoned(request.request_id, poll_id, is_gone=False)
        raise
    if isinstance(found, Lease) and is_gone(context.receive):
        await broker.poll_abandoned(request.request_id, poll_id)
        raise CallerGoneError
    return found


# --- leases ---


async def renew(context: RequestContext) -> Reply:
    """Renew a lease for another `ttl_seconds`. A lease that has ended is never revived: 409."""
    check_content_type(context.headers, is_needed=False)
    lease = await context.parts.broker.renew(_lease_id(context), _owner(context, "renewing"))
    return json_reply(200, lease_body(lease))


async def release(context: RequestContext) -> Reply:
    """Release a lease; twice is harmless. An administrator's key releases any lease and ends its quarantine."""
    lease_id = _lease_id(context)
    by = None if context.caller.is_admin else _owner(context, "releasing")
    await context.parts.broker.release(lease_id, by)
    return json_reply(200, {"lease_id": lease_id, "released": True})


def _lease_id(context: RequestContext) -> str:
    if not _ID.match(context.identifier):
        raise _unknown_lease(context.identifier)
    return context.identifier


def _owner(context: RequestContext, what: str) -> str:
    token = context.headers.x_lease_token
    if token is None:
        raise _token_needed(what)
    return owner_of(token.decode("latin-1"))


# --- views: open to everyone ---


async def leases(context: RequestContext) -> Reply:
    """All leases, oldest first, and how their holders use them."""
    broker = context.parts.broker
    if broker.problem is not None:
        raise LedgerUnavailableError(broker.problem)
    found = list(broker.leases.values()) if broker.is_informed else await broker.held()
    return json_reply(200, {"leases": [lease_row(each, broker.usage_of(each)) for each in found]})


async def lease(context: RequestContext) -> Reply:
    """One lease. Leases that have ended are not shown."""
    broker = context.parts.broker
    found = await broker.lease(context.identifier)
    if found is None:
        raise _unknown_lease(context.identifier)
    return json_reply(200, lease_row(found, broker.usage_of(found)))


async def queue(context: RequestContext) -> Reply:
    """All requests that wait, the next one first."""
    return json_reply(200, {"queue": [queue_row(waiting) for waiting in await context.parts.broker.queue()]})


async def explanation(context: RequestContext) -> Reply:
    """Why a request waits: for every GPU the obstacles, with numbers."""
    broker, request_id = context.parts.broker, context.identifier
    found = await broker.explain(request_id)
    if found is None:
        raise _unknown_request(request_id)
    return json_reply(200, explanation_body(request_id, found, broker.index_of))


async def explanation_of_requirements(context: RequestContext) -> Reply:
    """Why a new request with these requirements would wait; open to everyone, and nothing is requested.

    The answer is that of `GET /queue/{request_id}`, with an empty `request_id`.
    """
    _, requirements = await _read(RequirementsBody, context)
    broker = context.parts.broker
    found = await broker.explain_requirements(await _within_visible_gpus(context, requirements))
    return json_reply(200, explanation_body("", found, broker.index_of))


# --- refusals ---


def _unknown_lease(lease_id: str) -> Refusal:
    return Refusal(404, "unknown_lease", f"there is no lease {lease_id[:64]!r}; GET /leases lists what there is")


def _unknown_request(request_id: str) -> Refusal:
    return Refusal(404, "unknown_request", f"no waiting request has the id {request_id[:64]!r}; GET /queue lists them")


def _token_needed(what: str) -> Refusal:
    return Refusal(403, "token_needed", f"{what} needs the lease's token: send X-Lease-Token")
