"""The server's Unix socket: the kernel says who each caller is, and nothing that a caller sends changes that."""

from __future__ import annotations

import json
import os
import pwd
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server_process import ServerProcess
from tests.socket_users import NAMES, SocketServer, UserProcess, ask, gpu_pool, needs_root, open_folder, requests_in
from tests.waiting import eventually

from gpu_worker_pool.core import Origin

ME = pwd.getpwuid(os.getuid()).pw_name
NOW = {"wait_seconds": 0}


@pytest.fixture
def folder() -> Iterator[Path]:
    with open_folder() as made:
        yield made


@pytest.fixture
def server(folder: Path) -> Iterator[SocketServer]:
    with SocketServer(folder) as started:
        yield started


@pytest.fixture
def users() -> Iterator[tuple[UserProcess, UserProcess]]:
    needs_root()
    started = [UserProcess(name) for name in NAMES]
    try:
        yield started[0], started[1]
    finally:
        for user in started:
            user.kill()


@pytest.fixture
def mine() -> Iterator[UserProcess]:
    """A process of the user of the tests."""
    user = UserProcess(None)
    try:
        yield user
    finally:
        user.kill()


# --- who a caller is ---


async def test_the_kernel_says_who_holds_and_who_waits(server: SocketServer, mine: UserProcess) -> None:
    holder = mine.do(ask, server.socket, "POST", "/leases", {**NOW, "request_id": "held"})
    assert holder.status == 201
    assert mine.do(ask, server.socket, "POST", "/leases", {**NOW, "request_id": "waits"}).status == 202
    requests = await requests_in(server)
    for name in ("held", "waits"):
        request = requests[name]
        assert request.account == f"user:{os.getuid()}"
        assert request.origin == Origin(ME, socket.gethostname(), mine.pid, None, is_verified=True)
        assert f"/{mine.pid}/" in request.process
    (row,) = server.on_socket("GET", "/leases").body["leases"]
    assert row["user"] == ME


async def test_a_header_forges_nobody(server: SocketServer) -> None:
    """Over TCP nobody is a user; over the socket nobody is another one."""
    forged = {
        "gpu_pool.peer": "0",
        "gpu-pool-peer": "0",
        "X-Peer-Uid": "0",
        "X-Remote-User": "root",
        "Host": "gpu-pool.sock",
    }
    tcp = server.ask("POST", "/leases", {**NOW, "request_id": "tcp"}, headers={**forged, "Host": "localhost"})
    assert tcp.status == 201
    assert (await requests_in(server))["tcp"].account == "loopback"
    assert server.get("/leases").json["leases"][0]["user"] is None
    unix = server.on_socket("POST", "/leases", {"wait_seconds": 0, "request_id": "unix"}, forged)
    assert unix.status == 202
    request = (await requests_in(server))["unix"]
    assert (request.account, request.origin and request.origin.pid) == (f"user:{os.getuid()}", os.getpid())
    # The name that the client uses for the socket is no name of this host over TCP.
    assert server.ask("POST", "/leases", NOW, headers=forged).status == 421


def test_a_proxy_on_the_socket_speaks_for_others(server: SocketServer) -> None:
    refused = server.on_socket("POST", "/leases", NOW, {"X-Forwarded-For": "127.0.0.1"})
    assert (refused.status, refused.body["error"]) == (403, "leases_closed")
    assert "leases" in server.on_socket("GET", "/").body["features"]


def test_a_page_check_is_not_needed_but_json_is(server: SocketServer) -> None:
    assert server.on_socket("POST", "/leases", NOW, {"Host": "example.org", "Origin": "http://x"}).status == 201
    refused = server.on_socket("POST", "/leases", NOW, {"Content-Type": "text/plain"})
    assert (refused.status, refused.body["error"]) == (415, "not_json")
    assert server.on_socket("POST", "/leases", {"label": "x" * 70_000}).status == 413


