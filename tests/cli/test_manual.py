"""The man page names every command and option, and `man` shows it. `make release-check` compares the one in docs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from gpu_worker_pool.cli.program import COMMANDS, gpu_pool

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("man") is None, reason="man is not installed: apt-get install man-db")
def test_man_shows_every_command_and_option_and_has_nothing_to_complain_of(tmp_path: Path) -> None:
    page = tmp_path / "gpu-pool.1"
    subprocess.run([sys.executable, ROOT / "docs/make_manual.py", page], timeout=30, check=True)
    environment = {**os.environ, "MANWIDTH": "500", "LC_ALL": "C.UTF-8", "MANROFFOPT": "", "GROFF_NO_SGR": "1"}
    words = ["man", "--warnings", "-P", "cat", "-l", str(page)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    shown = re.sub(r".\x08", "", done.stdout).replace("\u2010", "-")
    context = click.Context(gpu_pool)
    for name in COMMANDS:
        assert f"gpu-pool {name} " in shown
        command = gpu_pool.get_command(context, name)
        assert command is not None
        missing = [
            option
            for parameter in command.params
            if isinstance(parameter, click.Option) and not parameter.hidden
            for option in parameter.opts
            if option not in shown
        ]
        assert missing == []
