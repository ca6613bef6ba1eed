"""Where processes of one host meet: what was chosen wins, and what cannot be relied on is refused."""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

import pytest

from gpu_worker_pool import state_directory as module
from gpu_worker_pool.errors import LedgerPermissionError, LedgerUnusableError
from gpu_worker_pool.state_directory import announce_privacy, locate, open_shared, share_file, state_directory


@pytest.fixture(autouse=True)
def nothing_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARED_DIRECTORY", tmp_path / "var")
    monkeypatch.delenv("GPU_POOL_STATE_DIR", raising=False)


def test_what_was_chosen_wins_and_is_made(tmp_path: Path) -> None:
    environ = {"GPU_POOL_STATE_DIR": str(tmp_path / "by" / "variable")}
    assert state_directory(environ=environ) == tmp_path / "by" / "variable"
    assert state_directory(str(tmp_path / "given"), environ) == tmp_path / "given"
    assert (tmp_path / "given").is_dir()


def test_a_home_may_be_written_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_directory("~/pool", {}) == tmp_path / "pool"


def test_a_relative_path_is_refused_and_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        LedgerUnusableError, match=rf"^GPU_POOL_STATE_DIR='pool/here' is .*such as {tmp_path}/pool/here$"
    ):
        state_directory(environ={"GPU_POOL_STATE_DIR": "pool/here"})
    assert list(tmp_path.iterdir()) == []


def test_the_shared_one_where_it_is_there(tmp_path: Path) -> None:
    (tmp_path / "var").mkdir()
    assert state_directory(environ={}) == tmp_path / "var"
    assert not locate(environ={}).is_private


def test_else_the_users_own(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    assert locate(environ=environ) == (tmp_path / "gpu-pool", True)
    assert not (tmp_path / "gpu-pool").exists()
    directory = state_directory(environ=environ)
    assert directory.stat().st_mode & 0o777 == 0o700


def test_a_file_in_the_place_of_the_shared_folder_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "var").symlink_to("nowhere")
    with pytest.raises(LedgerUnusableError, match=r"is not a folder: remove it; to share this host's GPUs"):
        state_directory(environ={})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere; tests/cli/test_users.py has real users")
def test_a_shared_folder_that_we_may_not_use_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "var").mkdir(mode=0o500)
    with pytest.raises(LedgerPermissionError, match=r"exists, but you may not write to it"):
        state_directory(environ={})


def test_that_only_our_own_jobs_are_seen_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_announced", [])
    said: list[str] = []
    announce_privacy(str(tmp_path), say=said.append)  # chosen
    assert said == []
    for _ in range(3):
        announce_privacy(say=said.append)
    (line,) = said
    assert line.startswith("only your own jobs are coordinated; to share this host's GPUs with other users: sudo ")
    *_, program, command = shlex.split(line.partition(": ")[2])
    assert command == "setup"
    assert Path(program).is_file() or program == "gpu-pool"


def test_a_home_that_is_not_known_is_an_error_that_says_what_to_set() -> None:
    with pytest.raises(LedgerUnusableError, match="set GPU_POOL_STATE_DIR"):
        state_directory("~nobody-of-this-name/x", {})


def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = f"1 0 0:1 / / rw - ext4 /dev/sda rw\n2 1 0:2 / {tmp_path} rw - nfs4 server:/x rw\n"
    real = Path.read_text

    def read_text(path: Path, *args: object, **kwargs: object) -> str:
        return mounts if str(path) == "/proc/self/mountinfo" else real(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", read_text)
    with pytest.raises(LedgerUnusableError, match=r"network file system \(nfs4\)"):
        state_directory(str(tmp_path / "pool"), {})


@pytest.mark.parametrize(("folder", "file"), [(0o2770, 0o660), (0o1777, 0o666), (0o755, 0o600)])
def test_a_new_file_is_for_those_who_may_write_to_its_folder(tmp_path: Path, folder: int, file: int) -> None:
    tmp_path.chmod(folder)
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    share_file(descriptor, tmp_path)
    found = os.fstat(descriptor)
    os.close(descriptor)
    assert stat.S_IMODE(found.st_mode) == file
    assert found.st_gid == tmp_path.stat().st_gid


def test_a_link_that_another_user_made_is_not_opened_to_others(tmp_path: Path) -> None:
    """In a shared folder a name of ours may be a second name of a file of ours that is elsewhere."""
    (folder := tmp_path / "shared").mkdir()
    folder.chmod(0o777)
    secret = tmp_path / "secret"
    secret.touch(0o600)
    os.link(secret, folder / "file")
    descriptor = os.open(folder / "file", os.O_RDWR)
    with pytest.raises(OSError, match="second name"):
        share_file(descriptor, folder)
    os.close(descriptor)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


def test_a_file_from_elsewhere_with_a_second_name_in_the_folder_is_not_opened(tmp_path: Path) -> None:
    """Its content would be replaced, as root by whoever may write to the folder, where links are not restricted."""
    precious, name = tmp_path / "precious", tmp_path / "readings-real-v3.jsonl"
    precious.write_text("precious")
    name.hardlink_to(precious)
    with pytest.raises(OSError, match="one with a second name"):
        open_shared(name)
    name.unlink()
    os.close(open_shared(precious))
