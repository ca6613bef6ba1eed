"""Settings in a file, and variables with a name of their own: which counts, and what `gpu-pool config` says of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.people import lab, needs_root


class Home:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / ".config" / "gpu-pool" / "config.toml"
        self.file.parent.mkdir(parents=True)
        self.environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words],
            env=self.environment | variables,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def settings(self, **variables: str) -> dict[str, dict[str, Any]]:
        done = self.run("-m", "gpu_worker_pool", "config", "--json", **variables)
        return {row["name"]: row for row in json.loads(done.stdout)["settings"]}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_the_file_counts_after_the_variables_and_before_the_defaults(home: Home) -> None:
    home.file.write_text(
        'endpoints = ["a=http://gpu1:8000", "b=http://gpu2:8000"]\nlease_ttl = 30\nkey_file = "key"\n'
        "memory_threshold_percent = 50\n"
    )
    key = home.file.parent / "key"
    key.write_text("a-key-that-is-long-enough\n")
    key.chmod(0o600)
    found = home.settings(GPU_MEMORY_THRESHOLD_PERCENT="70")
    endpoints = found["GPU_STATS_SERVICE_ENDPOINTS"]
    assert (endpoints["value"], endpoints["source"]) == ("a=http://gpu1:8000, b=http://gpu2:8000", str(home.file))
    assert (found["GPU_POOL_LEASE_TTL"]["value"], found["GPU_POOL_LEASE_TTL"]["source"]) == ("30.0", str(home.file))
    assert found["GPU_MEMORY_THRESHOLD_PERCENT"]["value"] == "70.0"
    assert found["GPU_MEMORY_THRESHOLD_PERCENT"]["source"] == "environment"
    assert found["GPU_POOL_API_KEY"]["value"] == "set, not shown"
    assert found["GPU_POLLING_INTERVAL"]["source"] == "default"
    assert [row for row in found.values() if row["problem"]] == []


def test_an_endpoint_in_the_environment_replaces_those_of_the_file(home: Home) -> None:
    home.file.write_text('endpoints = ["http://gpu1:8000", "http://gpu2:8000"]\n')
    script = (
        "from gpu_worker_pool.config import MultiEndpointConfigurationManager as M; print(M().get_service_endpoints())"
    )
    done = home.run("-c", script, GPU_SERVICE_ENDPOINT="http://mine:9000")
    assert "mine" in done.stdout
    assert "gpu1" not in done.stdout


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("lease_ttl = ", "cannot be used"),
        ('lease-ttl = "30"', "lease-ttl: unknown setting"),
        ("endpoint = {}", "endpoint: not a text, a number or a list of texts"),
        ('key_file = "nowhere"', "key_file:"),
        ('key_file = "~no-such-user/key"', "~no-such-user/key cannot be read"),
        ('key_file = "pipe"', "pipe is not a regular file"),
        ('key_file = "a\\u0000b"', "cannot be read (embedded null byte)"),
        (f"endpoint = {'[' * 3000}{']' * 3000}", "cannot be used (maximum recursion depth exceeded"),
        ("#" * 70_000, "larger than 65536 bytes"),
        ("\xff", "cannot be used"),
    ],
)
def test_what_cannot_be_used_is_reported_and_ignored(home: Home, content: str, problem: str) -> None:
    os.mkfifo(home.file.with_name("pipe"), 0o600)
    home.file.write_bytes(content.encode("latin-1"))
    found = home.settings()[str(home.file)]
    assert problem in found["problem"]
    done = home.run("-m", "gpu_worker_pool", "status", GPU_BACKEND="simulated:1")
    assert done.returncode == 0, done


def test_a_file_that_was_chosen_and_is_not_there_is_reported(home: Home) -> None:
    """Else a slip of the pen would silently be local:// instead of the server."""
    home.file.write_text('endpoint = "http://gpu1:8000"\n')
    nowhere = str(home.folder / "confg.toml")
    problem = home.settings(GPU_POOL_CONFIG=nowhere)[nowhere]["problem"]
    assert "does not exist, and GPU_POOL_CONFIG names it" in problem
    done = home.run("-m", "gpu_worker_pool", "status", GPU_BACKEND="simulated:1", GPU_POOL_CONFIG=nowhere)
    assert (done.returncode, nowhere in done.stderr) == (0, True)
    quiet = home.run("-m", "gpu_worker_pool", "status", GPU_BACKEND="simulated:1", GPU_POOL_CONFIG="/dev/null")
    assert (quiet.returncode, quiet.stderr) == (0, "")


def test_a_key_that_others_can_read_is_reported(home: Home) -> None:
    home.file.write_text('key_file = "key"\n')
    (key := home.file.parent / "key").write_text("a-key-that-is-long-enough")
    key.chmod(0o644)
    assert f"others can read {key}; chmod go-rwx {key}" in home.settings()[str(home.file)]["problem"]


def test_a_server_variable_has_another_name_which_wins(home: Home) -> None:
    found = home.settings(HOST="x86_64-conda-linux-gnu", GPU_POOL_SERVER_HOST="127.0.0.1", GPU_POOL_SERVER_PORT="9")
    assert (found["HOST"]["value"], found["HOST"]["source"]) == ("127.0.0.1", "GPU_POOL_SERVER_HOST")
    assert found["PORT"]["value"] == "9"
    assert "GPU_POOL_SERVER_HOST" not in found, "it is no unknown setting"
    bad = home.settings(GPU_POOL_SERVER_PORT="eighty")["PORT"]
    assert "GPU_POOL_SERVER_PORT must be a whole number" in bad["problem"]


def test_an_option_wins_over_both_names_of_a_variable(home: Home) -> None:
    done = home.run(
        "-m", "gpu_worker_pool", "serve", "--host", "256.0.0.1", HOST="127.0.0.1", GPU_POOL_SERVER_HOST="127.0.0.1"
    )
    assert "no address '256.0.0.1' on this host" in done.stderr


@needs_root
def test_a_home_of_another_user_is_passed_over() -> None:
    """As after `su` without a dash: HOME is that of root, which nobody else may enter."""
    with lab(1) as people:
        private, state = people.top / "private", people.top / "state"
        private.mkdir(0o700)
        state.mkdir()
        state.chmod(0o777)
        done = people.gpu_pool(people.users[0], "leases", HOME=str(private), GPU_POOL_STATE_DIR=str(state))
    assert (done.status, done.err) == (0, ""), done
