"""Decides from a request's connection and headers who the caller is and whether it may change leases.

Programs on this host may, and callers with a key. A caller over the Unix socket is the user that the kernel says. A web
page in a browser on this host may not: its requests come from this host, but name another one in `Host` or `Origin`,
and without a preflight a browser sends no JSON to other origins.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from functools import lru_cache
from hmac import compare_digest
from http import HTTPStatus
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpu_worker_pool.core.accounts import LOOPBACK
from gpu_worker_pool.gpu_server.keys import KeyRing, digest_of
from gpu_worker_pool.gpu_server.responses import Refusal
from gpu_worker_pool.gpu_server.unix_socket import PEER
from gpu_worker_pool.gpu_server.wrong_keys import WrongKeys

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import Scope

    from gpu_worker_pool.core.events import Request
    from gpu_worker_pool.gpu_server.settings import ServerSettings
    from gpu_worker_pool.gpu_server.unix_socket import Peer

KEY_WRONG: Final = "key_wrong"
_BEARER: Final = re.compile(rb"bearer +(\S+) *", re.IGNORECASE)
_HOST: Final = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::[0-9]{1,5})?")
#: Headers that proxies add. A proxy that adds none looks like a program on this host.
_PROXY_HEADERS: Final = frozenset(
    [
        b"forwarded",
        b"via",
        b"x-real-ip",
        b"x-client-ip",
        b"x-cluster-client-ip",
        b"x-proxyuser-ip",
        b"true-client-ip",
        b"proxy-connection",
        b"cdn-loop",
        b"cf-ray",
        b"cf-connecting-ip",
        b"fastly-client-ip",
        b"fly-client-ip",
    ]
)
_PROXY_PREFIXES: Final = (b"x-forwarded", b"x-original-", b"x-envoy-", b"x-arr-", b"x-azure-", b"x-amzn-")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request that may change leases."""

    #: For whom it asks, as `core/accounts.py` writes it.
    account: str
    is_admin: bool
    #: The process at the other end of the Unix socket; None over TCP.
    peer: Peer | None = None

    def has_requested(self, request: Request) -> bool:
        """Whether the kernel says that this user requested it, so that no token is needed."""
        return self.peer is not None and request.account == self.account


class RequestHeaders(NamedTuple):
    """The headers of a request that matter here, by name; None for those that were not sent."""

    host: bytes | None = None
    origin: bytes | None = None
    sec_fetch_site: bytes | None = None
    authorization: bytes | None = None
    content_type: bytes | None = None
    content_length: bytes | None = None
    x_lease_token: bytes | None = None
    is_proxied: bool = False
    #: The first header that was sent twice: a proxy and this server may disagree on which one counts.
    twice: str | None = None


_FIELDS: Final = {
    name.replace("_", "-").encode(): name for name in RequestHeaders._fields if name not in ("is_proxied", "twice")
}


def read_headers(scope: Scope) -> RequestHeaders:
    found: dict[str, Any] = {}
    for name, value in scope["headers"]:
        if field := _FIELDS.get(name):
            if field in found:
                found.setdefault("twice", name.decode())
            found[field] = value
        elif name in _PROXY_HEADERS or name.startswith(_PROXY_PREFIXES):
            found["is_proxied"] = True
    return RequestHeaders(**found)


