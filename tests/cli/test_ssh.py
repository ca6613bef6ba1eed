"""`gpu-pool run --ssh` with a real sshd, as another user: words, status, signals, and connections that break."""

from __future__ import annotations

import json
import os
import shlex
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_worker_pool.cli.running.remote_script import SHORTEST_SILENCE_SECONDS
from tests.cli.programs import GPU_POOL, Programs, Started, children_of, is_there, state_of
from tests.cli.ssh_host import SSHHost, why_not
from tests.server_process import ServerProcess
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

API_KEY, ADMIN_KEY = "key-of-this-test-0123456789", "admin-key-of-this-test-0123"
#: Says which signals it gets, and ends by SIGTERM with 5.
LISTENER = """
for name in HUP INT QUIT USR1 USR2; do trap "echo SIG$name >> $0" $name; done
trap "echo SIGTERM >> $0; exit 5" TERM
echo ready >> $0
while :; do sleep 0.1; done
"""
#: Ends two seconds after it was told to. It writes nothing: without a connection that would end it sooner.
SLOW = (
    "exec > /dev/null 2>&1; trap 'sleep 2; echo slow > $0; exit 0' TERM HUP; echo $$ > $0; while :; do sleep 0.1; done"
)


@pytest.fixture(scope="module")
def host() -> Iterator[SSHHost]:
    with SSHHost() as started:
        yield started


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    keys = {"GPU_POOL_ADMIN_KEYS": ADMIN_KEY, "GPU_POOL_API_KEYS": API_KEY}
    folder = tmp_path_factory.mktemp("server")
    with ServerProcess(folder, GPU_BACKEND="simulated:1", ACCESS_LOG="false", **keys) as started:
        yield started


@pytest.fixture
def programs(server: ServerProcess, host: SSHHost, tmp_path: Path) -> Iterator[Programs]:
    """On one GPU, with nothing left of earlier tests at either end."""
    # A folder of its own, so that a test that fails leaves nothing to the next. Its path must be short.
    sockets = Path(tempfile.mkdtemp(prefix="run-", dir=host.folder))
    variables = {"GPU_SERVICE_ENDPOINT": server.url, "GPU_POOL_SSH": host.program, "GPU_POOL_API_KEY": API_KEY}
    with Programs(tmp_path, **variables, XDG_RUNTIME_DIR=str(sockets)) as started:
        yield started
    eventually(lambda: host.processes() == [], 30)
    eventually(lambda: list(sockets.iterdir()) == [])
    eventually(lambda: host.own_files() == [])
    admin = {"Authorization": f"Bearer {ADMIN_KEY}"}

    def is_free() -> bool:
        for row in server.get("/leases").json["leases"]:
            server.ask("DELETE", f"/leases/{row['lease_id']}", headers=admin)
        return not server.get("/leases").json["leases"]

    eventually(is_free)


def remote(programs: Programs, host: SSHHost, *words: object, ssh: str | None = None, **options: object) -> Started:
    """A run over ssh that goes on."""
    return programs.start("run", f"--ssh={ssh or host.target}", *words, **options)  # type: ignore[arg-type]


def file_of(host: SSHHost, name: str) -> Path:
    """A new file of the other user."""
    path = host.home / name
    path.unlink(missing_ok=True)
    return path


# --- words, variables, streams, status ---


def test_the_command_runs_there_with_its_variables_and_status(programs: Programs, host: SSHHost) -> None:
    show = "id -un; pwd; env | grep -E '^(CUDA|NVIDIA|GPU|MY)_' | sort; echo told >&2; exit 7"
    words = ["--env", "MY_WORD=it's\nso", "--env", "MY_OWN", "--env", "MY_MISSING", "--", "sh", "-c", show]
    done = programs.call("run", f"--ssh={host.target}", *words, MY_OWN="ours", MY_OTHER="not named")
    assert done.returncode == 7, done.stderr
    user, folder, *variables = done.stdout.splitlines()
    assert user == host.user
    assert folder == str(host.home)  # pytest's folder is closed to others
    assert f"gpu-pool: '{programs.folder}' cannot be entered on 127.0.0.1: the command runs in the home directory" in (
        done.stderr
    )
    assert done.stderr.endswith("told\n")
    assert [line for line in variables if not line.startswith(("GPU_POOL_RUN_MARK=", "GPU_POOL_LEASE_ID=lease-"))] == [
        "CUDA_DEVICE_ORDER=PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES=0",
        "GPU_POOL_HOST=127.0.0.1",
        f"GPU_POOL_LEASE_ENDPOINT={programs.environment['GPU_SERVICE_ENDPOINT']}",
        "MY_OWN=ours",
        "MY_WORD=it's",
        next(line for line in variables if line.startswith("NVIDIA_VISIBLE_DEVICES=")),
    ]
    assert programs.leases() == []


