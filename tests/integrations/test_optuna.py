"""The Optuna study of docs/WORKERS.md, with Optuna itself: `make test-integrations`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers.conftest import Host

pytest.importorskip("optuna", reason="make test-integrations installs it")

ROOT = Path(__file__).parents[2]


def test_the_trials_of_a_study_have_a_gpu_each(host: Host) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "optuna_study.py")],
        env=host.environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"Trial \d+ finished with value: [0-9.e-]+ and parameters: {'rate': ", done.stderr)) == 20
    assert host.is_given_back()


def test_the_example_is_the_one_of_the_page() -> None:
    page = (ROOT / "docs" / "WORKERS.md").read_text()
    (block,) = [each for each in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if "import optuna" in each]
    example = (ROOT / "examples" / "optuna_study.py").read_text()
    assert list(filter(None, block.splitlines())) == list(filter(None, example.splitlines()))[1:]
