"""The HTTP client against servers that do everything wrong, over real sockets: bounded, clear, nothing left behind."""

from __future__ import annotations

import asyncio
import functools
import gc
import gzip
import json
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.fakes.http_server import (
    Behaviour,
    HostileServer,
    answer,
    answer_json,
    black_hole_url,
    drip,
    flood,
    gpu_row,
    gzip_bomb,
    hang_up,
    head,
    in_turn,
    raw,
    refusing_url,
    reset_after,
    silent,
    stops_after,
    summary,
)
from tests.waiting import eventually

from gpu_worker_pool import errors, http_client
from gpu_worker_pool._version import __version__
from gpu_worker_pool.api import summary_decoder
from gpu_worker_pool.api.http_client import AsyncGPUStatsHTTPClient, Fetched, MultiEndpointHTTPClientPool, make_session
from gpu_worker_pool.api.json_values import LARGEST_BODY_BYTES
from gpu_worker_pool.api.summary_decoder import DecodedSummary, decode_summary
from gpu_worker_pool.config import EndpointConfig
from gpu_worker_pool.errors import NetworkRetryableError, ServiceRefusedError, ServiceRetryableError
from gpu_worker_pool.models import GPUInfo

GOOD = json.dumps(summary(gpu_row(0))).encode()
good = answer_json(summary(gpu_row(0)))
#: Of fetches that are meant to run into it.
SHORT_SECONDS = 0.3
#: How much later than its deadline a fetch may end on a busy machine.
GRACE_SECONDS = 2.0


@asynccontextmanager
async def session_of(**kwargs: Any) -> AsyncIterator[aiohttp.ClientSession]:
    """In the test's own task, and after it: no task, no connection, no warning."""
    loop = asyncio.get_running_loop()
    loop.set_debug(True)
    loop.slow_callback_duration = 10.0
    before = asyncio.all_tasks()
    session = make_session(**kwargs)
    try:
        yield session
    finally:
        await session.close()
        # Transports say goodbye in callbacks.
        for _ in range(3):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == before
        # The young objects are those of this test; all of them would take longer than the test.
        gc.collect(1)


async def fetch(url: str, timeout_seconds: float = 10.0, **kwargs: Any) -> Fetched:
    async with session_of(**kwargs) as session:
        return await AsyncGPUStatsHTTPClient(url, session, timeout_seconds=timeout_seconds).fetch()


async def failure(
    error_class: type[errors.GPUWorkerPoolError], url: str, timeout_seconds: float = 10.0, **kwargs: Any
) -> Any:
    """The error of a fetch, whose message names the URL and stays short; and it came in time."""
    begun = time.monotonic()
    with pytest.raises(error_class) as caught:
        await fetch(url, timeout_seconds, **kwargs)
    assert time.monotonic() - begun < timeout_seconds + GRACE_SECONDS
    assert type(caught.value) is error_class
    message = str(caught.value)
    assert f"GET {url}/gpu/summary " in message
    assert message.isprintable()
    assert len(message) < 600
    return caught.value


def told(error: Exception) -> str:
    """The message behind the URL."""
    return str(error).partition("/gpu/summary ")[2]


# --- good answers ---


async def test_a_good_reply() -> None:
    with HostileServer(answer_json(summary(gpu_row(0), sample_age_seconds=1.5))) as server:
        before = time.monotonic()
        fetched = await fetch(server.url)
        after = time.monotonic()
    assert fetched.stats.gpus_summary == [GPUInfo(0, "NVIDIA GeForce RTX 3080", 20.0, 15)]
    assert fetched.stats.sample_age_seconds == 1.5
    assert fetched.problems == ()
    assert before <= fetched.sent_at <= fetched.sent_at + fetched.took_seconds <= after
    assert fetched.took_seconds > 0


