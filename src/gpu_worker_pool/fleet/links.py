"""Links between hosts and candidates of a fleet: one connection that the host opens, with frames of JSON both ways.

It begins as an HTTP request to the candidate's usual port, and is upgraded. Then both sides prove that they know the
fleet's key, by answering each other's challenge. What the messages mean is not known here.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar, Final

import aiohttp

from gpu_worker_pool.api.fingerprints import certificates_for
from gpu_worker_pool.api.json_values import cleaned
from gpu_worker_pool.api.transport import reason_of, under
from gpu_worker_pool.fleet.keys import id_of, proof_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_worker_pool.fleet.keys import FleetKeys

logger: logging.Logger = logging.getLogger(__name__)

Message = dict[str, Any]

#: Where a candidate takes links, and the protocol that `Upgrade` names.
PATH: Final = "/fleet/link"
PROTOCOL: Final = "gpu-pool-fleet"
#: The largest frame: the leases of a large host take a tenth of it.
MOST_BYTES: Final = 4 * 1024 * 1024
#: The largest frame of one that has not proved that it knows the key.
MOST_BYTES_OF_STRANGERS: Final = 4096
#: How many links may be open at once whose peer has not proved that.
MOST_STRANGERS: Final = 512
#: How much may wait to be sent: a peer that does not read loses its link.
MOST_UNSENT_BYTES: Final = 16 * 1024 * 1024
#: Something is sent this often, and a link is closed after this long without a frame.
HEARTBEAT_SECONDS: Final = 1.0
SILENCE_SECONDS: Final = 6.0
#: How long the proofs may take.
HANDSHAKE_SECONDS: Final = 5.0
_HEADER_BYTES: Final = 4
_HEARTBEAT: Final = b"\0\0\0\2{}"


class HandshakeError(Exception):
    """The two sides will not speak to each other; the text says why."""


class Link:
    """What both ends of a link can do. Belongs to one event loop.

    `on_message` gets every message, and `on_closed` is called once. A link may also be in memory (`pair`).
    """

    def __init__(self) -> None:
        self.on_message: Callable[[Link, Message], object] = lambda _link, _message: None
        self.on_closed: Callable[[Link, str], object] = lambda _link, _reason: None
        self.is_open: bool = False
        #: Who is at the other end, once it has said so.
        self.name: str = ""

    def send(self, message: Message) -> None:
        """Send it, if the link is open."""
        raise NotImplementedError

    def close(self, reason: str = "closed") -> None:
        if self.is_open:
            self.is_open = False
            self._disconnect()
            self.on_closed(self, reason)

    def _disconnect(self) -> None:
        raise NotImplementedError


# --- in memory: a candidate is a host, too ---


class _MemoryLink(Link):
    other: _MemoryLink

    def send(self, message: Message) -> None:
        if self.is_open:
            # As over a connection: no object is shared, and a message is not handled within the call that sends it.
            asyncio.get_running_loop().call_soon(self.other.receive, json.dumps(message, separators=(",", ":")))

    def receive(self, text: str) -> None:
        if self.is_open:
            self.on_message(self, json.loads(text))

    def _disconnect(self) -> None:
        asyncio.get_running_loop().call_soon(self.other.close, "the other end was closed")


def pair() -> tuple[Link, Link]:
    """Both ends of a link within one process."""
    one, other = _MemoryLink(), _MemoryLink()
    one.other, other.other = other, one
    one.is_open = other.is_open = True
    return one, other


# --- over a connection ---


class ConnectedLink(Link, asyncio.Protocol):
    """A link over a connection whose HTTP request was upgraded; `_greet` begins the proofs."""

    def __init__(self, keys: FleetKeys) -> None:
        super().__init__()
        self._keys = keys
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._nonce = secrets.token_hex(16)
        self._most_bytes = MOST_BYTES_OF_STRANGERS
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._sent_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        #: Whether it is closed, or failed before it was open.
        self._is_over = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name or 'unknown'}, {'open' if self.is_open else 'not open'}>"

    # --- connection ---

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(high=MOST_UNSENT_BYTES)
        self._timer = self._loop.call_later(
            HANDSHAKE_SECONDS, self._fail, "the other side did not prove in time that it knows the fleet's key"
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("the connection broke" if exc is None else f"the connection broke: {exc}")

    def pause_writing(self) -> None:
        """Called beyond `MOST_UNSENT_BYTES`."""
        self._fail("the other side reads too slowly")

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        received = self._received
        received += data
        at = 0
        while len(received) - at >= _HEADER_BYTES and not self._is_over:
            size = int.from_bytes(received[at : at + _HEADER_BYTES], "big")
            if size > self._most_bytes:
                self._fail(f"a frame of {size} bytes is too large")
                return
            if len(received) - at < _HEADER_BYTES + size:
                break
            body = bytes(received[at + _HEADER_BYTES : at + _HEADER_BYTES + size])
            at += _HEADER_BYTES + size
            self._body(body)
        del received[:at]

    def _body(self, body: bytes) -> None:
        try:
            frame = json.loads(body)
        except (ValueError, RecursionError):
            frame = None
        if not isinstance(frame, dict):
            self._fail("a frame is not a JSON object")
        elif self.is_open:
            if frame:  # else it is a sign of life
                self.on_message(self, frame)
        elif isinstance(said := frame.get("error"), str):
            self._fail(cleaned(said, 300))
        elif frame:
            self._prove(frame)

    def send(self, message: Message) -> None:
        if self.is_open:
            self._send_frame(message)

    def _send_frame(self, frame: Message) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        body = json.dumps(frame, separators=(",", ":")).encode()
        if len(body) > MOST_BYTES:
            self._fail(f"a frame of {len(body)} bytes is too large to be sent")
            return
        self._sent_at = self._loop.time()
        self._transport.write(len(body).to_bytes(_HEADER_BYTES, "big") + body)

    def _disconnect(self) -> None:
        self._is_over = True
        self._received.clear()
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.close()
            # Closing waits until everything is sent.
            self._loop.call_later(1.0, self._transport.abort)

    def _fail(self, reason: str) -> None:
        if not self.is_open and self._transport is not None and not self._is_over:
            self._send_frame({"error": reason})
        self._end(reason)

    def _end(self, reason: str) -> None:
        if self._is_over:
            return
        was_open, self.is_open = self.is_open, False
        self._disconnect()
        if was_open:
            self.on_closed(self, reason)
        else:
            self._not_opened(reason)

    # --- proofs ---

    def _prove(self, frame: Message) -> None:
        raise NotImplementedError

    def _not_opened(self, reason: str) -> None:
        """It failed before it was open."""

    def _nonces(self, host: str, candidate: str) -> str:
        return f"{host} {candidate}"

    def _is_proved(self) -> None:
        """From now on it is trusted."""
        self._most_bytes = MOST_BYTES
        if self._timer is not None:
            self._timer.cancel()
        self.is_open = True
        self._timer = self._loop.call_later(HEARTBEAT_SECONDS, self._beat)

    def _beat(self) -> None:
        now = self._loop.time()
        # This process may have been stopped itself: first read what arrived meanwhile.
        if now - self._heard_at > SILENCE_SECONDS and now - self._beat_at < 2 * HEARTBEAT_SECONDS:
            self._end(f"nothing came for {SILENCE_SECONDS:g} s")
            return
        self._beat_at = now
        if now - self._sent_at > HEARTBEAT_SECONDS / 2 and self._transport is not None:
            self._sent_at = now
            self._transport.write(_HEARTBEAT)
        self._timer = self._loop.call_later(HEARTBEAT_SECONDS, self._beat)

    _beat_at = 0.0


class AcceptedLink(ConnectedLink):
    """The candidate's end."""

    #: Those that have not proved that they know the key, the oldest first.
    strangers: ClassVar[dict[AcceptedLink, None]] = {}

    def __init__(self, keys: FleetKeys, own_url: str, on_open: Callable[[AcceptedLink], object]) -> None:
        super().__init__(keys)
        self._own_url = own_url
        self._on_open = on_open
        self._key: bytes | None = None
        self._said = ""

    def connection_made(self, transport: Any) -> None:
        AcceptedLink.strangers[self] = None
        super().connection_made(transport)

    def _prove(self, frame: Message) -> None:
        if self._key is None:
            nonce, ids = frame.get("nonce"), frame.get("keys")
            if not (isinstance(nonce, str) and nonce.isascii() and 16 <= len(nonce) <= 64 and isinstance(ids, list)):
                self._fail("the first frame is not that of a host of a fleet")
                return
            key = next((key for key in self._keys.current() if id_of(key) in ids), None)
            if key is None:
                self._fail("the fleet's key is another one here: the key file must be the same on all hosts")
                return
            self._key, self._said = key, self._nonces(nonce, self._nonce)
            self._send_frame({"nonce": self._nonce, "key": id_of(key), "proof": proof_of(key, "candidate", self._said)})
            return
        proof = frame.get("proof")
        if not (isinstance(proof, str) and proof.isascii()) or not hmac.compare_digest(
            proof.encode(), proof_of(self._key, "host", self._said).encode()
        ):
            self._fail("the fleet's key is another one here: the key file must be the same on all hosts")
            return
        AcceptedLink.strangers.pop(self, None)
        self._is_proved()
        # A host may know it by several addresses.
        self._send_frame({"welcome": self._own_url})
        self._on_open(self)

    def close_unproved(self) -> None:
        AcceptedLink.strangers.pop(self, None)
        self._end("others wanted to join")

    def _not_opened(self, reason: str) -> None:
        AcceptedLink.strangers.pop(self, None)
        logger.debug("a link was not opened: %s", reason)


