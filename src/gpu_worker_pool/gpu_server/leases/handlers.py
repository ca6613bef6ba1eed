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
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.core.accounts import key_name, uid_of
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
    RenewalBody,
    RequirementsBody,
    YieldBody,
    gpu_naming,
    invalid,
    parse_body,
    parse_plain,
)
from gpu_worker_pool.gpu_server.responses import NO_STORE, RETRY_AFTER, Refusal, Reply, json_reply
from gpu_worker_pool.gpu_server.security import check_content_type
from gpu_worker_pool.hardware.leasable import readings_of
from gpu_worker_pool.hardware.origin import host_name
from gpu_worker_pool.hardware.proc import ancestors_of, user_name
from gpu_worker_pool.hardware.processes import name_of_process

if TYPE_CHECKING:
    from gpu_worker_pool.broker.broker import Waiting
    from gpu_worker_pool.core.events import Origin
    from gpu_worker_pool.core.requirements import Requirements
    from gpu_worker_pool.gpu_server.fast_path import RequestContext
    from gpu_worker_pool.gpu_server.fleet.handlers import FleetHandlers
    from gpu_worker_pool.gpu_server.leases.schemas import AnyBody, Body
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
    began_at = boot_time()
    body, requirements = await _read(LeaseRequest, context)
    request_id = body.request_id or secrets.token_hex(16)
    within = await _enclosing_lease(context, body)
    in_fleet = _fleet_of(context) if within is None else None
    if within is None and in_fleet is None:
        requirements = await _within_visible_gpus(context, requirements, request_id)
    if in_fleet is not None and body.on_this_host:
        requirements = in_fleet.on_this_host(requirements)
    token = _token_for(context, request_id, in_fleet)
    if not _TOKEN.fullmatch(token):
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
        process="" if peer is None else _process(body, peer),
        asks=body.ask or None,
        origin=_origin(body, peer),
        within=within,
        expected_seconds=body.expected_seconds,
        max_seconds=body.max_seconds,
    )
    if in_fleet is not None:
        return await in_fleet.acquire(context, request, body, token)
    found = await _poll(context, request, body)
    if isinstance(found, Lease):
        index_of, waited_seconds = context.parts.broker.index_of, boot_time() - began_at
        location = f"{context.scope['path'].rstrip('/')}/{found.lease_id}".encode()
        granted = granted_body(found, token, index_of, body.gpu_names, waited_seconds)
        return json_reply(201, granted, ((b"location", location),))
    return json_reply(202, waiting_body(found, token), RETRY_AFTER)


def _origin(body: LeaseRequest, peer: Peer | None) -> Origin | None:
    """Over TCP it is what the caller says; over the Unix socket the kernel vouches for the user and the process."""
    said = None if body.holder is None else body.holder.origin()
    if peer is None:
        return said
    # `gpu-pool` has a process that holds the lease, and names the one around it, which started it.
    pid = said.pid if said is not None and said.pid in ancestors_of(peer.pid or 0) else peer.pid
    return vouched(said, user=peer.user, host=host_name(), pid=_worker_of(body, peer) or pid)


def _process(body: LeaseRequest, peer: Peer) -> str:
    """The one whose end ends the lease."""
    worker = _worker_of(body, peer)
    return peer.process if worker is None else name_of_process(worker)


def _worker_of(body: LeaseRequest, peer: Peer) -> int | None:
    """The lease process of an executor names the process for which it requests a lease: one that it has started."""
    pid = None if body.holder is None else body.holder.pid
    is_its_own = pid is not None and peer.pid is not None and peer.pid in ancestors_of(pid)
    return pid if is_its_own else None


async def cancel(context: RequestContext) -> Reply:
    """Cancel a request. If it was granted at the same moment, the lease is released."""
    broker, request_id, is_admin = context.parts.broker, context.identifier, context.caller.is_admin
    if not _ID.fullmatch(request_id):
        raise _unknown_request(request_id)
    if context.caller.peer is not None and not is_admin:
        by = _user_or_token(context, await broker.request_of(request_id), f"request {request_id}")
        if not await broker.cancel(request_id, by):
            raise _unknown_request(request_id)
        return json_reply(200, {"request_id": request_id, "cancelled": True})
    has_token = context.headers.x_lease_token is not None
    in_fleet = _fleet_of(context)
    if in_fleet is not None:
        by = None if is_admin else owner_of(_token_for(context, request_id, in_fleet))
        if not await in_fleet.cancel(request_id, by):
            raise _unknown_request(request_id)
        return json_reply(200, {"request_id": request_id, "cancelled": True})
    if not has_token and not is_admin and broker.held_by(request_id) is not None:
        raise _token_needed("releasing the lease that it was granted")
    try:
        by = None if is_admin else owner_of(_token_for(context, request_id, None))
        is_found = await broker.cancel(request_id, by)
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
    (host, lease_id), token = _split(context, body.within.lease_id), body.within.token
    if host:
        raise Refusal(409, "not_here", f"within: {lease_id} is a lease of {host}: send the request to its server")
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