def test_keys_on_the_socket(folder: Path) -> None:
    keys = {"GPU_POOL_API_KEYS": "an-ordinary-key-0123", "GPU_POOL_OPEN_ON_LOOPBACK": "false"}
    with SocketServer(folder, **keys) as server:
        assert server.ask("POST", "/leases", NOW).status == 401
        assert server.on_socket("POST", "/leases", NOW).status == 201
        assert server.on_socket("POST", "/leases", NOW, {"Authorization": "Bearer wrong-key-01234567"}).status == 401
        assert server.get("/config").json["leases"]["open_to"] == ["keys", "socket"]
        (row,) = server.get("/leases").json["leases"]
        assert row["user"] == ME


def test_headers_without_an_end_are_refused(server: SocketServer) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(server.socket)
        connection.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000)
        assert b" 400 " in connection.recv(1000)
        assert connection.recv(1000) == b""


# --- what a caller may end ---


def test_one_user_ends_what_is_hers_and_nothing_of_another(
    server: SocketServer, users: tuple[UserProcess, UserProcess]
) -> None:
    (alice, bob), (first, second) = users, NAMES
    held = alice.do(ask, server.socket, "POST", "/leases", {**NOW, "request_id": "a", "worker_id": "train"}).body
    waits = bob.do(ask, server.socket, "POST", "/leases", {**NOW, "request_id": "b"})
    assert (waits.status, waits.body["position"]) == (202, 1)
    lease = f"/leases/{held['lease_id']}"
    wrong = {"X-Lease-Token": "a-token-that-is-not-the-right-one"}
    for method, url, headers in (
        ("DELETE", lease, {}),
        ("DELETE", lease, wrong),
        ("POST", f"{lease}/renew", {}),
        ("POST", f"{lease}/renew", wrong),
        ("DELETE", "/queue/a", {}),
        ("DELETE", "/queue/a", wrong),
    ):
        refused = bob.do(ask, server.socket, method, url, None, headers)
        assert (refused.status, refused.body["error"]) == (403, "not_yours"), (method, url, headers)
        assert f"is {first}'s" in refused.body["detail"]
        assert f"ask them ({first} (pid" in refused.body["detail"]
    refused = alice.do(ask, server.socket, "DELETE", "/queue/b")
    assert (refused.status, f"is {second}'s" in refused.body["detail"]) == (403, True)
    # The other's id is taken, and not to be had by repeating it.
    assert bob.do(ask, server.socket, "POST", "/leases", {**NOW, "request_id": "a", "worker_id": "train"}).status == 409
    # What is one's own needs no token.
    assert alice.do(ask, server.socket, "POST", f"{lease}/renew").status == 200
    assert alice.do(ask, server.socket, "DELETE", lease).status == 200
    assert alice.do(ask, server.socket, "DELETE", lease).status == 200  # twice is harmless
    assert bob.do(ask, server.socket, "DELETE", lease).status == 403  # also of what has ended
    granted = eventually(
        lambda: (
            (found := bob.do(ask, server.socket, "POST", "/leases", {"request_id": "b", "wait_seconds": 5})).status
            == 201
            and found.body
        )
    )
    # A token works for anyone who has it, as over TCP.
    token = {"X-Lease-Token": granted["token"]}
    assert alice.do(ask, server.socket, "POST", f"/leases/{granted['lease_id']}/renew", None, token).status == 200
    assert bob.do(ask, server.socket, "DELETE", "/queue/nothing").status == 404
    assert bob.do(ask, server.socket, "DELETE", "/leases/lease-99").status == 404


def test_root_ends_anything(server: SocketServer, users: tuple[UserProcess, UserProcess]) -> None:
    alice, bob = users
    held = alice.do(ask, server.socket, "POST", "/leases", NOW).body
    assert bob.do(ask, server.socket, "POST", "/leases", {**NOW, "request_id": "b"}).status == 202
    assert server.on_socket("POST", f"/leases/{held['lease_id']}/renew").status == 403  # ends, but does not hold
    assert server.on_socket("DELETE", "/queue/b").status == 200
    assert server.on_socket("DELETE", f"/leases/{held['lease_id']}").status == 200
    assert server.on_socket("GET", "/leases").body["leases"] == []