def test_it_runs_in_the_same_directory_if_that_exists_there(programs: Programs, host: SSHHost) -> None:
    link = host.folder / "linked"
    link.unlink(missing_ok=True)
    link.symlink_to(host.home)
    words = shlex.join([*GPU_POOL, "run", f"--ssh={host.target}", "--", "sh", "-c", "pwd -P; echo $PWD"])
    done = programs.run(["sh", "-c", f"cd {link} && {words}"])
    assert (done.returncode, done.stdout) == (0, f"{host.home}\n{link}\n"), done.stderr
    assert done.stderr == ""


def test_hostile_words_arrive_as_they_are(programs: Programs, host: SSHHost) -> None:
    trap = file_of(host, "trap")
    hostile = [
        f"; touch {trap}",
        f"$(touch {trap})",
        f"`touch {trap}`",
        f"' ; touch {trap} ; '",
        "\"double\" and 'single'",
        "a\nnew\n\nline\n",
        "",
        " ",
        "-n",
        "--",
        "*",
        "ünï©ode \U0001f600",
        os.fsdecode(b"not \xff UTF-8"),
        "back\\slash\\",
        "!history",
        "percent %s",
        "x" * 100_000,
        "EOF",
    ]
    script = 'for word; do printf "%s" "$word" | od -An -v -tx1 | tr -d " \\n"; echo; done'
    done = programs.call("run", f"--ssh={host.target}", "--", "sh", "-c", script, "sh", *hostile)
    assert done.returncode == 0, done.stderr
    assert [os.fsdecode(bytes.fromhex(line)) for line in done.stdout.splitlines()] == hostile
    assert not trap.exists()


def test_streams_go_through(programs: Programs, host: SSHHost) -> None:
    text = "".join(f"line {number}\n" for number in range(100_000))
    script = "tee /dev/stderr; echo end"
    done = programs.run([*GPU_POOL, "run", f"--ssh={host.target}", "--", "sh", "-c", script], text_in=text)
    assert (done.returncode, done.stdout) == (0, f"{text}end\n")
    assert done.stderr.endswith(text)
    assert done.stderr.count("\n") == text.count("\n") + 1  # the directory


@pytest.mark.parametrize(("command", "status"), [("exit 255", 255), ("kill -9 $$", 137)])
def test_the_status_is_the_commands(programs: Programs, host: SSHHost, command: str, status: int) -> None:
    done = programs.call("run", f"--ssh={host.target}", "--", "sh", "-c", command)
    assert done.returncode == status, done.stderr
    assert done.stderr.count("\n") == 1  # the directory
    assert programs.leases() == []


def test_a_program_that_is_not_there(programs: Programs, host: SSHHost) -> None:
    done = programs.call("run", f"--ssh={host.target}", "--", "no such program")
    assert done.returncode == 127
    assert "gpu-pool: program 'no such program' not found on 127.0.0.1\n" in done.stderr


# --- signals and terminals ---


def test_signals_are_passed_on_once(programs: Programs, host: SSHHost) -> None:
    log = file_of(host, "signals")
    process = remote(programs, host, "--", "sh", "-c", LISTENER, log)
    eventually(log.exists)
    names = ["SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2"]
    for name in names:
        os.kill(process.pid, getattr(signal, name))
        eventually(lambda name=name: name in log.read_text())  # type: ignore[misc]
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(20) == 5
    assert log.read_text().split() == ["ready", *names, "SIGTERM"]
    assert programs.leases() == []


