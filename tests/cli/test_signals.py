"""Signals, terminals and sudden ends: the command gets each signal once, and nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.cli.programs import GPU_POOL, LISTENER, Programs, Terminal, children_of, is_there, signals_in, state_of
from tests.waiting import eventually

RUN = " ".join([*GPU_POOL, "run"])


# --- sent by other programs ---


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH"])
def test_passed_on_once(programs: Programs, name: str) -> None:
    process, log = programs.listening(ends=["SIGTERM"])
    number = getattr(signal, name)
    os.kill(process.pid, number)
    eventually(lambda: name in signals_in(log))
    if name != "SIGTERM":
        os.kill(process.pid, signal.SIGTERM)
    assert process.wait(10) == 5
    assert signals_in(log) == [name] + ["SIGTERM"] * (name != "SIGTERM")


def test_sent_to_the_whole_group_it_comes_once_all_the_same(programs: Programs) -> None:
    process, log = programs.listening(ends=["SIGTERM"])
    for name in ("SIGUSR1", "SIGINT", "SIGHUP", "SIGUSR1"):
        os.killpg(process.pid, getattr(signal, name))
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(10) == 5
    assert signals_in(log) == ["SIGUSR1", "SIGINT", "SIGHUP", "SIGUSR1", "SIGTERM"]
    assert programs.leases() == []


def test_however_late_the_keeper_is_it_comes_once(programs: Programs) -> None:
    process, log = programs.listening(ends=["SIGTERM"])
    keeper, _ = children_of(process.pid)
    os.kill(keeper, signal.SIGSTOP)
    os.killpg(process.pid, signal.SIGUSR1)
    time.sleep(0.5)  # in which it cannot say that it got the signal, too
    os.kill(keeper, signal.SIGCONT)
    os.kill(process.pid, signal.SIGUSR2)
    eventually(lambda: "SIGUSR2" in signals_in(log))
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(10) == 5
    assert signals_in(log) == ["SIGUSR1", "SIGUSR2", "SIGTERM"]


def test_a_keeper_that_is_stopped_does_not_keep_signals_from_the_command(programs: Programs) -> None:
    process, log = programs.listening(ends=["SIGTERM"])
    keeper, _ = children_of(process.pid)
    os.kill(keeper, signal.SIGSTOP)
    os.kill(process.pid, signal.SIGUSR1)
    eventually(lambda: signals_in(log) == ["SIGUSR1"])
    os.kill(keeper, signal.SIGCONT)


def test_timeout_of_coreutils(programs: Programs) -> None:
    """Which sends to us, and then to the whole group."""
    log = programs.folder / "log"
    command = [sys.executable, "-c", LISTENER, str(log), "SIGTERM"]
    for seconds in (4, 12, 25):  # on a busy machine it may take longer until the command listens
        done = programs.run(["timeout", str(seconds), *GPU_POOL, "run", "--", *command])
        assert done.returncode == 124
        if log.exists():
            break
    eventually(lambda: signals_in(log) == ["SIGTERM"])


def test_what_the_command_started_is_ended_with_it(programs: Programs, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"sleep 100 & echo $! > {pid_file}; wait"
    process = programs.start("run", "--", "sh", "-c", script)
    eventually(lambda: pid_file.exists() and pid_file.read_text())
    process.terminate()
    assert process.wait(10) == 143
    assert not is_there(int(pid_file.read_text()))
    assert "left" not in process.err


def test_a_signal_that_the_command_survived_does_not_end_what_it_leaves_behind(
    programs: Programs, tmp_path: Path
) -> None:
    begun, heard, pid_file = tmp_path / "begun", tmp_path / "heard", tmp_path / "pid"
    script = (
        f"trap 'touch {heard}' TERM; touch {begun}; while [ ! -e {heard} ]; do sleep 0.05; done; "
        f"setsid sleep 100 & echo $! > {pid_file}; exit 0"
    )
    process = programs.start("run", "--ttl", "2s", "--", "bash", "-c", script)
    eventually(begun.exists)
    process.terminate()
    assert process.wait(30) == 0
    assert "left processes running" in process.err
    assert is_there(int(pid_file.read_text()))


def test_signals_that_were_ignored_stay_so_and_no_others(programs: Programs) -> None:
    # Whatever this machine's own programs ignore before us: the command must see no difference.
    look = ["grep", "-E", "Sig(Ign|Blk)", "/proc/self/status"]
    without = programs.run(["nohup", *look]).stdout
    ignored = int(re.search(r"SigIgn:\s*(\w+)", without)[1], 16)  # type: ignore[index]
    assert ignored & 1 << (signal.SIGHUP - 1)
    assert programs.run(["nohup", *GPU_POOL, "run", "--", *look]).stdout == without


# --- while it waits ---


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_whoever_is_ended_while_waiting_leaves_the_queue(programs: Programs, name: str) -> None:
    programs.holding()
    waiting = programs.start("run", "--", "true")
    eventually(programs.waiting)
    waiting.send_signal(getattr(signal, name))
    assert waiting.wait(10) == 128 + getattr(signal, name)
    eventually(lambda: programs.waiting() == [])


def test_whoever_is_killed_while_waiting_leaves_the_queue(programs: Programs) -> None:
    programs.holding()
    waiting = programs.start("run", "--", "true")
    eventually(programs.waiting)
    waiting.kill()
    eventually(lambda: programs.waiting() == [])


# --- killed ---


def in_the_ledger(programs: Programs) -> str:
    """As it was left: whoever only counts ends no lease whose holder has gone."""
    (found,) = [check["what"] for check in programs.json("doctor")["checks"] if check["check"] == "ledger"]
    return str(found)


def test_a_killed_run_ends_its_command_and_gives_the_gpu_back(programs: Programs) -> None:
    process = programs.holding()
    keeper, command = children_of(process.pid)
    process.kill()
    eventually(lambda: not is_there(command), within_seconds=5)
    eventually(lambda: not is_there(keeper), within_seconds=5)
    assert programs.call("run", "--no-wait", "--", "true").returncode == 0


def test_a_killed_group_leaves_nothing_and_the_gpu_comes_back(programs: Programs) -> None:
    process = programs.holding()
    family = children_of(process.pid)
    os.killpg(process.pid, signal.SIGKILL)
    eventually(lambda: not any(map(is_there, family)), within_seconds=5)
    assert programs.call("run", "--no-wait", "--", "true").returncode == 0


def test_what_still_runs_after_a_kill_keeps_the_gpu_from_being_given_back(programs: Programs, tmp_path: Path) -> None:
    """The kernel kills the command, not what it has started: that may still be on the GPU."""
    pid_file = tmp_path / "pid"
    process = programs.start("run", "--", "sh", "-c", f"sleep 100 & echo $! > {pid_file}; wait")
    eventually(lambda: pid_file.exists() and pid_file.read_text())
    orphan = int(pid_file.read_text())
    keeper, _ = children_of(process.pid)
    process.kill()
    eventually(lambda: not is_there(keeper))
    assert in_the_ledger(programs).endswith(": 1 leases, 0 waiting")
    assert is_there(orphan)
    os.kill(orphan, signal.SIGKILL)
    assert eventually(lambda: programs.call("run", "--no-wait", "--", "true").returncode == 0)


@pytest.mark.parametrize("on_lost", ["warn", "terminate"])
def test_a_killed_keeper_is_a_lost_lease(programs: Programs, on_lost: str) -> None:
    process = programs.holding("--on-lost", on_lost)
    keeper, command = children_of(process.pid)
    os.kill(keeper, signal.SIGKILL)
    if on_lost == "warn":
        time.sleep(0.5)
        assert is_there(command)
        process.terminate()
    assert process.wait(10) == 143
    told = process.err
    assert "gpu-pool: the lease is lost: the lease process has ended" in told
    assert ("ending the command" in told) == (on_lost == "terminate")


@pytest.mark.fault(1)
def test_a_killed_lease_process_leaves_the_gpu_to_its_command(programs: Programs) -> None:
    """The command may not have touched its GPU yet, so that no reading shows it."""
    process = programs.holding()
    keeper, _ = children_of(process.pid)
    os.kill(keeper, signal.SIGKILL)
    eventually(lambda: "the lease process has ended" in process.err)
    assert [programs.call("run", "--no-wait", "--", "true").returncode for _ in range(3)] == [75] * 3
    process.terminate()
    process.wait(10)
    eventually(lambda: programs.call("run", "--no-wait", "--", "true").returncode == 0)


@pytest.mark.fault(1)
def test_a_holder_that_is_killed_with_all_that_serves_the_ledger_is_shown_nowhere(programs: Programs) -> None:
    """No process is left that could end its lease: who looks does."""
    process = programs.holding()
    keeper, command = children_of(process.pid)
    for pid in (keeper, process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait(10)
    eventually(lambda: not is_there(command))
    assert [lease for lease in programs.leases() if lease["state"] == "held"] == []
    (host,) = programs.json("status")["endpoints"]
    assert [lease for gpu in host["gpus"] for lease in gpu["leases"] if lease["state"] == "held"] == []


# --- on a terminal ---


def listening_terminal(programs: Programs, *ends: str) -> tuple[Terminal, Path]:
    log = programs.folder / "terminal-log"
    terminal = programs.terminal([*GPU_POOL, "run", "--", sys.executable, "-c", LISTENER, str(log), *ends])
    eventually(lambda: log.exists() and "ready" in log.read_text())
    return terminal, log


def test_ctrl_c_reaches_the_command_once(programs: Programs) -> None:
    terminal, log = listening_terminal(programs, "SIGTERM")
    terminal.type("\x03")
    eventually(lambda: signals_in(log))
    time.sleep(0.3)
    assert signals_in(log) == ["SIGINT"]
    terminal.type("\x1c")
    eventually(lambda: signals_in(log) == ["SIGINT", "SIGQUIT"])
    os.kill(terminal.pid, signal.SIGTERM)
    assert terminal.wait() == 5


def test_ctrl_c_that_ends_the_command_ends_us_by_the_signal(programs: Programs) -> None:
    """Which a shell shows as 130, and which ends its loops."""
    terminal = programs.terminal([*GPU_POOL, "run", "--", "sh", "-c", "echo begun; exec sleep 60"])
    terminal.until("begun")
    terminal.type("\x03")
    assert terminal.wait() == -signal.SIGINT
    assert programs.leases() == []


def test_ctrl_c_ends_a_script_and_its_loop(programs: Programs, tmp_path: Path) -> None:
    script = tmp_path / "loop.sh"
    script.write_text(f"for i in 1 2 3; do {RUN} -- sh -c 'echo turn; exec sleep 60'; done; echo after\n")
    terminal = programs.terminal(["bash", str(script)])
    terminal.until("turn")
    terminal.type("\x03")
    assert terminal.wait() == -signal.SIGINT
    assert terminal.shown.count("turn") == 1
    assert "after" not in terminal.shown


def test_ctrl_c_while_waiting(programs: Programs) -> None:
    programs.holding()
    terminal = programs.terminal([*GPU_POOL, "run", "--", "true"])
    terminal.until("next in line")
    terminal.type("\x03")
    assert terminal.wait() == -signal.SIGINT
    eventually(lambda: programs.waiting() == [])


def test_ctrl_z_keeps_the_lease_and_fg_goes_on(programs: Programs) -> None:
    shell = programs.terminal(["bash", "--norc", "--noprofile", "-i"], PS1="prompt> ")
    shell.until("prompt> ")
    shell.type(f"{RUN} --ttl 2s -- sh -c 'echo be''gun; sleep 1; echo went'' on; exit 3'\n")
    shell.until("begun")
    shell.type("\x1a")
    shell.until("Stopped")
    # Longer than the lease would live if nobody renewed it, and its GPU than a quarantine.
    time.sleep(5)
    assert programs.call("run", "--no-wait", "--", "true").returncode == 75
    assert "went on" not in shell.shown
    shell.type("fg\n")
    shell.until("went on")
    shell.type("echo status $?\n")
    shell.until("status 3")
    assert programs.leases() == []


def test_a_command_that_wants_the_terminal_in_the_background_keeps_its_lease(programs: Programs) -> None:
    shell = programs.terminal(["bash", "--norc", "--noprofile", "-i"], PS1="prompt> ")
    shell.until("prompt> ")
    shell.type(f"{RUN} -- sh -c 'echo $PPID > pid; read line; echo got $line' &\n")
    eventually((programs.folder / "pid").exists)
    front = int((programs.folder / "pid").read_text())
    eventually(lambda: state_of(front) == "T")
    keeper = children_of(front)[0]
    assert state_of(keeper) != "T"
    shell.type("fg\nhello\n")
    shell.until("got hello")


def test_a_command_that_suspends_itself_gives_the_terminal_back(programs: Programs) -> None:
    shell = programs.terminal(["bash", "--norc", "--noprofile", "-i"], PS1="outer> ")
    shell.until("outer> ")
    shell.type(f"{RUN} -- env PS1='in''ner> ' bash --norc --noprofile -i\n")
    shell.until("inner> ")
    shell.type("suspend\n")
    shell.until("Stopped")
    shell.type("echo ou''ter\n")
    shell.until("outer\r\n")
    shell.type("fg\n")
    shell.type("echo in''side $GPU_POOL_LEASE_ID\n")
    shell.until("inside lease-")


def test_in_the_background_of_a_shell(programs: Programs) -> None:
    shell = programs.terminal(["bash", "--norc", "--noprofile", "-i"], PS1="prompt> ")
    shell.until("prompt> ")
    shell.type(f"{RUN} -- sh -c 'sleep 0.5; echo worked; exit 4' &\n")
    shell.until("worked", times=2)
    shell.type("wait $!; echo status $?\n")
    shell.until("status 4")


def test_a_command_that_wants_the_terminal_has_it(programs: Programs) -> None:
    terminal = programs.terminal(
        [*GPU_POOL, "run", "--", "sh", "-c", "read line; echo got $line; test -t 0 && stty size"]
    )
    time.sleep(0.5)
    terminal.type("hello\n")
    terminal.until("got hello")
    terminal.until("40 120")
    assert terminal.wait() == 0


def test_a_pipe_into_a_pager_leaves_the_terminal_to_it(programs: Programs) -> None:
    shell = programs.terminal(["bash", "--norc", "--noprofile", "-i"], PS1="prompt> ")
    shell.until("prompt> ")
    shell.type(f"{RUN} -- echo through | (cat; read answer < /dev/tty; echo answered $answer)\n")
    shell.until("through", times=2)
    shell.type("yes\n")
    shell.until("answered yes")


def test_a_closed_terminal_leaves_nothing(programs: Programs) -> None:
    terminal = programs.terminal([*GPU_POOL, "run", "--", "sh", "-c", "echo begun; exec sleep 60"])
    terminal.until("begun")
    family = children_of(terminal.pid)
    terminal.hang_up()
    assert terminal.wait() == 128 + signal.SIGHUP
    eventually(lambda: not any(map(is_there, family)))
    assert programs.leases() == []


def test_the_line_on_a_terminal_is_kept_up_to_date(programs: Programs) -> None:
    first = programs.holding()
    terminal = programs.terminal([*GPU_POOL, "run", "--", "echo", "done"])
    terminal.until("waiting 2 s: one idle GPU: next in line; of 1 GPU: 1 held")
    # One line, written over and over.
    assert "\n" not in terminal.shown
    assert terminal.written.count("\r") >= 2
    first.terminate()
    terminal.until("done")
    assert terminal.wait() == 0
    assert "gpu-pool: GPU 0 after" in terminal.shown


def test_a_dumb_terminal_gets_plain_lines(programs: Programs) -> None:
    programs.holding()
    terminal = programs.terminal([*GPU_POOL, "run", "--timeout", "3", "--", "true"], TERM="dumb")
    assert terminal.wait() == 124
    assert "\x1b" not in terminal.written
    assert terminal.shown.count("waiting") == 1
