"""The command line and GPU servers: runs over HTTP, servers that go away, leases that are taken away."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.programs import Programs, children_of, is_there
from tests.fakes.http_server import Conversation, HostileServer, answer, answer_json
from tests.fakes.lease_server import UUID, LeaseServer
from tests.server_process import ServerProcess
from tests.waiting import eventually

API_KEY, ADMIN_KEY = "k" * 20, "a" * 20


def start_server(folder: Path) -> ServerProcess:
    keys = {"GPU_POOL_ADMIN_KEYS": ADMIN_KEY, "GPU_POOL_API_KEYS": API_KEY}
    return ServerProcess(folder, GPU_BACKEND="simulated:2", ACCESS_LOG="false", **keys)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with start_server(tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture
def programs(server: ServerProcess, tmp_path: Path) -> Iterator[Programs]:
    """At a server that nobody harms."""
    with Programs(tmp_path, GPU_SERVICE_ENDPOINT=server.url) as started:
        yield started
    admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
    for row in server.get("/queue").json["queue"]:
        server.ask("DELETE", f"/queue/{row['request_id']}", headers=admin)
    while rows := server.get("/leases").json["leases"]:
        for row in rows:
            server.ask("DELETE", f"/leases/{row['lease_id']}", headers=admin)


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[ServerProcess]:
    with start_server(tmp_path / "server") as started:
        yield started


@pytest.fixture
def brave(mortal: ServerProcess, tmp_path: Path) -> Iterator[Programs]:
    """At a server that will be killed."""
    with Programs(tmp_path, GPU_SERVICE_ENDPOINT=mortal.url) as started:
        yield started


def test_without_a_key_the_remedy_is_one_for_the_command_line(tmp_path: Path) -> None:
    settings = {"GPU_BACKEND": "simulated:1", "ACCESS_LOG": "false", "GPU_POOL_OPEN_ON_LOOPBACK": "false"}
    with (
        ServerProcess(tmp_path, GPU_POOL_API_KEYS=API_KEY, **settings) as server,
        Programs(tmp_path, GPU_SERVICE_ENDPOINT=server.url) as programs,
    ):
        done = programs.call("run", "--", "true")
        assert done.returncode != 0
        assert done.stderr.endswith("; set GPU_POOL_API_KEY\n")
        assert "api_key=" not in done.stderr
        assert programs.call("run", "--", "true", GPU_POOL_API_KEY=API_KEY).returncode == 0


def test_a_run_and_what_is_shown_of_it(programs: Programs, server: ServerProcess) -> None:
    show = "echo $CUDA_VISIBLE_DEVICES $GPU_POOL_LEASE_ID; exit 6"
    done = programs.call("run", "--", "sh", "-c", show)
    assert done.returncode == 6
    assert done.stdout.split()[0] in ("0", "1")
    programs.holding("-n", "2", "--label", "both")
    assert programs.json("queue") == server.get("/queue").json == {"queue": []}
    (ours,), (theirs,) = programs.leases(), server.get("/leases").json["leases"]
    volatile = ("held_seconds", "expires_in_seconds", "granted_at", "expires_at", "idle_seconds", "memory_used_mb")
    assert {name: value for name, value in ours.items() if name not in volatile} == {
        name: value for name, value in theirs.items() if name not in volatile
    }
    assert ours.keys() == theirs.keys()
    assert ours["label"] == "both"
    assert programs.call("run", "--no-wait", "--", "true").returncode == 75
    explained = programs.json("explain", "-n", "2")
    assert [gpu["obstacles"][0]["kind"] for gpu in explained["gpus"]] == ["held", "held"]
    assert explained["position"] == 1
    status = programs.json("status")
    assert [row["gpu_id"] for row in status["endpoints"][0]["gpus"]] == [0, 1]
    assert len(status["endpoints"][0]["leases"]) == 1


def test_a_server_explains_as_its_host_does(tmp_path: Path) -> None:
    """Also what only the ledger knows: what others wish for, and how much was in use before."""
    with start_server(tmp_path) as server, Programs(tmp_path) as programs:
        at, here = ["-e", server.url], ["-e", "local://"]
        programs.environment |= {"GPU_BACKEND": "simulated:2"}
        programs.holding("--memory", "4GiB", "--share")
        # The priority decides the order: without it, whoever asks the server, an account that has used nothing yet,
        # would be ahead of this user, as soon as the server has counted what the holder used.
        programs.start("run", "-n", "2", "--only", "0,1", "--priority", "1", "--", "true")
        eventually(lambda: programs.waiting(*at))

        def without_times(body: dict[str, Any]) -> str:
            return re.sub(r"for \d+ s", "for a while", json.dumps(body, sort_keys=True))

        for requirements in ([], ["-n", "2"], ["--memory", "8GiB", "--share"], ["--memory", "100GiB"], ["--idle"]):

            def agree(requirements: list[str] = requirements) -> bool:
                told = [without_times(programs.json("explain", *where, *requirements)) for where in (at, here)]
                assert told[0] == told[1]
                return True

            eventually(agree, 30)


def test_inside_a_lease_it_does_not_wait_for_itself(programs: Programs) -> None:
    show = "sh -c 'echo $GPU_POOL_LEASE_ID $CUDA_VISIBLE_DEVICES'"
    script = (
        f"{show}; gpu-pool run --no-wait -n 2 -- {show}; gpu-pool run --no-wait -- {show}; "
        "gpu-pool run --model H100 -- true; echo $?"
    )
    done = programs.call("run", "-n", "2", "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    (outside, *seen), (both, *all_seen), (one, *one_seen), impossible = map(str.split, done.stdout.splitlines())
    assert (seen, all_seen, one_seen) == (["0,1"], ["0,1"], ["0"])
    assert len({outside, both, one}) == 3
    assert impossible == ["65"]
    assert "could ever serve it (GPU 0, 1: Simulated GPU 24GB, not H100)" in done.stderr
    assert programs.leases() == []


def test_inside_a_lease_of_an_older_server_all_programs_use_it(tmp_path: Path) -> None:
    row = {"lease_id": "lease-5", "request_id": "around", "fence": 5, "state": "held"}
    row |= {"gpus": [{"gpu_id": 3, "uuid": UUID.format(3), "name": "A"}]}
    tokens = tmp_path / "home-state" / "gpu-pool" / "requests"
    tokens.mkdir(parents=True)
    (tokens / "request-around").write_text("t" * 20)
    with LeaseServer(GET_leases=answer_json({"leases": [row]})) as older, Programs(tmp_path) as programs:
        show = ["sh", "-c", "echo $CUDA_VISIBLE_DEVICES $GPU_POOL_LEASE_ID"]
        done = programs.call("run", "-e", older.url, "--", *show, GPU_POOL_LEASE_ID="lease-5")
        assert done.stdout == "3 lease-5\n", done.stderr
        assert older.asked("POST /leases") == 0


def test_however_a_request_ends_its_secret_is_forgotten(programs: Programs) -> None:
    kept = Path(programs.environment["XDG_STATE_HOME"]) / "gpu-pool" / "requests"
    assert programs.call("run", "--", "sh", "-c", f"ls {kept} | grep -c request-").stdout == "1\n"
    assert list(kept.iterdir()) == []
    assert programs.call("run", "--model", "H100", "--", "true").returncode == 65
    programs.holding("-n", "2")
    assert programs.call("run", "--no-wait", "--", "true").returncode == 75
    waiting = programs.start("run", "--", "true")
    (row,) = eventually(programs.waiting)
    assert programs.call("release", row["request_id"]).returncode == 0
    assert waiting.wait(10) == 1
    (held,) = programs.leases()
    assert [path.name for path in kept.iterdir()] == [f"request-{held['request_id']}"]


def test_a_server_that_is_away_while_the_command_runs(brave: Programs, mortal: ServerProcess) -> None:
    process = brave.holding("--ttl", "12s")
    mortal.kill()
    eventually(lambda: "renewal failed; retrying" in process.err)
    mortal.start()
    eventually(lambda: "the lease is renewed again" in process.err)
    process.terminate()
    assert process.wait(10) == 143
    assert brave.leases() == []


@pytest.mark.long
def test_a_server_that_is_away_for_longer_than_the_lease_lives(brave: Programs, mortal: ServerProcess) -> None:
    process = brave.holding("--ttl", "3s", seconds=40)
    mortal.kill()
    eventually(lambda: "could not be renewed for 3 s, its TTL; the command keeps running" in process.err)
    time.sleep(18)  # time in which nobody serves the ledger does not count
    mortal.start()
    eventually(lambda: "the lease is renewed again" in process.err)
    assert process.wait(40) == 0
    assert brave.leases() == []


def test_a_command_that_ends_while_the_server_is_away(brave: Programs, mortal: ServerProcess) -> None:
    process = brave.holding(seconds=2)
    mortal.kill()
    assert process.wait(20) == 0
    assert "the lease could not be given back; retrying" in process.err
    mortal.start()
    # The lease process goes on trying, alone.
    eventually(lambda: brave.leases() == [], within_seconds=15)


@pytest.mark.parametrize("on_lost", ["warn", "terminate"])
def test_a_lease_that_was_released_by_its_owner(programs: Programs, on_lost: str) -> None:
    process = programs.holding("--ttl", "2s", "--on-lost", on_lost)
    _, command = children_of(process.pid)
    (lease,) = programs.leases()
    done = programs.call("release", lease["lease_id"])
    assert (done.returncode, done.stdout) == (0, f"lease {lease['lease_id']} is released\n")
    if on_lost == "warn":
        eventually(lambda: "the lease is lost" in process.err)
        assert is_there(command)
        process.terminate()
    assert process.wait(10) == 143
    again = programs.call("release", lease["lease_id"])
    assert again.returncode == 1
    assert "there is no lease and no request" in again.stderr


def test_a_request_that_is_taken_out_of_the_queue(programs: Programs) -> None:
    programs.holding("-n", "2")
    waiting = programs.start("run", "--", "true")
    (row,) = eventually(programs.waiting)
    explained = programs.json("explain", "--request", row["request_id"])
    assert explained["request_id"] == row["request_id"]
    done = programs.call("release", row["request_id"])
    assert done.stdout == f"request {row['request_id']} is taken out of the queue\n"
    assert waiting.wait(10) == 1
    assert "the request was removed from the queue" in waiting.err


def test_only_the_owner_and_an_administrator_may_release(programs: Programs, tmp_path: Path) -> None:
    programs.holding()
    (lease,) = programs.leases()
    # As somebody else would: without our folder of tokens.
    refused = programs.call("release", lease["lease_id"], XDG_STATE_HOME=str(tmp_path / "elsewhere"))
    assert refused.returncode == 1
    assert "was not requested by you" in refused.stderr
    assert "GPU_POOL_ADMIN_KEY" in refused.stderr
    elsewhere = {"XDG_STATE_HOME": str(tmp_path / "elsewhere")}
    wrong = programs.call("release", lease["lease_id"], GPU_POOL_ADMIN_KEY="w" * 20, **elsewhere)
    assert wrong.returncode == 1
    assert "w" * 20 not in wrong.stderr
    done = programs.call("release", lease["lease_id"], GPU_POOL_ADMIN_KEY=ADMIN_KEY, **elsewhere)
    assert done.returncode == 0, done.stderr


def test_several_endpoints(programs: Programs, server: ServerProcess, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "second", GPU_BACKEND="simulated:2") as second:
        both = ["-e", f"first={server.url}", "-e", f"second={second.url}"]
        gone = ["-e", "gone=http://127.0.0.1:9"]
        programs.holding("-n", "2", *both)
        programs.holding("-n", "2", *both)
        assert {row["endpoint"] for row in programs.leases(*both)} == {"first", "second"}
        assert programs.call("run", "--no-wait", *both, "--", "true").returncode == 75
        done = programs.call("leases", *both, *gone)
        assert done.returncode == 0
        assert "gpu-pool: gone: " in done.stderr
        status = programs.json("status", *both, *gone)
        assert [each["error"] is None for each in status["endpoints"]] == [True, True, False]
        waiting = programs.start("run", *both, "--", "true")
        eventually(lambda: len(programs.waiting(*both)) == 2)
        waiting.terminate()
        assert waiting.wait(10) == 143
        eventually(lambda: programs.waiting(*both) == [])


def test_a_server_without_leases(programs: Programs) -> None:
    """An older one, or not one of ours."""
    memory = {"total_mb": 1000, "used_mb": 10, "free_mb": 990, "usage_percent": 1.0}
    power = {"draw_w": None, "limit_w": None}
    row = {"gpu_id": 0, "name": "Old GPU", "memory": memory, "utilization_percent": 3, "power": power, "uuid": None}

    def older(talk: Conversation) -> None:
        if b" /gpu/stats " in talk.request:
            answer_json({"gpu_count": 1, "gpus": [row], "timestamp": ""})(talk)
        else:
            answer_json({"detail": "Not Found"}, 404)(talk)

    with HostileServer(older) as old:
        at = ["-e", old.url]
        done = programs.call("run", *at, "--", "true")
        assert done.returncode == 69
        assert "this server gives no leases" in done.stderr or "Not Found" in done.stderr
        shown = programs.call("status", *at)
        assert shown.returncode == 0
        assert "this server gives no leases" in shown.stdout
        explained = programs.call("explain", *at)
        assert explained.returncode == 69
        assert f"{old.url} cannot explain requirements: it is an older server; update it" in explained.stderr
        assert programs.call("leases", *at).returncode == 69


def test_what_is_no_gpu_server_is_named(programs: Programs) -> None:
    with HostileServer(answer(b"<html>hello</html>")) as website:
        done = programs.call("status", "-e", website.url)
    assert done.returncode == 69
    assert f"GET {website.url}/gpu/stats was answered, but the reply is not JSON" in done.stderr


def test_doctor_and_a_server(brave: Programs, mortal: ServerProcess) -> None:
    findings = brave.json("doctor")
    assert findings["ok"] is True
    assert any(check["what"] == "2 GPUs, read by simulated" for check in findings["checks"])
    mortal.kill()
    done = brave.call("doctor")
    assert done.returncode == 1
    assert "connection refused" in done.stdout


def test_the_wait_of_a_shell(programs: Programs) -> None:
    done = programs.run(["bash", "-c", "x=$(gpu-pool wait -n 2) || exit 1; gpu-pool leases --json"])
    assert len(json.loads(done.stdout)["leases"]) == 1
    assert eventually(lambda: programs.leases() == [])