def test_a_signal_that_ends_the_command_ends_what_it_started(programs: Programs, host: SSHHost) -> None:
    begun = file_of(host, "begun")
    process = remote(programs, host, "--", "sh", "-c", "sleep 100 & setsid sleep 101 & touch $0; wait", begun)
    eventually(begun.exists)
    process.terminate()
    assert process.wait(20) == 143
    assert host.processes() == []
    assert "left" not in process.err
    assert programs.leases() == []


def test_what_a_command_leaves_behind_keeps_its_gpu(programs: Programs, host: SSHHost) -> None:
    script = "setsid sh -c 'sleep 3' > /dev/null 2>&1 < /dev/null & exit 3"
    done = programs.call("run", "--ttl", "20s", f"--ssh={host.target}", "--", "sh", "-c", script)
    assert done.returncode == 3
    assert f"the command left processes running on {host.target} (" in done.stderr
    assert len(programs.leases()) == 1


def test_ctrl_c_on_a_terminal(programs: Programs, host: SSHHost) -> None:
    begun = file_of(host, "begun")
    script = f"test -t 0 && test -t 1 && stty size; touch {begun}; sleep 60"
    terminal = programs.terminal([*GPU_POOL, "run", f"--ssh={host.target}", "--", "sh", "-c", script])
    terminal.until("40 120")
    eventually(begun.exists)
    terminal.type("\x03")
    assert terminal.wait() == -signal.SIGINT
    assert "Shared connection" not in terminal.shown
    assert programs.leases() == []


def test_ctrl_c_where_the_output_is_a_pipe(programs: Programs, host: SSHHost) -> None:
    """The local terminal makes a signal of it, which ssh must survive so that the command's last words arrive."""
    begun = file_of(host, "begun")
    script = f"trap 'sleep 0.5; echo last words; exit 4' INT; touch {begun}; while :; do sleep 0.1; done"
    shell = programs.terminal(["bash", "--norc", "--noprofile", "-i"], PS1="prompt> ")
    shell.until("prompt> ")
    run = shlex.join([*GPU_POOL, "run", f"--ssh={host.target}", "--", "sh", "-c", script])
    shell.type(f"{run} | (trap '' INT; cat); echo status ${{PIPESTATUS[0]}}\n")
    eventually(begun.exists)
    shell.type("\x03")
    shell.until("last words", times=2)
    shell.until("status 4")


def test_a_terminal_is_as_it_was_after_ssh_was_killed(programs: Programs, host: SSHHost) -> None:
    begun = file_of(host, "begun")
    shell = programs.terminal(["bash", "--norc", "--noprofile", "-i"], PS1="prompt> ")
    shell.until("prompt> ")
    shell.type(f"{shlex.join([*GPU_POOL, 'run', f'--ssh={host.target}'])} -- sh -c 'touch {begun}; sleep 60'\n")
    eventually(begun.exists)
    (front,) = children_of(shell.pid)
    os.kill(children_of(front)[-1], signal.SIGKILL)
    shell.until("prompt> ", times=2)
    shell.type("stty -a | grep -o -e '-*icanon' -e '-*echo '; echo status $?\n")
    shown = shell.until("status 0")
    assert "icanon\r\necho \r\n" in shown
    assert "-icanon\r\n" not in shown


# --- connections that break ---


def lease_process_of(process: Started) -> int:
    return children_of(process.pid)[0]


def connection_of(process: Started) -> int:
    """The ssh that has the connection; the session of the command uses it."""
    (ssh,) = children_of(lease_process_of(process))
    return ssh


def test_a_connection_that_breaks_ends_the_command_and_the_gpu_waits_for_that(
    programs: Programs, host: SSHHost
) -> None:
    log = file_of(host, "slow")
    process = remote(programs, host, "--ttl", "30s", "--", "sh", "-c", SLOW, log)
    eventually(lambda: log.exists() and log.read_text())
    os.kill(connection_of(process), signal.SIGKILL)
    assert process.wait(10) == 69
    assert f"the connection to {host.target} is gone: the command is ended there" in process.err
    # The command still runs, and later it has ended: no other request gets the GPU before its lease has expired.
    assert programs.call("run", "--no-wait", "--", "true").returncode == 75
    eventually(lambda: log.read_text() == "slow\n")
    eventually(lambda: host.processes() == [])
    (lease,) = programs.leases()
    assert lease["expires_in_seconds"] > 0
    assert programs.call("run", "--no-wait", "--", "true").returncode == 75


