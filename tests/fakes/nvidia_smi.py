"""A program named nvidia-smi that says what a test tells it to, also while a server process is calling it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

Call = Literal["gpus", "processes", "list", "table"]
_CALLS: tuple[Call, ...] = ("gpus", "processes", "list", "table")

# Reads its orders anew in each call and never changes itself: a program that is written to cannot be executed.
_PROGRAM = """\
#!{python} -IS
import json, os, sys, time
with open({calls!r}, "a") as log:
    log.write(json.dumps([os.getpid(), sys.argv[1:], os.environ.get("LC_ALL"), os.getpgid(0)]) + "\\n")
with open({orders!r}) as file:
    orders = json.load(file)
words = " ".join(sys.argv[1:])
call = "list" if words else "table"
for option, queried in ("--query-gpu=", "gpus"), ("--query-compute-apps=", "processes"):
    call = queried if option in words else call
order = orders[call]
if order.get("grandchild_seconds"):
    if os.fork() == 0:
        if order["grandchild_session"]:
            os.setsid()
        time.sleep(order["grandchild_seconds"])
        os._exit(0)
if order.get("hang_seconds"):
    if order["hang_closes_output"]:
        os.close(1), os.close(2)
    time.sleep(order["hang_seconds"])
for _ in range(order.get("megabytes", 0)):
    os.write(1, b"x" * 2**20)
if "stdout" in order:
    out = bytes.fromhex(order["stdout"])
elif call == "gpus":
    fields = next(word for word in sys.argv if word.startswith("--query-gpu=")).partition("=")[2].split(",")
    for field in fields:
        if field in orders["unknown_fields"]:
            print('Field "%s" is not a valid field to query.\\n' % field)
            sys.exit(2)
    rows = [", ".join(gpu.get(field, "[N/A]") for field in fields) + "\\n" for gpu in orders["gpus_seen"]]
    out = "".join(rows).encode()
    if not rows:
        print("No devices were found")
        sys.exit(6)
elif call == "processes":
    out = "".join(", ".join(map(str, row)) + "\\n" for row in orders["processes_seen"]).encode()
else:
    out = b""
sys.stdout.buffer.write(out)
sys.stdout.flush()
sys.stderr.buffer.write(bytes.fromhex(order.get("stderr", "")))
sys.stderr.flush()
if order.get("signal"):
    os.kill(os.getpid(), order["signal"])
os._exit(order.get("exit_status", 0))
"""


def healthy_gpu(index: int = 0, **cells: str) -> dict[str, str]:
    """A GPU by nvidia-smi's own field names, as text; `memory_used="512"` changes `memory.used`."""
    gpu = {
        "index": str(index),
        "name": "NVIDIA Test 24GB",
        "uuid": f"GPU-{index:08x}-1111-2222-3333-444444444444",
        "pci.bus_id": f"00000000:{index + 1:02X}:00.0",
        "driver_version": "570.10.20",
        "memory.total": "24576",
        "memory.used": "512",
        "memory.free": "23800",
        "utilization.gpu": "7",
        "temperature.gpu": "35",
        "power.draw": "60.25",
        "power.limit": "350.00",
        "ecc.errors.uncorrected.volatile.total": "[N/A]",
        "gpu_recovery_action": "None",
        "mig.mode.current": "[N/A]",
    }
    dotted = {field.replace(".", "_"): field for field in gpu}
    return gpu | {dotted[name]: value for name, value in cells.items()}


class FakeNvidiaSMI:
    """Healthy with one idle GPU until told otherwise; every change is seen by the next call, from any process."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "fake-nvidia-smi"
        self.folder.mkdir()
        self.program = self.folder / "nvidia-smi"
        self._calls = self.folder / "calls.jsonl"
        self._orders = self.folder / "orders.json"
        self._state: dict[str, Any] = {"unknown_fields": [], "gpus_seen": [], "processes_seen": []}
        self._state |= {call: {} for call in _CALLS}
        self.set_gpus(healthy_gpu())
        text = _PROGRAM.format(python=sys.executable, calls=str(self._calls), orders=str(self._orders))
        self.program.write_text(text)
        self.program.chmod(0o755)

    @property
    def path_env(self) -> str:
        """A PATH on which this is the first nvidia-smi."""
        return f"{self.folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"

    @property
    def env(self) -> dict[str, str]:
        """Lay it over an environment: `{**os.environ, **fake.env}`."""
        return {"PATH": self.path_env}

    # --- healthy answers ---

    def set_gpus(self, *gpus: Mapping[str, str]) -> None:
        """Each by field names, as `healthy_gpu` makes them; none at all is `No devices were found`."""
        self._state["gpus_seen"] = [dict(gpu) for gpu in gpus]
        self._write()

    def set_processes(self, *rows: tuple[str, int | str, str, int | str]) -> None:
        """Each as (GPU UUID, pid, name, memory in MiB)."""
        self._state["processes_seen"] = [list(row) for row in rows]
        self._write()

    def set_unknown_fields(self, *fields: str) -> None:
        """Fields that this version of the driver refuses."""
        self._state["unknown_fields"] = list(fields)
        self._write()

    # --- anything else, for one kind of call or for all ---

    def answer(
        self,
        stdout: str | bytes | None = None,
        *,
        stderr: str | bytes = b"",
        exit_status: int = 0,
        dies_of: signal.Signals | None = None,
        to: Call | None = None,
    ) -> None:
        """Exactly this; `stdout=None` keeps what `set_gpus` and `set_processes` say."""
        order: dict[str, Any] = {"stderr": _hex(stderr), "exit_status": exit_status, "signal": dies_of or 0}
        if stdout is not None:
            order["stdout"] = _hex(stdout)
        self._order(order, to)

    def hang(self, seconds: float = 3600.0, *, closes_output: bool = False, to: Call | None = None) -> None:
        self._order({"hang_seconds": seconds, "hang_closes_output": closes_output}, to)

    def leave_grandchild(self, seconds: float, *, own_session: bool = False, to: Call | None = None) -> None:
        """Answers, but leaves a child behind that keeps stdout and stderr open."""
        self._order({"grandchild_seconds": seconds, "grandchild_session": own_session}, to)

    def write_megabytes(self, megabytes: int, *, to: Call | None = None) -> None:
        self._order({"megabytes": megabytes}, to)

    def recover(self, *, of: Call | None = None) -> None:
        """Back to healthy answers."""
        self._order({}, of)

    # --- what happened ---

    @property
    def calls(self) -> list[list[str]]:
        """The arguments of each call so far."""
        return [arguments for _, arguments, _, _ in self._log()]

    @property
    def pids(self) -> list[int]:
        return [pid for pid, _, _, _ in self._log()]

    @property
    def locales_and_groups(self) -> list[tuple[str, int]]:
        return [(locale, group) for _, _, locale, group in self._log()]

    def kill_all(self) -> None:
        """For the end of a test that made one nobody may kill."""
        for pid in self.pids:
            with suppress(OSError):  # it has ended, as it should
                if str(self.program).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)

    def _log(self) -> list[Any]:
        return [json.loads(line) for line in self._calls.read_text().splitlines()] if self._calls.exists() else []

    def _order(self, order: dict[str, Any], to: Call | None) -> None:
        for call in _CALLS if to is None else (to,):
            self._state[call] = order
        self._write()

    def _write(self) -> None:
        """In one step: a call sees the orders before or after, never half of them."""
        new = self._orders.with_suffix(".new")
        new.write_text(json.dumps(self._state))
        new.replace(self._orders)


def _hex(text: str | bytes) -> str:
    return (text.encode() if isinstance(text, str) else text).hex()
