"""Who may change leases: programs on this host and callers with a key, but no web page."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from gpu_worker_pool.gpu_server import ServerSettings
from gpu_worker_pool.gpu_server.responses import Refusal
from gpu_worker_pool.gpu_server.security import Authenticator, Caller, check_content_type, read_headers
from gpu_worker_pool.gpu_server.unix_socket import PEER, Peer

KEY, ADMIN_KEY = "a-key-of-somebody-0123", "an-administrators-key-4567"
HERE, ELSEWHERE = "127.0.0.1", "192.0.2.7"
BOTH = ServerSettings(gpu_pool_api_keys=(KEY,), gpu_pool_admin_keys=(ADMIN_KEY,))


def scope_of(client: str | None = HERE, version: str = "1.1", **headers: str | list[str]) -> dict[str, Any]:
    sent = {"host": "localhost:8000"} | {name.replace("_", "-").lower(): value for name, value in headers.items()}
    pairs = [
        (name.encode(), value.encode("latin-1"))
        for name, values in sent.items()
        for value in ([values] if isinstance(values, str) else values)
    ]
    return {
        "type": "http",
        "http_version": version,
        "client": None if client is None else (client, 40000),
        "headers": pairs,
    }


def ask(settings: ServerSettings = BOTH, **request: Any) -> Caller:
    scope = scope_of(**request)
    return Authenticator(settings, hostnames=["gpu1.lab.example", "gpu1"]).identify(scope, read_headers(scope))


def refusal(settings: ServerSettings = BOTH, **request: Any) -> tuple[int, str]:
    return answer_of(refused(settings, **request))


def answer_of(refusal: Refusal) -> tuple[int, str]:
    body = json.loads(refusal.reply.body)
    assert body["detail"] == str(refusal) != ""
    return refusal.reply.status, body["error"]


def refused(settings: ServerSettings = BOTH, **request: Any) -> Refusal:
    with pytest.raises(Refusal) as raised:
        ask(settings, **request)
    return raised.value


def bearer(key: str) -> str:
    return f"Bearer {key}"


# --- where from ---


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "127.255.255.254", "::1", "::ffff:127.0.0.1"])
@pytest.mark.parametrize("settings", [BOTH, ServerSettings()])
def test_this_host_needs_no_key(address: str, settings: ServerSettings) -> None:
    assert ask(settings, client=address) == Caller("loopback", is_admin=False)


@pytest.mark.parametrize(
    "address",
    ["192.0.2.7", "10.0.0.1", "128.0.0.1", "0.0.0.0", "::", "::2", "::ffff:10.0.0.1", "fe80::1%eth0", "testclient", ""],
)
def test_from_elsewhere_a_key_is_needed(address: str) -> None:
    assert refusal(client=address) == (401, "key_needed")
    assert refusal(ServerSettings(), client=address) == (403, "leases_closed")


def test_nobody_knows_who_is_behind_a_unix_socket() -> None:
    assert refusal(client=None) == (401, "key_needed")


@pytest.mark.parametrize(
    "header",
    [
        "forwarded",
        "via",
        "x-forwarded",
        "x-forwarded-for",
        "x-forwarded-proto",
        "x-forwarded-host",
        "x-real-ip",
        "x-original-host",
        "x-envoy-external-address",
        "cf-connecting-ip",
        "true-client-ip",
        "proxy-connection",
    ],
)
def test_who_comes_through_a_proxy_is_from_elsewhere_whatever_it_says(header: str) -> None:
    for value in ("127.0.0.1", "", "192.0.2.7, 127.0.0.1"):
        assert refusal(**{header: value}) == (401, "key_needed")
        assert refusal(ServerSettings(), **{header: value}) == (403, "leases_closed")
        assert isinstance(ask(authorization=bearer(KEY), **{header: value}), Caller)


def test_http_1_0_is_spoken_by_proxies() -> None:
    """nginx does by default, and adds no header."""
    assert refusal(version="1.0") == (401, "key_needed")


def test_what_is_closed_says_how_to_open_it() -> None:
    assert "GPU_POOL_API_KEYS" in refused(ServerSettings(), client=ELSEWHERE).args[0]


def test_loopback_can_be_closed_too() -> None:
    closed = ServerSettings(gpu_pool_open_on_loopback=False, gpu_pool_api_keys=(KEY,))
    assert refusal(closed) == (401, "key_needed")
    assert isinstance(ask(closed, authorization=bearer(KEY)), Caller)
    assert refusal(ServerSettings(gpu_pool_open_on_loopback=False)) == (403, "leases_closed")


# --- keys ---


@pytest.mark.parametrize("client", [HERE, ELSEWHERE])
@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER   "])
def test_a_key_opens(client: str, scheme: str) -> None:
    caller = ask(client=client, authorization=scheme + KEY)
    assert isinstance(caller, Caller)
    assert not caller.is_admin
    assert caller.account.startswith("key-")
    assert KEY not in repr(caller)


def test_an_administrators_key_counts_as_both() -> None:
    caller = ask(client=ELSEWHERE, authorization=bearer(ADMIN_KEY))
    assert isinstance(caller, Caller)
    assert caller.is_admin
    only_admins = ServerSettings(gpu_pool_admin_keys=(ADMIN_KEY,))
    assert isinstance(ask(only_admins, client=ELSEWHERE, authorization=bearer(ADMIN_KEY)), Caller)
    in_both_lists = ServerSettings(gpu_pool_api_keys=(ADMIN_KEY,), gpu_pool_admin_keys=(ADMIN_KEY,))
    caller = ask(in_both_lists, client=ELSEWHERE, authorization=bearer(ADMIN_KEY))
    assert isinstance(caller, Caller)
    assert caller.is_admin


def test_each_key_has_an_account_of_its_own() -> None:
    keys = [f"key-number-{number}-of-many" for number in range(20)]
    settings = ServerSettings(gpu_pool_api_keys=tuple(keys))
    accounts = [ask(settings, client=ELSEWHERE, authorization=bearer(key)) for key in keys]
    assert len({caller.account for caller in accounts if isinstance(caller, Caller)}) == 20
    assert accounts == [ask(settings, client=ELSEWHERE, authorization=bearer(key)) for key in keys]


@pytest.mark.parametrize(
    "authorization",
    [
        bearer("not-one-of-the-keys-here"),
        bearer(KEY[:-1]),
        bearer(KEY + "x"),
        bearer(KEY.upper()),
        bearer(f"{KEY} {ADMIN_KEY}"),
        f"Basic {KEY}",
        f"Bearer{KEY}",
        KEY,
        "Bearer",
        "",
        "Bearer \xff\xfe\xfd",
    ],
)
def test_a_wrong_key_is_refused_also_on_this_host(authorization: str) -> None:
    for client in (HERE, ELSEWHERE):
        answer = refused(client=client, authorization=authorization)
        assert answer_of(answer) == (401, "key_wrong")
        assert dict(answer.reply.headers) == {b"www-authenticate": b"Bearer", b"cache-control": b"no-store"}
        assert KEY not in repr(vars(answer))
    assert refusal(ServerSettings(), authorization=authorization) == (401, "key_wrong")
    assert refusal(ServerSettings(), client=ELSEWHERE, authorization=authorization) == (403, "leases_closed")


def test_two_keys_are_none() -> None:
    assert refusal(client=ELSEWHERE, authorization=[bearer("wrong-key-wrong-key"), bearer(KEY)]) == (400, "invalid")


def test_keys_are_not_shown() -> None:
    for text in (repr(BOTH), str(BOTH), repr(Authenticator(BOTH))):
        assert KEY not in text
        assert ADMIN_KEY not in text


# --- web pages ---


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:8000",
        "LocalHost.:8000",
        "gpu.localhost:8000",
        "127.0.0.1:8000",
        "127.1.2.3",
        "[::1]:8000",
        "[::1]",
        "[::ffff:127.0.0.1]:8000",
        "0.0.0.0:8000",
        "gpu1",
        "GPU1.lab.example:8000",
    ],
)
def test_names_of_this_machine(host: str) -> None:
    assert isinstance(ask(host=host), Caller)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "notlocalhost",
        "127.0.0.1.evil.example",
        "gpu1.evil.example",
        "192.0.2.7:8000",
        "[2001:db8::1]",
        "[::1",
        "::1",
        "2130706433",
        "0x7f.1",
        "localhost:8000:9",
        "localhost@evil.example",
        "localhost/",
        " localhost",
        "",
        "\xff",
        "x" * 5000,
    ],
)
def test_a_page_that_was_given_our_address_has_another_name(host: str) -> None:
    """DNS rebinding: the browser connects to this host and says the attacker's name."""
    assert refusal(host=host) == (421, "wrong_host")
    assert refusal(host=host, origin=f"http://{host}") == (421, "wrong_host")
    assert isinstance(ask(host=host, authorization=bearer(KEY)), Caller), "a page has no key"


