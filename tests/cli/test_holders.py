"""Who holds and who waits: real programs, seen by other commands, without a server and with one."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gpu_worker_pool.hardware.origin import host_name
from tests.cli.programs import Programs
from tests.server_process import ServerProcess
from tests.waiting import eventually

USER = pwd.getpwuid(os.getuid()).pw_name
#: Holds a GPU until it may end; with `again`, it requests another one and says what it was told.
TRAIN = """
import sys
from gpu_worker_pool import WorkerTimeoutError, sync

with sync.GPUWorkerPoolClient(sys.argv[1], polling_interval=0.2) as client:
    client.request_gpu(label="mine")
    print("held", flush=True)
    if "again" in sys.argv:
        try:
            client.request_gpu(timeout=float(sys.argv[-1]))
        except WorkerTimeoutError as error:
            print(error, flush=True)
    sys.stdin.readline()
"""


class Train(subprocess.Popen[str]):
    """`train.py`, which holds a GPU."""

    def __init__(self, programs: Programs, endpoint: str, *arguments: str, before: str = "") -> None:
        script = programs.folder / "train.py"
        script.write_text(before + TRAIN)
        super().__init__(
            [sys.executable, str(script), endpoint, "--secret", *arguments],
            env=programs.environment,
            cwd=programs.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.stdout is not None
        assert self.stdout.readline() == "held\n"

    def __exit__(self, *details: Any) -> None:
        if self.poll() is None:
            self.kill()
        super().__exit__(*details)


@pytest.fixture(params=["local://", "server"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local://":
        yield "local://"
        return
    with ServerProcess(tmp_path / "server", GPU_BACKEND="simulated:1") as server:
        yield server.url


def test_a_program_and_a_command_are_seen_everywhere(programs: Programs, endpoint: str) -> None:
    is_local, at = endpoint == "local://", ("-e", endpoint)
    note = "" if is_local else ", unverified"
    with Train(programs, endpoint) as train:
        waiting = programs.start("run", *at, "--", "python", "wait.py", "--secret", "x")
        (row,) = eventually(lambda: programs.waiting(*at))
        (lease,) = programs.leases(*at)
        holder = {"user": USER, "host": host_name(), "pid": train.pid, "program": "train.py", "verified": is_local}
        assert lease["holder"] == holder
        assert lease["worker_id"].startswith("worker-")
        assert lease["user"] == (USER if is_local else None), "as before"
        assert row["holder"] == {**holder, "pid": waiting.pid, "program": "wait.py"}
        (seen,) = programs.json("status", *at)["endpoints"]
        assert [each["holder"] for each in seen["gpus"][0]["leases"]] == [holder]
        assert (seen["leases"][0]["holder"], seen["queue"][0]["holder"]) == (holder, row["holder"])

        told = f"held by {USER}'s train.py (pid {train.pid}{note}) for"
        assert told in row["reasons"][1]
        for arguments in ([], ["--request", row["request_id"]]):
            assert told in programs.call("explain", *at, *arguments).stdout
        name, other = f"{USER} train.py (pid {train.pid}{note})", f"{USER} wait.py (pid {waiting.pid}{note})"
        shown = {command: programs.call(command, *at, COLUMNS="40").stdout for command in ("status", "leases", "queue")}
        assert f"{name} (mine)" in shown["status"]
        assert other in shown["status"]
        assert name in shown["leases"]
        assert other in shown["queue"]
        assert row["request_id"] in shown["queue"]
        everything = [json.dumps(programs.json(command, *at)) for command in ("status", "leases", "queue")]
        assert "secret" not in "".join([*shown.values(), *everything, waiting.err])


def test_a_process_that_waits_for_itself_is_told_so(programs: Programs, endpoint: str) -> None:
    with Train(programs, endpoint, "again", "30") as train:
        (row,) = eventually(lambda: programs.waiting("-e", endpoint))
        own = f"this very process (pid {train.pid})"
        assert row["reasons"][0].endswith(f"of 1 GPU: 1 held; {own} holds it: release it first")
        explained = programs.call("explain", "-e", endpoint, "--request", row["request_id"]).stdout
        assert f"held by {own} for" in explained
        # A new request comes from another process.
        assert "this very process" not in programs.call("explain", "-e", endpoint).stdout


def test_its_timeout_says_so_too(programs: Programs, endpoint: str) -> None:
    with Train(programs, endpoint, "again", "1") as train:
        assert train.stdout is not None
        told = [train.stdout.readline() for _ in range(3)]
        assert told[0].startswith("no GPU in time for worker-")
        assert f"this very process (pid {train.pid}) holds it: release it first" in told[1]
        assert f"GPU 0: held by this very process (pid {train.pid}) for" in told[2]


def test_a_cell_that_is_run_again_is_told_so_while_it_waits(programs: Programs) -> None:
    """Without any logging configured, as in a notebook."""
    kernel = "import sys, types\nsys.modules['ipykernel.kernelapp'] = types.ModuleType('ipykernel.kernelapp')\n"
    programs.environment["JPY_SESSION_NAME"] = "/home/ada/Try.ipynb"
    with Train(programs, "local://", "again", "30", before=kernel) as train:
        assert train.stderr is not None
        warning = ""
        while "this very process" not in warning:
            warning = train.stderr.readline()
            assert warning, "it has ended"
        assert f"GPU 0: held by this very process (pid {train.pid}) for" in warning
        assert programs.leases()[0]["holder"]["program"] == "Try.ipynb"


def test_a_shell_that_waits_for_itself_is_told_so(programs: Programs) -> None:
    """Each `gpu-pool wait` holds the GPU from a process of its own, on behalf of the shell."""
    script = programs.folder / "work.sh"
    script.write_text("gpu-pool wait >/dev/null || exit\ngpu-pool wait --timeout 1s\necho $?\nread line\n")
    with subprocess.Popen(
        ["/bin/sh", str(script), "secret"],
        env=programs.environment,
        cwd=programs.folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == "124\n"
        (lease,) = programs.leases()
        assert (lease["holder"]["pid"], lease["holder"]["program"]) == (shell.pid, "work.sh")
        _, errors = shell.communicate("\n")
        assert f"this very process (pid {shell.pid}) holds it: release it first" in errors


class OlderServer(BaseHTTPRequestHandler):
    """Gives a lease to every request, but refuses a body with a key that it does not know, as older servers do."""

    bodies: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        if "holder" in body:
            reasons = ["holder: there is no such field"]
            self.answer(
                {"error": "invalid", "detail": f"this request is invalid: {reasons[0]}", "reasons": reasons}, 422
            )
            return
        gpus = [{"gpu_id": 0, "uuid": "GPU-a", "name": "A"}]
        self.answer({"lease_id": "lease-1", "request_id": body["request_id"], "fence": 1, "gpus": gpus}, 201)

    def do_DELETE(self) -> None:
        self.answer({"lease_id": "lease-1", "released": True}, 200)

    def answer(self, body: dict[str, Any], status: int) -> None:
        sent = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *_: object) -> None:
        pass


def test_a_server_that_does_not_know_holders_is_asked_without(programs: Programs) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), OlderServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = programs.call("run", "-e", f"http://127.0.0.1:{server.server_port}", "--", "echo", "ran")
        server.shutdown()
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    first, second = OlderServer.bodies
    assert first.pop("holder")["program"] == "echo"
    assert first == second
