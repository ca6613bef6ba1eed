"""Where `local://` finds the server of this host, and what comes before that."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from gpu_worker_pool.gpu_server import ServerSettings
from gpu_worker_pool.host_socket import Credentials, parse_socket, peer_credentials, socket_path


def test_the_usual_socket_is_used_where_it_is(tmp_path: Path) -> None:
    usual = tmp_path / "gpu-pool.sock"
    assert socket_path({}, str(usual)) is None
    usual.touch()
    assert socket_path({}, str(usual)) == str(usual)
    assert socket_path({"GPU_BACKEND": "nvml", "GPU_POOL_STATE_DIR": " "}, str(usual)) == str(usual)


@pytest.mark.parametrize(
    "environ", [{"GPU_POOL_STATE_DIR": "/x"}, {"GPU_BACKEND": "simulated:2"}, {"GPU_BACKEND": " Simulated:2"}]
)
def test_a_state_directory_and_simulated_gpus_come_first(environ: dict[str, str], tmp_path: Path) -> None:
    usual = tmp_path / "gpu-pool.sock"
    usual.touch()
    assert socket_path(environ, str(usual)) is None
    assert socket_path({**environ, "GPU_POOL_SOCKET": str(usual)}, str(usual)) is None


def test_one_that_is_named_is_used_even_if_it_is_not_there(tmp_path: Path) -> None:
    usual = tmp_path / "gpu-pool.sock"
    usual.touch()
    assert socket_path({"GPU_POOL_SOCKET": "/none/s.sock"}, str(usual)) == "/none/s.sock"


@pytest.mark.parametrize("text", ["gpu-pool.sock", "~/s.sock", "/run/", "/" + "x" * 107, "/" + "\u00e9" * 54])
def test_what_can_be_no_socket_is_named(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="must be an absolute path of a file, of at most 107 bytes"):
        parse_socket(text)
    assert socket_path({"GPU_POOL_SOCKET": text}, str(tmp_path / "none")) is None
    assert ServerSettings.from_environment({"GPU_POOL_SOCKET": text}).gpu_pool_socket is None
    assert [record.getMessage().startswith("GPU_POOL_SOCKET must be ") for record in caplog.records] == [True, True]


def test_credentials_are_those_of_the_process_at_the_other_end() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert peer_credentials(ours) == Credentials(os.getpid(), os.getuid(), os.getgid())
