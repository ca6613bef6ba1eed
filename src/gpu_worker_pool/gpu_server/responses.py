"""What the server answers: a reply with a JSON body, or a refusal that a handler raises."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from starlette.responses import Response

from gpu_worker_pool.errors import (
    IllegalEventError,
    ImpossibleRequestError,
    LeaseEndedError,
    LedgerUnavailableError,
    NotYourLeaseError,
    PolicyLimitError,
    PoolStoppedError,
    RequestEndedError,
    RequestMismatchError,
    TooManyLeasesError,
    TooManyWaitingError,
    UnknownLeaseError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.requests import Request

Headers = tuple[tuple[bytes, bytes], ...]

RETRY_AFTER: Final = ((b"retry-after", b"1"),)
PROBLEM_JSON: Final = b"application/problem+json"
NO_STORE: Final = (b"cache-control", b"no-store")

#: The errors that the broker raises, with the status and code of the answer; the first match counts.
_REFUSALS: Final[tuple[tuple[type[Exception], int, str], ...]] = (
    (ImpossibleRequestError, 409, "impossible"),
    (RequestMismatchError, 409, "request_mismatch"),
    (RequestEndedError, 409, "request_ended"),
    (UnknownLeaseError, 404, "unknown_lease"),
    (NotYourLeaseError, 403, "not_yours"),
    (LeaseEndedError, 409, "lease_ended"),
    (PolicyLimitError, 409, "too_many_waiting"),
    (TooManyLeasesError, 429, "too_many_leases"),
    (TooManyWaitingError, 429, "too_many_waiting"),
    (LedgerUnavailableError, 503, "ledger_unavailable"),
    (PoolStoppedError, 503, "stopping"),
    (IllegalEventError, 409, "not_now"),
)
REFUSED_BY_BROKER: Final = tuple(kind for kind, _, _ in _REFUSALS)


class Reply(NamedTuple):
    status: int
    #: JSON.
    body: bytes
    headers: Headers = ()


def as_json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()


def json_reply(status: int, body: dict[str, Any], headers: Headers = ()) -> Reply:
    return Reply(status, as_json(body), (NO_STORE, *headers))


def problem(status: int, error: str | None, detail: Any, headers: Headers = (), **more: Any) -> Reply:
    """An error, as all routes write it: our own keys, and those of RFC 9457 (`application/problem+json`)."""
    body = {"detail": detail, "error": error, **more}
    title = HTTPStatus(status).phrase if error is None else error.replace("_", " ").capitalize()
    body |= {"type": f"urn:gpu-worker-pool:{error or 'unknown'}", "title": title, "status": status}
    if status in (429, 503) and not any(name == b"retry-after" for name, _ in headers):
        headers = (*headers, *RETRY_AFTER)
    return json_reply(status, body, headers)


def content_type_of(status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """`headers`: of the request. Errors are JSON, and `application/problem+json` for callers that accept it."""
    if status >= HTTPStatus.BAD_REQUEST and any(
        name == b"accept" and PROBLEM_JSON in value.lower() for name, value in headers
    ):
        return PROBLEM_JSON
    return b"application/json"


def as_response(request: Request, reply: Reply) -> Response:
    """For FastAPI's routes."""
    status, body, headers = reply
    response = Response(body, status, media_type=content_type_of(status, request.headers.raw).decode())
    response.raw_headers += headers
    return response


class Refusal(Exception):  # noqa: N818  # an answer, not a failure
    """Ends the handling of a request with an error status.

    `detail` is for people, and says what to do. For programs: `error`; `state`, how a request has ended; and `lease`,
    what became of a lease whose renewal could not be written.
    """

    def __init__(
        self,
        status: int,
        error: str,
        detail: str,
        reasons: tuple[str, ...] = (),
        headers: Headers = (),
        state: str = "",
        lease: str = "",
    ) -> None:
        super().__init__(detail)
        self.error = error
        more: dict[str, Any] = {"reasons": reasons} if reasons else {}
        if state:
            more["state"] = state
        if lease:
            more["lease"] = lease
        self.reply: Reply = problem(status, error, detail, headers, **more)


def as_refusal(error: Exception) -> Refusal:
    """`error` is one of `REFUSED_BY_BROKER`."""
    status, code = next((status, code) for kind, status, code in _REFUSALS if isinstance(error, kind))
    facts = {name: getattr(error, name) for name in ("reasons", "state", "lease") if hasattr(error, name)}
    return Refusal(status, code, str(error), **facts)
