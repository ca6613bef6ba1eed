"""The front process of `map`: runs one job after the other on each GPU that the lease process has.

Each job has its own process group, which gets every signal that `gpu-pool` gets, once. If `gpu-pool` itself is killed,
the lease process ends the jobs.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.cli.exits import KILLED, CommandError, Status, die_of_interrupt
from gpu_worker_pool.cli.keys import KEPT_FROM_COMMANDS
from gpu_worker_pool.cli.quantities import spoken_seconds
from gpu_worker_pool.cli.running.command import TERMINATE_SECONDS, cannot_run
from gpu_worker_pool.cli.running.environment import shown_gpus, variables_of
from gpu_worker_pool.cli.running.front import ENDING, TICK_SECONDS, Front
from gpu_worker_pool.hardware.linux import SignalInfo, adopt_orphans
from gpu_worker_pool.hardware.proc import environment_of, process_stat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_worker_pool.cli.mapping.halt import Halt
    from gpu_worker_pool.cli.mapping.outputs import Outputs
    from gpu_worker_pool.cli.mapping.states import States
    from gpu_worker_pool.cli.mapping.words import JobWords
    from gpu_worker_pool.cli.running.lease_spec import LeaseSpec
    from gpu_worker_pool.cli.running.progress import Progress

#: How long processes that a job has left running may take to end before its GPU is given up.
SETTLE_SECONDS: Final = 1.0
LOOK_SECONDS: Final = 0.05
#: The variable by which the lease process finds the jobs of a map that was killed.
MARK: Final = "GPU_POOL_MAP_ID"
#: Signals that Python ignores and a command must not.
_DEFAULT_SIGNALS: Final = (signal.SIGPIPE, signal.SIGXFSZ)


@dataclass(slots=True)
class MapJob:
    words: JobWords
    #: How often it was started.
    tries: int = 0


@dataclass(slots=True)
class RunningJob:
    job: MapJob
    pid: int
    files: tuple[int, int]
    started_at: float
    #: When to kill it, if it does not end by then.
    kill_at: float | None = None
    #: It was ended by `map` itself, and is not tried again.
    is_stopped: bool = False


@dataclass(slots=True)
class Slot:
    """A lease, and what runs on its GPU."""

    number: int
    lease_id: str
    shown: str
    #: By endpoint and number.
    gpus: list[tuple[str, int]]
    variables: dict[str, str]
    running: RunningJob | None = None
    #: Until when it waits for processes that its last job has left running.
    settles_until: float | None = None
    is_lost: bool = False


@dataclass(slots=True)
class _Results:
    succeeded: int = 0
    #: The exit statuses of jobs that failed for good, by their number.
    failed: dict[int, int] = field(default_factory=dict)
    #: The numbers of jobs that `map` ended.
    stopped: set[int] = field(default_factory=set)


class MapFront(Front):
    def __init__(
        self,
        jobs: Sequence[JobWords],
        spec: LeaseSpec,
        progress: Progress,
        states: States,
        outputs: Outputs,
        *,
        retries: int,
        halt: Halt | None,
        by_uuid: bool,
        terminates_when_lost: bool,
    ) -> None:
        #: Unique, unlike lease ids, which several ledgers may share.
        self._mark = secrets.token_hex(8)
        super().__init__(spec._replace(job_variable=f"{MARK}={self._mark}"), progress)
        assert spec.most_leases is not None
        self._most_slots = self._wanted = spec.most_leases
        self._states = states
        self._outputs = outputs
        self._retries = retries
        self._halt = halt
        self._by_uuid = by_uuid
        self._terminates_when_lost = terminates_when_lost
        self._number_of_jobs = len(jobs)
        self._pending = deque(MapJob(words) for words in jobs)
        self._slots: dict[int, Slot] = {}
        self._by_pid: dict[int, Slot] = {}
        self._results = _Results()
        #: The signal that ends it, and whether it is Ctrl-C.
        self._ending: SignalInfo | None = None
        #: Why no more jobs are started.
        self._failure: CommandError | None = None
        self._is_halted = False
        self._begun_at = time.monotonic()
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    # --- the loop ---

    def run(self) -> int:
        adopt_orphans()
        try:
            while self._pending or self._by_pid or any(slot.settles_until is not None for slot in self._slots.values()):
                self.turn(self._seconds_to_deadline())
                self._do_what_is_due()
                self._start_jobs()
                self._say_what_is_wanted()
                self.progress.tick()
        finally:
            # Even after an internal error, no job may keep running without its lease.
            for slot in self._by_pid.values():
                self._send(slot, signal.SIGKILL)
        return self._finish()

    def _seconds_to_deadline(self) -> float | None:
        now = time.monotonic()
        running = [slot.running for slot in self._by_pid.values() if slot.running is not None]
        deadlines = [each.kill_at for each in running if each.kill_at is not None]
        if any(slot.settles_until is not None for slot in self._slots.values()):
            deadlines.append(now + LOOK_SECONDS)
        if self.progress.wants_ticks:
            deadlines.append(now + TICK_SECONDS)
        return min(deadlines) - now if deadlines else None

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        for slot in list(self._slots.values()):
            running = slot.running
            if running is not None and running.kill_at is not None and now >= running.kill_at:
                running.kill_at = None
                self._send(slot, signal.SIGKILL)
            if slot.settles_until is not None:
                self._settle(slot, now)

    def _start_jobs(self) -> None:
        for slot in list(self._slots.values()):
            if slot.running is not None or slot.settles_until is not None:
                continue
            self._fill(slot)

    def _fill(self, slot: Slot) -> None:
        while self._pending and not slot.is_lost:
            if self._start(slot, self._pending.popleft()):
                return
        self._give_back(slot, is_clean=True)

    def _say_what_is_wanted(self) -> None:
        wanted = min(self._most_slots, len(self._pending) + len(self._by_pid))
        if wanted != self._wanted and self._is_lease_process_heard:
            self._wanted = wanted
            self.lease_process.channel.send("want", leases=wanted)

    # --- a job ---

    def _start(self, slot: Slot, job: MapJob) -> bool:
        """False if it cannot be started, which was reported."""
        job.tries += 1
        number = job.words.number
        name = str(number) if job.tries == 1 else f"{number}.retry{job.tries - 1}"
        try:
            files = self._outputs.open(name)
        except CommandError as error:
            self._pending.appendleft(job)
            self._stop_starting(error)
            return False
        command = job.words.command
        try:
            pid = os.posix_spawnp(
                command[0],
                command,
                {name: value for name, value in os.environ.items() if name not in KEPT_FROM_COMMANDS} | slot.variables,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, self._nothing, 0),
                    (os.POSIX_SPAWN_DUP2, files[0], 1),
                    (os.POSIX_SPAWN_DUP2, files[1], 2),
                ],
                setpgroup=0,
                setsigmask=self.lease_process.mask_before,
                setsigdef=_DEFAULT_SIGNALS,
            )
        except OSError as error:
            self._outputs.close(files, is_reusable=True)
            failure = cannot_run(command[0], error.errno or 0)
            self._states.say(f"{self._name(job)} not started: {failure}", is_problem=True)
            self._ended(job, failure.status)
            return False
        slot.running = RunningJob(job, pid, files, time.monotonic())
        self._by_pid[pid] = slot
        self._states.used(slot.gpus)
        self._states.say(f"{self._name(job)} started on {slot.shown}")
        return True

    def on_child_ended(self, pid: int, wait_status: int) -> None:
        slot = self._by_pid.pop(pid, None)
        if slot is None or slot.running is None:
            return  # a process that a job has left behind
        running, slot.running = slot.running, None
        code = os.waitstatus_to_exitcode(wait_status)
        status = KILLED - code if code < 0 else code
        left = self._left_behind(slot)
        self._write_out(running, is_reusable=not left)
        if left:
            slot.settles_until = time.monotonic() + SETTLE_SECONDS
        took = spoken_seconds(time.monotonic() - running.started_at)
        name = self._name(running.job)
        if status == 0:
            self._states.say(f"{name} done in {took}")
        elif not running.is_stopped:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"failed with status {status}"
            more = ""
            if running.job.tries <= self._retries and self._is_starting:
                more = f"; trying again ({running.job.tries} of {self._retries})"
            self._states.say(f"{name} {how} after {took}{more}", is_problem=True)
        else:
            self._states.say(f"{name} stopped after {took}", is_problem=True)
        self._ended(running.job, status, is_stopped=running.is_stopped)

    def _ended(self, job: MapJob, status: int, *, is_stopped: bool = False) -> None:
        if status == 0:
            self._results.succeeded += 1
        elif is_stopped:
            self._results.stopped.add(job.words.number)
        elif job.tries <= self._retries and self._is_starting:
            self._pending.append(job)
            return
        else:
            self._results.failed[job.words.number] = status
        results = self._results
        if (
            self._halt is not None
            and self._is_starting
            and self._halt.is_reached(
                failed=len(results.failed), succeeded=results.succeeded, jobs=self._number_of_jobs
            )
        ):
            self._states.say(f"halting: {len(results.failed)} failed, {results.succeeded} done", is_problem=True)
            self._drop_pending()
            if self._halt.is_now:
                self._end_jobs(signal.SIGTERM)

    def _write_out(self, running: RunningJob, *, is_reusable: bool) -> None:
        try:
            if self._outputs.is_disk_full(running.files):
                where = self._outputs.shown_folder
                self._states.say(
                    f"{self._name(running.job)}: the disk of {where} is full, so its output may be incomplete",
                    is_problem=True,
                )
            self.progress.pause()
            sys.stderr.flush()
            self._outputs.write_out(running.files)
        except BrokenPipeError:
            self._stop_starting(CommandError("nothing reads the output any more", KILLED + signal.SIGPIPE))
            self._end_jobs(signal.SIGTERM)
        except OSError as error:
            why = error.strerror or str(error)
            self._stop_starting(CommandError(f"the output of {self._name(running.job)} cannot be written: {why}"))
        self._outputs.close(running.files, is_reusable=is_reusable)

    def _name(self, job: MapJob) -> str:
        shown = job.words.shown
        return f"job {job.words.number} of {self._number_of_jobs} ({shown if len(shown) <= 60 else shown[:59] + '…'})"

    # --- what a job leaves behind ---

    def _left_behind(self, slot: Slot) -> list[int]:
        """Processes of this lease that became our children when the job ended."""
        me = os.getpid()
        try:
            children = Path(f"/proc/{me}/task/{me}/children").read_text().split()
        except OSError:  # a kernel without this list: the lease ends as if nothing was left
            return []
        unknown = [pid for pid in map(int, children) if pid not in self._by_pid and pid != self.lease_process.pid]
        wanted = f"GPU_POOL_LEASE_ID={slot.lease_id}".encode()
        return [pid for pid in unknown if _is_alive(pid) and wanted in environment_of(pid)]

    def _settle(self, slot: Slot, now: float) -> None:
        left = self._left_behind(slot)
        if not left:
            slot.settles_until = None
        elif slot.settles_until is not None and now >= slot.settles_until:
            shown = ", ".join(map(str, left[:5])) + ("…" if len(left) > 5 else "")
            self._states.say(
                f"a job left processes running ({shown}): {slot.shown} stays reserved while they use it",
                is_problem=True,
            )
            self._give_back(slot, is_clean=False)

    # --- leases ---

    def on_message(self, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "granted":
                self._granted(message)
            case "waiting" | "trouble":
                if not self._slots:
                    self.progress.hear(message)
            case "told":
                slot = self._slots.get(message["lease"] or 0)
                self.progress.say(message["text"] if slot is None else f"{slot.shown}: {message['text']}")
            case "lost":
                self._lost(message)
            case "failed":
                self._stop_starting(CommandError(message["text"], message["status"]))
            case _:
                super().on_message(message)

    def _granted(self, message: dict[str, Any]) -> None:
        self.progress.pause()
        number = message["lease"]
        variables = variables_of(message, by_uuid=self._by_uuid) | {MARK: self._mark}
        gpus = [(message["endpoint"], gpu["gpu_id"]) for gpu in message["gpus"]]
        self._slots[number] = Slot(number, message["lease_id"], shown_gpus(message), gpus, variables)
        self._states.granted(self.progress.waited_seconds)

    def _give_back(self, slot: Slot, *, is_clean: bool) -> None:
        del self._slots[slot.number]
        self.lease_process.channel.send("return", lease=slot.number, is_clean=is_clean)

    def _lost(self, message: dict[str, Any]) -> None:
        slot = self._slots.get(message["lease"] or 0)
        if slot is None or slot.is_lost:
            return
        slot.is_lost = True
        running, text = slot.running, message["text"]
        if running is None:
            return
        if self._terminates_when_lost:
            self._states.say(f"{slot.shown} is lost: {text}; ending {self._name(running.job)}", is_problem=True)
            running.kill_at = time.monotonic() + TERMINATE_SECONDS
            self._send(slot, signal.SIGTERM)
        else:
            name = self._name(running.job)
            self._states.say(
                f"{slot.shown} is lost: {text}; {name} keeps running, but its GPU may be granted again", is_problem=True
            )

    def on_lease_process_gone(self) -> None:
        error = CommandError("the lease process has ended; was it killed?", Status.FAILED)
        self._stop_starting(self._failure or error)
        for number in list(self._slots):
            self._lost({"lease": number, "text": "the lease process has ended"})

    # --- the end ---

    @property
    def _is_starting(self) -> bool:
        return self._ending is None and self._failure is None and not self._is_halted

    def _drop_pending(self) -> None:
        self._is_halted = True
        self._pending.clear()

    def _stop_starting(self, error: CommandError) -> None:
        if self._failure is None:
            self._failure = error
        self._pending.clear()

    def on_signal(self, info: SignalInfo) -> None:
        if info.number == signal.SIGTSTP:
            self._send_to_all(signal.SIGTSTP)
            self.stop_myself()
            self._send_to_all(signal.SIGCONT)
        elif info.number not in ENDING:
            self._send_to_all(signal.Signals(info.number))
        elif self._ending is None:
            self._ending = info
            self._pending.clear()
            self._end_jobs(signal.Signals(info.number))
        else:
            self._send_to_all(signal.SIGKILL)  # asked for twice

    def _end_jobs(self, number: signal.Signals) -> None:
        for slot in self._by_pid.values():
            if slot.running is not None:
                slot.running.is_stopped = True
                slot.running.kill_at = time.monotonic() + TERMINATE_SECONDS
        self._send_to_all(number)

    def _send_to_all(self, number: signal.Signals) -> None:
        for slot in self._by_pid.values():
            self._send(slot, number)

    def _send(self, slot: Slot, number: signal.Signals) -> None:
        """To its whole group; it is not reaped yet, so the group is still its own."""
        if slot.running is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(slot.running.pid, number)

    def _finish(self) -> int:
        self.progress.pause()
        for slot in list(self._slots.values()):
            self._give_back(slot, is_clean=True)
        self.lease_process.channel.send("done", is_clean=True)
        results, ending = self._results, self._ending
        self._states.summarize(
            jobs=self._number_of_jobs,
            succeeded=results.succeeded,
            failed=sorted(results.failed),
            stopped=len(results.stopped),
            took_seconds=time.monotonic() - self._begun_at,
        )
        self.until_lease_process_is_gone()
        if ending is not None:
            is_ctrl_c = ending.number == signal.SIGINT and ending.is_from_kernel
            return die_of_interrupt() if is_ctrl_c else KILLED + ending.number
        worst = max(results.failed.values(), default=0)
        if self._failure is not None:
            raise CommandError(str(self._failure), max(worst, self._failure.status))
        if self._halt is not None and self._halt.what == "success" and self._is_halted:
            return 0
        return worst


def _is_alive(pid: int) -> bool:
    found = process_stat(pid)
    return found is not None and found.state != "Z"
