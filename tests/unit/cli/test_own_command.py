"""The commands that `gpu-pool` prints about itself work when they are typed, wherever it is installed."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from gpu_worker_pool.cli.own_command import own_command


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """In a virtual environment whose path has a blank."""
    folder = tmp_path / "my project" / ".venv" / "bin"
    folder.mkdir(parents=True)
    script = folder / "gpu-pool"
    script.write_text("#!/bin/sh\necho this one: $@\n")
    script.chmod(0o755)
    return script


def typed(command: str, folder: Path, path: str) -> str:
    words = ["/bin/sh", "-c", f"{command} status"]
    return subprocess.run(words, cwd=folder, env={"PATH": path}, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("where", "on_path", "expected"),
    [
        (".", False, ".venv/bin/gpu-pool"),
        (".venv", False, "bin/gpu-pool"),
        (".venv/bin", False, "./gpu-pool"),
        (".", True, "gpu-pool"),
        (".venv/lib", False, "../bin/gpu-pool"),
        ("/", False, None),
    ],
)
def test_it_is_short_and_works(
    monkeypatch: pytest.MonkeyPatch, script: Path, where: str, on_path: bool, expected: str | None
) -> None:
    folder = script.parents[2] / where
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    path = f"{script.parent}:/usr/bin:/bin" if on_path else "/usr/bin:/bin"
    monkeypatch.setenv("PATH", path)
    command = own_command([str(script), "demo"])
    assert command == (shlex.quote(str(script)[1:] if expected is None else expected))
    assert typed(command, folder, path) == "this one: status\n"


def test_another_gpu_pool_on_the_path_is_not_meant(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: Path
) -> None:
    other = tmp_path / "gpu-pool"
    other.write_text("#!/bin/sh\necho another one\n")
    other.chmod(0o755)
    monkeypatch.chdir("/")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert typed(own_command([str(script)]), Path("/"), str(tmp_path)) == "this one: status\n"


def test_started_as_a_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to("/bin/echo")  # as in a virtual environment: what it links to has other packages
    monkeypatch.chdir(tmp_path)
    command = own_command(["/somewhere/gpu_worker_pool/__main__.py", "demo"], str(python))
    assert command == "bin/python -m gpu_worker_pool"
    assert typed(command, tmp_path, "/usr/bin:/bin") == "-m gpu_worker_pool status\n"
