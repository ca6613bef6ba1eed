"""The documented variables and their defaults; a bad value is named in the log, and the default holds."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from gpu_worker_pool.gpu_server import ServerSettings, get_bool_env, get_float_env, get_int_env

DEFAULTS = {
    "host": "0.0.0.0",
    "port": 8000,
    "reload": True,
    "log_level": "info",
    "access_log": True,
    "workers": 1,
    "title": "GPU Statistics Server",
    "description": "A server that provides GPU statistics including memory usage and utilization",
    "version": "1.0.0",
    "docs_url": "/docs",
    "redoc_url": "/redoc",
    "enable_cors": True,
    "api_prefix": "",
    "refresh_interval": 1.0,
    "max_history": 100,
    "log_format": "%(asctime)s - %(name)s - %(levelname)s - %(message)s",
    "cuda_visible_devices": None,
    "gpu_backend": "auto",
    "gpu_simulated_outsiders": None,
    "gpu_pool_state_dir": None,
    "gpu_pool_socket": None,
    "gpu_pool_api_keys": (),
    "gpu_pool_admin_keys": (),
    "gpu_pool_api_keys_file": None,
    "gpu_pool_open_on_loopback": True,
    "gpu_pool_hosts": (),
    "gpu_pool_tls_cert": None,
    "gpu_pool_tls_key": None,
    "gpu_pool_idle_after": 1800.0,
    "gpu_pool_most_waiting": 1000,
    "gpu_pool_policy": None,
    "gpu_pool_most_leases_of_a_caller": 2000,
    "gpu_pool_most_leases": 10_000,
    "gpu_pool_peers": (),
    "gpu_pool_fleet_database": None,
    "gpu_pool_fleet_join": (),
    "gpu_pool_fleet_key_file": None,
    "gpu_pool_fleet_insecure": False,
    "gpu_pool_fleet_strategy": "pack",
    "gpu_pool_host_name": None,
    "gpu_pool_url": None,
}


def test_defaults_are_the_documented_ones(caplog: pytest.LogCaptureFixture) -> None:
    assert dataclasses.asdict(ServerSettings.from_environment({})) == DEFAULTS
    assert caplog.records == []


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("HOST", "127.0.0.1", "host", "127.0.0.1"),
        ("PORT", "9000", "port", 9000),
        ("RELOAD", "no", "reload", False),
        ("LOG_LEVEL", "WARNING", "log_level", "warning"),
        ("ACCESS_LOG", "off", "access_log", False),
        ("WORKERS", "4", "workers", 4),
        ("TITLE", "Mine", "title", "Mine"),
        ("DESCRIPTION", "Ours", "description", "Ours"),
        ("VERSION", "2.0", "version", "2.0"),
        ("DOCS_URL", "/swagger", "docs_url", "/swagger"),
        ("REDOC_URL", "/red/oc", "redoc_url", "/red/oc"),
        ("ENABLE_CORS", "0", "enable_cors", False),
        ("API_PREFIX", "/api/v1/", "api_prefix", "/api/v1"),
        ("API_PREFIX", "/", "api_prefix", ""),
        ("REFRESH_INTERVAL", "0.5", "refresh_interval", 0.5),
        ("MAX_HISTORY", "7", "max_history", 7),
        ("LOG_FORMAT", "json", "log_format", "json"),
        ("LOG_FORMAT", "%(message)s", "log_format", "%(message)s"),
        ("CUDA_VISIBLE_DEVICES", "", "cuda_visible_devices", ""),
        ("CUDA_VISIBLE_DEVICES", "0 2", "cuda_visible_devices", "0 2"),
        ("GPU_BACKEND", "Simulated:8", "gpu_backend", "simulated:8"),
        ("GPU_BACKEND", "simulated:2,seed=7,linger=0.5", "gpu_backend", "simulated:2,seed=7,linger=0.5"),
        ("GPU_POOL_STATE_DIR", "~/pool", "gpu_pool_state_dir", "~/pool"),
        ("GPU_POOL_SOCKET", "/run/gpu-pool/gpu-pool.sock", "gpu_pool_socket", "/run/gpu-pool/gpu-pool.sock"),
        ("GPU_POOL_API_KEYS", "0123456789abcdef", "gpu_pool_api_keys", ("0123456789abcdef",)),
        ("GPU_POOL_API_KEYS_FILE", "/etc/keys", "gpu_pool_api_keys_file", "/etc/keys"),
        (
            "GPU_POOL_ADMIN_KEYS",
            " first-of-two-keys, second~of+two/keys= first-of-two-keys ,",
            "gpu_pool_admin_keys",
            ("first-of-two-keys", "second~of+two/keys="),
        ),
        ("GPU_POOL_OPEN_ON_LOOPBACK", "no", "gpu_pool_open_on_loopback", False),
        (
            "GPU_POOL_HOSTS",
            "gpu1.example.org,[::1] 192.0.2.7",
            "gpu_pool_hosts",
            ("gpu1.example.org", "::1", "192.0.2.7"),
        ),
        ("GPU_POOL_IDLE_AFTER", "60.5", "gpu_pool_idle_after", 60.5),
        ("GPU_POOL_MOST_WAITING", "7", "gpu_pool_most_waiting", 7),
        ("GPU_POOL_POLICY", "/srv/policy.toml", "gpu_pool_policy", "/srv/policy.toml"),
        ("PORT", "", "port", 8000),
        ("PORT", "  ", "port", 8000),
    ],
)
def test_a_variable_sets_its_field(
    variable: str, text: str, field: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    assert getattr(ServerSettings.from_environment({variable: text}), field) == value
    assert caplog.records == []


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("PORT", "eighty"),
        ("PORT", "65536"),
        ("PORT", "-1"),
        ("RELOAD", "maybe"),
        ("LOG_LEVEL", "loud"),
        ("WORKERS", "0"),
        ("WORKERS", "1.5"),
        ("DOCS_URL", "docs"),
        ("DOCS_URL", "/a b"),
        ("DOCS_URL", "/docs?x"),
        ("REDOC_URL", "//x"),
        ("API_PREFIX", "api"),
        ("API_PREFIX", "/{gpu}"),
        ("REFRESH_INTERVAL", "0"),
        ("REFRESH_INTERVAL", "nan"),
        ("REFRESH_INTERVAL", "inf"),
        ("REFRESH_INTERVAL", "fast"),
        ("MAX_HISTORY", "0"),
        ("MAX_HISTORY", "1e3"),
        ("LOG_FORMAT", "%(nothing"),
        ("LOG_FORMAT", "plain"),
        ("LOG_FORMAT", "%(request_id)s %(message)s"),
        ("LOG_FORMAT", "%(message)d"),
        ("GPU_BACKEND", "cuda"),
        ("GPU_BACKEND", "simulated:"),
        ("GPU_BACKEND", "simulated:99999"),
        ("GPU_BACKEND", "simulated:4;rm"),
        ("GPU_POOL_HOSTS", "http://gpu1"),
        ("GPU_POOL_HOSTS", "gpu1:8000"),
        ("GPU_POOL_HOSTS", "*"),
        ("GPU_POOL_IDLE_AFTER", "0"),
        ("GPU_POOL_IDLE_AFTER", "inf"),
        ("GPU_POOL_MOST_WAITING", "0"),
        ("GPU_POOL_OPEN_ON_LOOPBACK", "perhaps"),
    ],
)
def test_a_bad_value_is_named_and_the_default_used(variable: str, text: str, caplog: pytest.LogCaptureFixture) -> None:
    assert dataclasses.asdict(ServerSettings.from_environment({variable: text})) == DEFAULTS
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert record.getMessage().startswith(f"{variable} must be ")
    assert f", not {text!r}; using the default " in record.getMessage()


@pytest.mark.parametrize("variable", ["GPU_POOL_API_KEYS", "GPU_POOL_ADMIN_KEYS"])
@pytest.mark.parametrize(
    "bad", ["tooshort1234567", "caf\xe9-caf\xe9-caf\xe9-caf\xe9", "\udcff" * 20, "tab\x01tab\x01tab\x01tab\x01"]
)
def test_a_key_that_cannot_be_used_is_counted_and_never_told(
    variable: str, bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = "a-key-that-is-long-enough"
    settings = ServerSettings.from_environment({variable: f"{bad},{good}"})
    assert getattr(settings, variable.lower()) == (good,)
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert record.getMessage().startswith(
        f"{variable}: 1 of 2 keys cannot be used (expected 16 or more ASCII characters"
    )
    assert bad not in caplog.text
    assert good not in caplog.text
    assert good not in repr(settings)


def test_workers_and_reload_exclude_each_other() -> None:
    assert ServerSettings.from_environment({"WORKERS": "2", "RELOAD": "true"}).reload is False


@pytest.mark.parametrize(
    "settings",
    [
        {"DOCS_URL": "/x", "REDOC_URL": "/x"},
        {"DOCS_URL": "/health"},
        {"REDOC_URL": "/openapi.json"},
        {"DOCS_URL": "/leases"},
        {"REDOC_URL": "/queue"},
        {"REDOC_URL": "/api/gpu/stats", "API_PREFIX": "/api"},
    ],
)
def test_pages_that_would_hide_something_have_their_defaults(
    settings: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    found = ServerSettings.from_environment(settings)
    assert (found.docs_url, found.redoc_url) == ("/docs", "/redoc")
    assert "must differ" in caplog.text


def test_what_is_no_text_can_still_be_shown() -> None:
    found = ServerSettings.from_environment({"TITLE": "caf\udce9", "CUDA_VISIBLE_DEVICES": "\udcff"})
    assert (found.title, found.cuda_visible_devices) == ("caf\ufffd", "\ufffd")


@pytest.mark.parametrize("content", ["TITLE=café\n".encode("latin-1"), "TITLE=x\n".encode("utf-16")])
def test_a_dotenv_file_that_cannot_be_read_is_done_without(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".env").write_bytes(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TITLE", raising=False)
    assert ServerSettings.from_environment().title == "GPU Statistics Server"
    assert caplog.text.count(".env cannot be read") == 1


@pytest.mark.parametrize(("mode", "owner"), [(0o666, None), (0o644, 12345)])
def test_a_dotenv_file_that_another_user_can_write_is_ignored(
    mode: int, owner: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a folder such as /tmp it may be anyone's, and name keys of theirs."""
    if owner is not None and os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    file = tmp_path / ".env"
    file.write_text("GPU_POOL_ADMIN_KEYS=key-of-somebody-else\n")
    file.chmod(mode)
    if owner is not None:
        os.chown(file, owner, owner)
    monkeypatch.chdir(tmp_path)
    assert ServerSettings.from_environment().gpu_pool_admin_keys == ()
    assert ".env cannot be read" in caplog.text
    assert "another user can write it" in caplog.text


