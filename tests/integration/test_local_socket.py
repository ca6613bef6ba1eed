"""`local://` where this host has a server with a Unix socket: it is asked, checked, and waited for."""

from __future__ import annotations

import json
import os
import pwd
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.programs import Programs
from tests.leasing import until
from tests.socket_users import NAMES, SocketServer, UserProcess, needs_root, open_folder, requests_in
from tests.waiting import eventually

from gpu_worker_pool import GPUWorkerPoolClient
from gpu_worker_pool.api.client import APIClient
from gpu_worker_pool.api.transport import make_session
from gpu_worker_pool.api.unix_socket import SOCKET_URL
from gpu_worker_pool.errors import (
    GPUWorkerPoolError,
    NetworkRetryableError,
    ServiceRefusedError,
    WorkerTimeoutError,
)

ME = pwd.getpwuid(os.getuid()).pw_name
#: The exit status of `gpu-pool` where no endpoint answered.
UNAVAILABLE = 69


@pytest.fixture
def folder() -> Iterator[Path]:
    with open_folder() as made:
        yield made


@pytest.fixture
def server(folder: Path) -> Iterator[SocketServer]:
    with SocketServer(folder, GPU_BACKEND="simulated:2") as started:
        yield started


@pytest.fixture
def programs(folder: Path, tmp_path: Path) -> Iterator[Programs]:
    """`gpu-pool` of a user who has configured nothing but the path, which nobody else has."""
    path = str(folder / "run" / "gpu-pool.sock")
    home = {"HOME": str(tmp_path), "XDG_STATE_HOME": ""}
    with Programs(tmp_path, GPU_BACKEND="", GPU_POOL_STATE_DIR="", GPU_POOL_SOCKET=path, **home) as started:
        yield started


