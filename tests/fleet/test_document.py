"""docs/FLEET.md leads from nothing to three hosts in one queue: typed as it stands there, in network namespaces."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.conftest import started
from tests.fleet.network import IP, Network, UnavailableNetworkError
from tests.postgres_server import PostgresServer, bin_folders
from tests.waiting import eventually

#: Several servers or programs are started, one after the other.
pytestmark = pytest.mark.timeout(180)

PAGE = (Path(__file__).parents[2] / "docs" / "FLEET.md").read_text(encoding="utf-8")
TUTORIAL = PAGE.partition("## Ten minutes to three hosts")[2].partition("\n## ")[0]
GPU_HOSTS = ("gpu-1", "gpu-2", "gpu-3")
#: The names of the page, and those of the namespaces.
HOSTS = {**{name: name for name in GPU_HOSTS}, "db.lab": "db"}
#: What is typed after `gpu-1$ `, in the order of the page; what happens on `db` needs its administrator.
TYPED = [
    (host, command)
    for block in re.findall(r"^```console\n(.*?)^```$", TUTORIAL, re.M | re.S)
    for host, command in re.findall(r"^(\S+)\$ (.+)$", block, re.M)
]


class Shell:
    """A shell on one host: its network, hostname, home and ledger are its own."""

    def __init__(self, host: str, network: Network, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self._log = (folder / "log").open("wb")
        inherited = {name: os.environ[name] for name in ("LANG", "LC_ALL", "TMPDIR") if name in os.environ}
        self.process = subprocess.Popen(
            [IP, "netns", "exec", network.namespace(host), "unshare", "--uts", "bash"],
            env=inherited
            | {
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "HOME": str(folder),
                "GPU_BACKEND": "simulated:4",
                "GPU_POOL_STATE_DIR": str(folder / "state"),
                "RELOAD": "false",
            },
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        assert self.type(f"hostname {host}") == 0

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def type(self, command: str, into: str = "") -> int | None:
        """Its exit status; None for what runs in the background."""
        status = self.folder / "status"
        status.unlink(missing_ok=True)
        assert self.process.stdin is not None
        is_background = command.endswith("&")
        self.process.stdin.write(f"{{ {command}; }} > {into}\n" if into else f"{command}\n")
        self.process.stdin.write(f"echo $? > {status}.new; mv {status}.new {status}\n")
        self.process.stdin.flush()
        eventually(status.exists, 60)
        return None if is_background else int(status.read_text())

    def json(self, command: str) -> Any:
        answer = self.folder / "answer"
        self.type(command, into=str(answer))
        return json.loads(answer.read_text() or "{}")

    def close(self) -> None:
        os.killpg(self.process.pid, 9)
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._log.close()


@pytest.fixture
def network() -> Iterator[Network]:
    """With the page's names for the hosts, known in each of them."""
    try:
        with Network([*HOSTS.values()]) as made:
            names = "127.0.0.1 localhost\n"
            names += "".join(f"{made.address(namespace)} {name}\n" for name, namespace in HOSTS.items())
            folders = [Path("/etc/netns") / made.namespace(host) for host in made.hosts]
            try:
                for folder in folders:
                    folder.mkdir(parents=True)
                    (folder / "hosts").write_text(names)
                yield made
            finally:
                for folder in folders:
                    shutil.rmtree(folder, ignore_errors=True)
    except UnavailableNetworkError as error:
        pytest.skip(f"no network namespaces: {error}")


@pytest.fixture
def postgres(network: Network) -> Iterator[PostgresServer]:
    """As the page's first step leaves it."""
    first = started(next(iter(bin_folders()), "18"))
    first.execute("CREATE ROLE pool LOGIN PASSWORD 'SECRET'", "CREATE DATABASE gpupool OWNER pool")
    first.stop()
    (first.data / "pg_hba.conf").write_text("host gpupool pool 10.77.0.0/24 scram-sha-256\n")
    first.namespace, first.address = network.place("db")
    first.port = 5432
    first.start(wait=False)
    try:
        yield first
    finally:
        first.remove()


def test_the_page_has_what_is_typed() -> None:
    assert {host for host, _ in TYPED} == set(GPU_HOSTS)
    assert sum("gpu-pool serve" in command for _, command in TYPED) == 3


def test_a_new_user_gets_three_hosts_into_one_queue(network: Network, postgres: PostgresServer, tmp_path: Path) -> None:
    shells = {host: Shell(host, network, tmp_path / host) for host in GPU_HOSTS}
    try:
        eventually(lambda: "ready to accept" in postgres.log)
        for host, command in TYPED:
            if command.startswith(("gpu-pool fleet status", "gpu-pool doctor")):
                wait_until_whole(shells[host])
            status = shells[host].type(command)
            assert status in (0, None), f"{command}: {shells[host].log}"
            if "key rotate" in command:
                for other in GPU_HOSTS[1:]:
                    shutil.copy(shells[host].folder / "fleet.key", shells[other].folder / "fleet.key")
        (program,) = re.findall(r"^```python\n(.*?)^```$", TUTORIAL, re.M | re.S)
        for shell in shells.values():
            (shell.folder / "program.py").write_text(program)
            assert shell.type("python program.py") == 0, shell.log
            assert re.search(r"^GPU gpu-\d:\d+ of gpu-\d$", shell.log, re.M), shell.log
        assert all("SECRET" not in shell.log for shell in shells.values())
    finally:
        for shell in shells.values():
            shell.close()


def wait_until_whole(shell: Shell) -> None:
    def is_whole() -> bool:
        found = shell.json("gpu-pool fleet status --json -e http://localhost:8000 2>/dev/null")
        up = {row["host"] for row in found.get("hosts", ()) if row["state"] == "up"}
        assert up == set(GPU_HOSTS), f"{found}\n{shell.log}"
        return found["dispatcher"] is not None

    eventually(is_whole, 60)
