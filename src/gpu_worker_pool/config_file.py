"""The client's configuration file: what it sets counts where no variable does, before the documented defaults."""

from __future__ import annotations

import logging
import os
import stat
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

logger: logging.Logger = logging.getLogger(__name__)

#: Names another file, and only that one is read; `/dev/null`: none.
VARIABLE: Final = "GPU_POOL_CONFIG"
SYSTEM_FILE: Final = Path("/etc/gpu-pool/config.toml")
#: A larger file was not meant.
_MOST_BYTES: Final = 64 * 1024
#: The keys of the file, and the variables they stand in for.
KEYS: Final = {
    "endpoint": "GPU_SERVICE_ENDPOINT",
    "endpoints": "GPU_STATS_SERVICE_ENDPOINTS",
    "key_file": "GPU_POOL_API_KEY",
    "tls_fingerprint": "GPU_POOL_TLS_FINGERPRINT",
    "coordination": "GPU_POOL_COORDINATION",
    "lease_ttl": "GPU_POOL_LEASE_TTL",
    "gpu_names": "GPU_POOL_GPU_NAMES",
    "memory_threshold_percent": "GPU_MEMORY_THRESHOLD_PERCENT",
    "utilization_threshold_percent": "GPU_UTILIZATION_THRESHOLD_PERCENT",
    "polling_interval": "GPU_POLLING_INTERVAL",
    "load_balancing_strategy": "GPU_LOAD_BALANCING_STRATEGY",
    "endpoint_timeout": "GPU_ENDPOINT_TIMEOUT",
    "endpoint_max_retries": "GPU_ENDPOINT_MAX_RETRIES",
    "endpoint_health_check_interval": "GPU_ENDPOINT_HEALTH_CHECK_INTERVAL",
}
#: A variable for one of these replaces all of them: an endpoint in the environment must not be joined by others.
_ENDPOINTS: Final = (
    "GPU_POOL_ENDPOINT",
    "GPU_STATS_SERVICE_ENDPOINTS",
    "GPU_SERVICE_ENDPOINTS",
    "GPU_SERVICE_ENDPOINT",
)


class FromFile(NamedTuple):
    value: str
    file: Path


class _Content(NamedTuple):
    values: dict[str, FromFile]
    problems: tuple[str, ...]


def from_file(name: str) -> FromFile | None:
    """What the configuration files set in place of this variable, which is not set."""
    if name in _ENDPOINTS and any(os.environ.get(each, "").strip() for each in _ENDPOINTS):
        return None
    return _content().values.get(name)


def problems_in_files() -> tuple[str, ...]:
    """Each begins with the name of the file."""
    return _content().problems


def files() -> tuple[Path, ...]:
    """The first one that sets a key counts."""
    if chosen := os.environ.get(VARIABLE, "").strip():
        return (Path(chosen),)
    base = os.environ.get("XDG_CONFIG_HOME", "")
    try:
        own = Path(base) if base.startswith("/") else Path.home() / ".config"
    except RuntimeError:  # the home directory is unknown
        return (SYSTEM_FILE,)
    return (own / "gpu-pool" / "config.toml", SYSTEM_FILE)


def _content() -> _Content:
    return _read(files())


@cache
def _read(found: tuple[Path, ...]) -> _Content:
    """Once per process."""
    values: dict[str, FromFile] = {}
    problems: list[str] = []
    for file in found:
        try:
            if not _is_there(file):
                if os.environ.get(VARIABLE, "").strip() and not os.path.lexists(file):
                    problems.append(f"{file} does not exist, and {VARIABLE} names it: no file is read")
                continue
            with file.open("rb") as opened:
                content = opened.read(_MOST_BYTES + 1)
        except OSError as error:
            problems.append(f"{file} cannot be read ({error.strerror}): ignoring it")
            continue
        for key, value in _parse(file, content, problems).items():
            if (text := _text(value)) is None or key not in KEYS:
                what = "unknown setting" if key not in KEYS else "not a text, a number or a list of texts"
                problems.append(f"{file}: {key}: {what}; ignoring it")
            else:
                values.setdefault(KEYS[key], FromFile(text, file))
    if (named := values.pop(KEYS["key_file"], None)) is not None and (secret := _key(named, problems)) is not None:
        values[KEYS["key_file"]] = secret
    for problem in problems:
        logger.error("%s", problem)
    return _Content(values, tuple(problems))


def _is_there(file: Path) -> bool:
    try:
        return file.is_file()  # not /dev/null, for example
    except PermissionError:
        # HOME is another user's, as it often is after su or sudo: what that user has set is no matter of ours.
        return False


def _parse(file: Path, content: bytes, problems: list[str]) -> dict[str, Any]:
    import tomllib  # only where there is a file

    if len(content) > _MOST_BYTES:
        problems.append(f"{file} cannot be used (it is larger than {_MOST_BYTES} bytes): ignoring it")
        return {}
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        problems.append(f"{file} cannot be used ({error}): ignoring it")
        return {}


def _text(value: object) -> str | None:
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return ",".join(value)
    return str(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else None


def _key(found: FromFile, problems: list[str]) -> FromFile | None:
    """The key itself is in a file of its own, which only its user can read."""
    path = Path(found.value)
    try:
        path = found.file.parent / path.expanduser()
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):  # a pipe would make every command wait
            problems.append(f"{found.file}: key_file: {path} is not a regular file; ignoring it")
            return None
        if mode & 0o077:
            problems.append(f"{found.file}: key_file: others can read {path}; chmod go-rwx {path}")
        with path.open() as opened:
            return FromFile(opened.read(1000).strip(), found.file)
    except (OSError, ValueError, RuntimeError) as error:
        problems.append(f"{found.file}: key_file: {path} cannot be read ({error}); ignoring it")
        return None