class OpenedLink(ConnectedLink):
    """The host's end. `opened` ends when both sides have proved that they know the key."""

    def __init__(self, keys: FleetKeys) -> None:
        super().__init__(keys)
        self.opened: asyncio.Future[None] = self._loop.create_future()
        self.response: aiohttp.ClientResponse | None = None

    def close_unopened(self) -> None:
        self._end("it was given up")
        if self.opened.done() and not self.opened.cancelled():
            self.opened.exception()  # it was reported, or nobody waits for it

    def _disconnect(self) -> None:
        super()._disconnect()
        if self.response is not None:
            self.response.close()

    def begin(self) -> None:
        self._send_frame({"nonce": self._nonce, "keys": [id_of(key) for key in self._keys.current()]})

    def _prove(self, frame: Message) -> None:
        if isinstance(url := frame.get("welcome"), str) and self._is_sure:
            self.name = url[:300]
            self._is_proved()
            self.opened.set_result(None)
            return
        nonce, proof = frame.get("nonce"), frame.get("proof")
        key = next((key for key in self._keys.current() if id_of(key) == frame.get("key")), None)
        if (
            key is None
            or not (isinstance(nonce, str) and nonce.isascii() and len(nonce) <= 64)
            or not (isinstance(proof, str) and proof.isascii())
        ):
            self._fail("the candidate does not know the fleet's key")
            return
        said = self._nonces(self._nonce, nonce)
        if not hmac.compare_digest(proof.encode(), proof_of(key, "candidate", said).encode()):
            self._fail("the candidate does not know the fleet's key")
            return
        self._is_sure = True
        self._send_frame({"proof": proof_of(key, "host", said)})

    #: Whether the candidate has proved that it knows the key.
    _is_sure = False

    def _not_opened(self, reason: str) -> None:
        if not self.opened.done():
            self.opened.set_exception(HandshakeError(reason))


