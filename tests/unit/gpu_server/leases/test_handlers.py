"""What reaches the broker: every requirement of a request, and callers that disconnect at the worst moment."""

from __future__ import annotations

import asyncio
import json
from dataclasses import fields
from typing import Any

import pytest
from tests.fakes.memory_ledger import MemoryLedger
from tests.leasing import until

from gpu_worker_pool.broker.broker import LeaseBroker, Waiting
from gpu_worker_pool.core.assignments import HeldGPU, Lease
from gpu_worker_pool.core.events import Request, Ticked
from gpu_worker_pool.core.moves import LeaseState
from gpu_worker_pool.core.requirements import Requirements
from gpu_worker_pool.core.settings import PoolSettings
from gpu_worker_pool.errors import PoolStoppedError
from gpu_worker_pool.gpu_server import ServerSettings, disconnect
from gpu_worker_pool.gpu_server.application import create_app
from gpu_worker_pool.gpu_server.fast_path import FastPathAPI, ServerParts
from gpu_worker_pool.gpu_server.host_view import HostView
from gpu_worker_pool.gpu_server.security import Authenticator
from gpu_worker_pool.hardware.sampler import LatestSamples
from gpu_worker_pool.ledger import OnCommit
from gpu_worker_pool.testing import FakeClock, gpu, snapshot


class FakeBroker:
    """Answers a waiting request when a test says so, and records what it is told."""

    def __init__(self) -> None:
        self.answers: list[asyncio.Future[Lease | Waiting]] = []
        self.told: list[str] = []
        self.poll_ids: list[str] = []
        self.requests: list[Request] = []

    async def acquire(
        self,
        request: Request,
        *,
        wait_seconds: float,  # noqa: ARG002
        may_reserve: bool = True,  # noqa: ARG002
        poll_id: str = "",
    ) -> Lease | Waiting:
        self.requests.append(request)
        self.poll_ids.append(poll_id)
        self.answers.append(asyncio.get_running_loop().create_future())
        return await self.answers[-1]

    async def poll_abandoned(self, request_id: str, poll_id: str, *, is_gone: bool = True) -> None:
        what = "does not hear" if is_gone else "is not told"
        self.told.append(f"{request_id} {what} of poll {self.poll_ids.index(poll_id)}")

    def token_for(self, _request_id: str) -> str:
        return "t" * 40

    def index_of(self, _gpu_id: str) -> int | None:
        return 0


class Call:
    """One connection that asks for a GPU."""

    def __init__(self, app: FastPathAPI, **body: Any) -> None:
        body = {"request_id": "r", "wait_seconds": 20, "may_keep": False} | body
        self._body: bytes | None = json.dumps(body).encode()
        self._closed = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/leases",
            "http_version": "1.1",
            "client": ("127.0.0.1", 1),
            "headers": headers,
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

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
def broker() -> FakeBroker:
    return FakeBroker()