def test_a_long_value_is_cut_short_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    ServerSettings.from_environment({"PORT": "x" * 10_000})
    assert len(caplog.text) < 500


def test_a_dotenv_file_counts_and_the_environment_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text(
        "PORT=9100\nTITLE=From the file # not this\nCUDA_VISIBLE_DEVICES=\nMAX_HISTORY=5\n"
        "LOG_FORMAT=%(asctime)s - %(name)s - %(levelname)s - %(message)s\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("MAX_HISTORY", "6")
    settings = ServerSettings.from_environment()
    assert (settings.port, settings.title, settings.max_history) == (9100, "From the file", 6)
    assert settings.cuda_visible_devices == ""
    assert settings.log_format == DEFAULTS["log_format"]
    assert get_int_env("PORT", 1) == 9100


# --- the documented helpers ---


@pytest.mark.parametrize("text", ["true", "1", "yes", "on", "TRUE", "On"])
def test_words_for_true(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SWITCH", text)
    assert get_bool_env("A_SWITCH", False) is True


@pytest.mark.parametrize("text", ["false", "0", "no", "off"])
def test_words_for_false(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SWITCH", text)
    assert get_bool_env("A_SWITCH", True) is False


def test_helpers_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_NUMBER", "cat")
    assert get_int_env("A_NUMBER", 3) == 3
    assert get_float_env("A_NUMBER", 0.5) == 0.5
    assert get_bool_env("A_NUMBER", True) is True
    monkeypatch.setenv("A_NUMBER", "12")
    assert (get_int_env("A_NUMBER", 3), get_float_env("A_NUMBER", 0.5)) == (12, 12.0)
    monkeypatch.delenv("A_NUMBER")
    assert (get_int_env("A_NUMBER", 3), get_float_env("A_NUMBER", 0.5)) == (3, 0.5)