def test_without_a_host_nobody_is_meant() -> None:
    scope = scope_of()
    scope["headers"] = []
    with pytest.raises(Refusal) as raised:
        Authenticator(BOTH).identify(scope, read_headers(scope))
    assert answer_of(raised.value) == (421, "wrong_host")


def test_two_hosts_are_none() -> None:
    assert refusal(host=["localhost", "evil.example"]) == (400, "invalid")


def test_further_names_can_be_configured() -> None:
    settings = ServerSettings.from_environment({"GPU_POOL_HOSTS": "gpu.example.org, Pool [2001:db8::1],192.0.2.9"})
    for host in ("gpu.example.org:8000", "POOL", "[2001:db8::1]:8000", "192.0.2.9"):
        assert isinstance(ask(settings, host=host), Caller), host
    assert refusal(settings, host="example.org") == (421, "wrong_host")


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "https://evil.example:8000",
        "null",
        "",
        "http://localhost",
        "http://localhost:3000",
        "http://localhost:8000.evil.example",
        "http://127.0.0.1:8000",
        "file://localhost:8000",
        "localhost:8000",
        "http://localhost:8000, http://evil.example",
    ],
)
def test_a_page_of_another_origin_may_not(origin: str) -> None:
    assert refusal(origin=origin) == (403, "cross_origin")


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_browser_that_says_so_is_believed(site: str) -> None:
    assert refusal(sec_fetch_site=site) == (403, "cross_origin")
    assert refusal(sec_fetch_site=site, origin="http://localhost:8000") == (403, "cross_origin")


