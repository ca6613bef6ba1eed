"""Request bodies up to a limit, and callers that disconnect at moments that a test chooses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gpu_worker_pool.gpu_server import disconnect
from gpu_worker_pool.gpu_server.disconnect import CallerGoneError, DisconnectWatch, is_gone, read_body
from gpu_worker_pool.gpu_server.responses import Refusal


class Connection:
    """As a server keeps it: messages come in, and at last that it was closed."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self._messages = list(messages)
        self._closed = asyncio.Event()

    def close(self) -> None:
        self._closed.set()

    async def receive(self) -> dict[str, Any]:
        if self._messages:
            return self._messages.pop(0)
        await self._closed.wait()
        return {"type": "http.disconnect"}


def part(body: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


@pytest.fixture(autouse=True)
def watch_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disconnect, "WATCH_AFTER_SECONDS", 0.0)


# --- bodies ---


async def test_a_body_in_parts_is_whole() -> None:
    connection = Connection(part(b"{", more=True), part(b"", more=True), part(b"}"))
    assert await read_body(connection.receive, None) == b"{}"
    assert await read_body(Connection(part(b"")).receive, b"0") == b""


async def test_a_body_up_to_the_limit() -> None:
    limit = disconnect.MOST_BODY_BYTES
    assert await read_body(Connection(part(b"x" * limit)).receive, b"%d" % limit) == b"x" * limit
    most = disconnect.MOST_DROPPED_BYTES
    for connection, declared in (
        (Connection(part(b"x" * limit, more=True), part(b"x")), b"%d" % (limit + 1)),
        (Connection(), b"%d" % (most + 1)),
        (Connection(), b"9" * 5000),
        (Connection(), b"-1"),
        (Connection(), b"x"),
        (Connection(part(b"x" * limit, more=True), part(b"x")), None),
        (Connection(part(b"x" * most, more=True), part(b"x", more=True)), None),
        (Connection(part(b"x" * (limit + 1))), b"3"),
    ):
        with pytest.raises(Refusal) as refusal:
            await read_body(connection.receive, declared)
        assert refusal.value.reply.status == 413
        assert refusal.value.reply.headers == ((b"cache-control", b"no-store"), (b"connection", b"close"))


async def test_who_leaves_in_the_middle_of_a_body_is_not_answered() -> None:
    connection = Connection(part(b"{", more=True))
    connection.close()
    with pytest.raises(CallerGoneError):
        await read_body(connection.receive, None)


# --- is it still there ---


async def test_whether_it_is_gone_is_known_without_waiting() -> None:
    connection = Connection()
    assert not is_gone(connection.receive)
    assert not is_gone(connection.receive)
    connection.close()
    assert is_gone(connection.receive)
    assert not is_gone(Connection(part(b"more")).receive)


async def test_views_disturbs_nobody_who_waits() -> None:
    connection = Connection()
    waiting = asyncio.create_task(connection.receive())
    await asyncio.sleep(0)
    assert not is_gone(connection.receive)
    connection.close()
    assert await asyncio.wait_for(waiting, 1) == {"type": "http.disconnect"}


def pending_tasks() -> int:
    return len([task for task in asyncio.all_tasks() if not task.done()])


async def test_who_goes_ends_what_it_waited_for() -> None:
    connection = Connection()
    ended = False

    async def wait_for_ever() -> None:
        nonlocal ended
        try:
            await asyncio.sleep(60)
        finally:
            ended = True

    asyncio.get_running_loop().call_later(0.05, connection.close)
    with pytest.raises(CallerGoneError), DisconnectWatch(connection.receive):
        await wait_for_ever()
    assert ended
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)  # nothing is left to be cancelled
    assert pending_tasks() == 1


async def test_who_stays_gets_what_it_waited_for() -> None:
    connection = Connection()
    with DisconnectWatch(connection.receive):
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.05)
    assert pending_tasks() == 1, "nobody watches any more"


async def test_who_is_answered_soon_is_never_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disconnect, "WATCH_AFTER_SECONDS", 0.02)
    with DisconnectWatch(Connection().receive):
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    assert pending_tasks() == 1


async def test_an_error_is_an_error() -> None:
    connection = Connection()

    async def fail() -> None:
        await asyncio.sleep(0.02)
        raise KeyError("x")

    with pytest.raises(KeyError), DisconnectWatch(connection.receive):
        await fail()


async def test_somebody_who_wants_the_task_to_end_has_it_end() -> None:
    """Also when the caller goes in the same moment."""
    for closes_too in (False, True):
        connection = Connection()

        async def serve(connection: Connection = connection) -> None:
            with DisconnectWatch(connection.receive):
                await asyncio.sleep(60)

        task = asyncio.create_task(serve())
        await asyncio.sleep(0.05)
        if closes_too:
            connection.close()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_gone_in_the_moment_of_the_answer() -> None:
    """Then the answer was not delivered: the handler learns that, and no cancellation is left over."""
    connection = Connection()
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def both() -> None:
        connection.close()
        # The watching task is woken first, and ends before the waiting one is.
        asyncio.get_running_loop().call_soon(answer.set_result, "yes")

    asyncio.get_running_loop().call_later(0.05, both)
    with pytest.raises(CallerGoneError), DisconnectWatch(connection.receive):
        await answer
    await asyncio.sleep(0)
