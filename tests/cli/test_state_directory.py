"""The folder of the ledger as commands find, show and refuse it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.programs import Programs


def finding(programs: Programs, check: str) -> list[dict[str, str]]:
    done = programs.call("doctor", "--json")
    return [each for each in json.loads(done.stdout)["checks"] if each["check"] == check]


@pytest.mark.parametrize(
    ("words", "status"),
    [(["run", "--", "true"], 69), (["wait"], 69), (["status"], 69), (["serve", "--state-dir", "pool"], 2)],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_a_relative_folder_is_refused_with_the_path_to_write(programs: Programs, words: list[str], status: int) -> None:
    programs.environment["GPU_POOL_STATE_DIR"] = "pool"
    done = programs.call(*words)
    assert done.returncode == status
    assert "GPU_POOL_STATE_DIR='pool' is relative" in done.stderr
    assert f"such as {programs.folder / 'pool'}" in done.stderr
    assert not (programs.folder / "pool").exists()


def test_config_shows_the_folder_in_use(programs: Programs) -> None:
    def shown() -> dict[str, str]:
        settings = json.loads(programs.call("config", "--json").stdout)["settings"]
        return next(each for each in settings if each["name"] == "GPU_POOL_STATE_DIR")

    assert shown()["value"] == programs.environment["GPU_POOL_STATE_DIR"]
    programs.environment["GPU_POOL_STATE_DIR"] = "pool"
    assert "is relative" in shown()["problem"]
    del programs.environment["GPU_POOL_STATE_DIR"]
    if not Path("/var/lib/gpu-pool").exists():
        assert shown()["value"] == f"{programs.environment['XDG_STATE_HOME']}/gpu-pool"
        assert shown()["source"] == "default"
        assert not Path(shown()["value"]).exists()


@pytest.mark.parametrize("content", [b"this was a shopping list " * 400, b""], ids=["a text", "empty"])
def test_what_is_no_ledger_is_an_error_at_once(programs: Programs, content: bytes) -> None:
    """Without a time limit: it would wait for ever."""
    folder = Path(programs.environment["GPU_POOL_STATE_DIR"])
    folder.mkdir()
    (folder / "ledger-simulated-1-v1.db").write_bytes(content)
    done = programs.call("run", "--", "true")
    assert done.returncode == 69
    assert done.stderr.startswith(f"gpu-pool: the ledger {folder}/ledger-simulated-1-v1.db is ")
    assert done.stderr.count("\n") == 1
    assert [each["status"] for each in finding(programs, "ledger")] == ["wrong"]


def test_doctor_says_with_whom_a_folder_is_shared(programs: Programs) -> None:
    assert programs.call("run", "--", "true").returncode == 0
    folder = Path(programs.environment["GPU_POOL_STATE_DIR"])
    (found,) = finding(programs, "shared with others")
    assert found["status"] == "ok"
    assert "users seen beside you: none; only " in found["what"]
    folder.chmod(0o1777)
    (folder / "ledger-simulated-1-v1.db").chmod(0o666)
    _, sticky = finding(programs, "shared with others")
    assert (sticky["status"], sticky["what"].startswith("the folder is sticky")) == ("wrong", True)
    assert sticky["advice"].endswith(f" setup --directory {folder}")
    folder.chmod(0o770)
    (folder / "ledger-simulated-1-v1.db").chmod(0o600)
    warning, closed = finding(programs, "shared with others")[1:]
    assert (warning["status"], "no setgid" in warning["what"]) == ("warning", True)
    assert closed["status"] == "wrong"
    assert closed["what"] == "ledger-simulated-1-v1.db is not open to the other users of the folder"
