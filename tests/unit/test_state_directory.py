"""Where processes of one host meet: what was chosen wins, and what cannot be relied on is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_worker_pool import state_directory as module
from gpu_worker_pool.state_directory import state_directory


@pytest.fixture(autouse=True)
def nothing_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARED_DIRECTORY", tmp_path / "var")


def test_what_was_chosen_wins_and_is_made(tmp_path: Path) -> None:
    environ = {"GPU_POOL_STATE_DIR": str(tmp_path / "by" / "variable")}
    assert state_directory(environ=environ) == tmp_path / "by" / "variable"
    assert state_directory(str(tmp_path / "given"), environ) == tmp_path / "given"
    assert (tmp_path / "given").is_dir()


def test_the_shared_one_where_it_is_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "var").mkdir()
    assert state_directory(environ={}) == tmp_path / "var"
    assert caplog.records == []


def test_else_the_users_own_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = state_directory(environ={"XDG_STATE_HOME": str(tmp_path)})
    assert directory == tmp_path / "gpu-pool"
    assert directory.stat().st_mode & 0o777 == 0o700
    assert "sharing among your own programs only" in caplog.text


def test_a_home_that_is_not_known_is_an_error_that_says_what_to_set() -> None:
    with pytest.raises(OSError, match="set GPU_POOL_STATE_DIR"):
        state_directory("~nobody-of-this-name/x", {})


def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = f"1 0 0:1 / / rw - ext4 /dev/sda rw\n2 1 0:2 / {tmp_path} rw - nfs4 server:/x rw\n"
    real = Path.read_text

    def read_text(path: Path, *args: object, **kwargs: object) -> str:
        return mounts if str(path) == "/proc/self/mountinfo" else real(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", read_text)
    with pytest.raises(OSError, match=r"network file system \(nfs4\)"):
        state_directory(str(tmp_path / "pool"), {})