def test_waiting_requests_are_counted_by_user(folder: Path, users: tuple[UserProcess, UserProcess]) -> None:
    alice, bob = users
    with SocketServer(folder, GPU_POOL_MOST_WAITING="1") as server:
        assert server.on_socket("POST", "/leases", NOW).status == 201
        assert alice.do(ask, server.socket, "POST", "/leases", NOW).status == 202
        assert alice.do(ask, server.socket, "POST", "/leases", NOW).status == 429
        assert bob.do(ask, server.socket, "POST", "/leases", NOW).status == 202


def test_two_users_share_one_queue_on_the_command_line(
    server: SocketServer, users: tuple[UserProcess, UserProcess]
) -> None:
    (alice, bob), (first, _) = users, NAMES
    held = alice.do(ask, server.socket, "POST", "/leases", {**NOW, "worker_id": "train"}).body
    assert bob.do(ask, server.socket, "POST", "/leases", {**NOW, "request_id": "b"}).status == 202
    status, out, err = bob.do(gpu_pool, server.socket, "status")
    assert (status, err, "1 waiting" in out) == (0, "", True), out
    status, out, _ = bob.do(gpu_pool, server.socket, "status", "--json")
    (endpoint,) = json.loads(out)["endpoints"]
    assert (status, endpoint["gpus"][0]["leases"][0]["user"]) == (0, first)
    status, out, _ = bob.do(gpu_pool, server.socket, "leases", "--json")
    assert (status, json.loads(out)["leases"][0]["user"]) == (0, first)
    status, _, err = bob.do(gpu_pool, server.socket, "release", held["lease_id"])
    assert (status, f"is {first}'s" in err) == (1, True), err
    status, _, err = alice.do(gpu_pool, server.socket, "release", "b")
    assert (status, "ask them" in err) == (1, True), err
    status, out, _ = alice.do(gpu_pool, server.socket, "release", held["lease_id"])
    assert (status, out) == (0, f"lease {held['lease_id']} is released\n")
    status, out, _ = bob.do(gpu_pool, server.socket, "release", "b")
    assert (status, out) == (0, "request b is taken out of the queue\n")


def test_doctor_says_with_whom_the_server_is_shared(
    server: SocketServer, users: tuple[UserProcess, UserProcess]
) -> None:
    (alice, bob), (first, second) = users, NAMES

    def shared(user: UserProcess) -> dict[str, str]:
        _, out, err = user.do(gpu_pool, server.socket, "doctor", "--json")
        assert out, err
        (found,) = (each for each in json.loads(out)["checks"] if each["check"] == "shared with others")
        return found

    assert alice.do(ask, server.socket, "POST", "/leases", NOW).status == 201
    text = f"every user of this host, by the ledger of its server, which runs as {ME}; users seen beside you: "
    assert (shared(alice)["status"], shared(alice)["what"]) == ("ok", f"{text}none")
    assert bob.do(ask, server.socket, "POST", "/leases", NOW).status == 202
    assert shared(alice)["what"] == f"{text}{second}"
    assert shared(bob)["what"] == f"{text}{first}"


def test_doctor_says_that_a_server_that_is_away_shares_nothing(folder: Path, mine: UserProcess) -> None:
    with SocketServer(folder) as server:
        server.kill()
        _, out, _ = mine.do(gpu_pool, server.socket, "doctor", "--json")
    (found,) = (each for each in json.loads(out)["checks"] if each["check"] == "shared with others")
    assert (found["status"], found["what"]) == ("wrong", "with no one while the server of this host does not answer")


# --- a dead process holds nothing ---


def test_a_killed_holder_and_a_killed_waiter_are_gone_at_once(server: SocketServer, mine: UserProcess) -> None:
    waiter = UserProcess(None)
    assert mine.do(ask, server.socket, "POST", "/leases", {**NOW, "ttl_seconds": 3600}).status == 201
    assert waiter.do(ask, server.socket, "POST", "/leases", {**NOW, "request_id": "w"}).status == 202
    waiter.kill()
    eventually(lambda: server.on_socket("GET", "/queue").body["queue"] == [])
    mine.kill()
    eventually(lambda: server.on_socket("POST", "/leases", {"request_id": "next", "wait_seconds": 1}).status == 201)


# --- the file ---


