"""Sends one HTTP request to a GPU server, bounded in time and size; it retries nothing and remembers nothing.

Whatever a server does, `exchange` ends within its timeout with a reply or with one of the package's errors.
"""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
import time
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import aiohttp
from aiohttp.client_exceptions import UnixClientConnectorError
from yarl import URL

from gpu_worker_pool._version import __version__
from gpu_worker_pool.api.fingerprints import VARIABLE, certificates_for, shown
from gpu_worker_pool.api.json_values import LARGEST_BODY_BYTES, LONGEST_SENTENCE, cleaned
from gpu_worker_pool.api.lease_decoder import decode_problem
from gpu_worker_pool.api.name_lookup import make_resolver
from gpu_worker_pool.api.unix_socket import TrustedUnixConnector
from gpu_worker_pool.errors import NetworkRetryableError, ServiceRefusedError, ServiceRetryableError

if TYPE_CHECKING:
    from collections.abc import Mapping

LONGEST_RETRY_AFTER_SECONDS: Final = 300.0
#: Bounds for reading the explanation of an error; the error itself must not wait for it.
_DETAIL_SECONDS: Final = 1.0
_DETAIL_BYTES: Final = 64 * 1024
#: OpenSSL's codes for a valid certificate of an authority that this host does not know.
_UNKNOWN_AUTHORITY: Final = frozenset({18, 19, 20, 21})


def make_session(
    *, limit_per_host: int = 8, ssl_context: ssl.SSLContext | None = None, unix_socket: str | None = None
) -> aiohttp.ClientSession:
    """One pool of connections for all endpoints; the caller closes it. Needs a running event loop.

    Without `ssl_context` certificates are checked against those the system trusts (or `SSL_CERT_FILE`).
    `unix_socket`: where to connect instead, whatever the URL.
    """
    connector: aiohttp.BaseConnector
    if unix_socket is not None:
        connector = TrustedUnixConnector(unix_socket, limit=0, limit_per_host=limit_per_host)
    else:
        connector = aiohttp.TCPConnector(
            # No limit over all hosts: with one, slow endpoints would block requests to the others.
            limit=0,
            limit_per_host=limit_per_host,
            ssl=True if ssl_context is None else ssl_context,
            resolver=make_resolver(),
        )
    return aiohttp.ClientSession(
        connector=connector,
        # Nothing is ever decompressed: a few kilobytes of gzip can be gigabytes.
        headers={
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            "User-Agent": f"gpu-worker-pool/{__version__}",
        },
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        # `exchange` sets a deadline for the whole request.
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
    )


@lru_cache(maxsize=1024)
def under(url: str, path: str) -> URL:
    """A path of a server. `url` is used as it was configured: quoting it again would change its path."""
    found = URL(f"{url.rstrip('/')}{path}", encoded=True)
    if found.scheme not in ("http", "https") or found.user is not None:
        raise ValueError("url must begin with http:// or https:// and hold no user name or password")
    return found


@dataclass(frozen=True, slots=True)
class HTTPReply:
    """A complete reply, of any status."""

    method: str
    url: URL
    status: int
    #: None if the status is not 2xx and the body is long or slow.
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
) -> HTTPReply:
    """Send a request and read the reply; a `RetryableError` if there is none, or none that can be read."""
    try:
        # The timeout covers everything: lookup, handshake, and a server that sends a byte per second. Leaving the
        # inner block with something unread closes the connection instead of reusing it.
        async with (
            asyncio.timeout(timeout_seconds),
            session.request(
                method, url, allow_redirects=False, data=body, headers=headers, ssl=certificates_for(url)
            ) as response,
        ):
            status = response.status
            if not 200 <= status < 300:
                return HTTPReply(method, url, status, await _read_detail(response), response.headers)
            encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
            if encoding not in ("identity", ""):
                what = f"the reply is encoded as {cleaned(encoding, 40)!r}, which was not asked for"
                raise bad_reply(method, url, what, status)
            read = await _read(response, most_bytes)
            if read is None:
                raise bad_reply(method, url, f"the reply has more than {most_bytes} bytes", status)
            return HTTPReply(method, url, status, read, response.headers)
    except TimeoutError:
        raise NetworkRetryableError(f"{method} {url} failed: no complete reply within {timeout_seconds:g} s") from None
    except aiohttp.ClientResponseError as error:
        raise bad_reply(method, url, f"the reply is not HTTP: {cleaned(error.message, 100)}") from None
    # A host name that cannot even be encoded is a UnicodeError.
    except (aiohttp.ClientError, OSError, UnicodeError) as error:
        raise NetworkRetryableError(f"{method} {url} failed: {reason_of(error)}") from error


