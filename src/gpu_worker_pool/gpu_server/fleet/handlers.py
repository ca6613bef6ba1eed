"""The lease API of a server in a fleet: requests go to the fleet's dispatcher, renewals to the host of the lease.

The usual handlers check a request, and hand it over to these. What concerns this host alone stays with them.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool import errors
from gpu_worker_pool.api.client import requirements_body
from gpu_worker_pool.api.lease_rows import lease_row
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.core.requirements import names_gpu
from gpu_worker_pool.errors import (
    GPUWorkerPoolError,
    ImpossibleRequestError,
    RequestEndedError,
    ServiceUnavailableError,
)
from gpu_worker_pool.fleet.links import PROTOCOL
from gpu_worker_pool.fleet.messages import Administer, Call, Cancel, Query, fleet_lease_id, host_and_lease
from gpu_worker_pool.fleet.questions import CallRefusedError, FleetUnavailableError
from gpu_worker_pool.gpu_server.connections import TAKE_OVER
from gpu_worker_pool.gpu_server.disconnect import CallerGoneError, DisconnectWatch, is_gone
from gpu_worker_pool.gpu_server.fleet.numbers import FleetNumbers, fleet_metrics
from gpu_worker_pool.gpu_server.responses import (
    NO_STORE,
    REFUSED_BY_BROKER,
    RETRY_AFTER,
    Refusal,
    Reply,
    as_json,
    as_refusal,
    json_reply,
)
from gpu_worker_pool.hardware.leasable import readings_of
from gpu_worker_pool.lease_variables import VisibleGPU, lease_variables

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prometheus_client.core import Metric

    from gpu_worker_pool.core.events import Request
    from gpu_worker_pool.core.requirements import Requirements
    from gpu_worker_pool.fleet.agent import FleetAgent
    from gpu_worker_pool.fleet.messages import Answer, Message
    from gpu_worker_pool.gpu_server.fast_path import RequestContext
    from gpu_worker_pool.gpu_server.fleet.parts import FleetParts
    from gpu_worker_pool.gpu_server.leases.schemas import LeaseRequest
    from gpu_worker_pool.lease_variables import GPUNaming

logger: logging.Logger = logging.getLogger(__name__)

#: Each view of the fleet is requested at most once in this time, however many callers there are.
VIEW_SECONDS: Final = 0.2
#: How old a view may be that is shown while there is no dispatcher.
OLDEST_VIEW_SECONDS: Final = 60.0
_UNKNOWN: Final = {"UnknownRequest": "unknown_request", "UnknownHost": "unknown_host"}
_UPGRADE: Final = ((b"upgrade", PROTOCOL.encode()),)


class FleetHandlers:
    """Of one server; belongs to its event loop."""

    def __init__(self, parts: FleetParts) -> None:
        self.parts = parts
        #: By view: when it was requested, and the request under way or its answer.
        self._views: dict[str, tuple[float, asyncio.Task[dict[str, Any]]]] = {}
        self._last_seen: dict[str, tuple[float, dict[str, Any]]] = {}

    @property
    def name(self) -> str:
        return self.parts.name

    @property
    def fleet_id(self) -> str:
        """Empty while it is not known."""
        agent = self.parts.agent
        return "" if agent is None or agent.welcome is None else agent.welcome.fleet_id

    def _agent(self) -> FleetAgent:
        if self.parts.agent is None:
            raise _unavailable("this server has not joined its fleet yet: its ledger cannot be opened")
        return self.parts.agent

    # --- requests ---

    def token_for(self, account: str, request_id: str) -> str:
        """The token for a client that sent none: the same whichever server derives it."""
        welcome = self._agent().welcome
        if welcome is None or not welcome.secret:
            raise _unavailable(self._agent().why_silent())
        return hmac.new(welcome.secret.encode(), f"{account}/{request_id}".encode(), hashlib.sha256).hexdigest()[:40]

    def on_this_host(self, requirements: Requirements) -> Requirements:
        """The same for this host's GPUs alone, in the words of the fleet."""
        only, exclude = requirements.only, requirements.exclude
        if only is None and not exclude:
            return replace(requirements, only=(self.name,))
        shown = self.parts.view.shown
        readings = () if shown is None else readings_of(shown.visibility.gpus)
        left = tuple(
            f"{self.name}/{reading.gpu_id}"
            for reading in readings
            if (only is None or any(names_gpu(name, reading) for name in only))
            and not any(names_gpu(name, reading) for name in exclude)
        )
        if not left:
            raise ImpossibleRequestError(reasons=(f"{self.name} has none of the GPUs that the request allows",))
        return replace(requirements, only=left, exclude=())

    async def acquire(self, context: RequestContext, request: Request, body: LeaseRequest, token: str) -> Reply:
        began_at = boot_time()
        agent, poll_id = self._agent(), secrets.token_hex(8)
        try:
            with DisconnectWatch(context.receive):
                answer = await agent.ask(
                    request, wait_seconds=body.wait_seconds, may_reserve=body.may_keep, poll_id=poll_id
                )
        except FleetUnavailableError as error:
            raise _unavailable(str(error)) from None
        self._views.clear()  # the next view of this server includes the change
        if is_gone(context.receive):
            agent.abandoned(request.request_id, poll_id)
            raise CallerGoneError
        if answer.state == "granted":
            granted = self._granted(answer, body.gpu_names)
            granted |= {"waited_seconds": round(boot_time() - began_at, 3), "token": token}
            location = f"{context.scope['path'].rstrip('/')}/{granted['lease_id']}".encode()
            return json_reply(201, granted, ((b"location", location),))
        if answer.state == "waiting":
            waiting = {
                "request_id": request.request_id,
                "position": answer.position,
                "waiting_seconds": round(answer.waiting_seconds, 3),
                "reasons": list(answer.reasons),
                "token": token,
            }
            return json_reply(202, waiting, RETRY_AFTER)
        if answer.state == "ended":
            if answer.error == "rejected":
                raise ImpossibleRequestError(reasons=answer.reasons)
            raise RequestEndedError(state=answer.error, reasons=answer.reasons)
        raise _error_of(answer.error, answer.text, answer.reasons)

    def _granted(self, answer: Answer, naming: GPUNaming) -> dict[str, Any]:
        lease = self._of_fleet(answer.host, dict(answer.body), naming)
        lease["endpoint_url"] = answer.url
        for row, global_id in zip(lease.get("gpus", ()), answer.global_ids, strict=False):
            row["global_id"] = global_id
        return lease

    def _of_fleet(self, host: str, lease: dict[str, Any], naming: GPUNaming) -> dict[str, Any]:
        """The answer to the holder of a lease, from what the lease's host says."""
        lease_id = str(lease.get("lease_id", ""))
        gpus = [VisibleGPU(row.get("gpu_id"), row.get("uuid")) for row in lease.get("gpus", ())]
        env = lease_variables(gpus, fleet_lease_id(host, lease_id), naming, host=host)
        return {**lease, "lease_id": fleet_lease_id(host, lease_id), "host": host, "env": env}

    async def cancel(self, request_id: str, by: str | None) -> bool:
        """Whether there was such a request in the fleet."""
        try:
            await self._call(lambda call_id: Cancel(call_id, request_id, by))
        except CallRefusedError as error:
            if error.error == "UnknownRequest":
                return False
            raise _error_of(error.error, str(error)) from None
        return True

    # --- leases ---

    def split(self, lease_id: str) -> tuple[str, str]:
        """The host of a lease, empty for this one, and the id there."""
        host, local_id = host_and_lease(lease_id)
        return ("" if host == self.name else host), local_id

    async def renew(self, host: str, lease_id: str, by: str, naming: GPUNaming, *, is_busy: bool) -> dict[str, Any]:
        arguments = {"lease_id": lease_id, "by": by, "is_busy": is_busy}
        return self._of_fleet(host, await self._of_host(host, "renew", arguments), naming)

    def renewed(self, lease: dict[str, Any], naming: GPUNaming) -> dict[str, Any]:
        """A lease of this host."""
        return self._of_fleet(self.name, lease, naming)

    async def release(self, host: str, lease_id: str, by: str | None) -> None:
        await self._of_host(host, "release", {"lease_id": lease_id, "by": by})

    async def ask_to_leave(self, host: str, lease_id: str, reason: str) -> None:
        await self._of_host(host, "yield", {"lease_id": lease_id, "reason": reason})

    async def _of_host(self, host: str, what: str, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self._call(lambda call_id: Call(call_id, host, what, arguments), may_be_any=True)
        except CallRefusedError as error:
            raise _error_of(error.error, str(error)) from None

    async def administer(self, what: str, host: str) -> dict[str, Any]:
        try:
            return await self._call(lambda call_id: Administer(call_id, what, host))
        except CallRefusedError as error:
            raise _error_of(error.error, str(error)) from None

    async def _call(self, make: Callable[[str], Message], *, may_be_any: bool = False) -> dict[str, Any]:
        try:
            found = await self._agent().call(make, may_be_any=may_be_any)
        except FleetUnavailableError as error:
            raise _unavailable(str(error)) from None
        self._views.clear()
        return found

    # --- views: open to everyone ---

    async def show(self, what: str) -> Reply:
        body = await (self.fleet() if what == "fleet" else self.view(what))
        if what == "leases":
            body = {"leases": await self._with_own_leases(body["leases"])}
        return Reply(200, await asyncio.to_thread(as_json, body), (NO_STORE,))

    async def _with_own_leases(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """This host's own leases come from its ledger, which knows more, and sooner."""
        broker = self.parts.broker
        try:
            held = await broker.held()
        except GPUWorkerPoolError:
            return rows
        others = [row for row in rows if row.get("host") != self.name]
        more = {"host": self.name, "endpoint_url": self.parts.url}
        own = [
            {**lease_row(lease, broker.usage_of(lease)), "lease_id": fleet_lease_id(self.name, lease.lease_id), **more}
            for lease in held
        ]
        return [*others, *own]

    async def take_link(self, context: RequestContext) -> Reply:
        """Raises `CallerGoneError` once the connection has become a link."""
        office, take_over = self.parts.office, context.scope.get(TAKE_OVER)
        if office is None:
            raise Refusal(409, "no_candidate", "this server is not a candidate of the fleet: join one that has --fleet")
        if take_over is None:
            raise Refusal(426, "no_link", "this route is for the links of the fleet's hosts", headers=_UPGRADE)
        take_over(office.take_link(), PROTOCOL)
        raise CallerGoneError

    async def view(self, what: str) -> dict[str, Any]:
        """ "fleet", "queue" or "leases"; without a dispatcher, the last answer."""
        now = time.monotonic()
        known = self._views.get(what)
        if known is None or now - known[0] > VIEW_SECONDS:
            task = asyncio.get_running_loop().create_task(self._query(what, {}))
            known = self._views[what] = (now, task)
        try:
            found = await asyncio.shield(known[1])
        except Refusal:
            last = self._last_seen.get(what)
            if last is None or now - last[0] > OLDEST_VIEW_SECONDS:
                raise
            return last[1]
        self._last_seen[what] = (now, found)
        return found

    async def _query(self, what: str, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self._agent().call(lambda call_id: Query(call_id, what, arguments))
        except FleetUnavailableError as error:
            raise _unavailable(str(error)) from None
        except CallRefusedError as error:
            raise _error_of(error.error, str(error)) from None

    async def fleet(self) -> dict[str, Any]:
        """The body of `GET /fleet`, also while there is no dispatcher."""
        agent = self._agent()
        if agent.dispatcher:
            try:
                return await self.view("fleet")
            except Refusal:
                logger.debug("the dispatcher does not answer")
        last = self._last_seen.get("fleet", (0.0, {}))[1]
        welcome, office = agent.welcome, self.parts.office
        return {
            "fleet_id": last.get("fleet_id") or (None if welcome is None else welcome.fleet_id),
            "epoch": last.get("epoch", 0),
            "dispatcher": None,
            "database": {"state": "unknown"} if office is None else office.database,
            "hosts": last.get("hosts", []),
            "queue": last.get("queue", []),
            "problem": agent.why_silent(),
        }

    async def metrics(self) -> Sequence[Metric]:
        return tuple(fleet_metrics(await self._numbers()))

    async def _numbers(self) -> FleetNumbers:
        """What concerns the whole fleet comes from its dispatcher, so that it is counted once."""
        agent, office = self.parts.agent, self.parts.office
        links = 0 if agent is None else agent.link_count
        if office is None:
            return FleetNumbers(links)
        shown: dict[str, Any] = {}
        if office.is_in_office:
            with suppress(Refusal):
                shown = await self.view("fleet")
        rows = shown.get("hosts", ())
        states = Counter(str(row.get("state")) for row in rows)
        silent = [row["seen_seconds_ago"] for row in rows if row.get("state") in ("up", "draining")]
        return FleetNumbers(
            links,
            is_dispatcher=office.is_in_office,
            is_database_up=office.database["state"] == "up",
            commit_seconds=office.commit_seconds,
            takeovers=office.takeovers,
            grants=office.grants,
            refusals=office.refusals,
            epoch=shown.get("epoch"),
            waiting=shown.get("waiting"),
            lag_seconds=max((each for each in silent if each is not None), default=None),
            hosts=dict(states) if shown else None,
        )

    async def explain(self, request_id: str) -> dict[str, Any]:
        return await self._query("explain", {"request_id": request_id})

    async def explain_requirements(self, requirements: Requirements, account: str) -> dict[str, Any]:
        arguments = {"requirements": requirements_body(requirements), "account": account}
        return await self._query("explain", arguments)


def _unavailable(text: str) -> Refusal:
    return Refusal(503, "fleet_unavailable", text, headers=RETRY_AFTER)


def _error_of(name: str, text: str, reasons: tuple[str, ...] = ()) -> Exception:
    """The same error that the handlers of a single host would raise."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, (ImpossibleRequestError, RequestEndedError)):
        return kind(text or None, reasons=reasons)
    if isinstance(kind, type) and issubclass(kind, REFUSED_BY_BROKER):
        return as_refusal(kind(text))
    if isinstance(kind, type) and issubclass(kind, ServiceUnavailableError):
        return _unavailable(text)
    if name in _UNKNOWN:
        return Refusal(404, _UNKNOWN[name], text)
    if isinstance(kind, type) and issubclass(kind, GPUWorkerPoolError):
        return Refusal(409, "not_now", text)
    return _unavailable(text or "the fleet refused, and did not say why")
