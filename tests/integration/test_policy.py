"""A policy with real servers, programs and webhooks: limits, time limits, idle holders, and who is asked to leave."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.cli.programs import Programs
from tests.fakes.nvidia_smi import FakeNvidiaSMI, healthy_gpu
from tests.server_process import ServerProcess
from tests.waiting import eventually

ADA, BOB = "ada:adas-own-key-0123456789", "bob:bobs-own-key-0123456789"


class Lab:
    """A server with a policy, and two people with keys."""

    def __init__(self, folder: Path, server: ServerProcess, policy: Path) -> None:
        self.folder, self.server, self.policy = folder, server, policy

    def ask(self, name: str, who: str, **body: Any) -> tuple[int, dict[str, Any]]:
        key = {"Authorization": f"Bearer {who.partition(':')[2]}", "X-Lease-Token": f"token-of-{name:0>10}"}
        reply = self.server.ask("POST", "/leases", {"request_id": name, **body}, headers=key)
        return reply.status, reply.json

    def renew(self, lease_id: str, name: str, who: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        key = {"Authorization": f"Bearer {who.partition(':')[2]}", "X-Lease-Token": f"token-of-{name:0>10}"}
        reply = self.server.ask("POST", f"/leases/{lease_id}/renew", body, headers=key)
        return reply.status, reply.json

    def release(self, lease_id: str, name: str, who: str) -> None:
        key = {"Authorization": f"Bearer {who.partition(':')[2]}", "X-Lease-Token": f"token-of-{name:0>10}"}
        assert self.server.ask("DELETE", f"/leases/{lease_id}", headers=key).status == 200


@pytest.fixture
def lab(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Lab]:
    policy = tmp_path / "policy.toml"
    policy.write_text(getattr(request, "param", ""))
    variables = {
        "GPU_BACKEND": "simulated:3",
        "REFRESH_INTERVAL": "0.2",
        "GPU_POOL_API_KEYS": f"{ADA},{BOB}",
        "GPU_POOL_POLICY": str(policy),
    }
    with ServerProcess(tmp_path / "server", **variables) as server:
        yield Lab(tmp_path, server, policy)


LIMITS = """
["*"]
most_gpus = 1
most_waiting = 1
highest_priority = 0
longest_time = "2h"

