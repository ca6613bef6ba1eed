"""One request to a GPU server, bounded in time and size; it retries nothing and remembers nothing.

Whatever a server does, `exchange` and `fetch` end within their timeout with an answer or with one of the errors below.
"""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp
from yarl import URL

from gpu_worker_pool._version import __version__
from gpu_worker_pool.api.name_lookup import make_resolver
from gpu_worker_pool.api.replies import (
    LARGEST_BODY_BYTES,
    cleaned,
    parse_detail,
    parse_features,
    parse_retry_after,
    parse_stats,
)
from gpu_worker_pool.errors import (
    NetworkRetryableError,
    RetryableError,
    ServiceRefusedError,
    ServiceRetryableError,
    ServiceUnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpu_worker_pool.config import EndpointConfig
    from gpu_worker_pool.errors import GPUWorkerPoolError
    from gpu_worker_pool.models import GPUStats

__all__ = [
    "Answer",
    "AsyncGPUStatsHTTPClient",
    "Fetched",
    "MultiEndpointHTTPClientPool",
    "NetworkRetryableError",
    "RetryableError",
    "ServiceRefusedError",
    "ServiceRetryableError",
    "ServiceUnavailableError",
    "exchange",
    "make_session",
    "status_error",
    "under",
]

#: What a server says about its error is read for this long and this far; the error itself must not wait for it.
_DETAIL_SECONDS = 1.0
_DETAIL_BYTES = 64 * 1024
#: A body from here on, about a thousand GPUs, would hold up the event loop for longer than 10 ms.
_LARGE_BODY_BYTES = 256 * 1024
#: OpenSSL's codes for a certificate that is well made, but by nobody this host knows.
_UNKNOWN_AUTHORITY = frozenset({18, 19, 20, 21})


def make_session(*, limit_per_host: int = 8, ssl_context: ssl.SSLContext | None = None) -> aiohttp.ClientSession:
    """One pool of connections for all endpoints; whoever makes it closes it. Needs a running event loop.

    Without `ssl_context` certificates are checked against those the system trusts (or `SSL_CERT_FILE`).
    """
    connector = aiohttp.TCPConnector(
        # No limit over all hosts: with one, slow endpoints would keep the others from being asked.
        limit=0,
        limit_per_host=limit_per_host,
        ssl=True if ssl_context is None else ssl_context,
        resolver=make_resolver(),
    )
    return aiohttp.ClientSession(
        connector=connector,
        # Identity, and nothing is ever decompressed: a few kilobytes of gzip can be gigabytes.
        headers={
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            "User-Agent": f"gpu-worker-pool/{__version__}",
        },
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        # Each fetch has a deadline of its own that covers all of it.
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
    )


def under(url: str, path: str) -> URL:
    """A path of a server, `url` being as it was configured: to quote it again would make another path of it."""
    found = URL(f"{url.rstrip('/')}{path}", encoded=True)
    if found.scheme not in ("http", "https") or found.user is not None:
        raise ValueError("url must begin with http:// or https:// and hold no user name or password")
    return found


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply to its last byte, whatever its status."""

    status: int
    #: Of one that is not 2xx only if it is short and came soon; else None.
    body: bytes | None
    headers: Mapping[str, str]


async def exchange(
    session: aiohttp.ClientSession,
    method: str,
    url: URL,
    *,
    timeout_seconds: float,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    most_bytes: int = LARGEST_BODY_BYTES,
) -> Answer:
    """Ask and read the answer; a `RetryableError` where there is none, or none that can be read."""
    try:
        # Of the whole: a name server, a handshake, or a byte every second cannot stretch it. Leaving the inner block
        # with something unread closes the connection instead of keeping it for the next one.
        async with (
            asyncio.timeout(timeout_seconds),
            session.request(method, url, allow_redirects=False, data=body, headers=headers) as response,
        ):
            status = response.status
            if not 200 <= status < 300:
                return Answer(status, await _read_detail(response), response.headers)
            encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
            if encoding not in ("identity", ""):
                what = f"the reply is encoded as {cleaned(encoding, 40)!r}, which was not asked for"
                raise _bad_reply(method, url, what, status)
            read = await _read(response, most_bytes)
            if read is None:
                raise _bad_reply(method, url, f"the reply has more than {most_bytes} bytes", status)
            return Answer(status, read, response.headers)
    except TimeoutError:
        raise NetworkRetryableError(f"{method} {url} failed: no complete reply within {timeout_seconds:g} s") from None
    except aiohttp.ClientResponseError as error:
        raise _bad_reply(method, url, f"the reply is not HTTP: {cleaned(error.message, 100)}") from None
    # A host name that cannot even be encoded is a UnicodeError.
    except (aiohttp.ClientError, OSError, UnicodeError) as error:
        raise NetworkRetryableError(f"{method} {url} failed: {_reason(error)}") from error


def status_error(method: str, url: URL, answer: Answer, hint: str = "") -> GPUWorkerPoolError:
    """What a status means that was not hoped for; `hint` is for one that the server does not explain."""
    status, headers = answer.status, answer.headers
    says = f"{method} {url} was answered with {status}"
    if 300 <= status < 400:
        says += (
            f", a redirect to {cleaned(headers.get('Location', 'nowhere'), 200)}, which is not followed; "
            "configure the URL that answers itself"
        )
    elif answer.body is not None and (detail := parse_detail(answer.body)):
        says += f": {detail}"
    elif hint:
        says += f"; {hint}"
    if 400 <= status < 500 and status not in (408, 429):
        return ServiceRefusedError(says, status=status)
    wait = parse_retry_after(headers.get("Retry-After"), headers.get("Date"), time.time())
    return ServiceRetryableError(says, status=status, retry_after_seconds=wait)


def _bad_reply(method: str, url: URL, what: str, status: int | None = None) -> ServiceRetryableError:
    return ServiceRetryableError(f"{method} {url} was answered, but {what}", status=status)


@dataclass(frozen=True, slots=True)
class Fetched:
    stats: GPUStats
    #: What was wrong with the reply, one sentence each, although it could be used.
    problems: tuple[str, ...]
    #: Monotonic. The readings are from `sent_at - stats.sample_age_seconds` or later.
    sent_at: float
    #: Until the last byte of the reply.
    took_seconds: float


class AsyncGPUStatsHTTPClient:
    """Asks one endpoint; `session` is shared with others and not closed here."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        *,
        timeout_seconds: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = url.rstrip("/")
        self._home_url = under(url, "/")
        self._summary_url = under(url, "/gpu/summary")
        self.timeout_seconds = timeout_seconds
        self._session = session
        self._now = now

    def __repr__(self) -> str:
        return f"<AsyncGPUStatsHTTPClient {self.url}>"

    async def fetch(self) -> Fetched:
        sent_at = self._now()
        url = self._summary_url
        answer = await exchange(self._session, "GET", url, timeout_seconds=self.timeout_seconds)
        took_seconds = self._now() - sent_at
        body = answer.body
        if answer.status != 200 or body is None:
            is_missing = answer.status == 404
            hint = "is this a GPU statistics server, and is its API_PREFIX part of the configured URL?"
            raise status_error("GET", url, answer, hint if is_missing else "")
        try:
            if len(body) < _LARGE_BODY_BYTES:
                parsed = parse_stats(body)
            else:
                parsed = await asyncio.to_thread(parse_stats, body)
        except ServiceRetryableError as error:
            raise _bad_reply("GET", url, str(error), status=200) from None
        return Fetched(parsed.stats, parsed.problems, sent_at, took_seconds)

    async def features(self) -> frozenset[str] | None:
        """What the server says it offers beyond statistics; None where it says nothing about that, as older ones do."""
        answer = await exchange(self._session, "GET", self._home_url, timeout_seconds=self.timeout_seconds)
        if answer.status >= 500 or answer.status in (408, 429):
            # It might offer leases when it is better, and must not be taken for one that does not.
            raise status_error("GET", self._home_url, answer)
        return None if answer.status != 200 or answer.body is None else parse_features(answer.body)


class MultiEndpointHTTPClientPool:
    """A client for each endpoint, over one session that is closed with it."""

    def __init__(self, *, timeout_seconds: float, session: aiohttp.ClientSession | None = None) -> None:
        self.session = make_session() if session is None else session
        self._timeout_seconds = timeout_seconds

    def client_for(self, endpoint: EndpointConfig) -> AsyncGPUStatsHTTPClient:
        return AsyncGPUStatsHTTPClient(endpoint.url, self.session, timeout_seconds=self._timeout_seconds)

    async def close(self) -> None:
        await self.session.close()


async def _read(response: aiohttp.ClientResponse, most_bytes: int) -> bytes | None:
    """The body, or `None` as soon as it is known to be longer than that."""
    length = response.content_length
    if length is not None:  # which the connection then keeps to
        return None if length > most_bytes else await response.read()
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > most_bytes:
            return None
    return bytes(body)


async def _read_detail(response: aiohttp.ClientResponse) -> bytes | None:
    try:
        async with asyncio.timeout(_DETAIL_SECONDS):
            return await _read(response, _DETAIL_BYTES)
    except (aiohttp.ClientError, OSError):  # of which TimeoutError is one
        return None


def _reason(error: Exception) -> str:
    """Why a server could not be reached, in words for whoever runs it."""
    match error:
        case aiohttp.ClientConnectorCertificateError(certificate_error=ssl.SSLCertVerificationError() as refusal):
            is_unknown = refusal.verify_code in _UNKNOWN_AUTHORITY
            hint = "; to trust an authority of your own, set SSL_CERT_FILE" if is_unknown else ""
            return f"its TLS certificate is refused: {refusal.verify_message.rstrip('.')}{hint}"
        case aiohttp.ClientSSLError():
            return f"TLS failed: {cleaned(str(error.os_error), 100)}; does this port speak https?"
        case aiohttp.ClientConnectorDNSError():
            return f"its name does not resolve: {str(error.strerror).lower()}"
        case UnicodeError() | aiohttp.InvalidURL():
            return f"its name cannot be one: {cleaned(str(error), 100)}"
        case aiohttp.ClientPayloadError():
            return "the reply broke off in the middle"
        case aiohttp.ServerDisconnectedError():
            return "it closed the connection without a reply"
        case OSError() if error.errno:
            hint = "; is the GPU server running?" if error.errno == errno.ECONNREFUSED else ""
            return f"{os.strerror(error.errno).lower()}{hint}"
        case aiohttp.ClientConnectorError():
            return "the connection ended while it was being made"
    return cleaned(f"{type(error).__name__}: {error}", 200)
