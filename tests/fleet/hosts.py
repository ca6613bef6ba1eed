"""A fleet of real servers on one real PostgreSQL, on loopback or in network namespaces, for tests and the demo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tests.postgres_server import PostgresServer
from tests.server_process import Reply, ServerProcess
from tests.waiting import eventually

#: What every caller from another host must give; on loopback none is needed.
API_KEY = "a-key-of-the-tests-1234"
ADMIN_KEY = "an-admin-key-of-the-tests-1234"
KEY_LINE = "the-key-of-this-fleet-1234567890\n"


class FleetServer(ServerProcess):
    """One host of the fleet; killed, frozen, restarted."""

    def __init__(self, folder: Path, name: str, **more: Any) -> None:
        super().__init__(folder, arguments=["-m", "gpu_worker_pool", "serve"], wait=False, **more)
        self.name = name
        self.environment |= {"GPU_POOL_HOST_NAME": name, "GPU_POOL_URL": self.url}

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def freeze(self) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGCONT)

    def ask(self, method: str, path: str, body: Any = None, *, headers: Any = None, timeout: float = 40) -> Reply:
        keys = {} if self.address == "127.0.0.1" else {"Authorization": f"Bearer {ADMIN_KEY}"}
        return super().ask(method, path, body, headers=keys | dict(headers or {}), timeout=timeout)

    def fleet(self) -> dict[str, Any]:
        """As `GET /fleet`; empty while it does not answer."""
        try:
            reply = self.ask("GET", "/fleet", timeout=5)
        except OSError:
            return {}
        found: dict[str, Any] = reply.json if reply.status == 200 else {}
        return found


class FleetServers:
    """`with FleetServers(folder, url) as fleet:` starts `gpu-1` and `gpu-2`, candidates, and `gpu-3`, which joins."""

    def __init__(
        self,
        folder: Path,
        database: str,
        *,
        gpus: int = 4,
        names: Sequence[str] = ("gpu-1", "gpu-2", "gpu-3"),
        candidates: int = 2,
        namespaces: Sequence[tuple[str, str]] = (),
        **env: str,
    ) -> None:
        """`namespaces`: for each host the network namespace that it is in, and its address there."""
        folder.mkdir(parents=True, exist_ok=True)
        key_file = folder / "fleet.key"
        key_file.write_text(KEY_LINE)
        key_file.chmod(0o600)
        env = {
            "GPU_BACKEND": f"simulated:{gpus}",
            "GPU_POOL_FLEET_KEY_FILE": str(key_file),
            "GPU_POOL_ADMIN_KEYS": ADMIN_KEY,
            "ACCESS_LOG": "false",
            "LOG_LEVEL": "info",
        } | env
        self.servers: list[FleetServer] = []
        for number, name in enumerate(names):
            placed: dict[str, Any] = {}
            if namespaces:
                namespace, address = namespaces[number]
                placed = {"prefix": ["ip", "netns", "exec", namespace], "address": address}
                env |= {"GPU_POOL_FLEET_INSECURE": "true", "GPU_POOL_API_KEYS": f"tests:{API_KEY}"}
            self.servers.append(FleetServer(folder / name, name, **placed, **env))
        self.candidates = self.servers[:candidates]
        for server in self.servers:
            server.environment |= (
                {"GPU_POOL_FLEET_DATABASE": database}
                if server in self.candidates
                else {"GPU_POOL_FLEET_JOIN": ",".join(each.url for each in self.candidates)}
            )

    def __enter__(self) -> Self:
        try:
            for server in self.servers:
                server.start()
            self.wait_until_whole()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.kill()

    @property
    def urls(self) -> str:
        return ",".join(server.url for server in self.servers)

    def wait_until_whole(self, within_seconds: float = 40) -> dict[str, Any]:
        """Until every server says that all hosts are up."""

        def is_whole() -> dict[str, Any]:
            found: dict[str, Any] = {}
            for server in self.servers:
                assert server.is_running, f"{server.name} ended:\n{server.log}"
                found = server.fleet()
                up = {row["host"] for row in found.get("hosts", ()) if row["state"] == "up"}
                assert up == {each.name for each in self.servers}, f"{server.name} sees {found}:\n{server.log[-3000:]}"
                assert found["dispatcher"] is not None
            return found

        return eventually(is_whole, within_seconds)

    def dispatcher(self) -> FleetServer:
        """Who it is, by what a server says of whom it asks."""

        def find() -> FleetServer:
            for server in self.servers:
                name = (server.fleet().get("dispatcher") or {}).get("host")
                found = next((each for each in self.servers if each.name == name), None)
                if found is not None and found.is_running:
                    return found
            raise AssertionError("no server knows a dispatcher that runs")

        return eventually(find, 40)

    def all_free(self, within_seconds: float = 60) -> None:
        """Waits until every GPU is free, and nobody waits."""

        def check() -> bool:
            found = self.wait_until_whole()
            taken = [(row["host"], row["free"], row["gpus"]) for row in found["hosts"] if row["free"] != row["gpus"]]
            assert taken == []
            assert found["queue"] == []
            return True

        eventually(check, within_seconds)

    @property
    def logs(self) -> str:
        return "\n".join(f"--- {server.name}\n{server.log}" for server in self.servers)


def make_fleet_tables(url: str) -> None:
    subprocess.run([sys.executable, "-m", "gpu_worker_pool", "fleet", "init", url], check=True, capture_output=True)


def wait_for_lease(
    servers: Sequence[FleetServer], request_id: str, *, first: int = 0, within_seconds: float = 50, **more: Any
) -> tuple[FleetServer, dict[str, Any]]:
    """A lease, as a client gets it that polls one server until it is granted, and the next one if it is silent."""
    deadline, number, said = time.monotonic() + within_seconds, first, "nothing"
    while time.monotonic() < deadline:
        server = servers[number % len(servers)]
        body = {"request_id": request_id, "count": 1, "wait_seconds": 3} | more
        headers = {"X-Lease-Token": f"token-of-{request_id}-1234"}
        try:
            reply = server.ask("POST", "/leases", body, headers=headers, timeout=8)
        except OSError as error:
            said = str(error)
            number += 1
            time.sleep(0.1)
            continue
        if reply.status in (200, 201):
            return server, reply.json
        said = f"{reply.status} {reply.body.decode()}"
        assert reply.status in (202, 503), said
        if reply.status == 503:
            number += 1
            time.sleep(0.2)
    raise AssertionError(f"{request_id} was not granted a lease within {within_seconds} s: {said}")


def release(server: FleetServer, lease: dict[str, Any], request_id: str) -> Reply:
    headers = {"X-Lease-Token": f"token-of-{request_id}-1234"}
    return server.ask("DELETE", f"/leases/{lease['lease_id']}", headers=headers)


def address_of(database: str, *servers: PostgresServer) -> str:
    """A URL that leads to whichever of the servers can be written to."""
    hosts = ",".join(f"{server.address}:{server.port}" for server in servers)
    return f"postgresql://postgres@{hosts}/{database}"