def _fleet_of(context: RequestContext) -> FleetHandlers | None:
    """The fleet's queue is for callers over TCP; users of the socket want GPUs of this host."""
    return context.parts.in_fleet if context.caller.peer is None else None


def _token_for(context: RequestContext, request_id: str, in_fleet: FleetHandlers | None) -> str:
    """The token that was sent, or one that is the same whenever this caller repeats the request."""
    sent = context.headers.x_lease_token
    if sent is not None:
        return sent.decode("latin-1")
    if in_fleet is not None:
        return in_fleet.token_for(context.caller.account, request_id)
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
    """Renew a lease for another `ttl_seconds`. A lease that has ended is never revived: 409.

    The answer says whether a user has asked for it back. With `{"is_busy": true}` as body, the holder says that it is
    not idle, whatever readings show.
    """
    check_content_type(context.headers, is_needed=False)
    host, lease_id = _lease_id(context)
    body = await _optional_body(RenewalBody, context)
    naming, broker, in_fleet = gpu_naming(context.scope["query_string"]), context.parts.broker, context.parts.in_fleet
    is_busy = body is not None and body.is_busy
    if in_fleet is not None and host:
        renewed = await in_fleet.renew(host, lease_id, _token_of(context, "renewing"), naming, is_busy=is_busy)
        return json_reply(200, renewed)
    owner = await _owner(context, lease_id, "renewing")
    lease = lease_body(await broker.renew(lease_id, owner, is_busy=is_busy), broker.index_of, naming)
    is_of_fleet = in_fleet is not None and lease_id != context.identifier
    return json_reply(200, in_fleet.renewed(lease, naming) if in_fleet is not None and is_of_fleet else lease)


async def ask_to_leave(context: RequestContext) -> Reply:
    """Ask the holder of a lease to give it back. It learns that when it renews, and may keep it."""
    check_content_type(context.headers, is_needed=False)
    host, lease_id = _lease_id(context)
    body = await _optional_body(YieldBody, context)
    said = None if body is None else body.reason
    peer = context.caller.peer
    by = peer.user if peer is not None and peer.user else key_name(context.caller.account)
    who = f"{by or 'another user'} asks for it"
    reason = f"{who}: {said}" if said else who
    if context.parts.in_fleet is not None and host:
        await context.parts.in_fleet.ask_to_leave(host, lease_id, reason)
    else:
        await context.parts.broker.ask_to_leave(lease_id, reason)
    return json_reply(200, {"lease_id": context.identifier, "asked": True})


async def _optional_body(shape: type[AnyBody], context: RequestContext) -> AnyBody | None:
    """None where nothing was sent."""
    if context.headers.content_length in (None, b"0"):
        return None
    return parse_plain(shape, await read_body(context.receive, context.headers.content_length))


async def release(context: RequestContext) -> Reply:
    """Release a lease; twice is harmless. An administrator's key releases any lease and ends its quarantine.

    Over the Unix socket, a user's own leases need no token, and root is an administrator.
    """
    host, lease_id = _lease_id(context)
    if context.parts.in_fleet is not None and host:
        by = None if context.caller.is_admin else _token_of(context, "releasing")
        await context.parts.in_fleet.release(host, lease_id, by)
    else:
        by = None if context.caller.is_admin else await _owner(context, lease_id, "releasing")
        await context.parts.broker.release(lease_id, by)
    return json_reply(200, {"lease_id": context.identifier, "released": True})


def _lease_id(context: RequestContext) -> tuple[str, str]:
    """The host of the lease, empty for this one, and the id there."""
    if not _ID.fullmatch(context.identifier):
        raise _unknown_lease(context.identifier)
    return _split(context, context.identifier)


def _split(context: RequestContext, lease_id: str) -> tuple[str, str]:
    return ("", lease_id) if context.parts.in_fleet is None else context.parts.in_fleet.split(lease_id)


async def _owner(context: RequestContext, lease_id: str, what: str) -> str | None:
    """The owner, as the ledger compares it; None: the lease is the caller's, who needs no token."""
    if context.caller.peer is not None:
        request = await context.parts.broker.request_of_lease(lease_id)
        return _user_or_token(context, request, f"lease {lease_id}")
    return _token_of(context, what)


def _token_of(context: RequestContext, what: str) -> str:
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
    if context.parts.in_fleet is not None:
        return await context.parts.in_fleet.show("leases")
    if broker.problem is not None:
        raise LedgerUnavailableError(broker.problem)
    return Reply(200, await context.parts.lease_events.listed.get(), (NO_STORE,))


