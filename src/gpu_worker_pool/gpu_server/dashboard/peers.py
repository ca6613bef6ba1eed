"""Shows other hosts on this host's dashboard: queries the configured servers, and only while a page is open.

Each is queried independently, with limits on time and size, without redirects. A page never waits for a peer: it
gets the last answer, with its age.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

from gpu_worker_pool.api.client import APIClient
from gpu_worker_pool.api.transport import make_session
from gpu_worker_pool.errors import GPUWorkerPoolError, ServiceRefusedError, ServiceRetryableError
from gpu_worker_pool.gpu_server.responses import as_json

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    import aiohttp

    from gpu_worker_pool.config import EndpointConfig

T = TypeVar("T")

#: A peer is queried no more often than this, however many pages are open.
INTERVAL_SECONDS: Final = 2.0
#: Time limit for one round of queries to a peer.
TIMEOUT_SECONDS: Final = 3.0
#: The largest answer that is accepted; a thousand GPUs take less than half of it.
MOST_BYTES: Final = 2 * 1024 * 1024
#: Limits for what a page gets of one peer.
MOST_GPUS: Final = 1024
MOST_LEASES: Final = 2048
MOST_WAITING: Final = 200
#: Readings that a small chart shows.
HISTORY_LIMIT: Final = 90
#: A page asks for the history once, when it opens.
HISTORY_SECONDS: Final = 5.0
_NO_LEDGER: Final = "its ledger cannot be read"


class Fleet:
    """Belongs to one event loop. Opens no connection until a page asks."""

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
        """The last answers of the peers, as JSON; starts a query of each peer whose answer is old."""
        now = self._clock()
        for peer in self._open():
            if not peer.is_being_queried and now - peer.queried_at >= INTERVAL_SECONDS:
                peer.is_being_queried = True
                peer.queried_at = now
                self._start(peer.query())
        return b'{"peers":[%b]}' % b",".join(peer.shown(now) for peer in self._open() if not peer.is_this_host)

    async def history(self) -> bytes:
        """The last readings of the peers that answer, by name; concurrent callers share one query."""
        now = self._clock()
        if self._history is None or (self._history.done() and now - self._history_at >= HISTORY_SECONDS):
            self._history_at = now
            self._history = self._start(self._query_history())
        # Other callers still wait for it if this one is cancelled.
        return await asyncio.shield(self._history)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _query_history(self) -> bytes:
        peers = [peer for peer in self._open() if not peer.is_this_host]
        found = await asyncio.gather(*(peer.history() for peer in peers))
        by_name = {peer.name: history for peer, history in zip(peers, found, strict=True) if history}
        return await asyncio.to_thread(as_json, {"peers": by_name})

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
        self._api = APIClient(
            endpoint.url, lambda: session, timeout_seconds=TIMEOUT_SECONDS, most_bytes=MOST_BYTES, now=clock
        )
        self._own_id = own_id
        self._clock = clock
        #: All hosts may be given the same list of peers, which then contains themselves.
        self.is_this_host = False
        self.is_being_queried = False
        self.queried_at = -INTERVAL_SECONDS
        self._is_identified = False
        self._answered_at: float | None = None
        #: Why the last query failed.
        self._problem: str | None = None
        #: The last answer, as JSON without the outer braces.
        self._answer = b""

    def shown(self, now: float) -> bytes:
        """`status`: `asking` until the first query ends, then `answers` or `silent`."""
        is_asking = self._answered_at is None and self._problem is None
        facts = {
            "name": self.name,
            "url": self._api.url,
            "status": "asking" if is_asking else "answers" if self._problem is None else "silent",
            "problem": self._problem,
            "answered_seconds_ago": None if self._answered_at is None else round(now - self._answered_at, 3),
        }
        return as_json(facts)[:-1] + b"," * bool(self._answer) + self._answer + b"}"

    async def query(self) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                if not self._is_identified:
                    self.is_this_host = await _unless(self._api.host_id(), 404) == self._own_id
                    self._is_identified = True
                if not self.is_this_host:
                    self._answer = as_json(await self._everything())[1:-1]
        except TimeoutError:
            self._problem = f"no complete answer within {TIMEOUT_SECONDS:g} s"
        except GPUWorkerPoolError as error:
            self._problem = str(error)
        else:
            self._problem = None
            self._answered_at = self._clock()
        finally:
            self.is_being_queried = False

    async def history(self) -> dict[str, Any] | None:
        with suppress(TimeoutError, GPUWorkerPoolError):
            async with asyncio.timeout(TIMEOUT_SECONDS):
                history = await self._api.history(HISTORY_LIMIT)
                return {**history, "gpus": history["gpus"][:MOST_GPUS]}
        return None

    async def _everything(self) -> dict[str, Any]:
        stats, health, (leases, ledger_problem), queue = await asyncio.gather(
            _unless(self._api.stats(), 503),
            _unless(self._api.health(), 404),
            self._leases(),
            _unless(self._api.queue(), 404, 503),
        )
        gpus = stats["gpus"][:MOST_GPUS] if stats else []
        if any(gpu.get("leases", ()) is None for gpu in gpus):
            ledger_problem = ledger_problem or _NO_LEDGER
        waiting = queue["queue"] if queue else []
        return {
            "health": {key: health[key] if health else None for key in ("status", "error")},
            "gpus": gpus,
            "sample_age_seconds": stats["sample_age_seconds"] if stats else None,
            # None for an older server, or if the ledger cannot be read: then `ledger_problem` says why.
            "leases": leases,
            "ledger_problem": ledger_problem,
            "queue": waiting[:MOST_WAITING],
            "waiting": len(waiting),
        }

    async def _leases(self) -> tuple[list[dict[str, Any]] | None, str | None]:
        """The leases, or None and the reason; None without a reason if the server gives no leases."""
        try:
            leases = await _unless(self._api.leases(), 404)
        except ServiceRetryableError as error:
            if error.status != 503:
                raise
            return None, error.detail or _NO_LEDGER
        return (leases["leases"][:MOST_LEASES] if leases else None), None


async def _unless(request: Awaitable[T], *statuses: int) -> T | None:
    """None if the server answers with one of these statuses: it does not have this, or not now."""
    try:
        return await request
    except (ServiceRefusedError, ServiceRetryableError) as error:
        if error.status in statuses:
            return None
        raise