def test_a_session_that_was_killed_ends_the_command_before_the_gpu_is_released(
    programs: Programs, host: SSHHost
) -> None:
    log = file_of(host, "slow")
    process = remote(programs, host, "--", "sh", "-c", SLOW, log)
    eventually(lambda: log.exists() and log.read_text())
    next_one = programs.start("run", "--", "sh", "-c", f"cat {log}")
    eventually(programs.waiting)
    os.kill(children_of(process.pid)[1], signal.SIGKILL)
    assert process.wait(20) == 137
    assert next_one.wait(20) == 0
    assert next_one.out == "slow\n"


def test_when_gpu_pool_is_killed_the_command_ends_before_the_gpu_is_released(programs: Programs, host: SSHHost) -> None:
    log = file_of(host, "slow")
    process = remote(programs, host, "--", "sh", "-c", SLOW, log)
    eventually(lambda: log.exists() and log.read_text())
    next_one = programs.start("run", "--", "sh", "-c", f"cat {log}")
    eventually(programs.waiting)
    process.kill()
    assert next_one.wait(20) == 0
    assert next_one.out == "slow\n"


def test_when_the_lease_process_is_killed_the_command_ends(programs: Programs, host: SSHHost) -> None:
    process = remote(programs, host, "--ttl", "20s", "--", "sh", "-c", "sleep 100")
    eventually(lambda: "sleep 100" in host.processes())
    os.kill(lease_process_of(process), signal.SIGKILL)
    assert process.wait(20) == 69
    eventually(lambda: host.processes() == [])
    assert len(programs.leases()) == 1


def test_silence_counts_as_a_broken_connection(programs: Programs, host: SSHHost) -> None:
    """As when a network cable is pulled: nothing arrives, and nothing is closed."""
    process = remote(programs, host, "--ttl", "2s", "--", "sh", "-c", "sleep 100")
    eventually(lambda: "sleep 100" in host.processes())
    connection = connection_of(process)
    os.kill(connection, signal.SIGSTOP)
    eventually(lambda: "sleep 100" not in host.processes(), 25)
    os.kill(connection, signal.SIGCONT)
    process.wait(20)


def test_a_stopped_gpu_pool_still_gives_signs_of_life(programs: Programs, host: SSHHost) -> None:
    log = file_of(host, "signals")
    process = remote(programs, host, "--ttl", "2s", "--", "sh", "-c", LISTENER, log)
    eventually(log.exists)
    beat = eventually(lambda: next((folder / "beat" for folder in host.own_files()), None))
    stopped_at = beat.stat().st_mtime
    os.kill(process.pid, signal.SIGSTOP)
    # Each sign of life writes the file anew, and after this long a silence the command would have been ended.
    eventually(lambda: beat.stat().st_mtime > stopped_at + 2 * SHORTEST_SILENCE_SECONDS)
    os.kill(process.pid, signal.SIGCONT)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(20) == 5


def test_ctrl_z_stops_the_command_too(programs: Programs, host: SSHHost) -> None:
    begun = file_of(host, "begun")
    process = remote(programs, host, "--", "sh", "-c", "echo $$ > $0; sleep 100; exit 6", begun)
    pid = int(eventually(lambda: begun.exists() and begun.read_text()))
    os.killpg(process.pid, signal.SIGTSTP)
    eventually(lambda: state_of(pid) == "T")
    os.killpg(process.pid, signal.SIGCONT)
    eventually(lambda: state_of(pid) == "S")
    process.terminate()
    assert process.wait(20) == 143


# --- what goes wrong before the command runs ---


def test_ssh_cannot_connect(programs: Programs, host: SSHHost) -> None:
    done = programs.call("run", f"--ssh=nobody-{host.target}", "--", "true")
    assert done.returncode == 69
    assert f"ssh could not connect to nobody-{host.target}" in done.stderr
    assert "Permission denied" in done.stderr  # ssh's own words
    assert programs.leases() == []
    missing = programs.call("run", f"--ssh={host.target}", "--", "true", GPU_POOL_SSH="no-such-ssh -v")
    assert missing.returncode == 127
    assert "program 'no-such-ssh' not found: install an OpenSSH client" in missing.stderr
    bad = programs.call("run", f"--ssh={host.target}", "--", "true", GPU_POOL_SSH="ssh '")
    assert bad.returncode == 2


