"""Leases of a GPU server, over its HTTP API; it asks once and remembers nothing but whether its key is wanted."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from gpu_worker_pool.api.http_client import exchange, status_error, under
from gpu_worker_pool.api.replies import parse_json
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.config import is_loopback_url, is_private_url
from gpu_worker_pool.errors import (
    ImpossibleRequestError,
    LeaseEndedError,
    NotYourLeaseError,
    RequestEndedError,
    RequestMismatchError,
    ServiceRefusedError,
    ServiceRetryableError,
    TooManyWaitingError,
    UnknownLeaseError,
)
from gpu_worker_pool.leases.replies import Problem, read_lease, read_problem, read_waiting

if TYPE_CHECKING:
    from collections.abc import Callable

    import aiohttp
    from yarl import URL

    from gpu_worker_pool.api.http_client import Answer
    from gpu_worker_pool.core.requirements import Requirements
    from gpu_worker_pool.errors import GPUWorkerPoolError
    from gpu_worker_pool.leases.values import HeldLease, LeaseAsk, StillWaiting

#: A release or a cancellation need not be waited for as long as a slow reading may be.
_SHORT_SECONDS = 5.0

#: By status and code, what a lease's holder is told. Any other 4xx is not the ledger's word.
_LOST: dict[tuple[int, str], type[GPUWorkerPoolError]] = {
    (404, "unknown_lease"): UnknownLeaseError,
    (403, "not_yours"): NotYourLeaseError,
    (403, "token_needed"): NotYourLeaseError,
    (409, "lease_ended"): LeaseEndedError,
}


class HTTPLeaseService:
    """`session` gives the one of the loop it is used in, which is shared with others and not closed here."""

    def __init__(
        self,
        endpoint_id: str,
        url: str,
        session: Callable[[], aiohttp.ClientSession],
        *,
        timeout_seconds: float,
        api_key: str | None = None,
        allow_insecure_key: bool = False,
        now: Callable[[], float] = boot_time,
    ) -> None:
        self.endpoint_id = endpoint_id
        self._url = url
        self._session = session
        self._timeout_seconds = timeout_seconds
        self._api_key = api_key
        self._may_send_key = allow_insecure_key or is_private_url(url)
        # A server on this host wants none as a rule, and one that has none refuses all of them.
        self._sends_key = api_key is not None and not is_loopback_url(url)
        self._now = now

    def __repr__(self) -> str:
        return f"<HTTPLeaseService {self.endpoint_id} {self._url}>"

    async def acquire(self, ask: LeaseAsk, *, wait_seconds: float, may_reserve: bool) -> HeldLease | StillWaiting:
        body = _body_of(ask) | {"wait_seconds": wait_seconds, "may_keep": may_reserve}
        sent_at = self._now()
        url = under(self._url, "/leases")
        answer = await self._send("POST", url, ask.token, self._timeout_seconds + wait_seconds, body)
        if answer.status in (200, 201):
            try:
                return read_lease(_json_of(answer), self.endpoint_id, ask, sent_at, self._now)
            except ServiceRetryableError as error:
                raise ServiceRetryableError(f"POST {url} was answered, but {error}", status=answer.status) from None
        if answer.status == 202:
            return read_waiting(_json_of(answer))
        problem = _problem_of(answer)
        if answer.status == 422 or problem.error == "impossible":
            reasons = problem.reasons or (problem.detail or "the server refuses it as it is",)
            raise ImpossibleRequestError(reasons=reasons)
        if problem.error == "request_ended":
            raise RequestEndedError(problem.detail or None, state=problem.state, reasons=problem.reasons)
        if problem.error == "request_mismatch":
            raise RequestMismatchError(problem.detail or None)
        if problem.error == "too_many_waiting":
            raise TooManyWaitingError(problem.detail or None)
        raise self._error("POST", url, answer)

    async def renew(self, lease: HeldLease, *, timeout_seconds: float) -> None:
        url = under(self._url, f"/leases/{quote(lease.lease_id, safe='')}/renew")
        answer = await self._send("POST", url, lease.ask.token, timeout_seconds)
        if answer.status != 200:
            raise self._lost(answer) or self._error("POST", url, answer)

    async def release(self, lease: HeldLease) -> None:
        url = under(self._url, f"/leases/{quote(lease.lease_id, safe='')}")
        answer = await self._send("DELETE", url, lease.ask.token, self._short_seconds)
        if answer.status != 200:
            raise self._lost(answer) or self._error("DELETE", url, answer)

    async def cancel(self, ask: LeaseAsk) -> None:
        url = under(self._url, f"/queue/{quote(ask.request_id, safe='')}")
        answer = await self._send("DELETE", url, ask.token, self._short_seconds)
        if answer.status not in (200, 404):  # nothing is left of it
            raise self._error("DELETE", url, answer)

    async def close(self) -> None:
        pass

    # --- keys ---

    async def _send(
        self, method: str, url: URL, token: str, timeout_seconds: float, body: dict[str, Any] | None = None
    ) -> Answer:
        while True:
            headers = {"X-Lease-Token": token}
            if body is not None or method == "POST":
                headers["Content-Type"] = "application/json"
            if self._sends_key:
                headers["Authorization"] = f"Bearer {self._checked_key()}"
            data = None if body is None else json.dumps(body).encode()
            answer = await exchange(
                self._session(), method, url, timeout_seconds=timeout_seconds, body=data, headers=headers
            )
            is_key_wanted = answer.status == 401 and self._api_key is not None and not self._sends_key
            if not is_key_wanted:
                return answer
            self._sends_key = True

    def _checked_key(self) -> str:
        if not self._may_send_key:
            raise ServiceRefusedError(
                f"{self.endpoint_id} needs a key, which is not sent over plain http to another host, where others can "
                "read it: use https://, or, in a network you trust, allow_insecure_key=True"
            )
        assert self._api_key is not None  # else it is not sent
        return self._api_key

    # --- errors ---

    @property
    def _short_seconds(self) -> float:
        return min(self._timeout_seconds, _SHORT_SECONDS)

    def _lost(self, answer: Answer) -> GPUWorkerPoolError | None:
        problem = _problem_of(answer)
        kind = _LOST.get((answer.status, problem.error))
        return None if kind is None else kind(problem.detail or None)

    def _error(self, method: str, url: URL, answer: Answer) -> GPUWorkerPoolError:
        hint = "has it been replaced by a server without leases? Then start this client anew"
        error = status_error(method, url, answer, hint if answer.status in (404, 405) else "")
        if answer.status == 401 and self._api_key is None:
            return ServiceRefusedError(f"{error}; give api_key= or set GPU_POOL_API_KEY", status=401)
        return error


def _body_of(ask: LeaseAsk) -> dict[str, Any]:
    """What makes the request: the same every time it is sent."""
    body = {"request_id": ask.request_id, "worker_id": ask.worker_id, "ttl_seconds": ask.ttl_seconds}
    return body | requirements_body(ask.requirements) | ({} if ask.label is None else {"label": ask.label})


def requirements_body(requirements: Requirements) -> dict[str, Any]:
    """As `POST /leases` and `POST /explain` understand them; without what is not wished for."""
    body: dict[str, Any] = {
        "count": requirements.count,
        "share": requirements.share,
        "priority": requirements.priority,
        "policy": requirements.policy,
        "memory_mb": requirements.memory_mb,
        "min_free_memory_mb": requirements.min_free_memory_mb,
        "gpu_model": requirements.gpu_model,
        "only": None if requirements.only is None else list(requirements.only),
        "exclude": list(requirements.exclude) or None,
        "memory_threshold": requirements.memory_threshold,
        "utilization_threshold": requirements.utilization_threshold,
    }
    return {name: value for name, value in body.items() if value is not None}


def _json_of(answer: Answer) -> object:
    return None if answer.body is None else parse_json(answer.body)


def _problem_of(answer: Answer) -> Problem:
    try:
        return read_problem(_json_of(answer))
    except ServiceRetryableError:
        return read_problem(None)