[account.bob]
most_gpus = 2
"""


@pytest.mark.parametrize("lab", [LIMITS], indirect=True)
def test_each_limit_over_http_and_a_bad_policy_keeps_the_old_one(lab: Lab) -> None:
    status, refused = lab.ask("urgent", ADA, priority=5)
    assert (status, refused["error"]) == (409, "impossible")
    assert refused["reasons"] == ["account ada may ask for priority 0 at most, not 5"]
    assert lab.ask("many", ADA, count=2)[1]["reasons"] == ["account ada may hold one GPU at most, not 2"]
    assert lab.ask("long", ADA, max_seconds=9000)[1]["reasons"] == ["account ada may hold GPUs for 2 h, not 2 h 30 min"]
    status, first = lab.ask("a1", ADA)
    assert status == 201
    assert 7190 < first["ends_in_seconds"] <= 7200
    status, waiting = lab.ask("a2", ADA)
    assert status == 202
    assert "kept back by the policy: account ada holds one GPU, its limit" in waiting["reasons"][0]
    status, refused = lab.ask("a3", ADA)
    assert (status, refused["error"]) == (409, "too_many_waiting")
    assert refused["detail"].startswith("account ada may have one waiting request at most")
    # Nobody waits behind who is kept back.
    assert lab.ask("b1", BOB, count=2)[0] == 201
    # A mistake changes nothing, and is said.
    lab.policy.write_text('["*"]\nmost_gpus = -1\n')
    config = {}

    def is_said() -> bool:
        config.update(lab.server.get("/config").json["leases"])
        return config["policy_problem"] is not None

    eventually(is_said)
    sentence = f"{lab.policy}, line 2: most_gpus must be a whole number of at least 0, not -1"
    assert config["policy_problem"] == f"{sentence}; the previous policy is in force"
    assert f"policy: {sentence}" in lab.server.log
    assert lab.ask("a2", ADA)[0] == 202
    # A better one counts at once, for those who wait, too.
    lab.policy.write_text('["*"]\nmost_gpus = 2\n')
    lab.release(first["lease_id"], "a1", ADA)
    eventually(lambda: lab.ask("a2", ADA)[0] == 201)


@pytest.mark.parametrize("lab", ['["*"]\nlongest_time = "3s"\n'], indirect=True)
def test_the_longest_time_ends_a_command(lab: Lab) -> None:
    with Programs(lab.folder, GPU_POOL_API_KEY=ADA.partition(":")[2]) as programs:
        done = programs.call("run", "-e", lab.server.url, "--ttl", "2s", "--", "sleep", "60", timeout=40)
    assert done.returncode == 128 + 15, done.stderr
    assert "the time limit is reached in" in done.stderr


IDLE = """
["*"]
idle_may_be_asked = true
[idle]
after = "1s"
grace = "4s"
[account.bob]
idle_may_be_asked = false
"""


@pytest.fixture
def idle_lab(tmp_path: Path) -> Iterator[Lab]:
    """GPUs that compute nothing, whoever holds them."""
    smi = FakeNvidiaSMI(tmp_path)
    smi.set_gpus(healthy_gpu(0, utilization_gpu="0"), healthy_gpu(1, utilization_gpu="0"))
    policy = tmp_path / "policy.toml"
    policy.write_text(IDLE)
    variables = {
        "GPU_BACKEND": "nvidia-smi",
        "REFRESH_INTERVAL": "0.2",
        "GPU_POOL_API_KEYS": f"{ADA},{BOB}",
        "GPU_POOL_POLICY": str(policy),
        **smi.env,
    }
    with ServerProcess(tmp_path / "server", **variables) as server:
        yield Lab(tmp_path, server, policy)


def test_an_idle_holder_is_told_and_then_loses_its_lease_to_one_who_waits(idle_lab: Lab) -> None:
    lab = idle_lab
    held = lab.ask("a1", ADA)[1]["lease_id"]
    kept = lab.ask("b1", BOB)[1]["lease_id"]
    told: dict[str, Any] = {}

    def is_told() -> bool:
        assert lab.ask("waits", BOB)[0] == 202
        row = lab.renew(held, "a1", ADA)[1]
        told.update(row)
        return bool(row["yield_asked"])

    eventually(is_told)
    assert "it has been idle for" in told["yield_reason"]
    assert 0 < told["leave_in_seconds"] <= 4
    # Patience is granted once more.
    assert lab.renew(held, "a1", ADA, {"is_busy": True})[1]["yield_asked"] is False

    def is_lost() -> bool:
        lab.ask("waits", BOB)
        status, said = lab.renew(held, "a1", ADA)
        told.update(said)
        return status == 409

    eventually(is_lost)
    assert "it was idle for" in told["detail"]
    assert "while others waited" in told["detail"]
    assert lab.renew(kept, "b1", BOB)[0] == 200, "the policy does not allow it for this account"


def test_a_command_and_a_python_program_are_asked_to_yield(lab: Lab) -> None:
    key = ADA.partition(":")[2]
    script = f"""
import time, gpu_worker_pool.sync as pool
asked = []
client = pool.GPUWorkerPoolClient(service_endpoint={lab.server.url!r}, lease_ttl=2, on_yield_asked=asked.append)
with client:
    gpu = client.request_gpu()
    open({str(lab.folder / "python-holds")!r}, "w").write(gpu.lease_id)
    while not asked:
        time.sleep(0.05)
    open({str(lab.folder / "python-asked")!r}, "w").write(asked[0].lease_id)
    client.release_gpu(gpu)
