"""Who a caller is, and whether it may change anything: decided from a request's address and headers, and nothing else.

Whoever is on this host may, and whoever has a key. A web page that a browser on this host shows is neither: it comes
from this host, but has another's name in `Host` or `Origin`, and cannot send JSON to strangers.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from hmac import compare_digest
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import Scope

    from gpu_worker_pool.gpu_server.settings import ServerSettings

#: The account of those who need no key.
LOOPBACK: Final = "loopback"

_BEARER: Final = re.compile(rb"bearer +(\S+) *", re.IGNORECASE)
_HOST: Final = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::[0-9]{1,5})?")
#: Whatever a proxy adds; one that adds nothing at all cannot be told from a program on this host.
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
_OURS: Final = frozenset(
    [b"host", b"origin", b"sec-fetch-site", b"authorization", b"content-type", b"content-length", b"x-lease-token"]
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why not: what is answered instead of what was asked for."""

    status: int
    #: For programs.
    error: str
    #: For people; it says what to do.
    detail: str
    reasons: tuple[str, ...] = ()
    headers: tuple[tuple[bytes, bytes], ...] = ()
    #: How a request has ended, for programs; empty where it is not about that.
    state: str = ""


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who may change something."""

    #: By which what one caller may have is counted: of a key its fingerprint, never the key.
    account: str
    is_admin: bool


class Headers(NamedTuple):
    """Of one request, those that matter here; None for what was not sent."""

    host: bytes | None = None
    origin: bytes | None = None
    fetch_site: bytes | None = None
    authorization: bytes | None = None
    content_type: bytes | None = None
    content_length: bytes | None = None
    lease_token: bytes | None = None
    is_proxied: bool = False
    #: The first that was sent twice: which of the two counts, two programs may see differently.
    twice: str | None = None


def read_headers(scope: Scope) -> Headers:
    found: dict[bytes, bytes] = {}
    is_proxied, twice = False, None
    for name, value in scope["headers"]:
        if name in _OURS:
            if name in found:
                twice = twice or name.decode()
            found[name] = value
        elif name in _PROXY_HEADERS or name.startswith(_PROXY_PREFIXES):
            is_proxied = True
    get = found.get
    return Headers(
        get(b"host"),
        get(b"origin"),
        get(b"sec-fetch-site"),
        get(b"authorization"),
        get(b"content-type"),
        get(b"content-length"),
        get(b"x-lease-token"),
        is_proxied,
        twice,
    )


class Authenticator:
    """`hostnames`: what this machine is called."""

    def __init__(self, settings: ServerSettings, hostnames: Iterable[str] | None = None) -> None:
        # An administrator's key is a key like any other, too.
        keys = dict.fromkeys(settings.gpu_pool_api_keys, False) | dict.fromkeys(settings.gpu_pool_admin_keys, True)
        self._keys = [(_digest(key.encode()), is_admin) for key, is_admin in keys.items()]
        self._is_open_on_loopback = settings.gpu_pool_open_on_loopback
        names = {"localhost", *(_own_names() if hostnames is None else hostnames), *settings.gpu_pool_hosts}
        self._names = frozenset(name.lower().rstrip(".") for name in names)
        # Few are ever asked for by honest programs, and parsing one takes longer than all the rest.
        self._is_ours = lru_cache(maxsize=64)(self._is_our_name)

    @property
    def open_to(self) -> list[str]:
        """Who may change something, as anybody may know."""
        return ["loopback"] * self._is_open_on_loopback + ["keys"] * bool(self._keys)

    def offers_leases(self, scope: Scope) -> bool:
        """Whether this caller can have leases, with a key if it needs one (D18)."""
        return bool(self._keys) or self._is_here(scope, read_headers(scope))

    def identify(self, scope: Scope, headers: Headers) -> Caller | Refusal:
        """Who wants to change something; or why it must not."""
        if headers.twice is not None:
            return Refusal(400, "invalid", f"the header {headers.twice} was sent twice: send it once")
        is_here = self._is_here(scope, headers)
        if not self._keys and not is_here:
            return Refusal(
                403,
                "leases_closed",
                "this server gives leases to programs on its own host only: to open it to others, start it with keys "
                "in GPU_POOL_API_KEYS (and send one as Authorization: Bearer KEY)",
            )
        if headers.authorization is not None:
            return self._by_key(headers.authorization)
        if not is_here:
            return _unauthorized("key_needed", "a key is needed from here: send Authorization: Bearer KEY")
        return self._is_no_web_page(headers) or Caller(LOOPBACK, is_admin=False)

    # --- where from ---

    def _is_here(self, scope: Scope, headers: Headers) -> bool:
        """Loopback, and nobody in between: nginx by default adds no header, but speaks HTTP/1.0 as nobody else does."""
        client = scope.get("client")
        return (
            self._is_open_on_loopback
            and client is not None
            and not headers.is_proxied
            and scope.get("http_version") != "1.0"
            and _is_loopback(client[0])
        )

    # --- with a key: a web page has none, whatever it is called ---

    def _by_key(self, authorization: bytes) -> Caller | Refusal:
        if not self._keys:
            detail = "this server has no keys (GPU_POOL_API_KEYS is not set): from its own host ask without one"
            return _unauthorized("key_wrong", detail)
        match = _BEARER.fullmatch(authorization)
        if match is None:
            return _unauthorized("key_wrong", "this is no key: send Authorization: Bearer KEY")
        sent = _digest(match[1])
        found: Caller | None = None
        # All of them, also after the right one, so that the time taken says nothing.
        for digest, is_admin in self._keys:
            if compare_digest(digest, sent):
                found = Caller(f"key-{digest.hex()[:12]}", is_admin)
        if found is None:
            return _unauthorized("key_wrong", "this key is not one of this server's: ask its administrator for one")
        return found

    # --- without a key, from this host: a program, or a web page that somebody looks at here ---

    def _is_no_web_page(self, headers: Headers) -> Refusal | None:
        if headers.host is None or not self._is_ours(headers.host):
            shown = "nothing" if headers.host is None else repr(headers.host.decode("latin-1")[:80])
            return Refusal(
                421,
                "wrong_host",
                f"Host says {shown}, which is no name of this machine: use localhost, send a key, or add the name to "
                "GPU_POOL_HOSTS",
            )
        is_same = headers.origin is None or _same_origin(headers.origin, headers.host)
        if not is_same or headers.fetch_site in (b"cross-site", b"same-site"):
            return Refusal(403, "cross_origin", "a web page of another origin must not do this without a key")
        return None

    def _is_our_name(self, host: bytes) -> bool:
        match = _HOST.fullmatch(host.decode("latin-1").lower())
        if match is None:
            return False
        name = match[1].rstrip(".")
        if name in self._names or name.strip("[]") in self._names or name.endswith(".localhost"):
            return True
        # Another address of this machine cannot be reached from loopback but through something in between.
        return _is_loopback(name.strip("[]"), or_any=True)


def check_content_type(headers: Headers, *, is_needed: bool) -> Refusal | None:
    """Only JSON: a form is all that a web page may send to strangers without asking first."""
    given = headers.content_type
    if given is None and not is_needed:
        return None
    kind = b"" if given is None else given.partition(b";")[0].strip().lower()
    if kind == b"application/json":
        return None
    said = "no Content-Type" if given is None else f"Content-Type {given.decode('latin-1')[:80]!r}"
    return Refusal(415, "not_json", f"{said}: send JSON, with Content-Type: application/json")


def _unauthorized(error: str, detail: str) -> Refusal:
    return Refusal(401, error, detail, headers=((b"www-authenticate", b"Bearer"),))


def _digest(key: bytes) -> bytes:
    """What is compared: of the same length for every key."""
    return sha256(key).digest()


def _same_origin(origin: bytes, host: bytes) -> bool:
    scheme, _, rest = origin.lower().partition(b"://")
    return scheme in (b"http", b"https") and rest == host.lower()


@lru_cache(maxsize=1024)
def _is_loopback(text: str, *, or_any: bool = False) -> bool:
    """`or_any`: 0.0.0.0 too, which Linux takes for this host."""
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
