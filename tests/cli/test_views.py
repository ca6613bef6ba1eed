"""Commands that show something: as JSON, in a pipe, and on a terminal."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cli.programs import GPU_POOL, Programs
from tests.fakes.http_server import Conversation, HostileServer, answer_json
from tests.fakes.nvml import FakeNVML, fake_gpus
from tests.server_process import ServerProcess
from tests.waiting import eventually

UUID = "GPU-51309a7e-0000-4000-8000-000000000000"
BAD_BACKEND = "GPU_BACKEND must be auto, nvml, nvidia-smi, amd or simulated:N, not 'nonsense'"


def test_leases_and_queue_have_the_bodies_of_the_api(programs: Programs) -> None:
    from gpu_worker_pool.gpu_server.leases.schemas import Leases, Queue

    assert programs.json("leases") == {"leases": []}
    assert programs.json("queue") == {"queue": []}
    programs.holding("--label", "mine", "--memory", "4GiB")
    programs.start("run", "-n", "1", "--priority", "3", "--", "true")
    eventually(programs.waiting)
    leases, queue = programs.json("leases"), programs.json("queue")
    Leases.model_validate_json(json.dumps(leases))
    Queue.model_validate_json(json.dumps(queue))
    (lease,) = leases["leases"]
    assert lease["gpus"] == [{"gpu_id": 0, "uuid": UUID, "name": "Simulated GPU 24GB"}]
    assert (lease["label"], lease["memory_mb"], lease["state"]) == ("mine", 4096.0, "held")
    (row,) = queue["queue"]
    assert (row["position"], row["priority"], row["count"]) == (1, 3, 1)


def test_what_people_see(programs: Programs) -> None:
    holder = programs.holding("--label", "mine")
    programs.start("run", "--", "true")
    eventually(programs.waiting)
    held = rf"^0 +17\.6/24 GiB +95 % +held +\S+ sh \(pid {holder.pid}\) \(mine\) +\d+ s +all +17\.6 GiB$"

    def with_load() -> str:
        """A simulated GPU is loaded a moment after it was granted."""
        shown = programs.call("status").stdout
        assert re.search(held, shown, re.M), shown
        return shown

    shown = eventually(with_load)
    assert "local: 1 x Simulated GPU 24GB, 0 free, 1 waiting" in shown
    assert re.search(r"^1 +\S+ true \(pid \d+\) +\d+ s +one idle GPU: next in line; of 1 GPU: 1 held$", shown, re.M)
    leases, queue = programs.call("leases").stdout, programs.call("queue").stdout
    assert leases.splitlines()[0].split() == ["LEASE", "GPU", "HOLDER", "SINCE", "PROMISED", "USED", "STATE", "LABEL"]
    assert "mine" in leases
    assert queue.splitlines()[0].split() == ["PLACE", "REQUEST", "WHO", "WAITING", "WANTS", "WHY", "LABEL"]


@pytest.mark.parametrize("width", [40, 60, 80])
def test_ids_can_be_copied_from_a_narrow_terminal(programs: Programs, width: int) -> None:
    holder = programs.holding("--label", "nightly run")
    waiting = programs.start("run", "--label", "another one", "--", "true")
    (row,) = eventually(programs.waiting)
    (lease,) = programs.leases()
    shown = {}
    for command in ("status", "leases", "queue"):
        terminal = programs.terminal([*GPU_POOL, command], width=width)
        assert terminal.wait() == 0
        shown[command] = terminal.shown.replace("\r", "")
        assert [line for line in shown[command].splitlines() if len(line.rstrip()) > width] == []
    assert re.search(rf"(^|\s){lease['lease_id']}\s", shown["leases"])
    assert re.search(rf"(^|\s){row['request_id']}\s", shown["queue"]), shown["queue"]
    for name, text in shown.items():
        assert re.search(rf"\b{holder.pid if name != 'queue' else waiting.pid}\b", text), text
    # What was copied is an argument.
    (copied,) = re.findall(r"\b[0-9a-f]{32}\b", shown["queue"])
    assert programs.call("release", copied).returncode == 0


def test_nothing_to_see(programs: Programs) -> None:
    assert programs.call("leases").stdout == "no leases\n"
    assert programs.call("queue").stdout == "no waiting requests\n"
    assert "1 free, 0 waiting" in programs.call("status").stdout
    assert programs.call("explain").stdout.startswith("one idle GPU: could be granted now\n")


def test_explanations(programs: Programs) -> None:
    told = programs.json("explain", "-n", "2")
    assert told["impossible"]
    assert told["position"] == 1
    never = programs.call("explain", "--memory", "100GiB")
    assert "can never be granted" in never.stdout
    holder = programs.holding()
    waiting = programs.start("run", "--", "true")
    (row,) = eventually(programs.waiting)
    for arguments in ([], ["--request", row["request_id"]]):
        told = programs.json("explain", *arguments)
        (gpu,) = told["gpus"]
        assert (gpu["gpu_id"], gpu["uuid"]) == (0, UUID)
        assert gpu["obstacles"][0]["kind"] == "held"
        assert f"'s sh (pid {holder.pid}) for" in gpu["obstacles"][0]["text"]
    missing = programs.call("explain", "--request", "nobody")
    assert missing.returncode == 1
    assert missing.stderr == "gpu-pool: no waiting request has the id 'nobody'; gpu-pool queue lists them\n"
    assert waiting.poll() is None


def test_where_nothing_can_ever_be_granted_nothing_is_said_to_be_grantable_now(programs: Programs) -> None:
    assert "granted now" not in programs.call("explain", "-n", "99").stdout


def test_a_terminal_that_cannot_show_a_letter_is_shown_the_rest(programs: Programs) -> None:
    programs.holding("--label", "für ana")
    done = programs.call("leases", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "f?r ana" in done.stdout


def test_release_of_this_hosts(programs: Programs) -> None:
    process = programs.holding("--ttl", "2s", "--on-lost", "terminate")
    (lease,) = programs.leases()
    done = programs.json("release", lease["lease_id"])
    assert done == {
        "released": [
            {
                "id": lease["lease_id"],
                "released": True,
                "endpoint": "local",
                "kind": "lease",
                "error": None,
            }
        ]
    }
    assert process.wait(10) == 143
    nothing = programs.call("release", "nothing", "--json")
    assert nothing.returncode == 1
    assert json.loads(nothing.stdout)["released"][0]["released"] is False


def test_status_as_json(programs: Programs) -> None:
    (endpoint,) = programs.json("status")["endpoints"]
    assert (endpoint["endpoint"], endpoint["url"], endpoint["error"]) == ("local", "local://", None)
    assert [gpu["uuid"] for gpu in endpoint["gpus"]] == [UUID]
    assert (endpoint["leases"], endpoint["queue"], endpoint["backend"]) == ([], [], "simulated")


def test_an_endpoint_that_is_away_is_told_in_json_and_by_the_status(programs: Programs) -> None:
    away = ["-e", "away=http://127.0.0.1:9"]
    done = programs.call("status", "--json", *away)
    assert done.returncode == 69
    (told,) = json.loads(done.stdout)["endpoints"]
    assert (told["endpoint"], "refused" in told["error"]) == ("away", True)
    assert programs.call("release", "lease-1", *away).returncode == 69


def test_top_as_json_is_a_line_each_time(programs: Programs) -> None:
    lines = programs.call("top", "--json", "--count", "2", "--interval", "0.2s").stdout.splitlines()
    assert [json.loads(line)["endpoints"][0]["gpu_count"] for line in lines] == [1, 1]


def test_top_in_a_pipe_and_on_a_terminal(programs: Programs) -> None:
    done = programs.call("top", "--count", "2", "--interval", "0.2")
    assert done.returncode == 0
    assert done.stdout.count("1 x Simulated GPU 24GB, 1 free, 0 waiting") == 2
    assert "\x1b" not in done.stdout
    terminal = programs.terminal([*GPU_POOL, "top", "--interval", "0.2"])
    terminal.until("Ctrl-C to quit")
    terminal.until("1 free, 0 waiting", times=2)
    terminal.type("\x03")
    assert terminal.wait() == 0


@pytest.mark.parametrize(
    ("variables", "is_coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colours_only_on_a_terminal(programs: Programs, variables: dict[str, str], is_coloured: bool) -> None:
    assert "\x1b" not in programs.call("status", **variables).stdout
    terminal = programs.terminal([*GPU_POOL, "status"], **variables)
    assert terminal.wait() == 0
    assert ("\x1b[32m" in terminal.written) == is_coloured
    assert "free" in terminal.shown


#: Colours, a title, what turns the direction of reading, and a control that begins a sequence without an escape.
EVIL = "x [/red]\x1b[31m\x1b]0;title\x07\u202e\x9b31m y"
CONTROLS = {"\x1b", "\x07", "\u202e", "\x9b"}
SHOWN = "x [/red][31m]0;title31m y"


def test_what_others_call_themselves_drives_no_terminal(programs: Programs) -> None:
    """A server may say whatever it likes, and whoever asked it for a GPU, too."""
    gpu = {"gpu_id": 0, "name": EVIL, "uuid": None, "utilization_percent": 3}
    memory = {"total_mb": 1000, "used_mb": 10, "free_mb": 990, "usage_percent": 1.0}
    lease = {
        "lease_id": EVIL,
        "request_id": EVIL,
        "worker_id": EVIL,
        "label": EVIL,
        "state": "held",
        "fence": 1,
        "gpus": [gpu],
        "memory_mb": None,
        "memory_used_mb": None,
        "held_seconds": 1.0,
        "share": False,
    }
    waiter = {
        "request_id": EVIL,
        "worker_id": EVIL,
        "label": EVIL,
        "position": 1,
        "waiting_seconds": 1.0,
        "reasons": [EVIL],
        "count": 1,
        "priority": 0,
    }
    explanation = {"request_id": EVIL, "summary": EVIL, "gpus": [{**gpu, "obstacles": [{"text": EVIL}]}]}
    bodies: dict[bytes, Any] = {
        b"/gpu/stats": {"gpu_count": 1, "gpus": [{**gpu, "memory": memory}], "timestamp": ""},
        b"/leases": {"leases": [lease]},
        b"/queue": {"queue": [waiter]},
        b"/queue/evil": explanation,
        b"/explain": explanation,
    }

    def answer(talk: Conversation) -> None:
        path = talk.request.split()[1]
        answer_json(bodies.get(path, {"detail": EVIL}), 200 if path in bodies else 500)(talk)

    with HostileServer(answer) as server:
        at = ["-e", f"evil={server.url}", "-e", f"other={server.url}/elsewhere"]
        commands = (
            ["status"],
            ["leases"],
            ["queue"],
            ["explain"],
            ["explain", "--request", "evil"],
            ["top", "-n", "1"],
        )
        for words in commands:
            done = programs.call(*words, *at)
            assert SHOWN in done.stdout, done.stderr
            assert not CONTROLS & set(done.stdout + done.stderr), words
            terminal = programs.terminal([*GPU_POOL, *words, *at], COLUMNS="400")
            assert terminal.wait() == 0
            assert SHOWN in terminal.shown, words
            assert CONTROLS & set(terminal.written) <= {"\x1b"}, words
            assert "\x1b[31m" not in terminal.written
        done = programs.call("release", EVIL, *at)
        assert "answered with 500" in done.stderr
        assert not CONTROLS & set(done.stderr)


def test_an_endpoint_that_cannot_be_used_does_not_hide_the_others(programs: Programs) -> None:
    memory = {"total_mb": 1000, "used_mb": 10, "free_mb": 990, "usage_percent": 1.0}
    row = {"gpu_id": 0, "name": "Healthy", "uuid": None, "utilization_percent": 0, "memory": memory, "obstacles": []}
    stats = {"gpu_count": 1, "gpus": [row], "timestamp": "", "leases": [], "queue": []}
    with HostileServer(answer_json(stats)) as server:
        at = ["-e", server.url, "-e", "local://"]
        for words in (["status"], ["top", "-n", "1"]):
            done = programs.call(*words, *at, GPU_BACKEND="nonsense")
            assert done.returncode == 0, done.stderr
            assert "1 x Healthy, 1 free" in done.stdout
            assert f"failed: {BAD_BACKEND}" in done.stdout
        listed = programs.call("leases", *at, GPU_BACKEND="nonsense")
        assert listed.stdout == "no leases\n"
        assert listed.stderr.startswith(f"gpu-pool: local: {BAD_BACKEND}")
    alone = programs.call("status", GPU_BACKEND="nonsense")
    assert (alone.returncode, alone.stdout) == (69, "")
    assert alone.stderr.startswith(f"gpu-pool: {BAD_BACKEND}")


def test_top_tells_why_what_was_there_is_not(programs: Programs, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "server", GPU_BACKEND="simulated:1") as server:
        top = programs.start("top", "-e", server.url, "--interval", "0.2")
        eventually(lambda: "1 free, 0 waiting" in top.out)
        server.kill()
        eventually(lambda: "connection refused; is the GPU server running?" in top.out)
        server.start()
        top.kill()


def test_what_is_logged_looks_like_all_the_rest(programs: Programs) -> None:
    done = programs.call("explain", "--policy", "thresholds", GPU_MEMORY_THRESHOLD_PERCENT="much")
    assert done.returncode == 0
    assert [line.partition(" ")[0] for line in done.stderr.splitlines()] == ["gpu-pool:"], done.stderr


# --- settings ---


def test_config_shows_every_setting_and_no_secret(programs: Programs) -> None:
    secret = "very-secret-key-0123456789"  # noqa: S105
    variables = {
        "GPU_POOL_API_KEY": secret,
        "GPU_POOL_API_KEYS": f"{secret},short",
        "GPU_POOL_ADMIN_KEY": secret,
        "GPU_POOL_ADMIN_KEYS": secret,
        "GPU_SERVICE_ENDPOINT": f"http://user:{secret}@host:1",
        "GPU_POLLING_INTERVAL": "often",
        "GPU_POOL_LEASETTL": "5",
    }
    done = programs.call("config", **variables)
    assert done.returncode == 1
    assert secret not in done.stdout + done.stderr
    as_json = programs.call("config", "--json", **variables)
    assert secret not in as_json.stdout
    settings = {row["name"]: row for row in json.loads(as_json.stdout)["settings"]}
    assert settings["GPU_POOL_API_KEYS"]["value"] == "1 keys, not shown"
    assert "often" in settings["GPU_POLLING_INTERVAL"]["problem"]
    assert settings["GPU_POLLING_INTERVAL"]["value"] == "5"
    assert settings["GPU_POOL_LEASETTL"]["problem"].endswith("did you mean GPU_POOL_LEASE_TTL?")
    assert settings["GPU_BACKEND"] == {
        "name": "GPU_BACKEND",
        "value": "simulated:1",
        "source": "environment",
        "used_by": "server and local://",
        "problem": None,
    }
    assert settings["PORT"]["source"] == "default"


def test_config_reads_the_servers_file_too(programs: Programs) -> None:
    (programs.folder / ".env").write_text("PORT=9999\n")
    settings = {row["name"]: row for row in programs.json("config", "--changed")["settings"]}
    assert (settings["PORT"]["value"], settings["PORT"]["source"]) == ("9999", ".env")
    assert "HOST" not in settings


# --- the doctor ---


def test_a_well_host(programs: Programs) -> None:
    done = programs.call("doctor")
    assert done.returncode == 0
    assert done.stdout.rstrip().endswith("\n1 warning: see above")
    assert "the GPUs are simulated" in done.stdout


@pytest.mark.parametrize(
    ("variables", "check", "what"),
    [
        ({"GPU_BACKEND": "nvidia-smi", "PATH": "/usr/bin:/bin"}, "GPUs", "nvidia-smi"),
        ({"GPU_BACKEND": "nonsense"}, "driver", BAD_BACKEND),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "visible devices", "hides every GPU"),
        ({"CUDA_VISIBLE_DEVICES": "7"}, "visible devices", "matches no GPU"),
        ({"GPU_SERVICE_ENDPOINT": "http://127.0.0.1:9"}, "127.0.0.1_9", "connection refused"),
        ({"GPU_POOL_STATE_DIR": "/proc/nowhere"}, "state directory", "/proc/nowhere"),
        ({"GPU_ENDPOINT_TIMEOUT": "-3"}, "GPU_ENDPOINT_TIMEOUT", "number of seconds above 0"),
    ],
)
def test_what_is_wrong(programs: Programs, variables: dict[str, str], check: str, what: str) -> None:
    done = programs.call("doctor", "--json", **variables)
    assert done.returncode == 1, done.stdout
    told = json.loads(done.stdout)
    assert told["ok"] is False
    wrong = [finding for finding in told["checks"] if finding["status"] == "wrong" and finding["check"] == check]
    assert any(what in finding["what"] for finding in wrong), told


@pytest.mark.parametrize("without", [(), ("nvmlDeviceSetMemoryLimits_v1",)])
def test_a_driver_that_can_limit_memory_is_named(programs: Programs, tmp_path: Path, without: tuple[str, ...]) -> None:
    fake = FakeNVML(tmp_path / "nvml", gpus=fake_gpus(1), without=without)
    done = programs.call("doctor", "--json", GPU_BACKEND="nvml", **fake.env)
    found = [check["what"] for check in json.loads(done.stdout)["checks"] if check["check"] == "memory limits"]
    assert [text.partition(" ")[0] for text in found] == ([] if without else ["an"]), done.stdout
    assert all("nvmlDeviceSetMemoryLimits" in text and "not a wall" in text for text in found)


# --- the server, for people ---


def test_serve(programs: Programs) -> None:
    from tests.server_process import free_port

    port = free_port()
    server = programs.start("serve", "--simulate", "2", "--host", "127.0.0.1", "--port", port, "--no-access-log")
    at = ["-e", f"http://127.0.0.1:{port}"]
    eventually(lambda: programs.call("status", *at).returncode == 0)
    assert "2 x Simulated GPU 24GB, 2 free" in programs.call("status", *at).stdout
    assert programs.call("run", *at, "--", "true").returncode == 0
    taken = programs.call("serve", "--simulate", "1", "--host", "127.0.0.1", "--port", port)
    assert taken.returncode == 1
    assert taken.stderr == (
        f"gpu-pool: cannot listen on 127.0.0.1 port {port}: Address already in use; choose another with --port\n"
    )
    server.terminate()
    assert server.wait(10) in (0, -15)


def test_serve_refuses_nonsense(programs: Programs) -> None:
    assert programs.call("serve", "--simulate", "1", "--backend", "nvml").returncode == 2
    assert programs.call("serve", "--backend", "abacus").returncode == 2
    for host in ("nonsense..x", "192.0.2.1"):
        done = programs.call("serve", "--simulate", "1", "--host", host)
        assert done.returncode == 2
        assert f"no address '{host}' on this host" in done.stderr
        assert "--port" not in done.stderr


@contextlib.contextmanager
def locked_ledger(programs: Programs) -> Iterator[None]:
    """Somebody else writes to the ledger, and does not come to an end."""
    (path,) = (programs.folder / "state").glob("ledger-*.db")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        yield
        connection.execute("ROLLBACK")


def test_no_gpu_is_called_free_while_the_ledger_is_locked(programs: Programs) -> None:
    programs.holding("--label", "mine")
    with locked_ledger(programs), ThreadPoolExecutor() as threads:  # each of them is held up for a while
        called = [threads.submit(programs.json, *what) for what in (("leases",), ("status",), ("explain",))]
        leases, status, told = [each.result() for each in called]
    assert [row["label"] for row in leases["leases"]] == ["mine"]
    assert [row["label"] for row in status["endpoints"][0]["gpus"][0]["leases"]] == ["mine"]
    assert told["gpus"][0]["obstacles"][0]["kind"] == "held"
