"""Streams: nobody is told twice, nothing but an outdated snapshot is left out, and nobody waits for a slow reader."""

from __future__ import annotations

import asyncio
from typing import Any

from gpu_worker_pool.gpu_server import events
from gpu_worker_pool.gpu_server.events import EventStream


class Listener:
    """The other end of a connection, which reads only while it is told to."""

    def __init__(self, stream: EventStream, first: bytes = b"first;") -> None:
        self.received: list[bytes] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.is_ended = False
        self._gone = asyncio.Event()
        self.task = asyncio.create_task(stream.serve(self._receive, self._send, lambda: first))

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
        return b"".join(self.received).removeprefix(b"retry: 2000\n\n")


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
    for _ in range(events.MOST_KEPT + 1):
        stream.publish(b"y")
    deaf.reads.set()
    await asyncio.wait_for(deaf.task, 5)
    assert deaf.is_ended


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
