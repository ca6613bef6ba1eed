"""Streams: each event is sent once, only outdated snapshots are dropped, and a slow listener delays no other."""

from __future__ import annotations

import asyncio
import gzip
import random
import zlib
from typing import Any

import pytest

from gpu_worker_pool.gpu_server import events
from gpu_worker_pool.gpu_server.events import EventStream


@pytest.fixture(params=[False, True], ids=["plain", "packed"], autouse=True)
def is_packed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """To both kinds of listeners all of this is promised."""
    monkeypatch.setattr(Listener, "is_packed", request.param)
    return bool(request.param)


class Listener:
    """The other end of a connection, which reads only while it is told to."""

    is_packed = False

    def __init__(self, stream: EventStream, first: bytes = b"first;") -> None:
        self.received: list[bytes] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.is_ended = False
        self._gone = asyncio.Event()
        serving = stream.serve(self._receive, self._send, lambda: first, is_packed=self.is_packed)
        self.task = asyncio.create_task(serving)

    def leave(self) -> None:
        self._gone.set()

    async def _receive(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.reads.wait()
        self.received.append(message["body"])
        self.is_ended = not message["more_body"]

    @property
    def text(self) -> bytes:
        body = b"".join(self.received)
        if self.is_packed:
            # Everything that has come can be read, also while the stream goes on.
            body = gzip.decompress(body) if self.is_ended else zlib.decompressobj(31).decompress(body)
        return body.removeprefix(b"retry: 2000\n\n")


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_everybody_gets_the_same_bytes_from_the_moment_they_join() -> None:
    stream = EventStream()
    early = Listener(stream)
    await settle()
    stream.publish(b"a;")
    await settle()
    late = Listener(stream)
    await settle()
    stream.publish_snapshot(lambda: b"b;")
    await settle()
    stream.stop()
    await asyncio.gather(early.task, late.task)
    assert (early.text, late.text) == (b"first;a;b;", b"first;b;")
    assert early.is_ended
    assert late.is_ended


async def test_nothing_is_lost_between_the_first_bytes_and_the_next() -> None:
    """What is published right after somebody joined is sent, though the first bytes are still on their way."""
    stream = EventStream()
    listener = Listener(stream)
    listener.reads.clear()
    await asyncio.sleep(0)
    stream.publish(b"a;")
    listener.reads.set()
    await settle()
    stream.stop()
    await listener.task
    assert listener.text == b"first;a;"


async def test_a_slow_reader_misses_outdated_snapshots_and_no_other_event() -> None:
    stream = EventStream()
    slow, quick = Listener(stream), Listener(stream)
    await settle()
    slow.reads.clear()
    for number in range(4):
        stream.publish(b"event%d;" % number)
        stream.publish_snapshot(lambda number=number: b"snapshot%d;" % number)  # type: ignore[misc]
        await settle()
    slow.reads.set()
    await settle()
    stream.stop()
    await asyncio.gather(slow.task, quick.task)
    assert slow.text == b"first;event0;snapshot0;event1;event2;event3;snapshot3;"
    assert quick.text == b"first;" + b"".join(b"event%d;snapshot%d;" % (number, number) for number in range(4))


async def test_who_leaves_is_forgotten_also_in_the_middle_of_a_send() -> None:
    stream = EventStream()
    leaving, blocked = Listener(stream), Listener(stream)
    await settle()
    leaving.leave()
    await settle()
    assert leaving.task.done(), "without anything happening that would wake it"
    blocked.reads.clear()
    stream.publish(b"a;")
    await settle()
    blocked.leave()
    blocked.reads.set()
    await blocked.task
    assert not stream._listeners


async def test_who_is_hopelessly_behind_is_let_go() -> None:
    stream = EventStream()
    deaf = Listener(stream)
    await settle()
    deaf.reads.clear()
    stream.publish(b"x")
    await settle()
    for _ in range(events.MOST_QUEUED + 1):
        stream.publish(b"y")
    deaf.reads.set()
    await asyncio.wait_for(deaf.task, 5)
    assert deaf.is_ended
    assert deaf.text == b"first;x" + b"y" * events.MOST_QUEUED


async def test_what_is_told_last_is_told_also_to_who_comes_last() -> None:
    stream = EventStream()
    listener = Listener(stream)
    await settle()
    stream.publish(b"last;")
    stream.stop()
    late = Listener(stream)
    await asyncio.gather(listener.task, late.task)
    assert (listener.text, late.text) == (b"first;last;", b"first;")


async def test_a_snapshot_nobody_listens_to_is_not_built() -> None:
    built: list[bytes] = []

    def build() -> bytes:
        built.append(b"x")
        return b"x"

    stream = EventStream()
    stream.publish_snapshot(build)
    assert built == []
    listener = Listener(stream)
    await settle()
    stream.publish_snapshot(build)
    assert built == [b"x"]
    stream.stop()
    await listener.task


async def test_silence_is_broken(monkeypatch: Any) -> None:
    stream = EventStream()
    listener = Listener(stream)
    await settle()
    stream.keep_alive()
    await settle()
    assert listener.text == b"first;"
    monkeypatch.setattr(events, "KEEP_ALIVE_SECONDS", 0.0)
    stream.keep_alive()
    await settle()
    assert listener.text == b"first;: still here\n\n"
    stream.stop()
    await listener.task


async def test_a_cancelled_stream_ends_and_is_forgotten() -> None:
    stream = EventStream()
    listener = Listener(stream)
    await settle()
    listener.task.cancel()
    await asyncio.gather(listener.task, return_exceptions=True)
    assert listener.task.cancelled()
    assert not stream._listeners


async def test_what_is_large_and_alike_becomes_small_and_is_made_so_once_for_all(
    is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    monkeypatch.setattr(
        events, "gzip_part", lambda plain, make=events.gzip_part: (made.append(len(plain)), make(plain))[1]
    )
    draw = random.Random(3)
    snapshots = [b"".join(b"gpu %d uses %d;" % (gpu, draw.randrange(10**6)) for gpu in range(500)) for _ in range(20)]
    stream = EventStream()
    listeners = [Listener(stream) for _ in range(5)]
    await settle()
    begun = len(made)
    for snapshot in snapshots:
        stream.publish_snapshot(lambda snapshot=snapshot: snapshot)  # type: ignore[misc]
        await settle()
    stream.stop()
    await asyncio.gather(*(listener.task for listener in listeners))
    assert all(listener.text == b"first;" + b"".join(snapshots) for listener in listeners)
    assert made[begun:] == (list(map(len, snapshots)) if is_packed else [])
    sent = sum(map(len, listeners[0].received))
    assert sent < (0.5 if is_packed else 1.1) * sum(map(len, snapshots))