def leases(server: SocketServer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.on_socket("GET", "/leases").body["leases"]
    return found


def client_of(server: SocketServer, **environ: str) -> GPUWorkerPoolClient:
    return GPUWorkerPoolClient("local://", polling_interval=0.2, environ={"GPU_POOL_SOCKET": server.socket, **environ})


async def health_of(path: str) -> dict[str, Any]:
    async with make_session(unix_socket=path) as session:
        return await APIClient(SOCKET_URL, lambda: session, timeout_seconds=10).health()


# --- the command line ---


def test_every_view_and_run_go_through_it(server: SocketServer, programs: Programs, tmp_path: Path) -> None:
    holding = programs.holding("-n", 2, "--label", "mine")
    (row,) = leases(server)
    assert (row["user"], row["label"], len(row["gpus"])) == (ME, "mine", 2)
    waiting = programs.start("run", "--", "true")
    (waits,) = eventually(programs.waiting)
    assert [each["lease_id"] for each in programs.leases()] == [row["lease_id"]]
    assert "0 free, 1 waiting" in programs.call("status").stdout
    assert "held" in programs.call("explain").stdout
    assert programs.call("explain", "--request", waits["request_id"]).returncode == 0
    assert programs.call("top", "-n", 1).returncode == 0
    found = json.loads(programs.call("doctor", "--json").stdout)["checks"]
    assert {"ok"} == {each["status"] for each in found if each["check"] in ("endpoints", "local")}
    assert not any(each["check"] in ("state directory", "ledger") for each in found)
    assert programs.call("release", row["lease_id"]).returncode == 0
    assert waiting.wait(30) == 0
    holding.kill()
    # Nothing was made for this user alone.
    assert not (tmp_path / ".local").exists()


def test_runs_inside_a_lease_divide_it(server: SocketServer, programs: Programs) -> None:
    """Without a token: the kernel says that the lease around them is this user's."""
    inner = f"{sys.executable} -m gpu_worker_pool run -q -- sleep 60"
    programs.start("run", "-n", "2", "--", "sh", "-c", f"{inner} & {inner} & wait")
    eventually(lambda: len(leases(server)) == 3)
    whole, *parts = leases(server)
    assert [row["within"] for row in (whole, *parts)] == [None, whole["lease_id"], whole["lease_id"]]
    assert sorted(row["gpus"][0]["gpu_id"] for row in parts) == [0, 1]


def test_a_program_inside_a_lease_gets_a_part_of_it(server: SocketServer, programs: Programs) -> None:
    inner = f"{sys.executable} -m gpu_worker_pool run -- sh -c 'echo $CUDA_VISIBLE_DEVICES $GPU_POOL_OUTER_LEASES'"
    both = programs.call("run", "-n", 2, "--", "sh", "-c", f"echo $GPU_POOL_LEASE_ID; {inner}")
    assert both.returncode == 0, both.stderr
    outer_lease, part = both.stdout.splitlines()
    assert part == f"0 {outer_lease}"
    assert leases(server) == []
    stale = programs.call("run", "--", "sh", "-c", "echo $GPU_POOL_LEASE_ID", GPU_POOL_LEASE_ID="lease-99")
    assert (stale.returncode, stale.stdout.startswith("lease-")) == (0, True)
    assert stale.stdout != "lease-99\n"


def test_visible_devices_limit_it(server: SocketServer, programs: Programs) -> None:
    done = programs.call("run", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES", CUDA_VISIBLE_DEVICES="1")
    assert done.stdout == "1\n", done.stderr
    assert server.on_socket("GET", "/leases").status == 200
    hidden = programs.call("run", "-n", 2, "--", "true", CUDA_VISIBLE_DEVICES="1")
    assert hidden.returncode == 65
    explained = programs.json("explain", "-n", 1)
    assert explained["impossible"] == []
    limited = json.loads(programs.call("explain", "--json", CUDA_VISIBLE_DEVICES="1").stdout)
    assert [len(gpu["obstacles"]) for gpu in limited["gpus"]] == [1, 0]


async def test_a_killed_lease_process_frees_its_gpu_at_once(server: SocketServer, programs: Programs) -> None:
    programs.holding("-n", 2, "--ttl", "1h")
    (row,) = leases(server)
    (request,) = (await requests_in(server)).values()
    assert request.origin is not None
    assert request.origin.pid is not None
    os.kill(request.origin.pid, signal.SIGKILL)
    eventually(lambda: all(each["lease_id"] != row["lease_id"] or each["state"] != "held" for each in leases(server)))


@pytest.mark.parametrize("winner", [{"GPU_BACKEND": "simulated:1"}, {"GPU_POOL_STATE_DIR": "chosen"}])
def test_a_state_directory_and_simulated_gpus_come_first(
    server: SocketServer, programs: Programs, tmp_path: Path, winner: dict[str, str]
) -> None:
    chosen = {name: value.replace("chosen", str(tmp_path / "chosen")) for name, value in winner.items()}
    backend = {"GPU_BACKEND": "simulated:1"} | chosen
    done = programs.call("run", "--", "true", **backend)
    assert done.returncode == 0, done.stderr
    assert "1 x Simulated GPU" in programs.call("status", **backend).stdout
    if "GPU_POOL_STATE_DIR" in winner:
        # Without a driver it is an error of this host, not an answer of the server.
        assert "local://" not in programs.call("status", **chosen).stdout
        assert programs.call("status", **chosen).returncode != 0
    assert server.on_socket("GET", "/leases").body["leases"] == []


# --- a server that is down ---


def _stopped(folder: Path) -> SocketServer:
    """As one that was killed: it leaves its file."""
    server = SocketServer(folder)
    Path(server.socket).parent.mkdir(0o755)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(server.socket)
    return server


def test_what_cannot_wait_fails_at_once_and_run_waits(programs: Programs, folder: Path, tmp_path: Path) -> None:
    server = _stopped(folder)
    for arguments in (["status"], ["explain"], ["run", "--no-wait", "--", "true"]):
        failed = programs.call(*arguments)
        assert failed.returncode == UNAVAILABLE, arguments
        assert f"nothing listens on {server.socket} (connection refused)" in failed.stderr, arguments
    assert programs.call("release", "lease-1").returncode == UNAVAILABLE
    doctor = programs.call("doctor")
    assert doctor.returncode == 1
    assert "curl --unix-socket" in doctor.stdout
    waiting = programs.start("run", "--", "true")
    eventually(lambda: "nothing listens" in waiting.err)
    assert waiting.poll() is None
    with server:
        assert waiting.wait(30) == 0
    assert not (tmp_path / ".local").exists()


async def test_a_missing_socket_that_was_named_is_an_error(folder: Path) -> None:
    with pytest.raises(NetworkRetryableError, match=r"nothing listens on .*no such file"):
        await health_of(str(folder / "run" / "gpu-pool.sock"))
    (folder / "run").mkdir(0o755)
    with pytest.raises(NetworkRetryableError, match=r"nothing listens on .*no such file"):
        await health_of(str(folder / "run" / "gpu-pool.sock"))


# --- a server that must not be trusted ---


async def test_a_folder_that_others_can_write_to_is_refused(server: SocketServer, programs: Programs) -> None:
    assert (await health_of(server.socket))["status"] == "healthy"
    run = Path(server.socket).parent
    for mode in (0o775, 0o1777):
        run.chmod(mode)
        with pytest.raises(ServiceRefusedError, match=f"other users can write to {run}") as refused:
            await health_of(server.socket)
        # Typed for /tmp, it would close /tmp to all users.
        assert (f"sudo chmod go-w {run}" in str(refused.value)) == (mode == 0o775)
    done = programs.call("run", "--", "true")  # does not wait for it
    assert (done.returncode, "is refused" in done.stderr) == (UNAVAILABLE, True)
    assert leases(server) == []


def _listen(path: str) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    _listening.append(listener)


def _received() -> bytes:
    """What the connections that were made have sent."""
    (listener,) = _listening
    listener.settimeout(20)
    connection, _ = listener.accept()
    connection.settimeout(20)
    with connection:
        return connection.recv(1000)


_listening: list[socket.socket] = []


async def test_the_server_of_another_user_is_refused_and_sent_nothing(folder: Path) -> None:
    needs_root()
    run, path = folder / "run", str(folder / "run" / "gpu-pool.sock")
    run.mkdir(0o755)
    first, second = (pwd.getpwnam(name).pw_uid for name in NAMES)
    os.chown(run, first, -1)
    impostor = UserProcess(NAMES[0])
    try:
        impostor.do(_listen, path)
        os.chown(run, second, -1)
        with pytest.raises(ServiceRefusedError, match=f"runs as user {first}, but its folder is that of user {second}"):
            await health_of(path)
        assert impostor.do(_received) == b""
    finally:
        impostor.kill()


# --- Python ---


async def test_the_client_gets_leases_and_readings_through_it(server: SocketServer) -> None:
    async with client_of(server) as client:
        assignment = await client.request_gpu(timeout=20)
        (row,) = leases(server)
        assert (row["user"], row["gpus"][0]["gpu_id"]) == (ME, assignment.gpu_id)
        assert assignment.lease_id == row["lease_id"]
        await until(lambda: client.get_pool_status().total_gpus == 2)
        await client.release_gpu(assignment)
        assert leases(server) == []


async def test_the_client_sees_what_its_environment_shows(server: SocketServer) -> None:
    async with client_of(server, CUDA_VISIBLE_DEVICES="1") as client:
        assignment = await client.request_gpu(timeout=20)
        assert assignment.gpu_id == 1
        await until(lambda: client.get_pool_status().total_gpus == 1)
        with pytest.raises(WorkerTimeoutError, match="CUDA_VISIBLE_DEVICES=1 limits the choice"):
            await client.request_gpu(timeout=0)
        inside = {"GPU_POOL_LEASE_ID": assignment.lease_id or "", "CUDA_VISIBLE_DEVICES": "1"}
        async with client_of(server, **inside) as other:
            inner = await other.request_gpu(timeout=20)
            assert (inner.gpu_id, inner.lease_id, len(leases(server))) == (1, assignment.lease_id, 1)
            await until(lambda: other.get_pool_status().total_gpus == 1)
            await other.release_gpu(inner)
        assert len(leases(server)) == 1


async def test_the_client_waits_for_a_server_that_is_down(folder: Path) -> None:
    server = _stopped(folder)
    async with client_of(server) as client:
        with pytest.raises(GPUWorkerPoolError, match="nothing listens"):
            await client.request_gpu(timeout=0.5)
        with server:
            assignment = await client.request_gpu(timeout=30)
            assert leases(server)[0]["lease_id"] == assignment.lease_id
            await client.release_gpu(assignment)