def test_our_own_pages_may() -> None:
    assert isinstance(ask(origin="http://localhost:8000", sec_fetch_site="same-origin"), Caller)
    assert isinstance(ask(origin="HTTPS://LOCALHOST:8000"), Caller)
    assert isinstance(ask(sec_fetch_site="none"), Caller)


@pytest.mark.parametrize(
    "given", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "json"]
)
def test_forms_are_no_json(given: str) -> None:
    for is_needed in (True, False):
        with pytest.raises(Refusal) as raised:
            check_content_type(read_headers(scope_of(content_type=given)), is_needed=is_needed)
        assert answer_of(raised.value) == (415, "not_json")


def test_json_is_json_and_nothing_is_nothing() -> None:
    for given in ("application/json", "Application/JSON; charset=utf-8", "application/json ;x=y"):
        check_content_type(read_headers(scope_of(content_type=given)), is_needed=True)
    check_content_type(read_headers(scope_of()), is_needed=False)
    with pytest.raises(Refusal):
        check_content_type(read_headers(scope_of()), is_needed=True)
    two = read_headers(scope_of(content_type=["application/json", "text/plain"]))
    assert two.twice == "content-type"


# --- over the Unix socket ---

SOCKET = "/run/gpu-pool/gpu-pool.sock"
ON_SOCKET = replace(BOTH, gpu_pool_socket=SOCKET, gpu_pool_open_on_loopback=False)


def ask_on_socket(
    uid: int | None, settings: ServerSettings = ON_SOCKET, path: str = SOCKET, **request: Any
) -> Caller | tuple[int, str]:
    scope = scope_of(None, **request) | {PEER: Peer(path, uid, 4242, "boot/1/4242/1.0")}
    try:
        return Authenticator(settings, hostnames=["gpu1"]).identify(scope, read_headers(scope))
    except Refusal as refusal:
        return answer_of(refusal)


