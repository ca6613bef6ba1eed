"""https: a real server with a certificate of `gpu-pool cert`, and clients that trust it by its fingerprint."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.server_process import ServerProcess
from tests.waiting import eventually

import gpu_worker_pool.sync as sync
from gpu_worker_pool.api.fingerprints import fingerprint_of, parse_fingerprints, shown

GPU_POOL = [sys.executable, "-m", "gpu_worker_pool"]
OTHER = "AB:" * 31 + "AB"


def make_certificate(folder: Path, name: str = "localhost") -> tuple[Path, Path, str]:
    folder.mkdir()
    words = ["cert", "--directory", str(folder), "--name", name, "--name", "127.0.0.1"]
    subprocess.run([*GPU_POOL, *words], check=True, capture_output=True, timeout=60)
    certificate = folder / "gpu-pool.crt"
    return certificate, folder / "gpu-pool.key", shown(fingerprint_of(certificate.read_text()))


def serve(folder: Path, certificate: Path, key: Path, *, wait: bool = True, **settings: str) -> ServerProcess:
    return ServerProcess(
        folder,
        wait=wait,
        GPU_BACKEND="simulated:1",
        GPU_POOL_TLS_CERT=str(certificate),
        GPU_POOL_TLS_KEY=str(key),
        **{"RELOAD": "false"} | settings,
    )


def served_fingerprint(port: int) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as connection,
        context.wrap_socket(connection) as secure,
    ):
        found = secure.getpeercert(binary_form=True)
        assert found is not None
        return shown(fingerprint_of(ssl.DER_cert_to_PEM_cert(found)))


def gpu_pool(*words: str, fingerprint: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GPU_POOL_TLS_FINGERPRINT": fingerprint}
    return subprocess.run([*GPU_POOL, *words], env=environment, capture_output=True, text=True, check=False, timeout=60)


def test_clients_trust_a_certificate_by_its_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key, fingerprint = make_certificate(tmp_path / "tls")
    with serve(tmp_path, certificate, key) as server:
        url = f"https://localhost:{server.port}"
        seen = gpu_pool("status", "-e", url, fingerprint=fingerprint)
        assert seen.returncode == 0, seen.stderr
        several = gpu_pool("status", "-e", url, fingerprint=f"{OTHER},localhost:{server.port}={fingerprint}")
        assert several.returncode == 0, several.stderr
        ran = gpu_pool("run", "-e", url, "--", "true", fingerprint=fingerprint.replace(":", "").lower())
        assert ran.returncode == 0, ran.stderr
        monkeypatch.setenv("GPU_POOL_TLS_FINGERPRINT", fingerprint)
        with sync.GPUWorkerPoolClient(url) as client:
            assignment = client.request_gpu(timeout=30)
            assert assignment.lease_id is not None
            client.release_gpu(assignment)


@pytest.mark.parametrize(
    ("fingerprint", "says"),
    [
        (OTHER, "its certificate is not the one that GPU_POOL_TLS_FINGERPRINT names, but {0}"),
        ("", "to trust this certificate, GPU_POOL_TLS_FINGERPRINT"),
        ("elsewhere={0}", "its TLS certificate is refused"),
        ("no fingerprint", "its certificate is not the one that GPU_POOL_TLS_FINGERPRINT names"),
        ("{0},AB:CD", "its certificate is not the one that GPU_POOL_TLS_FINGERPRINT names"),
    ],
)
def test_any_other_certificate_is_refused(tmp_path: Path, fingerprint: str, says: str) -> None:
    certificate, key, right = make_certificate(tmp_path / "tls")
    with serve(tmp_path, certificate, key) as server:
        seen = gpu_pool("status", "-e", f"https://localhost:{server.port}", fingerprint=fingerprint.format(right))
        assert seen.returncode != 0
        assert says.format(right) in " ".join(seen.stderr.split())


def test_a_typing_error_in_a_fingerprint_trusts_no_authority_either(tmp_path: Path) -> None:
    """Else a certificate of any authority would do for a client that was told to trust one certificate only."""
    certificate, key, right = make_certificate(tmp_path / "tls")
    environment = {**os.environ, "SSL_CERT_FILE": str(certificate)}
    with serve(tmp_path, certificate, key) as server:
        words = [*GPU_POOL, "status", "-e", f"https://localhost:{server.port}"]
        for fingerprint, status in ((None, 0), (right, 0), (right[:-1], 69), (f"elsewhere={right}", 0)):
            given = environment if fingerprint is None else environment | {"GPU_POOL_TLS_FINGERPRINT": fingerprint}
            done = subprocess.run(words, env=given, capture_output=True, text=True, check=False, timeout=60)
            assert done.returncode == status, (fingerprint, done.stderr)


def test_nothing_is_sent_to_a_server_with_another_certificate(tmp_path: Path) -> None:
    certificate, key, _ = make_certificate(tmp_path / "tls")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    received: list[bytes] = []

    def listen() -> None:
        connection, _ = listener.accept()
        with connection, context.wrap_socket(connection, server_side=True) as secure:
            received.append(secure.recv(1000))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listening = threading.Thread(target=listen)
        listening.start()
        seen = gpu_pool("leases", "-e", f"https://localhost:{listener.getsockname()[1]}", fingerprint=OTHER)
        listening.join(30)
    assert seen.returncode != 0
    assert received == [b""]


def test_a_new_certificate_is_read_on_sighup(tmp_path: Path) -> None:
    certificate, key, first = make_certificate(tmp_path / "tls")
    other_certificate, other_key, second = make_certificate(tmp_path / "other")
    with serve(tmp_path, certificate, key) as server:
        assert server.process is not None
        assert served_fingerprint(server.port) == first
        right_key = key.read_bytes()
        key.write_text("no key")
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: "the old one stays" in server.log)
        assert served_fingerprint(server.port) == first
        key.write_bytes(right_key)
        certificate.write_bytes(other_certificate.read_bytes())
        key.write_bytes(other_key.read_bytes())
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: served_fingerprint(server.port) == second)


@pytest.mark.parametrize("settings", [{}, {"WORKERS": "2"}])
def test_a_sighup_while_the_server_starts_does_not_end_it(tmp_path: Path, settings: dict[str, str]) -> None:
    """systemd would not even start it again: it takes that for a clean end."""
    certificate, key, fingerprint = make_certificate(tmp_path / "tls")
    with serve(tmp_path, certificate, key, wait=False, **settings) as server:
        assert server.process is not None
        eventually(lambda: "GPU statistics on" in server.log)
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: served_fingerprint(server.port) == fingerprint)


def test_a_server_that_reloads_its_code_reads_its_certificate_on_sighup_too(tmp_path: Path) -> None:
    certificate, key, _ = make_certificate(tmp_path / "tls")
    other_certificate, other_key, second = make_certificate(tmp_path / "other")
    with serve(tmp_path, certificate, key, RELOAD="true") as server:
        assert server.process is not None
        certificate.write_bytes(other_certificate.read_bytes())
        key.write_bytes(other_key.read_bytes())
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: served_fingerprint(server.port) == second)
        status, _ = server.terminate()
        assert status in (0, -signal.SIGTERM)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"GPU_POOL_TLS_CERT": "{0}"}, "set GPU_POOL_TLS_KEY"),
        ({"GPU_POOL_TLS_KEY": "{1}"}, "set GPU_POOL_TLS_CERT"),
        ({"GPU_POOL_TLS_CERT": "{0}", "GPU_POOL_TLS_KEY": "{0}"}, "cannot be used"),
        ({"GPU_POOL_TLS_CERT": "/nowhere", "GPU_POOL_TLS_KEY": "{1}"}, "no such file"),
    ],
)
def test_what_cannot_serve_https_is_refused_at_once(tmp_path: Path, settings: dict[str, str], says: str) -> None:
    certificate, key, _ = make_certificate(tmp_path / "tls")
    given = {name: value.format(certificate, key) for name, value in settings.items()}
    environment = {**os.environ, "GPU_BACKEND": "simulated:1", "GPU_POOL_STATE_DIR": str(tmp_path / "state"), **given}
    words = [*GPU_POOL, "serve", "--port", "0", "--host", "127.0.0.1"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert says in done.stderr.lower() or says in done.stderr


def test_a_certificate_is_never_overwritten(tmp_path: Path) -> None:
    certificate, key, fingerprint = make_certificate(tmp_path / "tls")
    before = certificate.read_bytes(), key.read_bytes()
    again = gpu_pool("cert", "--directory", str(tmp_path / "tls"))
    assert (again.returncode, certificate.read_bytes(), key.read_bytes()) == (1, *before)
    assert "is kept" in again.stderr
    assert key.stat().st_mode & 0o777 == 0o600
    assert gpu_pool("cert", "--fingerprint", str(certificate)).stdout.strip() == fingerprint
    assert "cannot be read as a certificate" in gpu_pool("cert", "--fingerprint", str(key)).stderr
    assert gpu_pool("cert", "--name", "a b", "--directory", str(tmp_path)).returncode == 2


def test_the_endpoint_that_is_shown_for_an_address_works(tmp_path: Path) -> None:
    done = gpu_pool("cert", "--directory", str(tmp_path), "--name", "::1")
    assert "GPU_SERVICE_ENDPOINT=https://[::1]:8000" in done.stdout


def test_a_key_that_all_users_can_read_is_reported(tmp_path: Path) -> None:
    certificate, key, _ = make_certificate(tmp_path / "tls")
    with serve(tmp_path, certificate, key) as server:
        assert "chmod o-rwx" not in server.log
    key.chmod(0o644)
    with serve(tmp_path / "again", certificate, key) as server:
        assert f"chmod o-rwx {key}" in server.log


@pytest.mark.parametrize("text", ["AB", "x" * 64, "host=", "AB" * 33, "=" + "AB" * 32, "host:99999999=" + "AB" * 32])
def test_what_is_no_fingerprint_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be SHA-256 fingerprints"):
        parse_fingerprints(text)