async def test_what_is_asked() -> None:
    with HostileServer(good) as server:
        await fetch(f"{server.url}/some/prefix%7Ehere/")
    [request] = server.requests
    line, *headers = request.decode().split("\r\n")
    assert line == "GET /some/prefix%7Ehere/gpu/summary HTTP/1.1"
    assert {header.split(": ")[0]: header.split(": ")[1] for header in headers} == {
        "Host": f"127.0.0.1:{server.port}",
        "Accept": "application/json",
        "Accept-Encoding": "identity",
        "User-Agent": f"gpu-worker-pool/{__version__}",
    }


async def test_no_cookie_is_kept_and_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        HostileServer(good) as proxy,
        HostileServer(answer(GOOD, Set_Cookie="id=1; Path=/")) as server,
    ):
        for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(variable, proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        async with session_of() as session:
            # Cookies of a bare address would be dropped by any client.
            url = server.url.replace("127.0.0.1", "localhost")
            client = AsyncGPUStatsHTTPClient(url, session, timeout_seconds=10)
            await client.fetch()
            await client.fetch()
    assert proxy.connections == 0
    assert len(server.requests) == 2
    assert not any(b"cookie" in request.lower() for request in server.requests)


async def test_one_connection_serves_many_fetches_also_after_an_error() -> None:
    turns = in_turn(good, answer_json({"detail": "no sample"}, 503), answer(b"no JSON"), good)
    with HostileServer(turns) as server:
        async with session_of() as session:
            client = AsyncGPUStatsHTTPClient(server.url, session, timeout_seconds=10)
            await client.fetch()
            for _ in range(2):
                with pytest.raises(ServiceRetryableError):
                    await client.fetch()
            await client.fetch()
        assert (server.connections, len(server.requests)) == (1, 4)


async def test_a_connection_that_the_server_closed_meanwhile_is_no_error() -> None:
    with HostileServer(in_turn(good, hang_up, good)) as server:
        async with session_of() as session:
            client = AsyncGPUStatsHTTPClient(server.url, session, timeout_seconds=10)
            await client.fetch()
            await client.fetch()
        assert server.connections == 2


async def test_problems_of_a_usable_reply_are_passed_on() -> None:
    with HostileServer(answer_json(summary(gpu_row(0), gpu_row(0)))) as server:
        fetched = await fetch(server.url)
    assert fetched.stats.gpu_count == 1
    assert fetched.problems == ("GPU 0 is listed more than once; the busier row counts",)


@pytest.mark.parametrize(("gpus", "in_a_thread"), [(8, False), (10_000, True)])
async def test_large_replies_are_not_parsed_in_the_event_loop(
    gpus: int, in_a_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def parse(body: bytes) -> DecodedSummary:
        threads.append(threading.current_thread())
        return decode_summary(body)

    monkeypatch.setattr(summary_decoder, "decode_summary", parse)
    with HostileServer(answer_json(summary(*map(gpu_row, range(gpus))))) as server:
        fetched = await fetch(server.url, timeout_seconds=20)
    assert fetched.stats.gpu_count == gpus
    assert [thread is not threading.current_thread() for thread in threads] == [in_a_thread]


# --- no reply, or half of one ---


async def test_refused() -> None:
    with refusing_url() as url:
        error = await failure(NetworkRetryableError, url)
    assert told(error) == "failed: connection refused; is the GPU server running?"


@pytest.mark.fault(16)
async def test_a_name_that_does_not_resolve() -> None:
    error = await failure(NetworkRetryableError, "http://nonexistent.invalid:8000")
    assert told(error).startswith("failed: its name does not resolve: ")


@pytest.mark.parametrize("host", ["a..b", "a" * 70 + ".invalid", "256.1.1.1"])
async def test_a_name_that_cannot_be_one(host: str) -> None:
    error = await failure(NetworkRetryableError, f"http://{host}")
    # Older versions of yarl leave it to the resolver.
    assert told(error).startswith(("failed: its name is not valid: ", "failed: its name does not resolve: "))


async def test_a_name_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, may_end = threading.Event(), threading.Event()

    def getaddrinfo(*_: object, **__: object) -> list[Any]:
        asked.set()
        may_end.wait(10)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    try:
        error = await failure(NetworkRetryableError, "http://gpu-server", SHORT_SECONDS)
    finally:
        may_end.set()
    assert asked.is_set()
    assert told(error) == "failed: no complete reply within 0.3 s"


@pytest.mark.fault(14)
async def test_a_black_hole() -> None:
    with black_hole_url() as url:
        error = await failure(NetworkRetryableError, url, SHORT_SECONDS)
    assert told(error) == "failed: no complete reply within 0.3 s"


DAWDLERS: dict[str, Behaviour] = {
    "silent": silent,
    "drips its headers": drip(head(X_Padding="x" * 1000)),
    "drips its body": drip(head(Content_Length=len(GOOD)) + GOOD),
    "drips chunks": drip(head(Transfer_Encoding="chunked") + b"1\r\n \r\n" * 1000),
    "stops in the body": stops_after(head(Content_Length=100) + b"{"),
    "continues for ever": drip(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000, 0.001),
}


@pytest.mark.fault(14)
@pytest.mark.parametrize("behaviour", DAWDLERS.values(), ids=DAWDLERS.keys())
async def test_a_server_that_takes_its_time_is_given_up(behaviour: Behaviour) -> None:
    with HostileServer(behaviour) as server:
        error = await failure(NetworkRetryableError, server.url, SHORT_SECONDS)
        assert told(error) == "failed: no complete reply within 0.3 s"
    assert server.connections == 1


BROKEN_OFF: dict[str, tuple[Behaviour, str]] = {
    "hangs up": (hang_up, "it closed the connection without a reply"),
    "resets at once": (reset_after(b""), "connection reset by peer"),
    "hangs up in the headers": (raw(b"HTTP/1.1 200 OK\r\nContent-"), "it closed the connection without a reply"),
    "resets in the body": (
        reset_after(head(Content_Length=len(GOOD)) + GOOD[:20]),
        "the reply broke off in the middle",
    ),
    "promises more": (raw(head(Content_Length=len(GOOD) + 1) + GOOD), "the reply broke off in the middle"),
    "hangs up between chunks": (
        raw(head(Transfer_Encoding="chunked") + b"5\r\n12345\r\n"),
        "the reply broke off in the middle",
    ),
}


@pytest.mark.fault(14)
@pytest.mark.parametrize(("behaviour", "reason"), BROKEN_OFF.values(), ids=BROKEN_OFF.keys())
async def test_a_connection_that_breaks_off(behaviour: Behaviour, reason: str) -> None:
    with HostileServer(behaviour) as server:
        error = await failure(NetworkRetryableError, server.url)
    assert told(error) == f"failed: {reason}"


# --- replies that are none ---

NO_REPLIES: dict[str, tuple[Behaviour, str]] = {
    "HTML": (answer(b"<html>It works!</html>", Content_Type="text/html"), "the reply is not JSON: "),
    "nothing": (answer(b""), "the reply is not JSON: "),
    "JSON cut off": (answer(GOOD[:-10]), "the reply is not JSON: "),
    # Whether it is bad JSON or bad HTTP depends on how it is cut into packets.
    "a length too short": (raw(head(Content_Length=len(GOOD) - 5) + GOOD), "the reply is not "),
    "bad UTF-8": (answer(b'{"gpus_summary": ["\xff"]}'), "the reply is not UTF-8: "),
    "wrong types": (answer_json({"gpus_summary": "none"}), "the reply must have a list gpus_summary, not 'none'"),
    "deep nesting": (answer(b"[" * 100_000), "the reply is nested too deeply"),
    "another protocol": (raw(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"), "the reply is not HTTP: "),
    "endless headers": (flood(b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n" * 100), "the reply is not HTTP: "),
    "an endless line": (flood(b"HTTP/1.1 200 ", b"A" * 65536), "the reply is not HTTP: "),
    "two lengths": (
        raw(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}    "),
        "the reply is not",
    ),
    "bad chunks": (raw(head(Transfer_Encoding="chunked") + b"zz\r\n\r\n"), "the reply is not HTTP: "),
    "a huge length, and no more": (stops_after(head(Content_Length=1 << 30)), "the reply has more than 8388608 bytes"),
    "an endless body": (flood(head()), "the reply has more than 8388608 bytes"),
    "gzip": (answer(gzip_bomb(1 << 20), Content_Encoding="gzip"), "the reply is encoded as 'gzip', which was not"),
    "an unknown coding": (answer(GOOD, Content_Encoding="x-zip"), "the reply is encoded as 'x-zip', which was not"),
}


@pytest.mark.fault(19)
@pytest.mark.parametrize(("behaviour", "says"), NO_REPLIES.values(), ids=NO_REPLIES.keys())
async def test_a_reply_that_cannot_be_used(behaviour: Behaviour, says: str) -> None:
    with HostileServer(behaviour) as server:
        error = await failure(ServiceRetryableError, server.url)
        assert len(server.requests) == 1, "nobody asked for a second try"
    assert told(error).startswith(f"was answered, but {says}")
    assert error.retry_after_seconds is None


@contextmanager
def memory_below(most_bytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most_bytes, f"{peak / 2**20:.0f} MiB"


@pytest.mark.fault(19)
async def test_a_gigabyte_is_not_read_and_not_kept() -> None:
    chunk = bytes(65536)
    with HostileServer(flood(head(), chunk)) as server:
        with memory_below(4 * LARGEST_BODY_BYTES):
            await failure(ServiceRetryableError, server.url)
        eventually(lambda: server.open_connections() == 0)
    # What lies in the buffers of two sockets was sent without being read.
    assert server.bytes_sent < LARGEST_BODY_BYTES + 24 * 2**20


async def test_a_gzip_bomb_is_never_unpacked() -> None:
    bomb = gzip_bomb(1 << 29)
    assert len(bomb) < 2**20
    with HostileServer(answer(bomb, Content_Encoding="gzip")) as server, memory_below(8 * 2**20):
        await failure(ServiceRetryableError, server.url)


async def test_a_body_of_exactly_the_largest_size_is_read() -> None:
    with HostileServer(answer(GOOD + b" " * (LARGEST_BODY_BYTES - len(GOOD)))) as server:
        assert (await fetch(server.url)).stats.gpu_count == 1
    with HostileServer(answer(GOOD + b" " * (LARGEST_BODY_BYTES - len(GOOD) + 1))) as server:
        await failure(ServiceRetryableError, server.url)


# --- redirects ---

_connected_to: list[object] = []


def _note_connections(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "socket.connect":
        _connected_to.append(arguments[1])


@functools.cache
def _note_all_connections() -> None:
    # Once in a process: it cannot be removed again, and costs next to nothing.
    sys.addaudithook(_note_connections)


@pytest.fixture
def connected_to() -> list[object]:
    """Every address this process tries to connect to from here on, by whatever library."""
    _note_all_connections()
    _connected_to.clear()
    return _connected_to


@pytest.mark.fault(18)
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize(
    "target", ["file:///etc/passwd", "http://169.254.169.254/latest/meta-data", "//169.254.169.254/", "/elsewhere"]
)
async def test_no_redirect_is_followed(status: int, target: str, connected_to: list[object]) -> None:
    with HostileServer(answer(GOOD, status, Location=target)) as server:
        error = await failure(ServiceRetryableError, server.url)
        assert len(server.requests) == 1
    assert connected_to == [("127.0.0.1", server.port)]
    assert error.status == status
    assert told(error) == (
        f"was answered with {status}, a redirect to {target}, which is not followed; "
        "configure the URL that answers itself"
    )


async def test_a_redirect_to_a_good_server_is_not_followed_either() -> None:
    with HostileServer(good) as other:
        with HostileServer(answer(b"", 302, Location=f"{other.url}/gpu/summary")) as server:
            await failure(ServiceRetryableError, server.url)
        assert other.connections == 0


# --- errors that a server tells ---


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504, 599, 999, 204, 304])
async def test_an_error_that_may_pass(status: int) -> None:
    with HostileServer(raw(head(status))) as server:
        error = await failure(ServiceRetryableError, server.url)
    assert (error.status, error.retry_after_seconds) == (status, None)
    assert told(error).startswith(f"was answered with {status}")


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 410, 418, 422, 451])
async def test_an_error_that_will_not_pass(status: int) -> None:
    with HostileServer(answer_json({"detail": "because"}, status)) as server:
        error = await failure(ServiceRefusedError, server.url)
    assert error.status == status
    assert not error.retryable
    assert isinstance(error, errors.ServiceUnavailableError)
    assert not isinstance(error, errors.RetryableError), "a breaker must not count it"
    assert told(error) == f"was answered with {status}: because"


async def test_a_404_says_what_to_look_for() -> None:
    with HostileServer(answer(b"<h1>Not Found</h1>", 404)) as server:
        error = await failure(ServiceRefusedError, server.url)
    assert told(error) == (
        "was answered with 404; is this a GPU server, and is its API_PREFIX part of the configured URL?"
    )


async def test_a_503_of_our_server_says_why() -> None:
    body = {"detail": "nvidia-smi was not found\x1b[2J", "error": "nvidia_smi_not_found"}
    with HostileServer(answer_json(body, 503)) as server:
        error = await failure(ServiceRetryableError, server.url)
    assert told(error) == "was answered with 503: nvidia-smi was not found[2J"


DETAILS: dict[str, Behaviour] = {
    "endless": flood(head(503)),
    "long": answer(b'{"detail": "x"}' + b" " * 100_000, 503),
    "bad": answer(b"\xff", 503),
    "broken off": raw(head(503, Content_Length=100) + b'{"detail": "x'),
    "gzip": answer(gzip.compress(b'{"detail": "x"}'), 503, Content_Encoding="gzip"),
}


@pytest.mark.parametrize("behaviour", DETAILS.values(), ids=DETAILS.keys())
async def test_an_error_whose_body_is_worse_than_the_error(behaviour: Behaviour) -> None:
    with HostileServer(behaviour) as server:
        error = await failure(ServiceRetryableError, server.url)
    assert (error.status, told(error)) == (503, "was answered with 503")


async def test_an_error_does_not_wait_for_its_explanation() -> None:
    with HostileServer(drip(head(401, Content_Length=1000) + b" " * 1000)) as server:
        begun = time.monotonic()
        error = await failure(ServiceRefusedError, server.url, timeout_seconds=30.0)
        assert time.monotonic() - begun < 10.0
    assert error.status == 401


@pytest.mark.parametrize("status", [429, 503])
async def test_retry_after(status: int) -> None:
    for value, seconds in [("7", 7.0), ("86400", 300.0), ("soon", None)]:
        with HostileServer(answer(b"", status, Retry_After=value)) as server:
            error = await failure(ServiceRetryableError, server.url)
        assert error.retry_after_seconds == seconds


async def test_retry_after_a_moment_goes_by_the_servers_clock() -> None:
    long_ago = 1e9
    dates = {"Date": formatdate(long_ago, usegmt=True), "Retry_After": formatdate(long_ago + 20, usegmt=True)}
    with HostileServer(answer(b"", 503, **dates)) as server:
        error = await failure(ServiceRetryableError, server.url)
    assert error.retry_after_seconds == 20.0


# --- TLS ---

OPENSSL = shutil.which("openssl")
needs_openssl = pytest.mark.skipif(OPENSSL is None, reason="openssl is needed to make certificates")

OPENSSL_CONFIG = """
[ca]
default_ca = mine
[mine]
database = index
serial = serial
new_certs_dir = .
default_md = sha256
policy = any
x509_extensions = names
[any]
commonName = supplied
[req]
distinguished_name = nobody
[nobody]
[names]
subjectAltName = {names}
"""


def make_certificate(folder: Path, names: str, not_after: str = "20991231235959Z") -> tuple[ssl.SSLContext, Path]:
    """Self-signed: what a server shows, and the file a client would trust."""
    (folder / "config").write_text(OPENSSL_CONFIG.format(names=names))
    (folder / "index").touch()
    (folder / "serial").write_text("01")

    def openssl(*arguments: str) -> None:
        assert OPENSSL is not None
        subprocess.run(
            [OPENSSL, *arguments, "-config", "config"], cwd=folder, check=True, capture_output=True, timeout=20
        )

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "key"]
    openssl("req", "-new", *key, "-subj", "/CN=gpu-server", "-out", "request")
    dates = ["-startdate", "20200101000000Z", "-enddate", not_after]
    openssl("ca", "-batch", "-selfsign", "-keyfile", "key", "-in", "request", "-out", "certificate", "-notext", *dates)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "certificate", folder / "key")
    return context, folder / "certificate"


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"), "IP:127.0.0.1")


def trusting(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate))


@needs_openssl
async def test_a_certificate_that_is_trusted(tls: tuple[ssl.SSLContext, Path]) -> None:
    with HostileServer(good, tls=tls[0]) as server:
        fetched = await fetch(server.url, ssl_context=trusting(tls[1]))
    assert fetched.stats.gpu_count == 1


@needs_openssl
async def test_a_self_signed_certificate_is_refused(tls: tuple[ssl.SSLContext, Path]) -> None:
    with HostileServer(good, tls=tls[0]) as server:
        error = await failure(NetworkRetryableError, server.url)
        assert server.requests == []
    assert told(error) == (
        "failed: its TLS certificate is refused: self-signed certificate; "
        "to trust an authority of your own, set SSL_CERT_FILE; to trust this certificate, GPU_POOL_TLS_FINGERPRINT"
    )


@pytest.mark.fault(17)
@needs_openssl
async def test_an_expired_certificate_is_refused(tmp_path: Path) -> None:
    context, certificate = make_certificate(tmp_path, "IP:127.0.0.1", not_after="20200102000000Z")
    with HostileServer(good, tls=context) as server:
        error = await failure(NetworkRetryableError, server.url, ssl_context=trusting(certificate))
        assert server.requests == []
    assert told(error) == "failed: its TLS certificate is refused: certificate has expired"


@needs_openssl
async def test_a_certificate_of_another_host_is_refused(tmp_path: Path) -> None:
    context, certificate = make_certificate(tmp_path, "DNS:elsewhere.example")
    with HostileServer(good, tls=context) as server:
        error = await failure(NetworkRetryableError, server.url, ssl_context=trusting(certificate))
        assert server.requests == []
    assert told(error) == (
        "failed: its TLS certificate is refused: IP address mismatch, certificate is not valid for '127.0.0.1'"
    )


@needs_openssl
async def test_a_handshake_that_never_begins(tls: tuple[ssl.SSLContext, Path]) -> None:
    with HostileServer(good, tls=tls[0], is_deaf=True) as server:
        error = await failure(NetworkRetryableError, server.url, SHORT_SECONDS)
    assert told(error) == "failed: no complete reply within 0.3 s"


@needs_openssl
@pytest.mark.parametrize("behaviour", [silent, drip(head() + GOOD), flood(head())], ids=["silent", "drips", "floods"])
async def test_bad_behaviour_behind_tls(behaviour: Behaviour, tls: tuple[ssl.SSLContext, Path]) -> None:
    with HostileServer(behaviour, tls=tls[0]) as server:
        begun = time.monotonic()
        with pytest.raises(errors.RetryableError):
            await fetch(server.url, 1.0, ssl_context=trusting(tls[1]))
        assert time.monotonic() - begun < 1.0 + GRACE_SECONDS


async def test_https_asked_of_a_server_of_plain_http() -> None:
    with HostileServer(answer(b"", 400)) as server:
        error = await failure(NetworkRetryableError, server.url.replace("http", "https"))
    assert told(error).startswith("failed: TLS failed: ")
    assert told(error).endswith("; does this port speak https?")


async def test_a_server_that_hangs_up_on_a_handshake() -> None:
    with HostileServer(hang_up) as server:
        error = await failure(NetworkRetryableError, server.url.replace("http", "https"))
    assert told(error) == "failed: the connection ended while it was being made"


@needs_openssl
async def test_plain_http_asked_of_a_server_of_https(tls: tuple[ssl.SSLContext, Path]) -> None:
    with HostileServer(good, tls=tls[0]) as server:
        await failure(NetworkRetryableError, server.url.replace("https", "http"))
        assert server.requests == []


# --- cancelled ---

MOMENTS: dict[str, Behaviour] = {
    "before the headers": silent,
    "in the body": stops_after(head(Content_Length=100) + b"{"),
    "in an error's body": stops_after(head(503, Content_Length=100) + b"{"),
}


@pytest.mark.parametrize("behaviour", MOMENTS.values(), ids=MOMENTS.keys())
async def test_a_cancelled_fetch_is_cancelled_and_closes_its_connection(behaviour: Behaviour) -> None:
    with HostileServer(behaviour) as server:
        async with session_of() as session:
            client = AsyncGPUStatsHTTPClient(server.url, session, timeout_seconds=30)
            task = asyncio.create_task(client.fetch())
            await asyncio.to_thread(eventually, lambda: server.requests)
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            assert session.connector is not None
            assert not session.connector._acquired
            server.behaviour = good
            assert (await client.fetch()).stats.gpu_count == 1
            assert server.connections == 2, "the half-read connection must not be used again"


async def test_cancelled_while_connecting() -> None:
    with black_hole_url() as url:
        async with session_of() as session:
            task = asyncio.create_task(AsyncGPUStatsHTTPClient(url, session, timeout_seconds=30).fetch())
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()


async def test_a_deadline_around_a_fetch_stays_its_owners() -> None:
    with HostileServer(silent) as server:
        async with session_of() as session:
            client = AsyncGPUStatsHTTPClient(server.url, session, timeout_seconds=30)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(SHORT_SECONDS):
                    await client.fetch()


async def test_a_slow_endpoint_does_not_delay_another() -> None:
    with HostileServer(silent) as slow, HostileServer(good) as quick:
        async with session_of() as session:
            waiting = [
                asyncio.create_task(AsyncGPUStatsHTTPClient(slow.url, session, timeout_seconds=30).fetch())
                for _ in range(150)
            ]
            await asyncio.to_thread(eventually, lambda: slow.requests)
            client = AsyncGPUStatsHTTPClient(quick.url, session, timeout_seconds=10)
            assert (await client.fetch()).stats.gpu_count == 1
            assert slow.connections <= 8
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)


