"""Other hosts on this host's page: their servers are asked while somebody looks, and only those that were configured.

Each is asked on its own and bounded in time and size, no redirect is followed, and of what it says only known keys are
passed on. Nobody who looks waits for it: what was last heard is told, with its age.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

from gpu_worker_pool.api.http_client import exchange, make_session, status_error, under
from gpu_worker_pool.api.replies import parse_detail
from gpu_worker_pool.errors import GPUWorkerPoolError
from gpu_worker_pool.gpu_server.dashboard.peer_schema import (
    UnbelievableError,
    believed_health,
    believed_history,
    believed_host_id,
    believed_leases,
    believed_queue,
    believed_stats,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    import aiohttp

    from gpu_worker_pool.api.http_client import Answer
    from gpu_worker_pool.config import EndpointConfig

T = TypeVar("T")

#: However many pages are open, a peer is asked no more often.
INTERVAL_SECONDS: Final = 2.0
#: For all that is asked of a peer at one time.
TIMEOUT_SECONDS: Final = 3.0
#: A thousand GPUs take less than one of them.
MOST_BYTES: Final = 2 * 1024 * 1024
#: To read more than this would hold up everybody else.
_LARGE_BYTES: Final = 64 * 1024
#: As many as a small chart shows.
HISTORY_LIMIT: Final = 90
#: A page asks once, when it begins.
HISTORY_SECONDS: Final = 5.0
_NO_LEDGER: Final = "its ledger cannot be read"


class Fleet:
    """Belongs to one event loop. Nothing is asked, and no connection made, before somebody looks."""

    def __init__(
        self, peers: Sequence[EndpointConfig], own_id: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._endpoints = tuple(peers)
        self.own_id = own_id
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None
        self._peers: list[_Peer] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._history: asyncio.Task[bytes] | None = None
        self._history_at = 0.0

    @property
    def names(self) -> list[str]:
        return [endpoint.endpoint_id for endpoint in self._endpoints]

    def shown(self) -> bytes:
        """What is known of the others, as JSON; whoever was not asked for a while is asked now."""
        now = self._clock()
        for peer in self._open():
            if not peer.is_being_asked and now - peer.asked_at >= INTERVAL_SECONDS:
                peer.is_being_asked = True
                peer.asked_at = now
                self._start(peer.ask())
        return b'{"peers":[%b]}' % b",".join(peer.shown(now) for peer in self._open() if not peer.is_this_host)

    async def history(self) -> bytes:
        """The last readings of those who answer, by name; the same to all who ask at once."""
        now = self._clock()
        if self._history is None or (self._history.done() and now - self._history_at >= HISTORY_SECONDS):
            self._history_at = now
            self._history = self._start(self._ask_history())
        # Whoever began it may leave; others wait for it, too.
        return await asyncio.shield(self._history)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _ask_history(self) -> bytes:
        peers = [peer for peer in self._open() if not peer.is_this_host]
        found = await asyncio.gather(*(peer.history() for peer in peers))
        by_name = {peer.name: history for peer, history in zip(peers, found, strict=True) if history}
        return await asyncio.to_thread(_as_bytes, {"peers": by_name})

    def _start(self, work: Coroutine[None, None, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _open(self) -> list[_Peer]:
        if self._session is None and self._endpoints:
            session = self._session = make_session(limit_per_host=4)
            self._peers = [_Peer(endpoint, session, self.own_id, self._clock) for endpoint in self._endpoints]
        return self._peers


class _Peer:
    def __init__(
        self, endpoint: EndpointConfig, session: aiohttp.ClientSession, own_id: str, clock: Callable[[], float]
    ) -> None:
        self.name = endpoint.endpoint_id
        self._url = endpoint.url
        self._session = session
        self._own_id = own_id
        self._clock = clock
        #: One list of peers may be given to all of them, this one included.
        self.is_this_host = False
        self.is_being_asked = False
        self.asked_at = -INTERVAL_SECONDS
        self._is_known = False
        self._answered_at: float | None = None
        #: Why it did not answer when it was last asked.
        self._problem: str | None = None
        #: What it last said, as JSON without the braces around it.
        self._said = b""

    def shown(self, now: float) -> bytes:
        """`status`: `asking` until it is known whether it answers, then `answers` or `silent`."""
        is_asking = self._answered_at is None and self._problem is None
        facts = {
            "name": self.name,
            "url": self._url,
            "status": "asking" if is_asking else "answers" if self._problem is None else "silent",
            "problem": self._problem,
            "answered_seconds_ago": None if self._answered_at is None else round(now - self._answered_at, 3),
        }
        return _as_bytes(facts)[:-1] + b"," * bool(self._said) + self._said + b"}"

    async def ask(self) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                if not self._is_known:
                    await self._get_to_know()
                if not self.is_this_host:
                    await self._look()
        except TimeoutError:
            self._problem = f"no complete answer within {TIMEOUT_SECONDS:g} s"
        except (GPUWorkerPoolError, UnbelievableError) as error:
            self._problem = str(error)
        else:
            self._problem = None
            self._answered_at = self._clock()
        finally:
            self.is_being_asked = False

    async def history(self) -> dict[str, Any] | None:
        with suppress(TimeoutError, GPUWorkerPoolError, UnbelievableError):
            async with asyncio.timeout(TIMEOUT_SECONDS):
                return await self._get(f"/gpu/history?limit={HISTORY_LIMIT}", believed_history)
        return None

    async def _get_to_know(self) -> None:
        host_id = await self._get("/dashboard/host", believed_host_id)
        self.is_this_host = host_id == self._own_id
        self._is_known = True

    async def _look(self) -> None:
        stats, health, (leases, ledger_problem), queue = await asyncio.gather(
            self._get("/gpu/stats", believed_stats, missing=(503,)),
            self._get("/health", believed_health),
            self._leases(),
            self._get("/queue", believed_queue, missing=(404, 503)),
        )
        waiting, waiting_count = queue or ([], 0)
        stats = stats or {"gpus": [], "sample_age_seconds": None, "is_ledger_unread": False}
        if stats.pop("is_ledger_unread"):
            ledger_problem = ledger_problem or _NO_LEDGER
        said = {
            "health": health or {"status": None, "error": None},
            **stats,
            # Null where it has none to tell of: an older server, or one whose ledger cannot be read, and why not.
            "leases": leases,
            "ledger_problem": ledger_problem,
            "queue": waiting,
            "waiting": waiting_count,
        }
        self._said = _as_bytes(said)[1:-1]

    async def _leases(self) -> tuple[list[dict[str, Any]] | None, str | None]:
        """All of them, or None and why they cannot be told; None and no reason where it knows of no leases."""
        answer = await self._answer("/leases")
        if answer.status == 503:
            return None, (answer.body and parse_detail(answer.body)) or _NO_LEDGER
        return await self._believed("/leases", answer, believed_leases, missing=(404,)), None

    async def _get(self, path: str, believe: Callable[[bytes], T], missing: tuple[int, ...] = (404,)) -> T | None:
        """None where the status is one of `missing`: it has no such thing, or not now."""
        return await self._believed(path, await self._answer(path), believe, missing)

    async def _answer(self, path: str) -> Answer:
        url = under(self._url, path)
        return await exchange(self._session, "GET", url, timeout_seconds=TIMEOUT_SECONDS, most_bytes=MOST_BYTES)

    async def _believed(
        self, path: str, answer: Answer, believe: Callable[[bytes], T], missing: tuple[int, ...]
    ) -> T | None:
        url = under(self._url, path)
        if answer.status in missing:
            return None
        if answer.status != 200 or answer.body is None:
            raise status_error("GET", url, answer, "is this a GPU server, and is its API_PREFIX part of the URL?")
        try:
            if len(answer.body) < _LARGE_BYTES:
                return believe(answer.body)
            return await asyncio.to_thread(believe, answer.body)
        except UnbelievableError as error:
            raise UnbelievableError(f"GET {url} was answered, but {error}") from None


def _as_bytes(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