def status_error(reply: HTTPReply, hint: str = "") -> ServiceRefusedError | ServiceRetryableError:
    """The error that an unexpected status means; `hint` is used where the server gives no explanation."""
    status, headers = reply.status, reply.headers
    detail = cleaned(decode_problem(reply.body).detail, LONGEST_SENTENCE)
    says = f"{reply.method} {reply.url} was answered with {status}"
    if 300 <= status < 400:
        says += (
            f", a redirect to {cleaned(headers.get('Location', 'nowhere'), 200)}, which is not followed; "
            "configure the URL that answers itself"
        )
    elif detail:
        says += f": {detail}"
    elif hint:
        says += f"; {hint}"
    if 400 <= status < 500 and status not in (408, 429):
        return ServiceRefusedError(says, status=status)
    wait = parse_retry_after(headers.get("Retry-After"), headers.get("Date"), time.time())
    return ServiceRetryableError(says, status=status, retry_after_seconds=wait, detail=detail)


def bad_reply(method: str, url: URL, what: str, status: int | None = None) -> ServiceRetryableError:
    return ServiceRetryableError(f"{method} {url} was answered, but {what}", status=status)


def parse_retry_after(value: str | None, date: str | None, now: float) -> float | None:
    """Seconds from 0 to 300; None if there is no valid value.

    A moment is compared with the server's own `Date`, so that its clock need not agree with ours; without one with
    `now`, in seconds since 1970.
    """
    value = (value or "").strip()
    if value.isascii() and value.isdigit():
        seconds = float(value)
    elif (moment := _moment(value)) is None:
        return None
    else:
        sent = _moment(date or "")
        seconds = moment - (now if sent is None else sent)
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER_SECONDS)


def _moment(date: str) -> float | None:
    """An HTTP date in seconds since 1970."""
    try:
        moment = parsedate_to_datetime(date)
        # Without a zone it would be taken for local time; HTTP dates are in UTC.
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    # That parser raises any of these.
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


async def _read(response: aiohttp.ClientResponse, most_bytes: int) -> bytes | None:
    """The body, or None as soon as it is known to be longer than that."""
    length = response.content_length
    if length is not None:  # aiohttp enforces it
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


def reason_of(error: Exception) -> str:
    """Why a server could not be reached, in words for its administrator."""
    match error:
        case aiohttp.ClientConnectorCertificateError(certificate_error=ssl.SSLCertVerificationError() as refusal):
            is_unknown = refusal.verify_code in _UNKNOWN_AUTHORITY
            hint = f"; to trust an authority of your own, set SSL_CERT_FILE; to trust this certificate, {VARIABLE}"
            hint = hint if is_unknown else ""
            return f"its TLS certificate is refused: {refusal.verify_message.rstrip('.')}{hint}"
        case aiohttp.ServerFingerprintMismatch():
            return (
                f"its certificate is not the one that {VARIABLE} names, but {shown(error.got)}; "
                "is this the right server, and has it a new certificate?"
            )
        case aiohttp.ClientSSLError():
            return f"TLS failed: {cleaned(str(error.os_error), 100)}; does this port speak https?"
        case UnixClientConnectorError():
            return f"nothing listens on {error.path} ({str(error.strerror).lower()}); is the GPU service running?"
        case aiohttp.ClientConnectorDNSError():
            return f"its name does not resolve: {str(error.strerror).lower()}"
        case UnicodeError() | aiohttp.InvalidURL():
            return f"its name is not valid: {cleaned(str(error), 100)}"
        case aiohttp.ClientPayloadError():
            return "the reply broke off in the middle"
        case aiohttp.ServerDisconnectedError():
            return "it closed the connection without a reply"
        case OSError() if error.errno is not None and error.errno < 0:  # of the resolver
            return f"its name does not resolve: {str(error.strerror).lower()}"
        case OSError() if error.errno:
            hint = "; is the GPU server running?" if error.errno == errno.ECONNREFUSED else ""
            return f"{os.strerror(error.errno).lower()}{hint}"
        case aiohttp.ClientConnectorError():
            return "the connection ended while it was being made"
    return cleaned(f"{type(error).__name__}: {error}", 200)