# --- the names ---


@pytest.mark.parametrize(
    "name",
    [
        "ServiceUnavailableError",
        "RetryableError",
        "NetworkRetryableError",
        "ServiceRetryableError",
        "ServiceRefusedError",
    ],
)
def test_errors_are_found_where_the_documents_say(name: str) -> None:
    assert getattr(http_client, name) is getattr(errors, name)
    assert name in http_client.__all__


@pytest.mark.parametrize("url", ["file:///etc", "local://", "ftp://host", "//host", "http://user:secret@host"])
async def test_only_http_and_https_and_no_password(url: str) -> None:
    async with session_of() as session:
        with pytest.raises(ValueError, match="url must begin with http:// or https://") as caught:
            AsyncGPUStatsHTTPClient(url, session, timeout_seconds=1)
    assert "secret" not in str(caught.value)


async def test_the_pool_has_one_client_an_endpoint_and_owns_the_session() -> None:
    with HostileServer(good) as a, HostileServer(good) as b:
        pool = MultiEndpointHTTPClientPool(timeout_seconds=10)
        try:
            first = pool.client_for(EndpointConfig("a", a.url))
            second = pool.client_for(EndpointConfig("b", b.url))
            assert (first.url, second.url) == (a.url, b.url)
            fetched = await asyncio.gather(first.fetch(), second.fetch())
            assert [one.stats.gpu_count for one in fetched] == [1, 1]
            assert repr(first) == f"<AsyncGPUStatsHTTPClient {a.url}>"
        finally:
            await pool.close()
        assert pool.session.closed
        await pool.close()
        eventually(lambda: a.open_connections() + b.open_connections() == 0)
