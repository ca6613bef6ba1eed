"""The Containerfile and compose.yaml. No engine is needed: the steps are run one by one in a bare environment."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.server_process import free_port
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Containerfile").read_text(encoding="utf-8")
STEPS = [
    (match[1], match[2])
    for line in TEXT.splitlines()
    if not line.startswith("#") and (match := re.fullmatch(r"([A-Z]+) (.+)", line))
]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
SERVICE: dict[str, Any] = COMPOSE["services"]["gpu-pool"]


def steps(word: str) -> list[str]:
    return [rest for first, rest in STEPS if first == word]


def variables() -> dict[str, str]:
    return dict(each.split("=", 1) for line in steps("ENV") for each in shlex.split(line))


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    """A folder that any user can enter, with an environment in which `RUN pip …` was run, offline."""
    folder = Path(tempfile.mkdtemp(prefix="gpu-pool-image-"))
    folder.chmod(0o755)
    try:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        build, install = (shlex.split(step[step.index("pip ") :])[1:] for step in steps("RUN") if "pip " in step)
        assert (build[0], build[-1], install[0], install[-1]) == ("wheel", ".", "install", "gpu-worker-pool")
        wheels = str(folder / "wheels")
        build, install = ([word.replace("/wheels", wheels) for word in step] for step in (build, install))
        # What it needs in turn is installed beside it already.
        subprocess.run([*pip, *build, "--no-deps", "--no-build-isolation"], cwd=ROOT, check=True, capture_output=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        python = folder / "venv/bin/python"
        done = [*pip, "--python", str(python), *install, "--no-deps"]
        subprocess.run(done, check=True, capture_output=True)
        (packages,) = (folder / "venv/lib").glob("python*/site-packages")
        (packages / "what_it_needs.pth").write_text("\n".join(site.getsitepackages()))
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.mark.long  # it builds and installs; `make release-check` runs it, too
def test_the_steps_make_a_server_that_says_whether_it_is_well(
    image: Path, record_property: Callable[[str, object], None]
) -> None:
    """As the user of the image, where such a user can run the Python of the tests."""
    port, state = free_port(), image / "state"
    state.mkdir(0o700)
    uid, gid = map(int, steps("USER")[-1].split(":"))
    user: dict[str, Any] = {"user": uid, "group": gid, "extra_groups": []}
    settings = {**variables(), "GPU_POOL_STATE_DIR": str(state), "PORT": str(port), "GPU_BACKEND": "simulated:2"}
    environment = {"PATH": f"{image}/venv/bin:/usr/bin:/bin", "HOST": "127.0.0.1", **settings}

    def run(words: list[str], **options: Any) -> subprocess.Popen[bytes]:
        words = [str(image / "venv/bin" / words[0]), *words[1:]]
        return subprocess.Popen(words, env=environment, cwd=state, stderr=subprocess.DEVNULL, **user, **options)

    try:
        os.chown(state, uid, gid)
        assert run(["python", "-c", "import gpu_worker_pool.cli, fastapi"]).wait(30) == 0
    except (PermissionError, AssertionError):
        user.clear()
        os.chown(state, os.geteuid(), os.getegid())
    record_property("run as", "the user of the image" if user else "the user of the tests")
    health = json.loads(steps("HEALTHCHECK")[0].partition("CMD ")[2])
    assert run(health).wait(30) != 0, "nothing runs yet"
    command = [*json.loads(steps("ENTRYPOINT")[0]), *json.loads(steps("CMD")[-1])]
    with run(command) as server:
        try:
            eventually(lambda: run(health).wait(30) == 0)
            server.terminate()
            assert server.wait(10) in (0, -15)
        finally:
            server.kill()
    assert run(health).wait(30) != 0


def test_it_runs_as_another_user_than_root_and_exposes_what_compose_publishes() -> None:
    uid, gid = steps("USER")[-1].split(":")
    assert (uid, gid) == ("10001", "10001")
    assert f"useradd --uid {uid}" in TEXT
    assert SERVICE["user"].startswith(f"{uid}:")
    (port,) = steps("EXPOSE")
    assert SERVICE["ports"] == [f"${{GPU_POOL_PORT:-8000}}:{port}"]
    assert [line.split()[-1] for line in steps("FROM") if " AS " in line] == ["build"]
    assert len(steps("FROM")) == 2


def test_compose_gives_it_the_devices_and_the_state_directory_and_nothing_else() -> None:
    (device,) = SERVICE["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", "all", ["utility"])
    (volume,) = SERVICE["volumes"]
    assert volume.endswith(f":{variables()['GPU_POOL_STATE_DIR']}")
    assert set(COMPOSE["volumes"]) == {"state"}
    assert (SERVICE["build"]["context"], SERVICE["build"]["dockerfile"]) == (".", "Containerfile")
    assert (SERVICE["read_only"], SERVICE["cap_drop"]) == (True, ["ALL"])
    assert "privileged" not in SERVICE


def test_what_is_copied_into_the_build_holds_no_secrets_of_this_folder() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv*", "gpu-pool.env"} <= set(ignored)
    assert SERVICE["env_file"][0]["path"] in ignored
