"""Real users of this host, made for a test and removed after it, and programs that run as them.

A program imports everything as root first, since the interpreter and this checkout need not be readable for others, and
then becomes the user for good. The shared folder and the policy of these programs are the test's own, never the host's.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.waiting import eventually

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make users, and be somebody else")

_BECOME = """
import asyncio, concurrent.futures.thread, difflib, encodings.idna, grp, importlib, os, pkgutil, pwd, sys, traceback
from pathlib import Path
import gpu_worker_pool, gpu_worker_pool.state_directory
rooms = ("api", "broker", "cli", "client", "core", "hardware", "leases", "ledger")
for found in pkgutil.walk_packages(gpu_worker_pool.__path__, "gpu_worker_pool."):
    if found.name.split(".")[1] in rooms:
        importlib.import_module(found.name)
gpu_worker_pool.GPUWorkerPoolClient
if os.environ["GPU_BACKEND"] == "nvml":
    import pynvml
gpu_worker_pool.state_directory.SHARED_DIRECTORY = Path(sys.argv[1])
gpu_worker_pool.ledger.policy_file.HOST_FILE = Path(sys.argv[1]).with_name("policy.toml")
if sys.argv[2] != "root":
    user = pwd.getpwnam(sys.argv[2])
    os.setgroups(os.getgrouplist(user.pw_name, user.pw_gid))
    os.setgid(user.pw_gid)
    os.setuid(user.pw_uid)
os.umask(int(sys.argv[3], 8))
os.chdir("/")
"""
_COMMAND = """
sys.argv = [str(Path(sys.executable).with_name("gpu-pool")), *sys.argv[4:]]
from gpu_worker_pool.cli import main
main()
"""


class Lab:
    """A few users, and a folder that all of them can enter; `shared` does not exist at first."""

    def __init__(self, top: Path, users: Sequence[str], group: str) -> None:
        self.top = top
        self.users = users
        self.group = group
        self.shared = top / "shared"
        self._started: list[subprocess.Popen[str]] = []

    def environment(self, user: str, **variables: str) -> dict[str, str]:
        home = self.top / f"home-{user}"
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "GPU_BACKEND": "simulated:1",
            "COLUMNS": "400",
            **variables,
        }

    def _start(
        self, user: str, script: str, words: Sequence[str], umask: int, variables: dict[str, str]
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", _BECOME + script, str(self.shared), user, f"{umask:o}", *words],
            env=self.environment(user, **variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def start(self, user: str, *words: str, umask: int = 0o077, **variables: str) -> subprocess.Popen[str]:
        """`gpu-pool` with these words."""
        return self._start(user, _COMMAND, words, umask, variables)

    def gpu_pool(self, user: str, *words: str, umask: int = 0o077, **variables: str) -> Ended:
        return self._end(self.start(user, *words, umask=umask, **variables))

    def run_script(self, user: str, script: str, **variables: str) -> subprocess.Popen[str]:
        return self._start(user, script, (), 0o077, variables)

    def python(self, user: str, script: str, **variables: str) -> Ended:
        return self._end(self.run_script(user, script, **variables))

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> Ended:
        out, err = process.communicate(timeout=50)
        return Ended(process.returncode, out, err)

    def end(self) -> None:
        for process in self._started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it leads a session of its own
            process.wait(10)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self._started.clear()
        _end_processes_of(self.users)


class Ended:
    def __init__(self, status: int, out: str, err: str) -> None:
        self.status = status
        self.out = out
        self.err = err

    def __repr__(self) -> str:
        return f"<status {self.status}, out {self.out!r}, err {self.err!r}>"


@contextmanager
def lab(count: int) -> Iterator[Lab]:
    """Only as root."""
    mark = secrets.token_hex(3)
    users = [f"gpt{mark}{letter}" for letter in "abcdef"[:count]]
    group = f"gpt{mark}g"
    top = Path(tempfile.mkdtemp(prefix="gpu-pool-lab-", dir="/tmp"))  # others must be able to come in
    top.chmod(0o755)
    made = Lab(top, users, group)
    try:
        for user in users:
            subprocess.run(["/usr/sbin/useradd", "-M", "-U", user], check=True, capture_output=True)
            home = top / f"home-{user}"
            home.mkdir(mode=0o700)
            shutil.chown(home, user, user)
        yield made
    finally:
        made.end()
        for user in users:
            subprocess.run(["/usr/sbin/userdel", user], check=False, capture_output=True)
        subprocess.run(["/usr/sbin/groupdel", group], check=False, capture_output=True)
        shutil.rmtree(top, ignore_errors=True)


def _end_processes_of(users: Sequence[str]) -> None:
    """A user who still has processes cannot be removed. Nobody else has these numbers: they were made here."""
    uids = {user.pw_uid for user in pwd.getpwall() if user.pw_name in users}

    def end_them() -> bool:
        found = False
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdecimal() and entry.stat().st_uid in uids:
                    found = True
                    os.kill(int(entry.name), signal.SIGKILL)
        return not found

    eventually(end_them)