def test_the_file_is_there_while_the_server_is(folder: Path) -> None:
    with SocketServer(folder) as server:
        found = os.lstat(server.socket)
        assert stat.S_ISSOCK(found.st_mode)
        assert stat.S_IMODE(found.st_mode) == 0o666
        assert stat.S_IMODE(Path(server.socket).parent.stat().st_mode) == 0o755
        assert server.terminate()[0] == -signal.SIGTERM
        assert not Path(server.socket).exists()
        # One that was killed leaves its file, which is replaced.
        server.start()
        server.kill()
        assert Path(server.socket).exists()
        server.start()
        assert server.on_socket("GET", "/health").status == 200


def refusal_to_start(folder: Path, **env: str) -> str:
    with SocketServer(folder, wait=False, **env) as second:
        assert second.process is not None
        assert second.process.wait(30) == 1
        return second.log


def test_a_socket_on_which_a_server_listens_is_not_replaced(server: SocketServer) -> None:
    log = refusal_to_start(server.folder)
    assert f"another server listens on {server.socket}" in log
    assert "Traceback" not in log
    assert server.on_socket("GET", "/health").status == 200


def test_what_is_not_our_socket_is_not_replaced(folder: Path) -> None:
    run = folder / "run"
    run.mkdir(0o755)
    path, target = run / "gpu-pool.sock", folder / "target"
    target.write_text("precious")
    path.symlink_to(target)
    assert "is not a socket" in refusal_to_start(folder)
    path.unlink()
    path.write_text("precious")
    assert "is not a socket" in refusal_to_start(folder)
    assert (path.read_text(), target.read_text()) == ("precious", "precious")
    path.unlink()
    run.chmod(0o777)
    assert f"other users can write to the folder {run}, and could replace the socket: chmod go-w {run}, or" in (
        refusal_to_start(folder)
    )
    run.chmod(0o1777)
    said = refusal_to_start(folder)
    assert f"other users can write to the folder {run}" in said
    assert "chmod" not in said, "typed for /tmp, it would close /tmp to all users"
    run.chmod(0o755)
    assert "API_PREFIX" in refusal_to_start(folder, API_PREFIX="/api")
    assert list(run.iterdir()) == []


def test_the_socket_of_another_user_is_not_replaced(folder: Path) -> None:
    needs_root()
    run = folder / "run"
    run.mkdir(0o755)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(run / "gpu-pool.sock"))
    os.chown(run / "gpu-pool.sock", pwd.getpwnam(NAMES[0]).pw_uid, -1)
    assert f"is a socket of {NAMES[0]}" in refusal_to_start(folder)
    os.chown(run, pwd.getpwnam(NAMES[1]).pw_uid, -1)
    assert f"belongs to {NAMES[1]}" in refusal_to_start(folder)


@pytest.mark.parametrize("several", [{"WORKERS": "2"}, {"RELOAD": "true"}], ids=["workers", "reload"])
def test_several_processes_serve_one_socket(folder: Path, several: dict[str, str]) -> None:
    with SocketServer(folder, **several) as server:
        for _ in range(6):
            assert server.on_socket("GET", "/health").status == 200
        assert server.on_socket("POST", "/leases", NOW).status == 201
        eventually(lambda: [row["user"] for row in server.get("/leases").json["leases"]] == [ME])
        server.terminate()
        assert not Path(server.socket).exists()


def test_serve_takes_the_path_as_an_option(folder: Path) -> None:
    path = str(folder / "s.sock")
    command = ["-m", "gpu_worker_pool", "serve", "--simulate", "1", "--socket", path]
    with ServerProcess(folder, arguments=command):
        assert ask(path, "GET", "/gpu/count").body["gpu_count"] == 1
        again = subprocess.run(
            [sys.executable, *command, "--port", "0"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
            env={**os.environ, "HOST": "127.0.0.1", "GPU_POOL_STATE_DIR": str(folder / "state")},
        )
        assert again.returncode == 1
        assert again.stderr.endswith(f"gpu-pool: another server listens on {path}: stop it, or choose another path\n")
    bad = subprocess.run(
        [sys.executable, "-m", "gpu_worker_pool", "serve", "--socket", "s.sock"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert bad.returncode == 2
    assert "--socket must be an absolute path" in bad.stderr
