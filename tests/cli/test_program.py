"""The program itself: help that teaches, completion, errors in a sentence, and nothing loaded that is not needed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpu_worker_pool.cli.program import COMMANDS
from tests.cli.programs import Programs
from tests.fakes.http_server import HostileServer
from tests.server_process import ServerProcess
from tests.waiting import eventually


@pytest.mark.parametrize("program", [["gpu-pool"], [sys.executable, "-m", "gpu_worker_pool"]])
def test_help_names_every_command(programs: Programs, program: list[str]) -> None:
    done = programs.run([*program, "--help"])
    assert done.returncode == 0
    for name, what in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(what)}$", done.stdout, re.M), name
    assert done.stdout == programs.run([*program, "-h"]).stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_teaches_by_example(programs: Programs, name: str) -> None:
    done = programs.call(name, "--help")
    assert done.returncode == 0
    assert f"Usage: gpu-pool {name}" in done.stdout
    assert f"gpu-pool {name}" in done.stdout.partition("Examples:")[2], done.stdout
    assert all(len(line) <= 100 for line in done.stdout.splitlines())


def test_version(programs: Programs) -> None:
    done = programs.call("--version")
    assert re.fullmatch(r"gpu-pool \d+\.\d+\.\d+\S*\n", done.stdout)


def test_a_command_that_is_not_there(programs: Programs) -> None:
    done = programs.call("stauts")
    assert done.returncode == 2
    assert "No such command 'stauts'. Did you mean 'status'?" in done.stderr
    assert programs.call().returncode == 2


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("gpu-pool ", set(COMMANDS)),
        ("gpu-pool rel", {"release"}),
        ("gpu-pool re", {"release", "report"}),
        ("gpu-pool run --me", {"--memory"}),
    ],
)
def test_completion_of_bash(programs: Programs, words: str, wanted: set[str]) -> None:
    variables = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_GPU_POOL_COMPLETE": "bash_complete"}
    done = programs.run(["gpu-pool"], **variables)
    assert {line.partition(",")[2] for line in done.stdout.splitlines()} == wanted


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("gpu-pool run -- python tr", {"file,tr"}),
        ("gpu-pool run -n 2 -- ./tr", {"file,./tr"}),
        ("gpu-pool run -- gpu-po", {"plain,gpu-pool"}),
    ],
)
def test_completion_behind_the_dashes_is_that_of_a_command(programs: Programs, words: str, wanted: set[str]) -> None:
    done = programs.call(COMP_WORDS=words, COMP_CWORD=str(len(words.split()) - 1), _GPU_POOL_COMPLETE="bash_complete")
    assert wanted <= set(done.stdout.split())


def test_completion_in_a_real_bash(programs: Programs) -> None:
    shell = programs.terminal(["bash", "--norc", "--noprofile", "-i"], PS1="prompt> ")
    shell.until("prompt> ")
    shell.type('eval "$(_GPU_POOL_COMPLETE=bash_source gpu-pool)"\n')
    shell.until("prompt> ", times=2)
    shell.type("gpu-pool exp\t")
    shell.until("gpu-pool explain")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed: apt-get install zsh")
def test_completion_in_a_real_zsh(programs: Programs) -> None:
    shell = programs.terminal(["zsh", "-f", "-i"], PS1="prompt> ")
    shell.until("prompt> ")
    shell.type(
        'autoload -Uz compinit; compinit -D; eval "$(_GPU_POOL_COMPLETE=zsh_source gpu-pool)"; echo is rea""dy\n'
    )
    shell.until("is ready")
    shell.type("gpu-pool exp\t")
    shell.until("gpu-pool explain")


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed: apt-get install fish")
def test_completion_in_a_real_fish(programs: Programs) -> None:
    """Asked by its own command, since what it draws on a terminal is hard to read."""
    script = "_GPU_POOL_COMPLETE=fish_source gpu-pool | source; complete -C 'gpu-pool exp'"
    done = programs.run(["fish", "--no-config", "-c", script], HOME=str(programs.folder))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "explain"


def test_a_range_of_gpus_is_a_usage_error_and_the_remedy_works(programs: Programs) -> None:
    for option in ("--only", "--exclude"):
        done = programs.call("explain", option, "0-2")
        assert done.returncode == 2
        assert done.stderr.endswith("'0-2' has a range, which is not understood; write 0,1,2.\n")
    assert programs.call("explain", "--only", "0,1,2").returncode == 0


def offered(programs: Programs, words: str, **variables: str) -> list[tuple[str, str]]:
    """The words and their descriptions, as a zsh gets them, without a word about anything that went wrong."""
    number = str(len(words.split(" ")) - 1)
    done = programs.call(COMP_WORDS=words, COMP_CWORD=number, _GPU_POOL_COMPLETE="zsh_complete", **variables)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    return [(lines[at + 1], lines[at + 2]) for at in range(0, len(lines), 3) if lines[at] == "plain"]


def until_offered(programs: Programs, words: str, names: list[str], **variables: str) -> list[tuple[str, str]]:
    """On a busy machine, the answer may come too late for the shell, which then offers nothing."""

    def found() -> list[tuple[str, str]]:
        found = offered(programs, words, **variables)
        assert [name for name, _ in found] == names
        return found

    return eventually(found, within_seconds=40)


def test_ids_to_release_are_offered_with_what_they_are(programs: Programs) -> None:
    assert offered(programs, "gpu-pool release ") == []
    holder = programs.holding("--label", "mine")
    waiting = programs.start("run", "--", "true")
    (row,) = eventually(programs.waiting)
    (lease,) = programs.leases()
    names = [lease["lease_id"], row["request_id"]]
    found = until_offered(programs, "gpu-pool release ", names)
    assert re.fullmatch(rf"GPU 0, held by \S+ sh \(pid {holder.pid}\), for \d+ s, mine", found[0][1])
    assert re.fullmatch(rf"waits for 1 GPU, \S+ true \(pid {waiting.pid}\), for \d+ s", found[1][1])
    until_offered(programs, "gpu-pool release lea", names[:1])
    until_offered(programs, f"gpu-pool release {names[0]} ", names[1:])
    until_offered(programs, "gpu-pool explain --request ", names[1:])


def test_a_lease_to_release_is_completed_in_a_real_bash(programs: Programs) -> None:
    programs.holding()
    (lease,) = programs.leases()
    shell = programs.terminal(["bash", "--norc", "--noprofile", "-i"], PS1="prompt> ")
    shell.until("prompt> ")
    shell.type('eval "$(_GPU_POOL_COMPLETE=bash_source gpu-pool)"\n')
    shell.until("prompt> ", times=2)
    shell.type("gpu-pool release l")

    def completed() -> str:
        shell.type("\t")
        return shell.until(f"gpu-pool release {lease['lease_id']}", within_seconds=5)

    eventually(completed, within_seconds=40)


def test_the_users_own_ids_come_first(programs: Programs, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "server", GPU_BACKEND="simulated:2", ACCESS_LOG="false") as server:
        theirs = server.ask("POST", "/leases", {"request_id": "theirs", "worker_id": "zoe"}).json["lease_id"]
        at = {"GPU_SERVICE_ENDPOINT": server.url}
        programs.holding(**at)
        (mine,) = {row["lease_id"] for row in server.get("/leases").json["leases"]} - {theirs}
        assert server.ask("POST", "/leases", {"request_id": "waiting"}).status == 202
        until_offered(programs, "gpu-pool release ", [mine, theirs, "waiting"], **at)
        until_offered(programs, f"gpu-pool release -e {server.url} ", [mine, theirs, "waiting"])


@pytest.mark.parametrize("what", ["nothing listens", "a silent server", "a broken folder", "a wrong variable"])
def test_nothing_is_offered_quickly_and_silently_where_nothing_answers(programs: Programs, what: str) -> None:
    with HostileServer(lambda _: None, is_deaf=True) as silent:
        variables = {
            "nothing listens": {"GPU_SERVICE_ENDPOINT": "http://127.0.0.1:9"},
            "a silent server": {"GPU_SERVICE_ENDPOINT": silent.url},
            "a broken folder": {"GPU_POOL_STATE_DIR": "/proc/nowhere"},
            "a wrong variable": {"GPU_BACKEND": "nonsense", "GPU_SERVICE_ENDPOINT": "nonsense"},
        }[what]
        begun_at = time.monotonic()
        assert offered(programs, "gpu-pool release ", **variables) == []
        assert time.monotonic() - begun_at < 10  # a second or two, where the machine is not busy


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(programs: Programs, shell: str) -> None:
    done = programs.run(["gpu-pool"], _GPU_POOL_COMPLETE=f"{shell}_source")
    assert done.returncode == 0
    assert "gpu-pool" in done.stdout


def test_no_traceback_whatever_happens(programs: Programs) -> None:
    (programs.folder / "state").write_text("not a folder")
    for arguments in (["run", "--no-wait", "--", "true"], ["status"], ["leases"], ["explain"], ["release", "x"]):
        done = programs.call(*arguments)
        assert done.returncode in (1, 69), (arguments, done)
        assert "Traceback" not in done.stderr
        assert done.stderr.startswith("gpu-pool: cannot make the state directory "), done.stderr
        assert str(programs.folder / "state") in done.stderr


@pytest.mark.parametrize("command", ["run", "wait"])
def test_another_system_is_told_in_a_sentence(command: str) -> None:
    script = f"import sys; sys.platform = 'darwin'; from gpu_worker_pool.cli import main; main([{command!r}, 'true'])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "gpu-pool: gpu-pool run and wait need Linux; from here, use the Python client and a GPU server\n"
    )


def test_a_reader_who_has_enough(programs: Programs) -> None:
    done = programs.run(["bash", "-c", "set -o pipefail; gpu-pool config | head -1"])
    assert done.stdout.startswith("SETTING")
    assert done.stderr == ""


def loaded_by(*arguments: str) -> set[str]:
    script = (
        "import sys\nfrom gpu_worker_pool.cli.program import run_program\n"
        f"run_program({list(arguments)!r})\nprint(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_help_loads_next_to_nothing() -> None:
    loaded = loaded_by("--help")
    assert "click" in loaded
    assert not {"asyncio", "aiohttp", "rich", "apsw", "gpu_worker_pool.core", "gpu_worker_pool.config"} & loaded
    assert not [name for name in loaded if name.startswith("gpu_worker_pool.cli.commands.")]


def test_without_a_server_nothing_of_http_is_loaded() -> None:
    loaded = "gpu_worker_pool.cli.running.lease_program, gpu_worker_pool.leases.local"
    script = f"import {loaded}, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"aiohttp", "click", "rich", "fastapi", "dotenv", "email", "uuid"} & set(done.stdout.split())


def test_the_package_itself_loads_no_command_line() -> None:
    script = "import gpu_worker_pool, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"click", "asyncio", "gpu_worker_pool.cli"} & set(done.stdout.split())
