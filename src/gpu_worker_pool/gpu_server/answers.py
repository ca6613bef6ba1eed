"""Answers of the lease API: a status and a body of JSON, written to the connection directly."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from starlette.responses import Response

from gpu_worker_pool.errors import (
    IllegalEventError,
    ImpossibleRequestError,
    LeaseEndedError,
    LedgerUnavailableError,
    NotYourLeaseError,
    PoolStoppedError,
    RequestEndedError,
    RequestMismatchError,
    TooManyWaitingError,
    UnknownLeaseError,
)
from gpu_worker_pool.gpu_server.security import Refusal

if TYPE_CHECKING:
    from starlette.types import Send

RETRY_AFTER: Final = ((b"retry-after", b"1"),)

#: What the desk may refuse with, and what is answered; the first that fits.
_REFUSALS: Final[tuple[tuple[type[Exception], int, str], ...]] = (
    (ImpossibleRequestError, 409, "impossible"),
    (RequestMismatchError, 409, "request_mismatch"),
    (RequestEndedError, 409, "request_ended"),
    (UnknownLeaseError, 404, "unknown_lease"),
    (NotYourLeaseError, 403, "not_yours"),
    (LeaseEndedError, 409, "lease_ended"),
    (TooManyWaitingError, 429, "too_many_waiting"),
    (LedgerUnavailableError, 503, "ledger_unavailable"),
    (PoolStoppedError, 503, "stopping"),
    (IllegalEventError, 409, "not_now"),
)
REFUSED_BY_BROKER: Final = tuple(kind for kind, _, _ in _REFUSALS)


def as_refusal(error: Exception) -> Refusal:
    status, code = next((status, code) for kind, status, code in _REFUSALS if isinstance(error, kind))
    headers = RETRY_AFTER if status in (429, 503) else ()
    return Refusal(status, code, str(error), getattr(error, "reasons", ()), headers, getattr(error, "state", ""))


class JSONAnswer:
    __slots__ = ("body", "headers", "status")

    def __init__(self, status: int, body: dict[str, Any], headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        self.status = status
        self.body = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
        self.headers = headers

    @classmethod
    def refusing(cls, refusal: Refusal) -> JSONAnswer:
        body: dict[str, Any] = {"detail": refusal.detail, "error": refusal.error}
        if refusal.reasons:
            body["reasons"] = list(refusal.reasons)
        if refusal.state:
            body["state"] = refusal.state
        return cls(refusal.status, body, refusal.headers)

    async def send(self, send: Send) -> None:
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(self.body)),
            (b"cache-control", b"no-store"),
            *self.headers,
        ]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})

    def as_response(self) -> Response:
        headers = {"cache-control": "no-store"} | {name.decode(): value.decode() for name, value in self.headers}
        return Response(self.body, self.status, media_type="application/json", headers=headers)