def caller(uid: int, *, is_admin: bool = False) -> Caller:
    return Caller(f"user:{uid}", is_admin, Peer(SOCKET, uid, 4242, "boot/1/4242/1.0"))


def test_the_kernel_says_who_a_caller_on_the_socket_is() -> None:
    assert ask_on_socket(1000) == caller(1000)
    assert ask_on_socket(0) == caller(0, is_admin=True)
    # No browser gets there.
    assert ask_on_socket(1000, host="evil.example", origin="https://evil.example") == caller(1000)
    assert ask_on_socket(1000, replace(ON_SOCKET, gpu_pool_api_keys=(), gpu_pool_admin_keys=())) == caller(1000)
    assert Authenticator(ON_SOCKET).open_to == ["keys", "socket"]


def test_a_key_on_the_socket_makes_no_other_user() -> None:
    assert ask_on_socket(1000, authorization=bearer(KEY)) == caller(1000)
    assert ask_on_socket(1000, authorization=bearer(ADMIN_KEY)) == caller(1000, is_admin=True)
    assert ask_on_socket(1000, authorization=bearer("wrong-key-0123456789")) == (401, "key_wrong")
    assert ask_on_socket(1000, host=["a", "b"]) == (400, "invalid")


def test_a_user_of_another_namespace_is_unknown() -> None:
    assert ask_on_socket(None) == (403, "unknown_user")


def test_on_another_socket_or_behind_a_proxy_a_key_is_needed() -> None:
    assert ask_on_socket(0, path="/run/other.sock") == (401, "key_needed")
    assert ask_on_socket(0, BOTH) == (401, "key_needed")
    assert ask_on_socket(0, x_forwarded_for="10.0.0.1") == (401, "key_needed")
    assert ask_on_socket(0, version="1.0") == (401, "key_needed")
    through = ask_on_socket(0, x_forwarded_for="10.0.0.1", authorization=bearer(KEY))
    assert isinstance(through, Caller)
    assert through.account.startswith("key-")
    assert not through.is_admin


# --- what is offered to whom (D18) ---


@pytest.mark.parametrize(
    ("settings", "here", "elsewhere", "open_to"),
    [
        (ServerSettings(), True, False, ["loopback"]),
        (BOTH, True, True, ["loopback", "keys"]),
        (ServerSettings(gpu_pool_open_on_loopback=False), False, False, []),
        (ServerSettings(gpu_pool_open_on_loopback=False, gpu_pool_api_keys=(KEY,)), True, True, ["keys"]),
    ],
)
def test_leases_are_offered_to_those_who_can_have_them(
    settings: ServerSettings, here: bool, elsewhere: bool, open_to: list[str]
) -> None:
    authenticator = Authenticator(settings)
    assert authenticator.offers_leases(scope_of(HERE)) == here
    assert authenticator.offers_leases(scope_of(ELSEWHERE)) == elsewhere
    assert authenticator.offers_leases(scope_of(HERE, x_forwarded_for="127.0.0.1")) == elsewhere
    assert authenticator.open_to == open_to


def test_leases_are_not_offered_to_callers_that_would_be_refused() -> None:
    without_keys, with_keys = Authenticator(ServerSettings(), ["gpu1"]), Authenticator(BOTH, ["gpu1"])
    assert without_keys.offers_leases(scope_of(host="gpu1:8000"))
    for refused_anyway in ({"host": "gpu2:8000"}, {"origin": "http://evil.example"}, {"sec_fetch_site": "cross-site"}):
        assert not without_keys.offers_leases(scope_of(**refused_anyway))
        # A client may have a key, which it sends only with its request for a lease.
        assert with_keys.offers_leases(scope_of(**refused_anyway))
        assert with_keys.offers_leases(scope_of(**refused_anyway, authorization=bearer(KEY)))
        assert not with_keys.offers_leases(scope_of(**refused_anyway, authorization=bearer("x" * 20)))