"""
    with Programs(lab.folder, GPU_POOL_API_KEY=key) as programs:
        run, log = programs.listening(
            "-e", lab.server.url, "--ttl", "2s", "--on-yield", "signal=USR1", ends=["SIGUSR1"]
        )
        eventually(lambda: log.exists() and "ready" in log.read_text())
        python = subprocess.Popen([sys.executable, "-c", script], env=programs.environment)
        held = lab.folder / "python-holds"
        eventually(lambda: held.exists() and held.read_text())
        rows = lab.server.get("/leases").json["leases"]
        assert len(rows) == 2
        for row in rows:
            asked = programs.call("yield", row["lease_id"], "-e", lab.server.url, "--reason", "a demo")
            assert (asked.returncode, asked.stdout) == (
                0,
                f"the holder of {row['lease_id']} is asked to give it back\n",
            ), asked.stderr
        eventually(lambda: "SIGUSR1" in log.read_text())
        assert run.wait(20) == 5, "the command ended by itself, as it wanted"
        assert "you are asked to give it back: another user asks for it: a demo" in run.err
        eventually((lab.folder / "python-asked").exists)
        assert python.wait(20) == 0
        missing = programs.call("yield", "lease-99", "-e", lab.server.url)
        assert (missing.returncode, "there is no lease 'lease-99'" in missing.stderr) == (1, True)


def test_a_holder_sees_whose_key_asks(lab: Lab) -> None:
    _, lease = lab.ask("a1", ADA)
    key = {"Authorization": f"Bearer {BOB.partition(':')[2]}"}
    asked = lab.server.ask("POST", f"/leases/{lease['lease_id']}/yield", {"reason": "a demo"}, headers=key)
    assert (asked.status, asked.json["asked"]) == (200, True)
    _, renewed = lab.renew(lease["lease_id"], "a1", ADA)
    assert (renewed["yield_asked"], renewed["yield_reason"]) == (True, "bob asks for it: a demo")


def test_a_waiter_asks_and_whoever_terminates_makes_room(lab: Lab) -> None:
    with Programs(lab.folder, GPU_POOL_API_KEY=ADA.partition(":")[2]) as programs:
        end = ("-e", lab.server.url, "--ttl", "2s")
        holder = programs.holding(*end, "-n", "3", "--on-yield", "terminate")
        done = programs.call(
            "run", *end, "--ask", "--timeout", "30s", "--notify", "echo $GPU_POOL_EVENT > told", "--", "true"
        )
        assert done.returncode == 0, done.stderr
        assert holder.wait(20) == 128 + 15
        eventually(lambda: (lab.folder / "told").read_text() == "granted\n")


class Hook(ThreadingHTTPServer):
    """Somebody's chat; the first message is answered with an error."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.failures = 1
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:  # as the library calls it
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if hook.failures:
                    hook.failures -= 1
                    self.send_response(503)
                else:
                    hook.got.append((dict(self.headers), body))
                    self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


def test_webhooks_are_signed_retried_and_never_delay_a_grant(lab: Lab) -> None:
    hook, secret = Hook(), lab.folder / "secret"
    secret.write_text("not to be told\n")
    address = f"http://127.0.0.1:{hook.server_address[1]}/room?token=x"
    silent = "http://127.0.0.1:9/room?token=x"
    lab.policy.write_text(
        f"""
["*"]
most_gpus = 1
[[webhook]]
url = "{address}"
events = ["granted", "ended"]
secret_file = "{secret}"
template = '{{"text": "${{event}}: ${{account}}, ${{label}}, GPU ${{gpus}}"}}'
[[webhook]]
url = "{silent}"
"""
    )
    numbers = itertools.count()

    def is_in_force() -> bool:
        refused = lab.ask(f"refused-{next(numbers)}", ADA, count=9)[1]
        return bool(refused["reasons"][0].startswith("account ada may hold one GPU"))

    eventually(is_in_force)
    try:
        status, lease = lab.ask("first", ADA, label='say "hi"')
        assert status == 201
        lab.release(lease["lease_id"], "first", ADA)
        eventually(lambda: len(hook.got) == 2)
        eventually(lambda: "webhook http://127.0.0.1:9: POST http://127.0.0.1:9 failed: " in lab.server.log)
    finally:
        hook.shutdown()
        hook.server_close()
    texts = [json.loads(body)["text"] for _, body in hook.got]
    assert texts == ['granted: ada, say "hi", GPU 0', 'ended: ada, say "hi", GPU 0']
    for headers, body in hook.got:
        signed = f"{headers['X-GPU-Pool-Timestamp']}.".encode() + body
        digest = hmac.new(b"not to be told", signed, hashlib.sha256).hexdigest()
        assert headers["X-GPU-Pool-Signature"] == f"sha256={digest}"
    assert "token=x" not in lab.server.log
    assert f"webhook http://127.0.0.1:{hook.server_address[1]}: it answered 503; trying again" in lab.server.log


@pytest.mark.parametrize("lab", ["[metrics]\naccount_names = true\n"], indirect=True)
def test_usage_is_counted_for_metrics_and_shown_on_the_page(lab: Lab) -> None:
    for number in range(2):
        lab.release(lab.ask(f"a{number}", ADA)[1]["lease_id"], f"a{number}", ADA)
    lab.ask("b", BOB)

    def counted() -> bool:
        text = lab.server.get("/metrics").body.decode()
        assert 'gpu_pool_account_leases_total{account="ada"} 2.0' in text
        assert 'gpu_pool_wait_seconds_bucket{le="1.0"} 2.0' in text
        assert "gpu_pool_hold_seconds_count 2.0" in text
        return True

    eventually(counted)
    shown = lab.server.get("/dashboard/usage").json
    for span in ("day", "month"):
        assert {row["name"]: row["leases"] for row in shown[span]["people"]} == {"ada": 2, "bob": 1}
        assert shown[span]["all"]["leases"] == 3
    lab.policy.write_text("")
    eventually(lambda: "gpu_pool_account_" not in lab.server.get("/metrics").body.decode())