@pytest.fixture
def app(broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> FastPathAPI:
    monkeypatch.setattr(disconnect, "WATCH_AFTER_SECONDS", 0.0)
    return app_with(broker)


def app_with(broker: FakeBroker | LeaseBroker) -> FastPathAPI:
    """A server of which only the lease routes work."""
    app = create_app(ServerSettings())
    assert isinstance(app, FastPathAPI)
    parts: Any = (HostView(LatestSamples), broker, Authenticator(ServerSettings()), None, None, None, None)
    app.parts = ServerParts(*parts)
    return app


async def settle() -> None:
    await asyncio.sleep(0.02)


async def test_one_that_stays_is_told(app: FastPathAPI, broker: FakeBroker) -> None:
    call = Call(app)
    await settle()
    broker.answers[0].set_result(LEASE)
    await call.task
    assert (call.status, broker.told) == (201, [])


async def test_every_requirement_reaches_the_broker(app: FastPathAPI, broker: FakeBroker) -> None:
    requirements = Requirements(
        count=2,
        memory_mb=8192.0,
        share=True,
        min_free_memory_mb=100.5,
        gpu_model="A100",
        only=("0", "GPU-6ec5"),
        exclude=("MIG-1",),
        policy="idle",
        memory_threshold=50.0,
        utilization_threshold=60.0,
        priority=-5,
    )
    sent = {each.name: getattr(requirements, each.name) for each in fields(Requirements) if each.init}
    assert all(sent[each.name] != each.default for each in fields(Requirements) if each.init)
    Call(app, **sent, worker_id="w", label="l", ttl_seconds=7.0)
    await settle()
    (request,) = broker.requests
    assert request.requirements == requirements
    assert (request.worker_id, request.label, request.ttl_seconds, request.account) == ("w", "l", 7.0, "loopback")


async def test_one_that_goes_keeps_its_place_and_stops_listening(app: FastPathAPI, broker: FakeBroker) -> None:
    call = Call(app)
    await settle()
    call.close()
    await call.task
    assert (call.sent, broker.told) == ([], ["r does not hear of poll 0"])
    assert broker.answers[0].cancelled()


async def test_gone_when_the_grant_comes(app: FastPathAPI, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disconnect, "WATCH_AFTER_SECONDS", 60.0)
    call = Call(app)
    await settle()
    call.close()
    broker.answers[0].set_result(LEASE)
    await call.task
    assert (call.sent, broker.told) == ([], ["r does not hear of poll 0"])


@pytest.mark.parametrize("watch_after_seconds", [0.0, 60.0])
async def test_one_that_has_come_back_is_not_taken_for_gone(
    app: FastPathAPI, broker: FakeBroker, watch_after_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its old connection is noticed to be closed only after, or when, the new one was told: it is said of the old one,
    and the ledger undoes nothing on the word of another poll."""
    monkeypatch.setattr(disconnect, "WATCH_AFTER_SECONDS", watch_after_seconds)
    old, new = Call(app), Call(app)
    await settle()
    broker.answers[1].set_result(LEASE)
    await new.task
    old.close()
    await asyncio.sleep(0)
    if watch_after_seconds:
        broker.answers[0].set_result(LEASE)
    await old.task
    assert (new.status, old.sent) == (201, [])
    assert len(set(broker.poll_ids)) == 2
    assert broker.told == ["r does not hear of poll 0"]


async def test_a_stop_is_told_and_the_place_is_kept(app: FastPathAPI, broker: FakeBroker) -> None:
    call = Call(app)
    await settle()
    broker.answers[0].set_exception(PoolStoppedError())
    await call.task
    assert (call.status, broker.told) == (503, ["r is not told of poll 0"]), "it is not the asker who went"


async def test_an_old_connection_that_breaks_leaves_the_new_one_listening(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disconnect, "WATCH_AFTER_SECONDS", 0.0)
    clock = FakeClock(1000.0)
    ledgers: list[MemoryLedger] = []

    def opened(on_commit: OnCommit) -> MemoryLedger:
        ledgers.append(MemoryLedger(PoolSettings(queue_ttl_seconds=1.0), on_commit, clock))
        return ledgers[-1]

    broker = LeaseBroker(opened, lambda _: None, clock=clock.now)
    await broker.start()
    (ledger,) = ledgers
    await ledger.submit(snapshot([gpu(0)], at=clock.now()))
    holder = await broker.acquire(Request("holder", owner="me", ttl_seconds=60.0), wait_seconds=0)
    assert isinstance(holder, Lease)
    app = app_with(broker)
    old = Call(app)
    await until(lambda: "r" in broker.waiting)
    new, asked_by_old = Call(app), broker.waiting["r"].poll_id
    await until(lambda: broker.waiting["r"].poll_id != asked_by_old)
    old.close()
    await old.task
    clock.advance(2.0)  # more than it would be waited for, had it gone
    await ledger.submit(Ticked())
    await broker.release(holder.lease_id, "me")
    clock.advance(0.1)
    await ledger.submit(snapshot([gpu(0)], at=clock.now()))
    await until(new.task.done)
    assert (new.status, old.sent) == (201, [])
    (lease,) = broker.leases.values()
    assert (lease.request.request_id, lease.state) == ("r", LeaseState.HELD)
    await broker.stop()
