"""The handlers of the lease API: check the request, ask the broker, and turn what it says into a reply.

The broker's errors are turned into refusals by `FastPathAPI`. Answers that are open to everyone hold no token.
"""

from __future__ import annotations

import hmac
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
from gpu_worker_pool.core.origins import name_of, vouched
from gpu_worker_pool.core.requirements import names_gpu
from gpu_worker_pool.errors import LedgerUnavailableError, NotYourLeaseError, PoolStoppedError
from gpu_worker_pool.gpu_server.disconnect import CallerGoneError, DisconnectWatch, is_gone, read_body
from gpu_worker_pool.gpu_server.leases.schemas import (
    ID_PATTERN,
    TOKEN_PATTERN,
    LeaseRequest,
    RequirementsBody,
    gpu_naming,
    invalid,
    parse_body,
)
from gpu_worker_pool.gpu_server.responses import RETRY_AFTER, Refusal, json_reply
from gpu_worker_pool.gpu_server.security import check_content_type
from gpu_worker_pool.hardware.leasable import readings_of
from gpu_worker_pool.hardware.origin import host_name
from gpu_worker_pool.hardware.proc import ancestors_of, user_name

if TYPE_CHECKING:
    from gpu_worker_pool.broker.broker import Waiting
    from gpu_worker_pool.core.events import Origin
    from gpu_worker_pool.core.requirements import Requirements
    from gpu_worker_pool.gpu_server.fast_path import RequestContext
    from gpu_worker_pool.gpu_server.leases.schemas import Body
    from gpu_worker_pool.gpu_server.responses import Reply
    from gpu_worker_pool.gpu_server.unix_socket import Peer

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
    within = await _enclosing_lease(context, body)
    if within is None:
        requirements = await _within_visible_gpus(context, requirements, request_id)
    token = _token_for(context, request_id)
    if not _TOKEN.match(token):
        raise invalid("X-Lease-Token: must be 16 to 200 ASCII characters without blanks")
    peer = context.caller.peer
    request = Request(
        request_id,
        requirements,
        body.worker_id or "",
        owner_of(token),
        body.label,
        body.ttl_seconds,
        context.caller.account,
        process="" if peer is None else peer.process,
        origin=_origin(body, peer),
        within=within,
    )
    found = await _poll(context, request, body)
    if isinstance(found, Lease):
        return json_reply(201, granted_body(found, token, context.parts.broker.index_of, body.gpu_names))
    return json_reply(202, waiting_body(found, token))


def _origin(body: LeaseRequest, peer: Peer | None) -> Origin | None:
    """Over TCP it is what the caller says; over the Unix socket the kernel vouches for the user and the process."""
    said = None if body.holder is None else body.holder.origin()
    if peer is None:
        return said
    # `gpu-pool` has a process that holds the lease, and names the one around it, which started it.
    pid = said.pid if said is not None and said.pid in ancestors_of(peer.pid or 0) else peer.pid
    return vouched(said, user=peer.user, host=host_name(), pid=pid)


async def cancel(context: RequestContext) -> Reply:
    """Cancel a request. If it was granted at the same moment, the lease is released."""
    broker, request_id, is_admin = context.parts.broker, context.identifier, context.caller.is_admin
    if not _ID.match(request_id):
        raise _unknown_request(request_id)
    if context.caller.peer is not None and not is_admin:
        by = _user_or_token(context, await broker.request_of(request_id), f"request {request_id}")
        if not await broker.cancel(request_id, by):
            raise _unknown_request(request_id)
        return json_reply(200, {"request_id": request_id, "cancelled": True})
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


async def _enclosing_lease(context: RequestContext, body: LeaseRequest) -> str | None:
    """The id of the lease inside which the request runs. If that has ended, the pool refuses the request."""
    if body.within is None:
        return None
    lease_id, token = body.within.lease_id, body.within.token
    found = await context.parts.broker.lease(lease_id)
    if found is None or context.caller.has_requested(found.request):
        return lease_id
    if token is None:
        raise Refusal(403, "token_needed", f"within: dividing {lease_id} needs its token: send it as within.token")
    if not hmac.compare_digest(found.request.owner, owner_of(token)):
        raise Refusal(403, "not_yours", f"within: the token is not that of {lease_id}")
    return lease_id


async def _within_visible_gpus(
    context: RequestContext, requirements: Requirements, request_id: str = ""
) -> Requirements:
    """Limits them to the GPUs that the server's `CUDA_VISIBLE_DEVICES` shows.

    The pool keeps the hidden GPUs: other programs that share the ledger may use them.
    """
    view = context.parts.view
    if view.filter.value is None:
        return requirements
    first = await context.parts.broker.request_of(request_id)
    if first is not None and replace(first.requirements, only=None) == replace(requirements, only=None):
        # A repeated request must stay the same, although GPUs may have come and gone.
        return first.requirements
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
    lease_id = _lease_id(context)
    naming, broker = gpu_naming(context.scope["query_string"]), context.parts.broker
    lease = await broker.renew(lease_id, await _owner(context, lease_id, "renewing"))
    return json_reply(200, lease_body(lease, broker.index_of, naming))


async def release(context: RequestContext) -> Reply:
    """Release a lease; twice is harmless. An administrator's key releases any lease and ends its quarantine.

    Over the Unix socket, a user's own leases need no token, and root is an administrator.
    """
    lease_id = _lease_id(context)
    by = None if context.caller.is_admin else await _owner(context, lease_id, "releasing")
    await context.parts.broker.release(lease_id, by)
    return json_reply(200, {"lease_id": lease_id, "released": True})


def _lease_id(context: RequestContext) -> str:
    if not _ID.match(context.identifier):
        raise _unknown_lease(context.identifier)
    return context.identifier


async def _owner(context: RequestContext, lease_id: str, what: str) -> str | None:
    """By whom, as the ledger compares it; None: it is the caller's, who needs no token."""
    if context.caller.peer is not None:
        request = await context.parts.broker.request_of_lease(lease_id)
        return _user_or_token(context, request, f"lease {lease_id}")
    token = context.headers.x_lease_token
    if token is None:
        raise _token_needed(what)
    return owner_of(token.decode("latin-1"))


def _user_or_token(context: RequestContext, request: Request | None, what: str) -> str | None:
    """The same over the Unix socket: what this user requested is the caller's, and so is what it has the token of."""
    caller, token = context.caller, context.headers.x_lease_token
    if request is None:
        return caller.account  # the broker says that there is no such thing
    if caller.has_requested(request):
        return None
    if token is not None and owner_of(token.decode("latin-1")) == request.owner:
        return request.owner
    raise _not_yours(request, what)


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


def _not_yours(request: Request, what: str) -> Refusal:
    kind, _, uid = request.account.partition(":")
    whose = f"{user_name(int(uid))}'s" if kind == "user" else "that of a program that asked over TCP"
    return Refusal(403, "not_yours", f"{what} is {whose}: ask them ({name_of(request, host_name())}), or root")


def _token_needed(what: str) -> Refusal:
    return Refusal(403, "token_needed", f"{what} needs the lease's token: send X-Lease-Token")