async def lease(context: RequestContext) -> Reply:
    """One lease. Leases that have ended are not shown."""
    broker = context.parts.broker
    host, lease_id = _split(context, context.identifier)
    if context.parts.in_fleet is not None and host:
        rows = (await context.parts.in_fleet.view("leases")).get("leases", ())
        row = next((row for row in rows if row.get("lease_id") == context.identifier), None)
        if row is None:
            raise _unknown_lease(context.identifier)
        return json_reply(200, row)
    found = await broker.lease(lease_id)
    if found is None:
        raise _unknown_lease(context.identifier)
    return json_reply(200, lease_row(found, broker.usage_of(found)))


async def queue(context: RequestContext) -> Reply:
    """All requests that wait, the next one first."""
    parts = context.parts
    if parts.in_fleet is not None:
        return await parts.in_fleet.show("queue")
    waiting = await parts.broker.queue()
    if parts.queue_shown[0] is not waiting:  # many callers get the same answer
        parts.queue_shown = waiting, json_reply(200, {"queue": list(map(queue_row, waiting))})
    return parts.queue_shown[1]


async def explanation(context: RequestContext) -> Reply:
    """Why a request waits: for every GPU the obstacles, with numbers."""
    broker, request_id = context.parts.broker, context.identifier
    found = await broker.explain(request_id)
    if found is None and context.parts.in_fleet is not None:
        return json_reply(200, await context.parts.in_fleet.explain(request_id))
    if found is None:
        raise _unknown_request(request_id)
    return json_reply(200, explanation_body(request_id, found, broker.index_of))


async def explanation_of_requirements(context: RequestContext) -> Reply:
    """Why a new request with these requirements would wait; open to everyone, and nothing is requested.

    The answer is that of `GET /queue/{request_id}`, with an empty `request_id`.
    """
    _, requirements = await _read(RequirementsBody, context)
    broker = context.parts.broker
    try:
        account = context.parts.authenticator.identify(context.scope, context.headers).account
    except Refusal:
        account = ""  # it may ask, but not request
    if context.parts.in_fleet is not None:
        return json_reply(200, await context.parts.in_fleet.explain_requirements(requirements, account))
    found = await broker.explain_requirements(await _within_visible_gpus(context, requirements), account=account)
    return json_reply(200, explanation_body("", found, broker.index_of))


async def fleet(context: RequestContext) -> Reply:
    """The fleet: its hosts, its dispatcher, its database and its queue. 404 for a server that is in none."""
    return await _joined(context).show("fleet")


async def fleet_link(context: RequestContext) -> Reply:
    """Where hosts of the fleet link to a candidate, with `Upgrade: gpu-pool-fleet`."""
    return await _joined(context).take_link(context)


async def drain_host(context: RequestContext) -> Reply:
    """Grant nothing more on a host of the fleet. Leases there go on. For administrators."""
    return await _administer(context, "drain", "draining")


async def undrain_host(context: RequestContext) -> Reply:
    """Use a drained host of the fleet again. For administrators."""
    return await _administer(context, "undrain", "up")


async def remove_host(context: RequestContext) -> Reply:
    """Forget a host of the fleet, such as one that will not come back. For administrators."""
    return await _administer(context, "remove", "removed")


async def _administer(context: RequestContext, action: str, state: str) -> Reply:
    check_content_type(context.headers, is_needed=False)
    in_fleet, host = _joined(context), context.identifier
    if not context.caller.is_admin:
        raise Refusal(
            403, "not_admin", "this needs an administrator's key (GPU_POOL_ADMIN_KEYS), or root over the Unix socket"
        )
    await in_fleet.administer(action, host)
    return json_reply(200, {"host": host, "state": state})


def _joined(context: RequestContext) -> FleetHandlers:
    if context.parts.in_fleet is None:
        raise Refusal(404, "no_fleet", "this server is not in a fleet: start it with --fleet or --join")
    return context.parts.in_fleet


# --- refusals ---


def _unknown_lease(lease_id: str) -> Refusal:
    return Refusal(404, "unknown_lease", f"there is no lease {lease_id[:64]!r}; GET /leases lists what there is")


def _unknown_request(request_id: str) -> Refusal:
    return Refusal(404, "unknown_request", f"no waiting request has the id {request_id[:64]!r}; GET /queue lists them")


def _not_yours(request: Request, what: str) -> Refusal:
    uid = uid_of(request.account)
    whose = "that of a program that asked over TCP" if uid is None else f"{user_name(uid)}'s"
    return Refusal(403, "not_yours", f"{what} is {whose}: ask them ({name_of(request, host_name())}), or root")


def _token_needed(what: str) -> Refusal:
    return Refusal(403, "token_needed", f"{what} needs the lease's token: send X-Lease-Token")
