"""What the server answers: a reply with a JSON body, or a refusal that a handler raises."""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

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

Headers = tuple[tuple[bytes, bytes], ...]

RETRY_AFTER: Final = ((b"retry-after", b"1"),)
NO_STORE: Final = (b"cache-control", b"no-store")

#: The errors that the broker raises, with the status and code of the answer; the first match counts.
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


class Reply(NamedTuple):
    status: int
    #: JSON.
    body: bytes
    headers: Headers = ()


def as_json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()


def json_reply(status: int, body: dict[str, Any], headers: Headers = ()) -> Reply:
    return Reply(status, as_json(body), (NO_STORE, *headers))


class Refusal(Exception):  # noqa: N818  # an answer, not a failure
    """Ends the handling of a request with an error status.

    `detail` is for people, and says what to do; `error` and `state`, how a request has ended, are for programs.
    """

    def __init__(
        self,
        status: int,
        error: str,
        detail: str,
        reasons: tuple[str, ...] = (),
        headers: Headers = (),
        state: str = "",
    ) -> None:
        super().__init__(detail)
        body: dict[str, Any] = {"detail": detail, "error": error}
        if reasons:
            body["reasons"] = reasons
        if state:
            body["state"] = state
        self.reply = json_reply(status, body, headers)


def as_refusal(error: Exception) -> Refusal:
    """`error` is one of `REFUSED_BY_BROKER`."""
    status, code = next((status, code) for kind, status, code in _REFUSALS if isinstance(error, kind))
    headers = RETRY_AFTER if status in (429, 503) else ()
    return Refusal(status, code, str(error), getattr(error, "reasons", ()), headers, getattr(error, "state", ""))
