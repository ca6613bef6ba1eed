"""Runs nvidia-smi, or a tool like it, for its output: one process at a time, and never beyond the deadline."""

from __future__ import annotations

import errno
import os
import selectors
import shutil
import signal
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.errors import DriverError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_LARGEST_OUTPUT_BYTES: Final = 8 * 1024 * 1024
#: Time for remaining output after the exit, if a child of the tool keeps the pipe open.
_GRACE_AFTER_EXIT_SECONDS: Final = 0.1
#: SIGKILL works at once, or never if the driver hangs.
_GRACE_AFTER_KILL_SECONDS: Final = 0.5
_LOOK_AGAIN_SECONDS: Final = 0.02


@dataclass(frozen=True, slots=True)
class ToolOutput:
    exit_status: int
    stdout: str
    stderr: str

    @property
    def everything(self) -> str:
        """Errors are on stdout or stderr, depending on the version."""
        return f"{self.stdout}\n{self.stderr}"


class Tool:
    """Starts no second process while one cannot be killed."""

    def __init__(
        self,
        command: str,
        timeout_seconds: float,
        environment: Mapping[str, str],
        kill_group: Callable[[int, int], None],
        *,
        not_found: str = "nvidia_smi_not_found",
        driver: str = "NVIDIA",
    ) -> None:
        """`not_found`: the code of the error if there is no such tool. `driver`: what brings it."""
        self._command = command
        self._name = os.path.basename(command)  # noqa: PTH119  # as it is called
        self._not_found = not_found
        self._driver = driver
        self._timeout_seconds = timeout_seconds
        self._environment = environment
        self._kill_group = kill_group
        self._unkillable: subprocess.Popen[bytes] | None = None
        self._running: subprocess.Popen[bytes] | None = None
        self._is_interrupted = False

    def run(self, arguments: Sequence[str], deadline: float) -> ToolOutput:
        if self._unkillable is not None:
            if self._unkillable.poll() is None:
                raise self._hangs()
            self._unkillable = None
        if time.monotonic() >= deadline:
            raise self._hangs()
        process = self._running = self._start(arguments)
        try:
            if self._is_interrupted:
                raise DriverError(f"{self._name} was not awaited: the reader is stopping.", code="interrupted")
            try:
                written = _collect(process, deadline)
            finally:
                self._end(process)
        except TimeoutError:
            raise self._hangs() from None
        if written is None:
            megabytes = _LARGEST_OUTPUT_BYTES // 1024**2
            raise DriverError(f"{self._name} wrote more than {megabytes} MiB: run it by hand to see what is wrong.")
        return ToolOutput(process.returncode, *written)

    def interrupt(self) -> None:
        """Called from another thread."""
        self._is_interrupted = True
        process = self._running
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                self._kill_group(process.pid, signal.SIGKILL)

    def _hangs(self) -> DriverError:
        message = f"{self._name} did not answer within {self._timeout_seconds:g} s and was stopped: look for "
        message += "Xid errors" if self._driver == "NVIDIA" else "errors of amdgpu"
        message += " in the kernel log, and restart the host if it happens again."
        if self._unkillable is not None:
            message = f"{self._name} (pid {self._unkillable.pid}) did not answer within {self._timeout_seconds:g} s and"
            message += " cannot be killed, so no other is started: the driver hangs; restart the host."
        return DriverError(message, code="driver_hangs")

    def _start(self, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        path = find_tool(self._command, self._environment, self._not_found, self._driver)
        try:
            return subprocess.Popen(  # noqa: S603 - the operator chose the program; there is no shell
                [path, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**self._environment, "LC_ALL": "C"},
                process_group=0,
                bufsize=0,
            )
        except OSError as error:
            if error.errno == errno.EACCES:
                raise _may_not_execute(path) from error
            reason = error.strerror or type(error).__name__
            raise DriverError(f"{path} cannot be run ({reason}): install the version of this host's driver.") from error

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Kill its whole group: until the process is reaped here, its group id is not reused."""
        with suppress(ProcessLookupError, PermissionError):
            self._kill_group(process.pid, signal.SIGKILL)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        try:
            process.wait(_GRACE_AFTER_KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self._unkillable = process
            # Reap it when it ends, even without another read.
            threading.Thread(target=process.wait, name=f"reap {self._name} {process.pid}", daemon=True).start()


def find_tool(
    command: str,
    environment: Mapping[str, str],
    not_found: str = "nvidia_smi_not_found",
    driver: str = "NVIDIA",
) -> str:
    # An empty entry of PATH would mean the working directory.
    path = os.pathsep.join(filter(None, environment.get("PATH", os.defpath).split(os.pathsep)))
    if (found := shutil.which(command, path=path)) is not None:
        return found
    if (file := shutil.which(command, os.F_OK, path)) is not None:
        raise _may_not_execute(file)
    message = f"{command} was not found: install the {driver} driver, or add the tool's folder to PATH."
    raise DriverError(message, code=not_found)


def _may_not_execute(path: str) -> DriverError:
    return DriverError(f"{path} is not executable for this user: change its permissions.", code="permission_denied")


def _collect(process: subprocess.Popen[bytes], deadline: float) -> tuple[str, str] | None:
    """Its output; None if it is too long; raises TimeoutError at the deadline."""
    assert process.stdout is not None
    assert process.stderr is not None
    stdout, stderr = bytearray(), bytearray()
    written = {process.stdout.fileno(): stdout, process.stderr.fileno(): stderr}
    give_up_at, has_exited = deadline, False
    with selectors.DefaultSelector() as selector:
        for pipe in written:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map() or not has_exited:
            if not has_exited and _has_exited(process.pid):
                has_exited = True
                # A child of the tool may keep the pipes open forever.
                give_up_at = time.monotonic() + _GRACE_AFTER_EXIT_SECONDS
            if time.monotonic() >= give_up_at:
                if not has_exited:
                    raise TimeoutError
                break
            if not selector.get_map():
                time.sleep(0.001)
                continue
            for key, _ in selector.select(_LOOK_AGAIN_SECONDS):
                received = os.read(key.fd, 65536)
                if not received:
                    selector.unregister(key.fd)
                written[key.fd] += received
            if sum(map(len, written.values())) > _LARGEST_OUTPUT_BYTES:
                return None
    return stdout.decode(errors="replace"), stderr.decode(errors="replace")


def _has_exited(pid: int) -> bool:
    """Does not reap it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # our program ignores SIGCHLD
        return True