def test_interrupted_while_it_connects(programs: Programs, host: SSHHost, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    slow = tmp_path / "slow-ssh"
    slow.write_text(f"#!/bin/sh\ntouch {begun}\nexec sleep 60\n")
    slow.chmod(0o755)
    process = remote(programs, host, "--", "true", GPU_POOL_SSH=str(slow))
    eventually(begun.exists)
    process.terminate()
    assert process.wait(10) == 143
    eventually(lambda: programs.leases() == [])


def test_the_endpoints_own_host_is_here(programs: Programs) -> None:
    """Then nothing goes through ssh, which could not be started anyway."""
    script = "id -un; echo $GPU_POOL_HOST $GPU_POOL_LEASE_ENDPOINT $MY_WORD"
    words = ["--ssh", "--env", "MY_WORD=ours", "sh", "-c", script]
    done = programs.call("run", *words, GPU_POOL_SSH="false")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["root", os.uname().nodename, programs.environment["GPU_SERVICE_ENDPOINT"], "ours"]


# --- secrets ---


def test_keys_tokens_and_values_are_in_no_argument_and_keys_in_no_variable(programs: Programs, host: SSHHost) -> None:
    log = file_of(host, "signals")
    value = "value-of-the-users-own-secret"
    words = ["--env", "MY_SECRET", "--", "sh", "-c", LISTENER, log]
    process = remote(programs, host, *words, MY_SECRET=value, GPU_POOL_ADMIN_KEY=ADMIN_KEY)
    eventually(log.exists)
    tokens = Path(programs.environment["XDG_STATE_HOME"]) / "gpu-pool" / "requests"
    (token,) = [path.read_text() for path in tokens.iterdir()]
    assert len(token) > 20
    ssh = [connection_of(process), children_of(process.pid)[1]]
    theirs = [pid for pid in host._pids(host.home.stat().st_uid) if is_there(pid)]
    assert len(theirs) > 2
    for pid in [process.pid, lease_process_of(process), *ssh, *theirs]:
        words_of = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
        assert not any(secret in words_of for secret in (API_KEY, ADMIN_KEY, token, value)), words_of
    for pid in [*ssh, *theirs]:
        variables = Path(f"/proc/{pid}/environ").read_bytes().decode()
        assert not any(secret in variables for secret in (API_KEY, ADMIN_KEY, token)), variables
    # Nor in a file, once the command has begun.
    (folder,) = host.own_files()
    assert folder.stat().st_mode & 0o777 == 0o700
    for path in [*folder.iterdir(), *Path(programs.environment["XDG_RUNTIME_DIR"]).rglob("*")]:
        assert not (path.is_file() and value.encode() in path.read_bytes()), path
    process.terminate()
    assert process.wait(20) == 5


def test_what_may_not_be_passed_on(programs: Programs, host: SSHHost) -> None:
    for name, why in {
        "GPU_POOL_API_KEY": "keys are not passed on",
        "GPU_POOL_ADMIN_KEYS=x": "keys are not passed on",
        "CUDA_VISIBLE_DEVICES=0": "the lease sets it",
        "GPU_POOL_LEASE_ID": "the lease sets it",
        "A-B=x": "--env must be NAME or NAME=VALUE",
        "=x": "--env must be NAME or NAME=VALUE",
    }.items():
        done = programs.call("run", f"--ssh={host.target}", "--env", name, "--", "true")
        assert done.returncode == 2
        assert why in done.stderr


def test_the_lease_of_a_command_elsewhere_is_an_ordinary_one(programs: Programs, host: SSHHost) -> None:
    log = file_of(host, "signals")
    process = remote(programs, host, "--label", "over there", "--", "sh", "-c", LISTENER, log)
    eventually(log.exists)
    (lease,) = programs.leases()
    assert lease["label"] == "over there"
    assert json.dumps(lease).count(API_KEY) == 0
    assert programs.call("release", lease["lease_id"]).returncode == 0
    process.terminate()
    assert process.wait(20) == 5
