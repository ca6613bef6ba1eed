"""Callers that go at the worst moment, and come back: what the desk is told, at moments a test chooses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gpu_worker_pool.core.assignments import HeldGPU, Lease
from gpu_worker_pool.core.events import Request
from gpu_worker_pool.core.moves import LeaseState
from gpu_worker_pool.desk.desk import Waiting
from gpu_worker_pool.errors import PoolStoppedError
from gpu_worker_pool.gpu_server import ServerSettings, connected
from gpu_worker_pool.gpu_server.leases.api import LeaseAPI
from gpu_worker_pool.gpu_server.security import Doorkeeper
from gpu_worker_pool.gpu_server.view import HostView
from gpu_worker_pool.hardware.sampler import Seen


class Desk:
    """Answers whoever waits when a test says so, and writes down what it is told."""

    def __init__(self) -> None:
        self.answers: list[asyncio.Future[Lease | Waiting]] = []
        self.told: list[str] = []
        #: The askings that came, and those whose answers could not be sent.
        self.asks: list[str] = []
        self.undelivered_asks: list[str] = []
        #: What somebody who does not wait is told.
        self.now: Lease | Waiting | None = None

    async def acquire(
        self, request: Request, *, wait_seconds: float, may_keep: bool = True, ask: str = ""
    ) -> Lease | Waiting:
        self.asks.append(ask)
        if wait_seconds == 0:
            self.told.append(f"asked {may_keep}")
            return self.now or Waiting(request, 1, 0.0, ())
        self.answers.append(asyncio.get_running_loop().create_future())
        return await self.answers[-1]

    async def undelivered(self, lease: Lease, ask: str) -> None:
        self.told.append(f"undelivered {lease.lease_id}")
        self.undelivered_asks.append(ask)

    def token_for(self, _request_id: str) -> str:
        return "t" * 40


class Call:
    """One connection that asks for a GPU."""

    def __init__(self, api: LeaseAPI) -> None:
        self._body: bytes | None = json.dumps({"request_id": "r", "wait_seconds": 20, "may_keep": False}).encode()
        self._closed = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "http_version": "1.1", "client": ("127.0.0.1", 1), "headers": headers}
        found = api.find("POST", "/leases")
        assert found is not None
        self.task = asyncio.create_task(api.serve(found, scope, self._receive, self._send))

    def close(self) -> None:
        self._closed.set()

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._closed.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None


LEASE = Lease("lease-7", Request("r"), "", ("GPU-1",), (HeldGPU("GPU-1"),), 7, LeaseState.HELD, 0.0, 0.0, 60.0)


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def api(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> LeaseAPI:
    monkeypatch.setattr(connected, "WATCH_AFTER_SECONDS", 0.0)
    return LeaseAPI(desk, Doorkeeper(ServerSettings()), HostView(Seen))  # type: ignore[arg-type]  # all that is needed


async def settle() -> None:
    await asyncio.sleep(0.02)


async def test_one_that_stays_is_told(api: LeaseAPI, desk: Desk) -> None:
    call = Call(api)
    await settle()
    desk.answers[0].set_result(LEASE)
    await call.task
    assert (call.status, desk.told) == (201, [])


async def test_one_that_goes_keeps_its_place_and_stops_listening(api: LeaseAPI, desk: Desk) -> None:
    call = Call(api)
    await settle()
    call.close()
    await call.task
    assert (call.sent, desk.told) == ([], ["asked False"])
    assert desk.answers[0].cancelled()


async def test_a_grant_that_was_on_its_way_when_it_went_is_only_offered(api: LeaseAPI, desk: Desk) -> None:
    call = Call(api)
    await settle()
    desk.now = LEASE
    call.close()
    await call.task
    assert (call.sent, desk.told) == ([], ["asked False", "undelivered lease-7"])


async def test_gone_when_the_grant_comes(api: LeaseAPI, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connected, "WATCH_AFTER_SECONDS", 60.0)
    call = Call(api)
    await settle()
    call.close()
    desk.answers[0].set_result(LEASE)
    await call.task
    assert (call.sent, desk.told) == ([], ["undelivered lease-7"])


@pytest.mark.parametrize("watch_after_seconds", [0.0, 60.0])
async def test_one_that_has_come_back_is_not_taken_for_gone(
    api: LeaseAPI, desk: Desk, watch_after_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its old connection is noticed to be closed only after, or when, the new one was told. It holds all the same: the
    ledger undoes nothing on the word of another asking."""
    monkeypatch.setattr(connected, "WATCH_AFTER_SECONDS", watch_after_seconds)
    old, new = Call(api), Call(api)
    await settle()
    desk.now = LEASE
    desk.answers[1].set_result(LEASE)
    await new.task
    old.close()
    await asyncio.sleep(0)
    if watch_after_seconds:
        desk.answers[0].set_result(LEASE)
    await old.task
    assert (new.status, old.sent) == (201, [])
    of_old, of_new = desk.asks[:2]
    assert of_old != of_new
    assert desk.undelivered_asks == [of_old]


async def test_a_stop_is_told_and_the_place_is_kept(api: LeaseAPI, desk: Desk) -> None:
    call = Call(api)
    await settle()
    desk.answers[0].set_exception(PoolStoppedError())
    await call.task
    assert (call.status, desk.told) == (503, ["asked False"])