async def open_link(session: aiohttp.ClientSession, url: str, keys: FleetKeys) -> OpenedLink:
    """A link to the candidate at this URL; a `HandshakeError` says why there is none."""
    target = under(url, PATH)
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            response = await session.get(
                target,
                headers={"Connection": "Upgrade", "Upgrade": PROTOCOL},
                allow_redirects=False,
                ssl=certificates_for(target),
            )
            connection = response.connection
            if response.status != HTTPStatus.SWITCHING_PROTOCOLS or connection is None or connection.transport is None:
                status = response.status
                response.close()
                raise HandshakeError(f"{url} accepts no links of hosts (HTTP {status}): is it a server with --fleet?")
            link = OpenedLink(keys)
            # The response holds the connection, and would close it when it is collected.
            link.response = response
            try:
                connection.transport.set_protocol(link)
                link.connection_made(connection.transport)
                link.begin()
                await link.opened
            except BaseException:
                link.close_unopened()
                raise
            return link
    except TimeoutError:
        raise HandshakeError(f"{url} does not answer within {HANDSHAKE_SECONDS:g} s") from None
    except (aiohttp.ClientError, OSError, UnicodeError) as error:
        raise HandshakeError(f"{url} cannot be reached: {reason_of(error)}") from None


def take_link(keys: FleetKeys, own_url: str, on_open: Callable[[AcceptedLink], object]) -> AcceptedLink:
    """The candidate's end of a requested link. With too many unproven links, the oldest is closed."""
    while len(AcceptedLink.strangers) >= MOST_STRANGERS:
        next(iter(AcceptedLink.strangers)).close_unproved()
    return AcceptedLink(keys, own_url, on_open)
