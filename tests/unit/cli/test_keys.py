"""The secrets of requests, kept by one `gpu-pool` so that another one of the same user may end what it has begun."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any, cast

import pytest

from gpu_worker_pool.api.client import ON_COMMAND_LINE
from gpu_worker_pool.cli.views.http_host import HTTPHost
from gpu_worker_pool.config import EndpointConfig, MultiEndpointConfigurationManager
from gpu_worker_pool.core import Request
from gpu_worker_pool.errors import RequestEndedError, ServiceRefusedError
from gpu_worker_pool.leases import remembered
from gpu_worker_pool.leases.lease import HeldLease, StillWaiting, with_new_id
from gpu_worker_pool.leases.remembered import RememberedLeases
from gpu_worker_pool.leases.tokens import Tokens

DAY_SECONDS = 24 * 3600.0


def new_request() -> Request:
    return with_new_id(Request("", worker_id="worker", ttl_seconds=60.0))


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return Tokens(tmp_path / "requests")


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "requests").iterdir())


def test_they_are_their_owners_alone(tokens: Tokens, tmp_path: Path) -> None:
    mine = new_request()
    tokens.remember(mine)
    assert tokens.of(mine.request_id) == mine.owner
    assert tokens.of("another") is None
    (file,) = kept(tmp_path)
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    tokens.forget(mine)
    tokens.forget(mine)
    assert kept(tmp_path) == []


def test_what_is_held_for_weeks_keeps_its_token(tokens: Tokens, tmp_path: Path) -> None:
    held, forgotten = new_request(), new_request()
    for each in (held, forgotten):
        tokens.remember(each)
    for file in kept(tmp_path):
        os.utime(file, (time.time() - 8 * DAY_SECONDS,) * 2)
    tokens.refresh(held)
    tokens.remember(new_request())
    assert tokens.of(held.request_id) == held.owner
    assert tokens.of(forgotten.request_id) is None


def test_a_file_that_others_tidy_away_meanwhile_does_no_harm(tokens: Tokens, tmp_path: Path) -> None:
    folder = tmp_path / "requests"
    folder.mkdir()
    (folder / "request-gone").symlink_to(folder / "nowhere")
    (folder / "request-locked").mkdir()
    os.utime(folder / "request-locked", (0, 0))
    mine, old = new_request(), folder / "request-old"
    old.touch()
    os.utime(old, (0, 0))
    tokens.remember(mine)
    assert tokens.of(mine.request_id) == mine.owner
    assert not old.exists()


def test_what_is_not_a_token_stays_where_the_folder_is_a_link_to_another(tokens: Tokens, tmp_path: Path) -> None:
    """As root with the HOME of another user, tidying would have emptied any folder that this user chose."""
    chosen = tmp_path / "etc"
    chosen.mkdir()
    (tmp_path / "requests").symlink_to(chosen)
    (chosen / "passwd").touch()
    os.utime(chosen / "passwd", (0, 0))
    mine = new_request()
    tokens.remember(mine)
    assert tokens.of(mine.request_id) == mine.owner
    assert (chosen / "passwd").exists()


class EndingOnce:
    """A service at which the first request has ended without its asker."""

    endpoint_id = "server"
    longest_silence_seconds = 60.0

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def acquire(self, request: Request, *, wait_seconds: float, may_reserve: bool) -> HeldLease | StillWaiting:  # noqa: ARG002
        self.asked.append(request.request_id)
        if len(self.asked) == 1:
            raise RequestEndedError(state="given_up")
        return StillWaiting(1, ())

    async def renew(self, lease: HeldLease, *, timeout_seconds: float) -> None: ...

    async def release(self, lease: HeldLease) -> None: ...

    async def cancel(self, request: Request) -> None: ...

    async def has_waiting(self) -> bool:
        return False

    async def rest(self) -> None: ...

    async def close(self) -> None: ...


def test_a_request_that_is_made_anew_has_one_token(tokens: Tokens, tmp_path: Path) -> None:
    leases = RememberedLeases("server", EndingOnce(), cast("Any", None), tokens)
    first = new_request()
    with pytest.raises(RequestEndedError):
        asyncio.run(leases.acquire(first, wait_seconds=0, may_reserve=True))
    again = with_new_id(first)
    asyncio.run(leases.acquire(again, wait_seconds=0, may_reserve=True))
    assert tokens.of(first.request_id) is None
    assert tokens.of(again.request_id) == again.owner
    asyncio.run(leases.cancel(again))
    assert kept(tmp_path) == []


async def test_what_the_command_line_says_about_keys_can_be_typed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not how a Python program would allow it."""
    monkeypatch.setenv("GPU_POOL_API_KEY", "k" * 20)
    endpoint = EndpointConfig("lab", "http://not-this-host.invalid:8000")

    def never() -> Any:
        raise AssertionError("nothing must be sent")

    monkeypatch.setattr(remembered, "make_session", never)
    service = remembered.server_leases(endpoint, MultiEndpointConfigurationManager(), ON_COMMAND_LINE)
    host = HTTPHost(endpoint, cast("Any", None))
    for refused in (
        service.acquire(new_request(), wait_seconds=0, may_reserve=True),
        host.release("lease-1", "t" * 20),
        host.cancel("request", "t" * 20),
    ):
        with pytest.raises(ServiceRefusedError) as caught:
            await refused
        assert str(caught.value).endswith("in a network you trust, set GPU_POOL_ALLOW_INSECURE_KEY=1")
        assert "=True" not in str(caught.value)
