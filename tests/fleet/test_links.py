"""The links of a fleet, against a real server that is a candidate: proofs of the key, frames, and strangers."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool.api.transport import make_session
from gpu_worker_pool.fleet.keys import FleetKeys, read_keys
from gpu_worker_pool.fleet.links import MOST_BYTES_OF_STRANGERS, HandshakeError, Link, open_link
from tests.server_process import ServerProcess

KEY = "a key of this fleet alone"
UPGRADE = b"GET /fleet/link HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: gpu-pool-fleet\r\n\r\n"


@pytest.fixture(scope="module")
def candidate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Its database is away, which is no reason not to take links."""
    folder = tmp_path_factory.mktemp("candidate")
    (folder / "key").write_text(f"{KEY}\n")
    with ServerProcess(
        folder,
        GPU_BACKEND="simulated:1",
        GPU_POOL_FLEET_DATABASE="postgresql://nobody@127.0.0.1:1/nothing",
        GPU_POOL_FLEET_KEY_FILE=str(folder / "key"),
    ) as server:
        yield server


def keys_of(folder: Path, *keys: str) -> FleetKeys:
    path = folder / "own-key"
    path.write_text("\n".join(keys))
    return FleetKeys(str(path))


def link_with(url: str, keys: FleetKeys, message: dict[str, Any] | None = None) -> str:
    """The name of the other end; or with a message, why it closed the link."""

    async def run() -> str:
        session = make_session(limit_per_host=0)
        try:
            link = await open_link(session, url, keys)
            closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            link.on_closed = lambda _link, reason: closed.done() or closed.set_result(reason)
            if message is None:
                link.close()
                return link.name
            link.send(message)
            async with asyncio.timeout(20):
                return await closed
        finally:
            await session.close()

    return asyncio.run(run())


def test_both_sides_prove_that_they_know_the_key(candidate: ServerProcess, tmp_path: Path) -> None:
    assert link_with(candidate.url, keys_of(tmp_path, KEY)) == candidate.url
    # While keys are changed, a host may know the new one already, and the candidate only the old one.
    assert link_with(candidate.url, keys_of(tmp_path, "the key that comes next", KEY)) == candidate.url


def test_another_key_is_refused_with_a_sentence(candidate: ServerProcess, tmp_path: Path) -> None:
    with pytest.raises(HandshakeError, match="the fleet's key is another one here"):
        link_with(candidate.url, keys_of(tmp_path, "another key of 16 letters"))


def test_a_key_must_be_long(tmp_path: Path) -> None:
    for text, problem in (("aStub", "shorter than 16"), ("", "empty"), ("x" * 70_000, "too large")):
        (tmp_path / "key").write_text(text)
        with pytest.raises(ValueError, match=problem) as refused:
            read_keys(str(tmp_path / "key"))
        assert not text or text not in str(refused.value)
    with pytest.raises(ValueError, match="cannot be read"):
        read_keys(str(tmp_path / "nothing"))


def test_the_first_message_says_who_the_host_is(candidate: ServerProcess, tmp_path: Path) -> None:
    message = {"type": "Report", "number": 1}
    assert "broke" in link_with(candidate.url, keys_of(tmp_path, KEY), message)


@pytest.mark.parametrize(
    "sent",
    [
        (MOST_BYTES_OF_STRANGERS + 1).to_bytes(4, "big"),
        b"\xff\xff\xff\xff",
        (2).to_bytes(4, "big") + b"[]",
        (3).to_bytes(4, "big") + b"\xff{}",
        (4000).to_bytes(4, "big") + b"[" * 4000,
    ],
)
def test_strangers_may_send_little(candidate: ServerProcess, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", candidate.port), timeout=10) as connection:
        connection.sendall(UPGRADE)
        assert connection.recv(4096).startswith(b"HTTP/1.1 101 ")
        connection.sendall(sent)
        while connection.recv(4096):
            pass  # a sentence, and the end


def test_a_stranger_that_proves_nothing_is_cut_off(candidate: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", candidate.port), timeout=10) as connection:
        began_at = time.monotonic()
        connection.sendall(UPGRADE)
        while connection.recv(4096):
            pass
        assert time.monotonic() - began_at >= 4.0


def test_a_server_that_is_no_candidate_takes_no_links(tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path, GPU_BACKEND="simulated:1") as server,
        pytest.raises(HandshakeError, match="is it a server with --fleet"),
    ):
        link_with(server.url, keys_of(tmp_path, KEY))


def test_a_link_route_is_no_page(candidate: ServerProcess) -> None:
    assert candidate.get("/fleet/link").json["error"] == "no_link"


def test_nobody_is_there(tmp_path: Path) -> None:
    with pytest.raises(HandshakeError, match="cannot be reached: connection refused"):
        link_with("http://127.0.0.1:1", keys_of(tmp_path, KEY))
    assert Link().is_open is False
