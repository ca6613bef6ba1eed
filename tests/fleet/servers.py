"""Several real servers as hosts of one fleet, for tests: each a process with simulated GPUs and a ledger of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from gpu_worker_pool.fleet.database_care import make_tables
from gpu_worker_pool.fleet.postgres import PostgresStore
from tests.server_process import Reply, ServerProcess
from tests.waiting import eventually

KEY = "a key of this fleet alone"


class Fleet:
    """`servers` by name; the first `candidates` of them know the database."""

    def __init__(self, folder: Path, database: str, *, hosts: int, candidates: int, gpus: int, **env: str) -> None:
        store = PostgresStore(database)
        make_tables(store)
        store.close()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "key").write_text(KEY)
        self.servers: dict[str, ServerProcess] = {}
        for number in range(hosts):
            name = f"gpu-{number + 1}"
            is_candidate = number < candidates
            join = ",".join(server.url for server in list(self.servers.values())[:candidates])
            own = {"GPU_POOL_FLEET_DATABASE": database} if is_candidate else {"GPU_POOL_FLEET_JOIN": join}
            self.servers[name] = ServerProcess(
                folder / name,
                GPU_BACKEND=f"simulated:{gpus}",
                GPU_POOL_HOST_NAME=name,
                GPU_POOL_FLEET_KEY_FILE=str(folder / "key"),
                REFRESH_INTERVAL="0.5",
                wait=False,
                ACCESS_LOG="false",
                **own,
                **env,
            )

    def __getitem__(self, name: str) -> ServerProcess:
        return self.servers[name]

    @property
    def logs(self) -> str:
        return "\n".join(f"--- {name}\n{server.log}" for name, server in self.servers.items())

    def seen_by(self, name: str) -> dict[str, Any]:
        reply = self[name].get("/fleet")
        assert reply.status == 200, reply
        body: dict[str, Any] = reply.json
        return body

    def until_up(self, *names: str, by: str = "gpu-1") -> dict[str, Any]:
        """`GET /fleet`, once these hosts are up and there is a dispatcher."""
        wanted = set(names or self.servers)

        def look() -> dict[str, Any]:
            found = self.seen_by(by)
            assert found["dispatcher"] is not None, found
            up = {row["host"] for row in found["hosts"] if row["state"] == "up" and row["gpus"]}
            assert wanted <= up, found
            return found

        return eventually(look)

    def request(self, by: str, request_id: str, token: str = "", **body: Any) -> Reply:
        headers = {"X-Lease-Token": token} if token else {}
        return self[by].ask("POST", "/leases", {"request_id": request_id, **body}, headers=headers, timeout=40)

    def release(self, by: str, lease: dict[str, Any]) -> Reply:
        return self[by].ask("DELETE", f"/leases/{lease['lease_id']}", headers={"X-Lease-Token": lease["token"]})


@contextmanager
def fleet_of(
    folder: Path, database: str, *, hosts: int = 3, candidates: int = 2, gpus: int = 2, **env: str
) -> Iterator[Fleet]:
    fleet = Fleet(folder, database, hosts=hosts, candidates=candidates, gpus=gpus, **env)
    with ExitStack() as stack:
        for server in fleet.servers.values():
            stack.enter_context(server)
        try:
            fleet.until_up()
        except AssertionError as error:
            raise AssertionError(f"{error}\n{fleet.logs}") from None
        yield fleet
