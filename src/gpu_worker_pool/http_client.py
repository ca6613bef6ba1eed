"""One GET of a GPU statistics server, bounded in time and size; it retries nothing and remembers nothing.

Whatever a server does, `fetch` ends within its timeout with stats or with one of the errors below.
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
from gpu_worker_pool.errors import (
    NetworkRetryableError,
    RetryableError,
    ServiceRefusedError,
    ServiceRetryableError,
    ServiceUnavailableError,
)
from gpu_worker_pool.name_lookup import make_resolver
from gpu_worker_pool.replies import LARGEST_BODY_BYTES, cleaned, parse_detail, parse_retry_after, parse_stats

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_worker_pool.config import EndpointConfig
    from gpu_worker_pool.errors import GPUWorkerPoolError
    from gpu_worker_pool.models import GPUStats

__all__ = [
    "AsyncGPUStatsHTTPClient",
    "Fetched",
    "MultiEndpointHTTPClientPool",
    "NetworkRetryableError",
    "RetryableError",
    "ServiceRefusedError",
    "ServiceRetryableError",
    "ServiceUnavailableError",
    "make_session",
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
        # As configured: to quote it again would make another path of it.
        self._summary_url = URL(f"{self.url}/gpu/summary", encoded=True)
        if self._summary_url.scheme not in ("http", "https") or self._summary_url.user is not None:
            raise ValueError("url must begin with http:// or https:// and hold no user name or password")
        self.timeout_seconds = timeout_seconds
        self._session = session
        self._now = now

    def __repr__(self) -> str:
        return f"<AsyncGPUStatsHTTPClient {self.url}>"

    async def fetch(self) -> Fetched:
        sent_at = self._now()
        try:
            # Of the whole: a name server, a handshake, or a byte every second cannot stretch it.
            async with asyncio.timeout(self.timeout_seconds):
                body = await self._get()
        except TimeoutError:
            raise NetworkRetryableError(
                f"GET {self._summary_url} failed: no complete reply within {self.timeout_seconds:g} s"
            ) from None
        except aiohttp.ClientResponseError as error:
            raise self._bad_reply(f"the reply is not HTTP: {cleaned(error.message, 100)}") from None
        # A host name that cannot even be encoded is a UnicodeError.
        except (aiohttp.ClientError, OSError, UnicodeError) as error:
            raise NetworkRetryableError(f"GET {self._summary_url} failed: {_reason(error)}") from error
        took_seconds = self._now() - sent_at
        try:
            if len(body) < _LARGE_BODY_BYTES:
                parsed = parse_stats(body)
            else:
                parsed = await asyncio.to_thread(parse_stats, body)
        except ServiceRetryableError as error:
            raise self._bad_reply(str(error), status=200) from None
        return Fetched(parsed.stats, parsed.problems, sent_at, took_seconds)

    async def _get(self) -> bytes:
        # Leaving the block with something unread closes the connection instead of keeping it for the next fetch.
        async with self._session.get(self._summary_url, allow_redirects=False) as response:
            if response.status != 200:
                raise await self._status_error(response)
            encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
            if encoding not in ("identity", ""):
                what = f"the reply is encoded as {cleaned(encoding, 40)!r}, which was not asked for"
                raise self._bad_reply(what, response.status)
            body = await _read(response, LARGEST_BODY_BYTES)
            if body is None:
                raise self._bad_reply(f"the reply has more than {LARGEST_BODY_BYTES} bytes", response.status)
            return body

    async def _status_error(self, response: aiohttp.ClientResponse) -> GPUWorkerPoolError:
        status, headers = response.status, response.headers
        says = f"GET {self._summary_url} was answered with {status}"
        if 300 <= status < 400:
            says += (
                f", a redirect to {cleaned(headers.get('Location', 'nowhere'), 200)}, which is not followed; "
                "configure the URL that answers itself"
            )
        elif detail := await _read_detail(response):
            says += f": {detail}"
        elif status == 404:
            says += "; is this a GPU statistics server, and is its API_PREFIX part of the configured URL?"
        if 400 <= status < 500 and status not in (408, 429):
            return ServiceRefusedError(says, status=status)
        wait = parse_retry_after(headers.get("Retry-After"), headers.get("Date"), time.time())
        return ServiceRetryableError(says, status=status, retry_after_seconds=wait)

    def _bad_reply(self, what: str, status: int | None = None) -> ServiceRetryableError:
        return ServiceRetryableError(f"GET {self._summary_url} was answered, but {what}", status=status)


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


async def _read_detail(response: aiohttp.ClientResponse) -> str | None:
    try:
        async with asyncio.timeout(_DETAIL_SECONDS):
            body = await _read(response, _DETAIL_BYTES)
    except (aiohttp.ClientError, OSError):  # of which TimeoutError is one
        return None
    return None if body is None else parse_detail(body)


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
