"""Who can change leases on a real server: attacks by web pages, through proxies and from other hosts."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server_process import Reply, ServerProcess

KEY, ADMIN_KEY = "a-key-for-those-elsewhere", "an-administrators-own-key"
SETTINGS = {"GPU_BACKEND": "simulated:4", "REFRESH_INTERVAL": "0.2"}
TOKEN = {"X-Lease-Token": "a-token-of-my-own-making"}
THROUGH_A_PROXY = {"X-Forwarded-For": "127.0.0.1"}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """As it is without any configuration."""
    with ServerProcess(tmp_path_factory.mktemp("open"), **SETTINGS) as server:
        yield server
        assert "Traceback" not in server.log


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    settings = SETTINGS | {"GPU_POOL_API_KEYS": KEY, "GPU_POOL_ADMIN_KEYS": ADMIN_KEY, "HOST": "0.0.0.0"}
    with ServerProcess(tmp_path_factory.mktemp("keys"), **settings) as started:
        yield started
        assert "Traceback" not in started.log
        assert KEY not in started.log
        assert ADMIN_KEY not in started.log


def send(
    server: ServerProcess,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
    address: str = "127.0.0.1",
) -> Reply:
    """With these headers and no others."""
    with contextlib.closing(http.client.HTTPConnection(address, server.port, timeout=10)) as connection:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in ({"Host": f"localhost:{server.port}"} | (headers or {})).items():
            connection.putheader(name, value)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        reply = connection.getresponse()
        return Reply(reply.status, reply.headers, reply.read())


JSON = {"Content-Type": "application/json"}


def changes(lease_id: str = "lease-1") -> list[tuple[str, str, bytes | None, dict[str, str]]]:
    """Everything that would change something."""
    return [
        ("POST", "/leases", b"{}", JSON),
        ("POST", f"/leases/{lease_id}/renew", None, TOKEN),
        ("DELETE", f"/leases/{lease_id}", None, TOKEN),
        ("DELETE", "/queue/nobody", None, {}),
    ]


def all_refused(server: ServerProcess, expected: tuple[int, str], headers: dict[str, str], **where: Any) -> None:
    before = leases(server)
    for method, path, body, own in changes():
        reply = send(server, method, path, body, {**own, **headers}, **where)
        assert (reply.status, reply.json["error"]) == expected, (method, path, reply.body)
        assert reply.json["detail"]
        assert "access-control-allow-origin" not in reply.headers
    assert leases(server) == before


def leases(server: ServerProcess) -> list[str]:
    return [row["lease_id"] for row in server.get("/leases").json["leases"]]


def own_address() -> str:
    """One by which this machine reaches itself, and which is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        address = str(probe.getsockname()[0])
    if address.startswith("127."):
        pytest.skip("this machine has no address but loopback")
    return address


# --- from where ---


def test_this_host_needs_nothing(open_server: ServerProcess) -> None:
    reply = send(open_server, "POST", "/leases", b"{}", JSON)
    assert reply.status == 201
    token = {"X-Lease-Token": reply.json["token"]}
    assert send(open_server, "DELETE", f"/leases/{reply.json['lease_id']}", headers=token).status == 200
    assert open_server.get("/").json["features"][-1] == "leases"


def test_from_another_address_a_key_is_needed(server: ServerProcess) -> None:
    address = own_address()
    host = {"Host": f"{address}:{server.port}"}
    all_refused(server, (401, "key_needed"), host, address=address)
    all_refused(server, (401, "key_wrong"), host | bearer("x" * 20), address=address)
    reply = send(server, "POST", "/leases", b"{}", JSON | host | bearer(KEY), address=address)
    assert reply.status == 201
    end = {"X-Lease-Token": reply.json["token"]} | host | bearer(KEY)
    assert send(server, "DELETE", f"/leases/{reply.json['lease_id']}", headers=end, address=address).status == 200
    assert send(server, "GET", "/leases", headers=host, address=address).status == 200, "reading is open"


def test_a_proxy_on_this_host_brings_callers_from_elsewhere(server: ServerProcess, open_server: ServerProcess) -> None:
    """uvicorn believes a proxy on this host, and takes the caller's address from what it says."""
    for forwarded in ("127.0.0.1", "::1", "192.0.2.7", "192.0.2.7, 127.0.0.1", ""):
        headers = {"X-Forwarded-For": forwarded}
        all_refused(server, (401, "key_needed"), headers)
        all_refused(open_server, (403, "leases_closed"), headers)
        assert send(server, "POST", "/leases", b"{}", JSON | headers | bearer("x" * 20)).status == 401
    for header in ("Forwarded", "Via", "X-Real-IP", "X-Forwarded-Proto"):
        all_refused(open_server, (403, "leases_closed"), {header: "x"})
    reply = send(open_server, "POST", "/leases", b"{}", JSON | THROUGH_A_PROXY)
    assert "GPU_POOL_API_KEYS" in reply.json["detail"]


