"""`gpu-pool run -- COMMAND` does without the parser: it must ask for what the parser would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from gpu_worker_pool.cli.commands.run import run
from gpu_worker_pool.cli.options import lease_options
from gpu_worker_pool.cli.running.plain import plain_spec


def test_it_asks_for_what_the_parser_would() -> None:
    parsed: dict[str, Any] = {}
    command = click.command()(lease_options(lambda **given: parsed.update(given)))
    command.main([], standalone_mode=False)
    spec = plain_spec(["python", "train.py"])
    assert spec._replace(worker_id="", program=None, pid=None) == parsed["spec"]
    assert spec.program == "train.py"
    assert parsed["uuids"] is False
    own = ("on_lost", "on_yield", "notify", "ssh", "variables")
    parameters = run.make_context("run", ["--", "true"]).params
    assert [parameters[name] for name in own] == ["warn", None, None, None, ()]
    assert set(parameters) - {parameter.name for parameter in command.params} == {*own, "command"}


def test_the_parser_is_not_loaded(tmp_path: Path) -> None:
    program = (
        "import os, sys\nfrom gpu_worker_pool.cli import main\n"
        "exit = os._exit\n"
        "os._exit = lambda status: (print('click' in sys.modules), sys.stdout.flush(), exit(status))\n"
        "main(sys.argv[1:])\n"
    )
    environment = {"GPU_BACKEND": "simulated:1", "GPU_POOL_STATE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    for options, is_loaded in (([], False), (["-q"], True)):
        done = subprocess.run(
            [sys.executable, "-c", program, "run", *options, "--", "echo", "$0"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == ["$0", str(is_loaded)]
