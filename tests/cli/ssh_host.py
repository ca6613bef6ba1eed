"""Another user's account behind a real sshd on loopback: the "other host" of the tests of `gpu-pool run --ssh`."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Self

from tests.server_process import free_port
from tests.waiting import eventually

#: Where programs of another user put their files.
_TEMPORARY = Path("/tmp")  # noqa: S108


def _path(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin:/sbin")


def why_not() -> str | None:
    """Why these tests cannot run here."""
    if os.geteuid() != 0:
        return "needs root, to make another user and start sshd for it"
    missing = [name for name in ("sshd", "ssh", "ssh-keygen", "useradd", "userdel") if _path(name) is None]
    if missing:
        return f"needs {', '.join(missing)}: apt-get install openssh-server openssh-client"
    return None


class SSHHost:
    """`with SSHHost() as host: … host.target … host.program`; the user and all its processes are gone afterwards."""

    def __init__(self, *settings: str) -> None:
        self._settings = settings
        self.user = f"gpu-pool-{os.getpid()}"
        self.target = f"{self.user}@127.0.0.1"
        # Not in pytest's folder, which the user may not enter.
        self.folder = Path(tempfile.mkdtemp(prefix="gpu-pool-sshd-", dir=_TEMPORARY))
        self._sshd: subprocess.Popen[bytes] | None = None
        #: What somebody left there whose number this user may get.
        self._older_files = set(_TEMPORARY.iterdir())

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def program(self) -> str:
        """For `GPU_POOL_SSH`."""
        return f"ssh -F {self.folder}/config"

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._sshd is not None:
            self._sshd.kill()
            self._sshd.wait(10)
        try:
            number = pwd.getpwnam(self.user).pw_uid
        except KeyError:
            pass
        else:
            for pid in self._pids(number):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            eventually(lambda: not self._pids(number))
            subprocess.run([_path("userdel"), self.user], check=True, capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        self.folder.chmod(0o755)
        port = free_port()
        # `*`: no password, but not locked. The shell is the plainest.
        account = [_path("useradd"), "-M", "-d", str(self.home), "-s", "/bin/sh", "-p", "*", self.user]
        subprocess.run(account, check=True, capture_output=True)
        self.home.mkdir()
        shutil.chown(self.home, self.user)
        for name in ("host_key", "key"):
            subprocess.run([_path("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name], check=True)
        shutil.copy(self.folder / "key.pub", self.folder / "authorized_keys")
        (self.folder / "sshd_config").write_text(
            f"Port {port}\nListenAddress 127.0.0.1\nHostKey {self.folder}/host_key\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {self.folder}/authorized_keys\nStrictModes no\nPasswordAuthentication no\n"
            + "".join(f"{line}\n" for line in self._settings)
        )
        host_key = (self.folder / "host_key.pub").read_text()
        (self.folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {host_key}")
        (self.folder / "config").write_text(
            f"Port {port}\nIdentityFile {self.folder}/key\nIdentitiesOnly yes\nIdentityAgent none\n"
            f"UserKnownHostsFile {self.folder}/known_hosts\nGlobalKnownHostsFile /dev/null\nStrictHostKeyChecking yes\n"
        )
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd insists on it
        with (self.folder / "log").open("wb") as log:
            self._sshd = subprocess.Popen([_path("sshd"), "-D", "-e", "-f", self.folder / "sshd_config"], stderr=log)

        def answers() -> bool:
            words = [*self.program.split(), self.target, "true"]
            return subprocess.run(words, capture_output=True, check=False, stdin=subprocess.DEVNULL).returncode == 0

        eventually(answers)

    def processes(self) -> list[str]:
        """The command lines of the user's processes, without sshd's own."""
        found = []
        for pid in self._pids(pwd.getpwnam(self.user).pw_uid):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                found.append(" ".join(map(os.fsdecode, words)).strip())
        return [line for line in found if line and not line.startswith("sshd")]

    def own_files(self) -> list[Path]:
        """What the user has in the folder for temporary files."""
        number = pwd.getpwnam(self.user).pw_uid
        found = []
        for path in set(_TEMPORARY.iterdir()) - self._older_files:
            with suppress(OSError):
                if path.stat().st_uid == number:
                    found.append(path)
        return found

    @staticmethod
    def _pids(user_number: int) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdecimal() and entry.stat().st_uid == user_number:
                    found.append(int(entry.name))
        return found
