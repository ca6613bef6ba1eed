"""Where requests come from: the program's name without its arguments, the process, the user and the host."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from gpu_worker_pool.hardware.origin import (
    LONGEST_NAME,
    bounded,
    host_name,
    origin_of_this_process,
    program_of_command,
    program_of_process,
    program_of_python,
)

SHOW = "from gpu_worker_pool.hardware.origin import origin_of_this_process as me; print(me().program, me().pid)"


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("./train --secret x", "train"),
        ("/opt/tools/torchrun --nproc-per-node 2 train.py", "torchrun"),
        ("python train.py --lr 3", "train.py"),
        ("python3.12 -u /home/ada/train.py --secret x", "train.py"),
        ("python -m torch.distributed.run train.py", "torch.distributed.run"),
        ("python -um pkg.mod --secret x", "pkg.mod"),
        ("python -mpkg --secret x", "pkg"),
        ("python -W ignore -X dev train.py", "train.py"),
        ("python -Wonce train.py", "train.py"),
        ("python -- train.py", "train.py"),
        ("python -c secret", "python"),
        ("python -uc secret", "python"),
        ("python - secret", "python"),
        ("python --unknown secret", "python"),
        ("python -Z secret", "python"),
        ("python", "python"),
        ("python3 -m", "python3"),
        ("pypy3 train.py", "train.py"),
        ("pythonic secret", "pythonic"),
        ("bash run.sh secret", "run.sh"),
        ("bash -euo pipefail run.sh", "run.sh"),
        ("bash -c secret", "bash"),
        ("sh -lc secret", "sh"),
        ("bash +x secret", "bash"),
        ("bash --rcfile secret run.sh", "bash"),
        ("bash -s secret", "bash"),
        ("bash /dev/fd/63", "bash"),
        ("node --title secret serve.js", "node"),
        ("node serve.js secret", "serve.js"),
        ("julia -t 4 train.jl", "julia"),
        ("env TOKEN=secret python train.py", "env"),
        ("/bin/", "bin"),
    ],
)
def test_the_program_of_a_command(command: str, program: str) -> None:
    assert program_of_command(command.split()) == program


def test_a_command_without_a_name_has_no_program() -> None:
    assert [program_of_command(command) for command in ([], [""], ["/"], ["\x1b\x07"])] == [None] * 4


@pytest.mark.parametrize(
    ("argv", "module", "program"),
    [
        (["/home/ada/train.py", "--secret"], None, "train.py"),
        (["/home/ada/.venv/bin/pytest"], None, "pytest"),
        (["/site/pkg/__main__.py"], "pkg.__main__", "pkg"),
        (["/site/pkg/tool.py"], "pkg.tool", "pkg.tool"),
        (["archive.pyz"], "__main__", "archive.pyz"),
        ([""], None, "python"),
        (["-c", "secret"], None, "python"),
        (["-"], None, "python"),
        ([], None, "python"),
    ],
)
def test_the_program_of_a_python_process(argv: list[str], module: str | None, program: str) -> None:
    spec = None if module is None else ModuleSpec(module, None)
    assert program_of_python(argv, spec, {}, {"JPY_SESSION_NAME": "/home/ada/other.ipynb"}) == program


@pytest.mark.parametrize(
    ("environ", "program"),
    [({}, "notebook"), ({"JPY_SESSION_NAME": "/home/ada/Try this.ipynb"}, "Try this.ipynb")],
)
def test_a_notebook_has_its_own_name(environ: dict[str, str], program: str) -> None:
    argv, spec = ["/site/ipykernel_launcher.py", "-f", "x.json"], ModuleSpec("ipykernel_launcher", None)
    assert program_of_python(argv, spec, {"ipykernel.kernelapp": None}, environ) == program


def test_names_are_printable_and_not_too_long() -> None:
    assert bounded("tr\x1b[31main\u202e.py\n\udcff") == "tr[31main.py"
    assert bounded(" \x00\t ") is None
    assert bounded("x" * 500) == "x" * LONGEST_NAME


def test_this_process() -> None:
    mine = origin_of_this_process()
    assert (mine.user, mine.pid) == (pwd.getpwuid(os.getuid()).pw_name, os.getpid())
    assert (mine.host, mine.is_verified) == (host_name(), False)
    assert origin_of_this_process() is mine, "a request does not make it anew"


def test_real_processes_know_their_program(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SHOW)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(SHOW)

    def shown(*arguments: str, text_in: str = "") -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, input=text_in, capture_output=True, text=True, check=True
        )
        return done.stdout.split()[0]

    assert shown("train.py", "--secret") == "train.py"
    assert shown("-m", "package", "--secret") == "package"
    assert shown("-c", SHOW) == "python"
    assert shown(text_in=SHOW) == "python"


def test_a_forked_child_is_another_process(tmp_path: Path) -> None:
    (tmp_path / "fork.py").write_text(
        "import os\nfrom gpu_worker_pool.hardware.origin import origin_of_this_process as me\n"
        "before = me().pid\nif os.fork() == 0:\n    print(me().pid != before, me().pid == os.getpid())\n"
        "else:\n    os.wait()\n"
    )
    done = subprocess.run([sys.executable, str(tmp_path / "fork.py")], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


def test_the_program_of_a_process_that_runs(tmp_path: Path) -> None:
    script = tmp_path / "hold.sh"
    script.write_text("echo ready; read line\n")
    with subprocess.Popen(
        ["/bin/sh", str(script), "secret"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert program_of_process(process.pid) == "hold.sh"
        process.communicate("\n")
    assert program_of_process(process.pid) is None
    # A process may write a text over its command line.
    with subprocess.Popen(
        ["/x train.py --secret"], executable="/bin/cat", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert program_of_process(process.pid) == "cat"
        process.communicate(b"")