class Authenticator:
    """`hostnames`: the names of this machine; by default those that the system reports."""

    def __init__(self, settings: ServerSettings, hostnames: Iterable[str] | None = None) -> None:
        self._ring = KeyRing(settings)
        self._is_open_on_loopback = settings.gpu_pool_open_on_loopback
        self._socket = settings.gpu_pool_socket
        names = {"localhost", *(_own_names() if hostnames is None else hostnames), *settings.gpu_pool_hosts}
        self._names = frozenset(name.lower().rstrip(".") for name in names)
        self._wrong_keys = WrongKeys()
        # Honest programs use few names, and parsing one takes longer than all other checks.
        self._is_ours = lru_cache(maxsize=64)(self._is_our_name)

    @property
    def open_to(self) -> list[str]:
        """Who may change leases, as `/config` shows it to everyone."""
        on_socket = self._socket is not None
        return ["loopback"] * self._is_open_on_loopback + ["keys"] * bool(self._ring.current()) + ["socket"] * on_socket

    def offers_leases(self, scope: Scope) -> bool:
        """Whether this caller can acquire leases (D18).

        Clients ask for the features without their key, so a server with keys offers leases to all who send none.
        """
        headers = read_headers(scope)
        if self._ring.current() and headers.authorization is None:
            return True
        try:
            self.identify(scope, headers)
        except Refusal as refusal:
            if refusal.reply.status == HTTPStatus.TOO_MANY_REQUESTS:
                raise
            return False
        return True

    def identify(self, scope: Scope, headers: RequestHeaders) -> Caller:
        """The caller; raises a `Refusal` for one that may not change leases."""
        try:
            return self._identify(scope, headers)
        except Refusal as refusal:
            # Only after the key was compared: a right one passes, however many wrong ones came from the same address.
            if refusal.error == KEY_WRONG and (seconds := self._wrong_keys.seconds_to_wait(_address(scope))):
                raise Refusal(
                    429,
                    "too_many_wrong_keys",
                    f"too many wrong keys came from your address: {refusal}",
                    # Each try then costs a new connection.
                    headers=((b"retry-after", b"%d" % seconds), (b"connection", b"close")),
                ) from None
            raise

    def _identify(self, scope: Scope, headers: RequestHeaders) -> Caller:
        if headers.twice is not None:
            raise Refusal(400, "invalid", f"the header {headers.twice} was sent twice: send it once")
        if (peer := self._peer(scope, headers)) is not None:
            return self._by_peer(peer, headers)
        is_here = self._is_here(scope, headers)
        if not self._ring.current() and not is_here:
            to_whom = "to programs on its own host only" if self._is_open_on_loopback else "over its Unix socket only"
            raise Refusal(
                403,
                "leases_closed",
                f"this server gives leases {to_whom}: to open it to others, start it with keys in GPU_POOL_API_KEYS "
                "(and send one as Authorization: Bearer KEY)",
            )
        if headers.authorization is not None:
            return self._by_key(headers.authorization)
        if not is_here:
            raise _unauthorized("key_needed", "a key is needed from here: send Authorization: Bearer KEY")
        self._refuse_web_page(headers)
        return Caller(LOOPBACK, is_admin=False)

    def _peer(self, scope: Scope, headers: RequestHeaders) -> Peer | None:
        """Who is at the other end of our socket; None over TCP, and for a proxy, which speaks for others."""
        peer: Peer | None = scope.get(PEER)
        if peer is None or peer.path != self._socket or headers.is_proxied or scope.get("http_version") == "1.0":
            return None
        return peer

    def _by_peer(self, peer: Peer, headers: RequestHeaders) -> Caller:
        if peer.uid is None:
            raise Refusal(
                403,
                "unknown_user",
                "the kernel does not tell this server which user you are: it runs in another user namespace",
            )
        is_admin = peer.uid == 0
        # An administrator's key counts here too, but the user stays the one that the kernel says.
        if headers.authorization is not None and self._by_key(headers.authorization).is_admin:
            is_admin = True
        return Caller(peer.account, is_admin, peer)

    def _is_here(self, scope: Scope, headers: RequestHeaders) -> bool:
        """Whether it comes from loopback and not through a proxy; nginx may add no header, but uses HTTP/1.0."""
        client = scope.get("client")
        return (
            self._is_open_on_loopback
            and client is not None
            and not headers.is_proxied
            and scope.get("http_version") != "1.0"
            and _is_loopback(client[0])
        )

    def _by_key(self, authorization: bytes) -> Caller:
        keys = self._ring.current()
        if not keys:
            detail = "this server has no keys (GPU_POOL_API_KEYS is not set): on its own host, send none"
            raise _unauthorized(KEY_WRONG, detail)
        match = _BEARER.fullmatch(authorization)
        if match is None:
            raise _unauthorized(KEY_WRONG, "this is not a key: send Authorization: Bearer KEY")
        sent = digest_of(match[1])
        found: Caller | None = None
        # Compares all keys, also after a match, so that the time taken reveals nothing.
        for key in keys:
            if compare_digest(key.digest, sent):
                found = Caller(key.account, key.is_admin)
        if found is None:
            raise _unauthorized(KEY_WRONG, "this server does not know this key: ask its administrator for one")
        return found

    def _refuse_web_page(self, headers: RequestHeaders) -> None:
        """A request from this host without a key comes from a program, or from a web page that a user here looks at."""
        if headers.host is None or not self._is_ours(headers.host):
            shown = "nothing" if headers.host is None else repr(headers.host.decode("latin-1")[:80])
            raise Refusal(
                421,
                "wrong_host",
                f"Host says {shown}, which is not a name of this machine: use localhost, send a key, or add the name "
                "to GPU_POOL_HOSTS",
            )
        is_same = headers.origin is None or _same_origin(headers.origin, headers.host)
        if not is_same or headers.sec_fetch_site in (b"cross-site", b"same-site"):
            raise Refusal(403, "cross_origin", "a web page of another origin must not do this without a key")

    def _is_our_name(self, host: bytes) -> bool:
        match = _HOST.fullmatch(host.decode("latin-1").lower())
        if match is None:
            return False
        name = match[1].rstrip(".")
        if name in self._names or name.strip("[]") in self._names or name.endswith(".localhost"):
            return True
        # From loopback, another address of this machine is only reached through a proxy.
        return _is_loopback(name.strip("[]"), or_any=True)


def check_content_type(headers: RequestHeaders, *, is_needed: bool) -> None:
    """Refuses all but JSON: without a preflight, a web page can only send forms to other origins."""
    given = headers.content_type
    if given is None and not is_needed:
        return
    if given is None or given.partition(b";")[0].strip().lower() != b"application/json":
        said = "no Content-Type" if given is None else f"Content-Type {given.decode('latin-1')[:80]!r}"
        raise Refusal(415, "not_json", f"{said}: send JSON, with Content-Type: application/json")


def _address(scope: Scope) -> str:
    """Where it comes from: an address, or the user of the socket."""
    peer: Peer | None = scope.get(PEER)
    client = scope.get("client")
    return peer.account if peer is not None else client[0] if client else ""


def _unauthorized(error: str, detail: str) -> Refusal:
    return Refusal(401, error, detail, headers=((b"www-authenticate", b"Bearer"),))


def _same_origin(origin: bytes, host: bytes) -> bool:
    scheme, _, rest = origin.lower().partition(b"://")
    return scheme in (b"http", b"https") and rest == host.lower()


@lru_cache(maxsize=1024)
def _is_loopback(text: str, *, or_any: bool = False) -> bool:
    """`or_any`: also 0.0.0.0, which on Linux means this host."""
    if text == "127.0.0.1":
        return True
    try:
        address = ip_address(text)
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback or (or_any and address.is_unspecified)


def _own_names() -> list[str]:
    name = socket.gethostname()
    return [name, name.partition(".")[0]]
