"""The lease process's connection to the host of a remote command: it starts the watching session and talks to it.

The lease process has it because it goes on while `gpu-pool` is stopped (Ctrl-Z), and outlives it if that is killed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpu_worker_pool.cli.exits import CommandError, Status
from gpu_worker_pool.cli.running.remote_script import BOOTSTRAP, silence_seconds
from gpu_worker_pool.cli.running.ssh import ssh_environment, watch_words

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from gpu_worker_pool.leases.channel import Channel

#: How often a sign of life is sent within the time after which the other side would count the connection as gone.
_BEATS_PER_SILENCE: Final = 4
#: The other side needs at most this long to end the command and say so.
_OVER_SECONDS: Final = 25.0
#: Far more than an answer needs. Before the first one, login scripts may write anything.
_MOST_BYTES: Final = 1 << 16
_ANSWER: Final = b"gpu-pool-watch "
_MOST_LEFT: Final = 1000


class _Remains(NamedTuple):
    """What the other side says when the command is over."""

    #: The command's exit status, 128+N for a signal; None if it did not end by itself.
    status: int | None
    #: Processes that it left running.
    left: list[int]


class RemoteWatch:
    """One per lease; `gpu-pool` says by messages what it is to do, and gets the answers."""

    def __init__(self, target: str, ttl_seconds: float, channel: Channel) -> None:
        self._target = target
        self._silence_seconds = silence_seconds(ttl_seconds)
        self._channel = channel
        loop = asyncio.get_running_loop()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._received = b""
        self._ready: asyncio.Future[bool] = loop.create_future()
        #: None: the connection is gone.
        self._over: asyncio.Future[_Remains | None] = loop.create_future()
        self._tasks: set[asyncio.Task[None]] = set()

    def on_message(self, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "connect":
                self._start(self._connect(Path(message["folder"])))
            case "over":
                self._start(self._report_remains(message["ending"]))
            case kind:
                self._send(kind, message["name"])

    async def end_command(self) -> bool:
        """End what is left of it; whether nothing is left, as far as the other side could say so."""
        if not (self._ready.done() and self._ready.result()):
            return True  # it has not begun, and cannot
        remains = await self._remains()
        return remains is not None and not remains.left

    def close(self) -> None:
        """If the command still runs, the other side ends it."""
        for task in self._tasks:
            task.cancel()
        if self._process is not None:
            self._disconnected()
            self._process.kill()
            self._process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, folder: Path) -> None:
        """The folder has the scripts to send, and gets the socket that the command's session uses."""
        self._folder = folder
        scripts = folder / "scripts"
        try:
            self._open([*watch_words(str(folder / "ssh"), self._silence_seconds), "--", self._target, BOOTSTRAP])
            data = scripts.read_bytes()
        except (OSError, CommandError) as error:
            self._channel.send("failed", status=int(Status.FAILED), text=f"ssh cannot be started: {error}")
            return
        scripts.unlink()
        await asyncio.to_thread(self._write_all, data)
        if await self._ready:
            self._start(self._beat())
            self._channel.send("connected")
        else:  # ssh has said more on stderr
            text = f"ssh could not connect to {self._target}, or could not start a shell there"
            self._channel.send("failed", status=int(Status.UNAVAILABLE), text=text)

    async def _report_remains(self, ending: str) -> None:
        remains = await self._remains(ending)
        if remains is None:
            self._channel.send("disconnected")
        else:
            self._channel.send("ended", **remains._asdict())

    async def _remains(self, ending: str = "-") -> _Remains | None:
        """`ending`: the signal for what the command left behind, if a signal ended it."""
        if not self._over.done():
            self._send("over", ending)
        with suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(self._over), _OVER_SECONDS)
        return None

    # --- the session ---

    def _open(self, command: list[str]) -> None:
        # A change of the terminal's size reaches it; signals that are the command's do not, as we block them.
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGWINCH, signal.SIGCHLD])
        try:
            self._process = subprocess.Popen(  # noqa: S603  # the user's own ssh
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ssh_environment()
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        asyncio.get_running_loop().add_reader(self._process.stdout.fileno(), self._read)

    def _send(self, what: str, argument: str = "") -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # a full pipe: the connection is stuck; or it is gone, which is noticed
                os.write(self._process.stdin.fileno(), f"{what} {argument}\n".encode())

    def _write_all(self, data: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended, which is noticed at its output
            self._process.stdin.write(data)
            self._process.stdin.flush()
            os.set_blocking(self._process.stdin.fileno(), False)

    async def _beat(self) -> None:
        while True:
            self._send("beat")
            await asyncio.sleep(self._silence_seconds / _BEATS_PER_SILENCE)

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            read = os.read(self._process.stdout.fileno(), _MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            read = b""
        *lines, rest = (self._received + read).split(b"\n")
        self._received = rest[-_MOST_BYTES:]
        for line in lines:
            if line.startswith(_ANSWER):
                self._hear(line.removeprefix(_ANSWER).split())
        if not read:
            self._disconnected()

    def _hear(self, words: list[bytes]) -> None:
        if words == [b"ready"] and not self._ready.done():
            self._ready.set_result(True)
        elif words[:1] == [b"status"]:
            self._channel.send("status", status=_status(words[1:]))
        elif words[:1] == [b"ended"] and not self._over.done():
            left = [int(word) for word in words[2:] if word.isdigit() and len(word) < 20]
            self._over.set_result(_Remains(_status(words[1:]), left[:_MOST_LEFT]))

    def _disconnected(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        asyncio.get_running_loop().remove_reader(self._process.stdout.fileno())
        was_connected = self._ready.done() and not self._over.done()
        if not self._ready.done():
            self._ready.set_result(False)
        if not self._over.done():
            self._over.set_result(None)
        if was_connected:
            self._channel.send("disconnected")


def _status(words: list[bytes]) -> int | None:
    """As the other host says it: it may say anything."""
    if words and words[0].isdigit() and len(words[0]) <= 3 and int(words[0]) < 256:
        return int(words[0])
    return None
