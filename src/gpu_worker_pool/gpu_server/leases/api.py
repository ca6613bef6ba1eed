"""The lease API: who asks is looked at first, then what, then the desk decides; whatever it says becomes an answer.

What changes something is answered before the framework has looked at the request, as the hot routes are: a grant costs
a write to the disk, and little else should be added to it.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
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
from gpu_worker_pool.errors import LedgerUnavailableError, NotYourLeaseError, PoolStoppedError
from gpu_worker_pool.gpu_server.answers import REFUSED_BY_BROKER, JSONAnswer, as_refusal
from gpu_worker_pool.gpu_server.connected import CallerGoneError, DisconnectWatch, is_gone, read_body
from gpu_worker_pool.gpu_server.leases.schemas import (
    ID_PATTERN,
    TOKEN_PATTERN,
    Body,
    LeaseRequest,
    RequirementsBody,
    nonsense,
    read_request,
)
from gpu_worker_pool.gpu_server.leases.visible import within_what_is_shown
from gpu_worker_pool.gpu_server.security import Refusal, check_content_type, read_headers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.types import Receive, Scope, Send

    from gpu_worker_pool.broker.broker import LeaseBroker, Waiting
    from gpu_worker_pool.core.requirements import Requirements
    from gpu_worker_pool.gpu_server.security import Authenticator, Caller, Headers
    from gpu_worker_pool.gpu_server.view import HostView

    #: None: nobody is there any more to be answered.
    Outcome = JSONAnswer | Refusal | None
    Handler = Callable[["Call"], Awaitable[Outcome]]

_ID: Final = re.compile(ID_PATTERN)
_TOKEN: Final = re.compile(TOKEN_PATTERN)


@dataclass(slots=True)
class Call:
    """One request to change something, of somebody who may."""

    caller: Caller
    headers: Headers
    #: The id in the path.
    identifier: str
    receive: Receive

    @property
    def token(self) -> str | None:
        sent = self.headers.lease_token
        return None if sent is None else sent.decode("latin-1")


class LeaseAPI:
    """Belongs to one event loop."""

    def __init__(self, broker: LeaseBroker, authenticator: Authenticator, view: HostView, prefix: str = "") -> None:
        self.broker = broker
        self._authenticator = authenticator
        self._view = view
        #: Whether there is a folder for the ledger, usable or not.
        self.has_place = True
        self._leases, self._queue = f"{prefix}/leases", f"{prefix}/queue"

    @property
    def open_to(self) -> list[str]:
        return self._authenticator.open_to

    def are_offered_to(self, scope: Scope) -> bool:
        """Not where there is no place for a ledger at all: then others assign without one, as they did before."""
        return self.has_place and self._authenticator.offers_leases(scope)

    # --- which change is asked for ---

    def find(self, method: str, path: str) -> tuple[Handler, str] | None:
        """The one that this request asks for, and the id in its path."""
        if method == "POST":
            if path == self._leases:
                return self._acquire, ""
            if path.endswith("/renew"):
                return _with_id(self._renew, self._leases, path.removesuffix("/renew"))
        elif method == "DELETE":
            return _with_id(self._release, self._leases, path) or _with_id(self._cancel, self._queue, path)
        return None

    async def serve(self, found: tuple[Handler, str], scope: Scope, receive: Receive, send: Send) -> None:
        handler, identifier = found
        headers = read_headers(scope)
        caller = self._authenticator.identify(scope, headers)
        if isinstance(caller, Refusal):
            outcome: Outcome = caller
        else:
            try:
                outcome = await handler(Call(caller, headers, identifier, receive))
            except REFUSED_BY_BROKER as error:
                outcome = as_refusal(error)
        if isinstance(outcome, Refusal):
            outcome = JSONAnswer.refusing(outcome)
        if outcome is not None:
            await outcome.send(send)

    # --- asking ---

    async def _acquire(self, call: Call) -> Outcome:
        asked = await self._asked(LeaseRequest, call.headers, call.receive)
        if asked is None or isinstance(asked, Refusal):
            return asked
        fields, requirements = asked
        request_id = fields.request_id or secrets.token_hex(16)
        token = self._token_of(call, request_id)
        if not _TOKEN.match(token):
            return nonsense("X-Lease-Token: must be 16 to 200 characters of ASCII without blanks")
        request = Request(
            request_id,
            requirements,
            fields.worker_id or "",
            owner_of(token),
            fields.label,
            fields.ttl_seconds,
            call.caller.account,
        )
        found = await self._listen(request, fields, call)
        if found is None:
            return None
        if isinstance(found, Lease):
            return JSONAnswer(201, granted_body(found, token))
        return JSONAnswer(202, waiting_body(found, token))

    async def _asked(
        self, shape: type[Body], headers: Headers, receive: Receive
    ) -> tuple[Body, Requirements] | Refusal | None:
        """What is wished for, as far as it may be had here; None: nobody is there any more to be answered."""
        if refusal := check_content_type(headers, is_needed=True):
            return refusal
        body = await read_body(receive, headers.content_length)
        if body is None or isinstance(body, Refusal):
            return body
        asked = read_request(shape, body)
        if isinstance(asked, Refusal):
            return asked
        request_id = asked[0].request_id if isinstance(asked[0], LeaseRequest) else None
        requirements = await within_what_is_shown(
            asked[1], self._view, lambda: self.broker.requirements_of(request_id or "")
        )
        return requirements if isinstance(requirements, Refusal) else (asked[0], requirements)

    def _token_of(self, call: Call, request_id: str) -> str:
        """Its own, or ours: the same for every repetition by the same caller, and another for everybody else."""
        sent = call.token
        return self.broker.token_for(f"{call.caller.account}/{request_id}") if sent is None else sent

    async def _listen(self, request: Request, fields: LeaseRequest, call: Call) -> Lease | Waiting | None:
        """What the desk says; None if the caller has gone meanwhile, in which case the desk knows."""
        broker, poll_id = self.broker, secrets.token_hex(8)
        try:
            with DisconnectWatch(call.receive):
                found = await broker.acquire(
                    request, wait_seconds=fields.wait_seconds, may_reserve=fields.may_keep, poll_id=poll_id
                )
        except CallerGoneError:
            await broker.poll_abandoned(request.request_id, poll_id)
            return None
        except PoolStoppedError:
            await broker.poll_abandoned(request.request_id, poll_id, is_gone=False)
            raise
        if isinstance(found, Lease) and is_gone(call.receive):
            await broker.poll_abandoned(request.request_id, poll_id)
            return None
        return found

    # --- holding ---

    async def _renew(self, call: Call) -> Outcome:
        if refusal := check_content_type(call.headers, is_needed=False):
            return refusal
        if not _ID.match(call.identifier):
            return _unknown_lease(call.identifier)
        if call.token is None:
            return _token_needed("renewing")
        return JSONAnswer(200, lease_body(await self.broker.renew(call.identifier, owner_of(call.token))))

    async def _release(self, call: Call) -> Outcome:
        if not _ID.match(call.identifier):
            return _unknown_lease(call.identifier)
        if call.token is None and not call.caller.is_admin:
            return _token_needed("releasing")
        by = None if call.caller.is_admin or call.token is None else owner_of(call.token)
        await self.broker.release(call.identifier, by)
        return JSONAnswer(200, {"lease_id": call.identifier, "released": True})

    async def _cancel(self, call: Call) -> Outcome:
        request_id = call.identifier
        if not _ID.match(request_id):
            return _unknown_request(request_id)
        by = None if call.caller.is_admin else owner_of(self._token_of(call, request_id))
        if call.token is None and not call.caller.is_admin and self.broker.is_held(request_id):
            return _token_needed("giving back what it was granted")
        try:
            is_found = await self.broker.cancel(request_id, by)
        except NotYourLeaseError:
            if call.token is None:
                return _token_needed("taking it back")
            raise
        if not is_found:
            return _unknown_request(request_id)
        return JSONAnswer(200, {"request_id": request_id, "cancelled": True})

    # --- looking: open to all, so no token is in any of these ---

    async def leases(self) -> JSONAnswer:
        if refusal := self._closed():
            return refusal
        broker = self.broker
        try:
            leases = list(broker.leases.values()) if broker.is_informed else await broker.held()
        except REFUSED_BY_BROKER as error:
            return JSONAnswer.refusing(as_refusal(error))
        return JSONAnswer(200, {"leases": [lease_row(lease, broker.usage_of(lease)) for lease in leases]})

    async def lease(self, lease_id: str) -> JSONAnswer:
        try:
            lease = await self.broker.lease(lease_id)
        except REFUSED_BY_BROKER as error:
            return JSONAnswer.refusing(as_refusal(error))
        if lease is None:
            return JSONAnswer.refusing(_unknown_lease(lease_id))
        return JSONAnswer(200, lease_row(lease, self.broker.usage_of(lease)))

    async def queue(self) -> JSONAnswer:
        try:
            return JSONAnswer(200, {"queue": [queue_row(waiting) for waiting in await self.broker.queue()]})
        except REFUSED_BY_BROKER as error:
            return JSONAnswer.refusing(as_refusal(error))

    async def explanation(self, request_id: str) -> JSONAnswer:
        try:
            explanation = await self.broker.explain(request_id)
        except REFUSED_BY_BROKER as error:
            return JSONAnswer.refusing(as_refusal(error))
        if explanation is None:
            return JSONAnswer.refusing(_unknown_request(request_id))
        return JSONAnswer(200, explanation_body(request_id, explanation, self.broker.index_of))

    async def explanation_of_requirements(self, scope: Scope, receive: Receive) -> JSONAnswer:
        """What somebody who asked for this now would be told."""
        asked = await self._asked(RequirementsBody, read_headers(scope), receive)
        if asked is None or isinstance(asked, Refusal):
            return JSONAnswer.refusing(asked or nonsense("the body is not complete"))
        try:
            explanation = await self.broker.explain_requirements(asked[1])
        except REFUSED_BY_BROKER as error:
            return JSONAnswer.refusing(as_refusal(error))
        return JSONAnswer(200, explanation_body("", explanation, self.broker.index_of))

    def _closed(self) -> JSONAnswer | None:
        problem = self.broker.problem
        return None if problem is None else JSONAnswer.refusing(as_refusal(LedgerUnavailableError(problem)))


def _with_id(handler: Handler, start: str, path: str) -> tuple[Handler, str] | None:
    identifier = path[len(start) + 1 :]
    return (handler, identifier) if path == f"{start}/{identifier}" and "/" not in identifier else None


def _unknown_lease(lease_id: str) -> Refusal:
    return Refusal(404, "unknown_lease", f"there is no lease {lease_id[:64]!r}; GET /leases lists what there is")


def _unknown_request(request_id: str) -> Refusal:
    return Refusal(404, "unknown_request", f"no request {request_id[:64]!r} waits; GET /queue lists those that do")


def _token_needed(what: str) -> Refusal:
    return Refusal(403, "token_needed", f"{what} needs the lease's token: send X-Lease-Token")