def test_leases_are_among_the_features_for_those_who_can_have_them(
    server: ServerProcess, open_server: ServerProcess
) -> None:
    def features(at: ServerProcess, **headers: str) -> list[str]:
        found: list[str] = at.get("/", **headers).json["features"]
        return found

    assert "leases" in features(open_server)
    assert "leases" not in features(open_server, **THROUGH_A_PROXY)
    for headers in ({"Host": "gpu1:8000"}, {"Origin": "http://evil.example"}):
        assert send(open_server, "POST", "/leases", b"{}", JSON | headers).status in (403, 421)
        offered = json.loads(send(open_server, "GET", "/", headers=headers).body)["features"]
        assert "leases" not in offered, "it would be refused"
    assert "leases" in features(server, Host="gpu1:8000"), "it may have a key"
    assert "leases" not in features(server, **bearer("x" * 20))
    assert "leases" in features(server, **THROUGH_A_PROXY)
    assert open_server.get("/config").json["leases"]["open_to"] == ["loopback"]
    assert server.get("/config").json["leases"]["open_to"] == ["loopback", "keys"]


def test_http_1_0_is_what_a_proxy_speaks(open_server: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", open_server.port), timeout=10) as connection:
        connection.sendall(
            b"POST /leases HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
        )
        assert connection.recv(65536).startswith(b"HTTP/1.1 403")


# --- keys ---


def test_a_key_that_is_sent_must_be_right_also_on_this_host(server: ServerProcess, open_server: ServerProcess) -> None:
    all_refused(server, (401, "key_wrong"), bearer("not-one-of-them-at-all"))
    all_refused(server, (401, "key_wrong"), {"Authorization": f"Basic {KEY}"})
    all_refused(open_server, (401, "key_wrong"), bearer("not-one-of-them-at-all"))
    reply = send(server, "POST", "/leases", b"{}", JSON | bearer("x" * 16))
    assert reply.headers["www-authenticate"] == "Bearer"


def test_the_key_of_one_is_not_the_token_of_another(server: ServerProcess) -> None:
    """Callers that bring no token get one that is theirs alone, though they use the same request id."""
    body = json.dumps({"request_id": "the-same-id"}).encode()
    mine = send(server, "POST", "/leases", body, JSON | bearer(KEY))
    assert mine.status == 201
    for other in ({}, bearer(ADMIN_KEY)):
        reply = send(server, "POST", "/leases", body, JSON | other)
        assert (reply.status, reply.json["error"]) == (409, "request_mismatch")
        assert mine.json["token"] not in reply.body.decode()
    lease = f"/leases/{mine.json['lease_id']}"
    assert send(server, "DELETE", lease, headers=bearer(KEY)).json["error"] == "token_needed"
    assert send(server, "DELETE", lease, headers=bearer(ADMIN_KEY)).status == 200


def test_many_wrong_keys_are_too_many_and_a_right_one_passes_all_the_same(tmp_path: Path) -> None:
    keys = {"GPU_POOL_API_KEYS": KEY, "GPU_POOL_ADMIN_KEYS": ADMIN_KEY}
    with ServerProcess(tmp_path, **SETTINGS, **keys) as server:
        wrong = [bearer(f"{KEY}-{number}") for number in range(100)]
        replies = [send(server, "POST", "/leases", b"{}", JSON | each) for each in wrong]
        assert [reply.status for reply in replies[:20]] == [401] * 20
        statuses = [reply.status for reply in replies]
        assert statuses.count(429) > 60
        last = replies[-1] if statuses[-1] == 429 else replies[-2]
        assert last.json["error"] == "too_many_wrong_keys"
        assert "too many wrong keys came from your address" in last.json["detail"]
        assert int(last.headers["Retry-After"]) >= 1
        assert last.headers["Connection"] == "close"
        assert send(server, "GET", "/", headers=bearer("a-wrong-key-at-the-entrance")).status in (200, 429)
        assert 429 in [send(server, "GET", "/", headers=each).status for each in wrong[:5]], "nor elsewhere"
        for key in (KEY, ADMIN_KEY):
            reply = send(server, "POST", "/leases", b"{}", JSON | bearer(key))
            assert reply.status == 201
            lease_id, token = reply.json["lease_id"], {"X-Lease-Token": reply.json["token"]}
            assert send(server, "DELETE", f"/leases/{lease_id}", headers=bearer(key) | token).status == 200
        assert send(server, "POST", "/leases", b"{}", JSON).status == 201, "nor those that need none"
        assert not [line for line in server.log.splitlines() if KEY in line]


def test_an_administrators_key_works_from_elsewhere_and_a_common_one_is_none(server: ServerProcess) -> None:
    reply = send(server, "POST", "/leases", b"{}", JSON)
    lease = f"/leases/{reply.json['lease_id']}"
    assert send(server, "DELETE", lease, headers=THROUGH_A_PROXY | bearer(KEY)).status == 403
    assert send(server, "DELETE", lease, headers=THROUGH_A_PROXY | bearer(ADMIN_KEY)).status == 200


# --- web pages that somebody on this host looks at ---


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:3000", "https://localhost"])
def test_a_page_of_another_origin(open_server: ServerProcess, origin: str) -> None:
    all_refused(open_server, (403, "cross_origin"), {"Origin": origin})
    all_refused(open_server, (403, "cross_origin"), {"Origin": origin, "Sec-Fetch-Site": "same-site"})


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_what_the_browser_says_of_a_page(open_server: ServerProcess, site: str) -> None:
    all_refused(open_server, (403, "cross_origin"), {"Sec-Fetch-Site": site})


def test_dns_rebinding(open_server: ServerProcess) -> None:
    """A page whose name suddenly means 127.0.0.1: to the browser it is the same origin."""
    for host in (f"evil.example:{open_server.port}", "evil.example", "localhost.evil.example", ""):
        rebound = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
        all_refused(open_server, (421, "wrong_host"), rebound)
        all_refused(open_server, (421, "wrong_host"), {"Host": host})


def test_a_form_post(open_server: ServerProcess) -> None:
    """What a page may send to strangers without asking; from a browser that does not say where the page is from."""
    before = leases(open_server)
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        reply = send(open_server, "POST", "/leases", b'{"count": 1}', {"Content-Type": content_type})
        assert (reply.status, reply.json["error"]) == (415, "not_json")
        reply = send(open_server, "POST", "/leases/lease-1/renew", b"x", {"Content-Type": content_type, **TOKEN})
        assert reply.status == 415
    assert send(open_server, "POST", "/leases", b'{"count": 1}').status == 415
    assert leases(open_server) == before


def test_no_page_is_told_that_it_may(open_server: ServerProcess) -> None:
    """What is no form, a browser asks for first."""
    for method, path in (("POST", "/leases"), ("DELETE", "/leases/lease-1"), ("DELETE", "/queue/x")):
        headers = {
            "Origin": "http://evil.example",
            "Access-Control-Request-Method": method,
            "Access-Control-Request-Headers": "content-type,x-lease-token,authorization",
        }
        reply = send(open_server, "OPTIONS", path, headers=headers)
        assert reply.status == 400
        assert method not in reply.headers.get("access-control-allow-methods", "")


def test_our_own_pages_may(open_server: ServerProcess) -> None:
    """Swagger UI, where requests can be tried."""
    own = {"Origin": f"http://localhost:{open_server.port}", "Sec-Fetch-Site": "same-origin"}
    reply = send(open_server, "POST", "/leases", b"{}", JSON | own)
    assert reply.status == 201
    token = {"X-Lease-Token": reply.json["token"]}
    assert send(open_server, "DELETE", f"/leases/{reply.json['lease_id']}", headers=own | token).status == 200


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/dashboard"])
def test_no_page_may_frame_ours(open_server: ServerProcess, path: str) -> None:
    """Three clicks in a page of someone else would take a place in the queue."""
    headers = send(open_server, "GET", path).headers
    assert "frame-ancestors 'none'" in headers["content-security-policy"].split("; ")
    assert headers["x-frame-options"] == "DENY"


def test_with_a_key_any_name_will_do(server: ServerProcess) -> None:
    for host in (f"gpu1.example.org:{server.port}", "10.0.0.5"):
        headers = JSON | bearer(KEY) | {"Host": host}
        reply = send(server, "POST", "/leases", b"{}", headers)
        assert reply.status == 201
        assert send(server, "DELETE", f"/leases/{reply.json['lease_id']}", headers=bearer(ADMIN_KEY)).status == 200


def test_headers_that_come_twice(open_server: ServerProcess) -> None:
    for name, values in (("Host", ("localhost", "evil.example")), ("X-Lease-Token", ("a" * 16, "b" * 16))):
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", open_server.port, timeout=10)) as connection:
            connection.putrequest("DELETE", "/leases/lease-1", skip_host=True)
            if name != "Host":
                connection.putheader("Host", "localhost")
            for value in values:
                connection.putheader(name, value)
            connection.endheaders()
            assert connection.getresponse().status == 400


# --- as configured ---


def test_loopback_can_be_closed_and_names_added(tmp_path: Path) -> None:
    closed = SETTINGS | {"GPU_POOL_OPEN_ON_LOOPBACK": "no", "GPU_POOL_API_KEYS": KEY}
    with ServerProcess(tmp_path / "closed", **closed) as server:
        all_refused(server, (401, "key_needed"), {})
        assert send(server, "POST", "/leases", b"{}", JSON | bearer(KEY)).status == 201
    with ServerProcess(tmp_path / "named", **SETTINGS, GPU_POOL_HOSTS="gpu.example.org") as server:
        assert send(server, "POST", "/leases", b"{}", JSON | {"Host": "gpu.example.org:80"}).status == 201


def test_a_key_that_is_too_short_is_none(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, **SETTINGS, GPU_POOL_API_KEYS="hunter2") as server:
        all_refused(server, (403, "leases_closed"), THROUGH_A_PROXY | bearer("hunter2"))
        assert "GPU_POOL_API_KEYS: 1 of 1 keys cannot be used" in server.log
        assert "hunter2" not in server.log
