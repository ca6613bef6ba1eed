"""The program itself: help that teaches, completion, errors in a sentence, and nothing loaded that is not needed."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from gpu_worker_pool.cli.program import COMMANDS
from tests.cli.programs import Programs


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
    [("gpu-pool ", set(COMMANDS)), ("gpu-pool re", {"release"}), ("gpu-pool run --me", {"--memory"})],
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
        assert done.stderr.startswith("gpu-pool: no usable state directory (GPU_POOL_STATE_DIR): "), done.stderr
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
