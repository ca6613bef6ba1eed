"""The typed client of one GPU server's HTTP API: a method per route. It retries nothing.

It checks statuses, decodes replies, and decides when the API key is sent.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from urllib.parse import quote

from gpu_worker_pool.api import decoder, lease_decoder, summary_decoder
from gpu_worker_pool.api.fleet_rows import decode_fleet, decode_host_state
from gpu_worker_pool.api.json_values import LARGEST_BODY_BYTES
from gpu_worker_pool.api.replies import Fetched
from gpu_worker_pool.api.transport import bad_reply, exchange, status_error, under
from gpu_worker_pool.config import is_loopback_url, is_private_url
from gpu_worker_pool.errors import (
    GPUWorkerPoolError,
    ImpossibleRequestError,
    LeaseEndedError,
    NotYourLeaseError,
    RequestEndedError,
    RequestMismatchError,
    ServiceRefusedError,
    ServiceRetryableError,
    TooManyLeasesError,
    TooManyWaitingError,
    UnknownLeaseError,
)
from gpu_worker_pool.hardware.samples import GPUReading, MIGReading

if TYPE_CHECKING:
    from collections.abc import Callable

    import aiohttp

    from gpu_worker_pool.api.lease_decoder import LeaseRow, Problem, QueuePosition
    from gpu_worker_pool.api.transport import HTTPReply
    from gpu_worker_pool.core.events import Origin
    from gpu_worker_pool.core.requirements import Requirements

    Body = dict[str, Any]

T = TypeVar("T")

#: Decoding a larger body would block the event loop for several milliseconds.
_LARGE_BODY_BYTES: Final = 64 * 1024
#: A release or a cancellation is not waited for as long as a slow reading.
_SHORT_SECONDS: Final = 5.0
_NO_SERVER: Final = "is this a GPU server, and is its API_PREFIX part of the configured URL?"
_NO_LEASES: Final = (
    "this server gives no leases: it is an older one, or not a gpu-worker-pool server; "
    "restart clients that used its leases before"
)
#: By status and code, the errors that mean a lease is lost. Any other 4xx says nothing about the lease.
_LOST: Final[dict[tuple[int, str], type[GPUWorkerPoolError]]] = {
    (404, "unknown_lease"): UnknownLeaseError,
    (403, "not_yours"): NotYourLeaseError,
    (403, "token_needed"): NotYourLeaseError,
    (409, "lease_ended"): LeaseEndedError,
}


#: Keys of `POST /leases` that came later, and without which a request means the same.
_NOT_NEEDED: Final = frozenset({"holder", "expected_seconds", "on_this_host"})


class KeyAdvice(NamedTuple):
    """How to give a key, in the words of the program that shows the error."""

    give: str
    allow_insecure: str


IN_PYTHON: Final = KeyAdvice("give api_key= or set GPU_POOL_API_KEY", "pass allow_insecure_key=True")
ON_COMMAND_LINE: Final = KeyAdvice("set GPU_POOL_API_KEY", "set GPU_POOL_ALLOW_INSECURE_KEY=1")


class ServerHome(NamedTuple):
    #: None if the server lists none: an older one, or not one of ours.
    features: frozenset[str] | None
    #: The server's clock, as an HTTP date.
    date: str | None


class APIClient:
    """`session` returns the session of the event loop in use, which is shared with others and not closed here.

    The key is sent only where something is changed. A server on this host normally needs none, and one that has none
    refuses every key: there it is sent only after a 401, unless it `is_admin_key`.
    """

    def __init__(
        self,
        url: str,
        session: Callable[[], aiohttp.ClientSession],
        *,
        timeout_seconds: float,
        most_bytes: int = LARGEST_BODY_BYTES,
        api_key: str | None = None,
        is_admin_key: bool = False,
        allow_insecure_key: bool = False,
        advice: KeyAdvice = IN_PYTHON,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        under(url, "/")  # a `ValueError` for a URL that cannot be used
        self.url: str = url.rstrip("/")
        self.timeout_seconds = timeout_seconds
        self._session = session
        self._most_bytes = most_bytes
        self._api_key = api_key
        self._advice = advice
        self._may_send_key = allow_insecure_key or is_private_url(url)
        self._sends_key = api_key is not None and (is_admin_key or not is_loopback_url(url))
        self._now = now
        #: Keys of `POST /leases` that this server does not know, and can do without.
        self._unknown_keys: set[str] = set()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    # --- reading: open to all ---

    async def summary(self) -> Fetched:
        sent_at = self._now()
        reply = await self._send("GET", "/gpu/summary")
        took_seconds = self._now() - sent_at
        decoded = await self._decoded(reply, summary_decoder.decode_summary)
        return Fetched(decoded.stats, decoded.problems, sent_at, took_seconds)

    async def home(self) -> ServerHome:
        reply = await self._send("GET", "/")
        return ServerHome(await self._decoded(reply, decoder.decode_features), reply.headers.get("Date"))

    async def features(self) -> frozenset[str] | None:
        """What the server offers beyond statistics; None if it does not say, as older ones do."""
        try:
            return (await self.home()).features
        except (ServiceRefusedError, ServiceRetryableError) as error:
            # A server that is overloaded or broken may offer leases once it is well again.
            if error.status is None or error.status >= 500 or error.status in (408, 429):
                raise
            return None

    async def stats(self) -> Body:
        return await self._get("/gpu/stats", decoder.decode_stats)

    async def devices(self) -> tuple[GPUReading, ...]:
        """Its GPUs and their MIG devices, to tell them apart: without values."""
        devices = []
        for row in (await self.stats())["gpus"]:
            migs = tuple(MIGReading(mig["uuid"], mig["name"] or "") for mig in row["mig_devices"] if mig["uuid"])
            devices.append(
                GPUReading(row["gpu_id"], row["name"], row["uuid"], mig_devices=migs, mig_enabled=row["mig_enabled"])
            )
        return tuple(devices)

    async def health(self) -> Body:
        return await self._get("/health", decoder.decode_health)

    async def history(self, limit: int) -> Body:
        return await self._get(f"/gpu/history?limit={limit}", decoder.decode_history)

    async def host_id(self) -> str | None:
        return await self._get("/dashboard/host", decoder.decode_host_id)

    async def leases(self) -> Body:
        return await self._get("/leases", decoder.decode_leases)

    async def lease(self, lease_id: str) -> LeaseRow | None:
        rows = (await self.leases())["leases"]
        return next((lease_decoder.read_lease_row(row) for row in rows if row["lease_id"] == lease_id), None)

    async def queue(self) -> Body:
        return await self._get("/queue", decoder.decode_queue)

    async def explain_request(self, request_id: str) -> Body | None:
        """None if no such request waits."""
        reply = await self._send("GET", f"/queue/{quote(request_id, safe='')}")
        return None if reply.status == 404 else await self._decoded(reply, decoder.decode_explanation)

    async def explain_requirements(self, requirements: Requirements) -> Body:
        reply = await self._send("POST", "/explain", requirements_body(requirements))
        if reply.status in (404, 405):
            raise ServiceRefusedError(
                f"{self.url} cannot explain requirements: it is an older server; update it, or use --request ID",
                status=reply.status,
            )
        return await self._decoded(reply, decoder.decode_explanation)

    # --- leases ---

    async def acquire(
        self, request: Body, token: str, *, wait_seconds: float, may_reserve: bool
    ) -> LeaseRow | QueuePosition:
        """Send a request, or poll for it again. `request` is the same every time."""
        body = request | {"wait_seconds": wait_seconds, "may_keep": may_reserve}
        body = {name: value for name, value in body.items() if name not in self._unknown_keys}
        reply = await self._change("POST", "/leases", token, self.timeout_seconds + wait_seconds, body)
        if reply.status == 422 and (unknown := _unneeded(body, lease_decoder.decode_problem(reply.body))):
            # An older server, which refuses every key it does not know. What these say matters less than the GPU.
            self._unknown_keys |= unknown
            return await self.acquire(request, token, wait_seconds=wait_seconds, may_reserve=may_reserve)
        if reply.status in (200, 201):
            decode = partial(lease_decoder.decode_lease, request_id=request["request_id"], count=request["count"])
            return await self._decoded(reply, decode)
        if reply.status == 202:
            return await self._decoded(reply, lease_decoder.decode_queue_position)
        problem = lease_decoder.decode_problem(reply.body)
        if reply.status == 422 or problem.error == "impossible":
            reasons = problem.reasons or (problem.detail or "the server refuses it as it is",)
            raise ImpossibleRequestError(reasons=reasons)
        if problem.error == "request_ended":
            raise RequestEndedError(problem.detail or None, state=problem.state, reasons=problem.reasons)
        if problem.error == "request_mismatch":
            raise RequestMismatchError(problem.detail or None)
        if problem.error == "too_many_waiting":
            raise TooManyWaitingError(problem.detail or None)
        if problem.error == "too_many_leases":
            raise TooManyLeasesError(problem.detail or None)
        raise self._error(reply)

    async def renew(
        self, lease_id: str, token: str | None, *, timeout_seconds: float, is_busy: bool = False
    ) -> LeaseRow | None:
        """The lease, as far as it can be read: it is renewed all the same."""
        path = f"/leases/{quote(lease_id, safe='')}/renew"
        reply = await self._change("POST", path, token, timeout_seconds, {"is_busy": True} if is_busy else None)
        try:
            self._check_held(reply)
        except ServiceRetryableError as error:
            error.is_lease_held = reply.status == 503 and lease_decoder.decode_problem(reply.body).lease == "held"
            raise
        try:
            return await self._decoded(reply, lease_decoder.decode_renewed)
        except GPUWorkerPoolError:
            return None

    async def ask_to_leave(self, lease_id: str, reason: str | None) -> None:
        path = f"/leases/{quote(lease_id, safe='')}/yield"
        body = {} if reason is None else {"reason": reason}
        self._check_held(await self._change("POST", path, None, min(self.timeout_seconds, _SHORT_SECONDS), body))

    async def release(self, lease_id: str, token: str | None) -> None:
        path = f"/leases/{quote(lease_id, safe='')}"
        self._check_held(await self._change("DELETE", path, token, min(self.timeout_seconds, _SHORT_SECONDS)))

    async def cancel(self, request_id: str, token: str | None) -> bool:
        """False if there is no such request."""
        path = f"/queue/{quote(request_id, safe='')}"
        reply = await self._change("DELETE", path, token, min(self.timeout_seconds, _SHORT_SECONDS))
        if reply.status != 404:
            self._check_held(reply)
        return reply.status != 404

    # --- the fleet that the server belongs to ---

    async def fleet(self) -> Body:
        reply = await self._send("GET", "/fleet")
        if reply.status in (404, 405):
            raise ServiceRefusedError(f"{self.url} belongs to no fleet: gpu-pool serve --fleet or --join", status=404)
        return await self._decoded(reply, decode_fleet)

    async def administer_host(self, host: str, action: str) -> str | None:
        """`action`: `drain`, `undrain` or `remove`. The state of the host afterwards."""
        path = f"/fleet/hosts/{quote(host, safe='')}"
        method, path = ("DELETE", path) if action == "remove" else ("POST", f"{path}/{action}")
        reply = await self._change(method, path, None, self.timeout_seconds)
        if reply.status == 401 and self._api_key is None:
            raise ServiceRefusedError(f"{self._error(reply)}; {self._advice.give}", status=401)
        return await self._decoded(reply, decode_host_state)

    def _check_held(self, reply: HTTPReply) -> None:
        if reply.status != 200:
            problem = lease_decoder.decode_problem(reply.body)
            lost = _LOST.get((reply.status, problem.error))
            raise self._error(reply) if lost is None else lost(problem.detail or None)

    # --- requests and replies ---

    async def _get(self, path: str, decode: Callable[[bytes], T]) -> T:
        return await self._decoded(await self._send("GET", path), decode)

    async def _send(
        self,
        method: str,
        path: str,
        body: Body | None = None,
        headers: dict[str, str] | None = None,
        timeout_seconds: float | None = None,
    ) -> HTTPReply:
        if method == "POST":
            headers = {**(headers or {}), "Content-Type": "application/json"}
        return await exchange(
            self._session(),
            method,
            under(self.url, path),
            timeout_seconds=self.timeout_seconds if timeout_seconds is None else timeout_seconds,
            body=None if body is None else json.dumps(body).encode(),
            headers=headers,
            most_bytes=self._most_bytes,
        )

    async def _change(
        self, method: str, path: str, token: str | None, timeout_seconds: float, body: Body | None = None
    ) -> HTTPReply:
        """Send what needs a lease token, or a key, or both."""
        while True:
            headers = {} if token is None else {"X-Lease-Token": token}
            if self._sends_key:
                headers["Authorization"] = f"Bearer {self._checked_key()}"
            reply = await self._send(method, path, body, headers, timeout_seconds)
            if reply.status != 401 or self._api_key is None or self._sends_key:
                return reply
            self._sends_key = True

    def _checked_key(self) -> str:
        if not self._may_send_key:
            raise ServiceRefusedError(
                f"{self.url} needs a key, and a key is not sent over plain http to another host, where others can "
                f"read it: use https://, or, in a network you trust, {self._advice.allow_insecure}"
            )
        assert self._api_key is not None  # else it is not sent
        return self._api_key

    async def _decoded(self, reply: HTTPReply, decode: Callable[[bytes], T]) -> T:
        if reply.status not in (200, 201, 202) or reply.body is None:
            raise self._error(reply)
        try:
            if len(reply.body) < _LARGE_BODY_BYTES:
                return decode(reply.body)
            return await asyncio.to_thread(decode, reply.body)
        except ServiceRetryableError as error:
            raise bad_reply(reply.method, reply.url, str(error), reply.status) from None

    def _error(self, reply: HTTPReply) -> ServiceRefusedError | ServiceRetryableError:
        is_lease_route = str(reply.url).startswith((f"{self.url}/leases", f"{self.url}/queue"))
        hint = _NO_LEASES if is_lease_route else _NO_SERVER
        error = status_error(reply, hint if reply.status in (404, 405) else "")
        if reply.status == 401 and is_lease_route and self._api_key is None:
            return ServiceRefusedError(f"{error}; {self._advice.give}", status=401)
        return error


def holder_body(origin: Origin) -> Body:
    """As `POST /leases` expects it, without what is not known."""
    said = {"user": origin.user, "host": origin.host, "pid": origin.pid, "program": origin.program}
    return {name: value for name, value in said.items() if value is not None}


def _unneeded(body: Body, problem: Problem) -> set[str]:
    """What a server refuses of this request that it need not know."""
    return {key for key in _NOT_NEEDED & body.keys() if any(reason.startswith(key) for reason in problem.reasons)}


def requirements_body(requirements: Requirements) -> Body:
    """As `POST /leases` and `POST /explain` expect them, without what is not set."""
    values = {each.name: getattr(requirements, each.name) for each in fields(requirements) if each.init}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if value is not None and value != ()
    }
