"""TLS certificates that are trusted by their SHA-256 fingerprint, for servers whose certificate no authority signed."""

from __future__ import annotations

import re
import ssl
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Final, NamedTuple

import aiohttp

from gpu_worker_pool.environment import Environment

if TYPE_CHECKING:
    import asyncio

    from yarl import URL

VARIABLE: Final = "GPU_POOL_TLS_FINGERPRINT"
_ENTRY: Final = re.compile(
    r"(?:(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?=)?(?P<print>[0-9A-Fa-f:]+)"
)
#: A SHA-256 in hexadecimal.
_DIGITS: Final = 64


class Pin(NamedTuple):
    #: None: any host, or any port.
    host: str | None
    port: int | None
    fingerprint: bytes


#: No certificate has this one.
_NOTHING: Final = (Pin(None, None, bytes(_DIGITS // 2)),)


def parse_fingerprints(text: str, name: str = VARIABLE) -> tuple[Pin, ...]:
    """Entries with commas between: `FINGERPRINT`, `HOST=FINGERPRINT` or `HOST:PORT=FINGERPRINT`."""
    return tuple(_parse(entry, name) for entry in re.split(r"[\s,]+", text.strip(" ,\t\n")) if entry)


def _parse(entry: str, name: str) -> Pin:
    match = _ENTRY.fullmatch(entry)
    digits = "" if match is None else match["print"].replace(":", "")
    if match is None or len(digits) != _DIGITS:
        raise ValueError(
            f"{name} must be SHA-256 fingerprints of 64 hexadecimal digits, or HOST:PORT=FINGERPRINT, "
            f"with commas between, not {entry[:100]!r}"
        )
    host = match["host"]
    return Pin(
        None if host is None else host.strip("[]").lower(),
        None if match["port"] is None else int(match["port"]),
        bytes.fromhex(digits),
    )


def shown(fingerprint: bytes) -> str:
    """As OpenSSL and browsers show it."""
    return fingerprint.hex(":").upper()


def fingerprint_of(certificate: str) -> bytes:
    """Of the first certificate in this text in PEM format."""
    end = "-----END CERTIFICATE-----"
    first, found, _ = certificate.partition(end)
    if not found:
        raise ValueError("it holds no certificate in PEM format")
    begin = first.rfind("-----BEGIN CERTIFICATE-----")
    return sha256(ssl.PEM_cert_to_DER_cert(first[begin:] + end)).digest()


class TrustedCertificates(aiohttp.Fingerprint):
    """Lets aiohttp refuse any other certificate before it sends anything."""

    def __init__(self, fingerprints: frozenset[bytes]) -> None:
        super().__init__(next(iter(fingerprints)))
        self._fingerprints = fingerprints

    def check(self, transport: asyncio.Transport) -> None:
        certificate = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        found = sha256(certificate).digest()
        if found not in self._fingerprints:
            host, port, *_ = transport.get_extra_info("peername")
            raise aiohttp.ServerFingerprintMismatch(self.fingerprint, found, host, port)


def certificates_for(url: URL) -> TrustedCertificates | bool:
    """How to check the server of this URL; True: by the authorities that the session trusts."""
    if url.scheme != "https":
        return True
    return _certificates_for(_pins(Environment().text(VARIABLE)), url.host or "", url.port)


@lru_cache(maxsize=8)
def _pins(text: str) -> tuple[Pin, ...]:
    # A bad value is logged, and trusts no certificate at all: its user did not want all that authorities have signed.
    return Environment({VARIABLE: text}).get(VARIABLE, _NOTHING if text else (), parse_fingerprints)


@lru_cache(maxsize=1024)
def _certificates_for(pins: tuple[Pin, ...], host: str, port: int | None) -> TrustedCertificates | bool:
    trusted = frozenset(pin.fingerprint for pin in pins if pin.host in (None, host) and pin.port in (None, port))
    return TrustedCertificates(trusted) if trusted else True
