"""Lists every setting with its value, where it came from, and any problem. Secrets are not shown."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.api.fingerprints import VARIABLE as FINGERPRINTS
from gpu_worker_pool.api.fingerprints import parse_fingerprints
from gpu_worker_pool.cli.keys import SECRETS, admin_key
from gpu_worker_pool.cli.running.ssh import SSH_VARIABLE
from gpu_worker_pool.config import VARIABLES, MultiEndpointConfigurationManager
from gpu_worker_pool.config_file import KEYS, files, from_file, problems_in_files
from gpu_worker_pool.environment import Environment
from gpu_worker_pool.errors import LedgerUnusableError, PolicyError
from gpu_worker_pool.gpu_server.settings import ServerSettings, alias_of, read_environment
from gpu_worker_pool.leases.endpoint_choice import chosen_endpoints
from gpu_worker_pool.leases.tokens import allows_insecure_key
from gpu_worker_pool.ledger.policy_file import VARIABLE as POLICY
from gpu_worker_pool.ledger.policy_file import policy_path, read_text
from gpu_worker_pool.ledger.policy_text import parse_policy
from gpu_worker_pool.state_directory import VARIABLE as STATE_DIRECTORY
from gpu_worker_pool.state_directory import locate

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

#: Known variables that are not settings.
_KNOWN_OTHERS: Final = (
    "GPU_POOL_LEASE_ID",
    "GPU_POOL_OUTER_LEASES",
    "GPU_POOL_HOST",
    "GPU_POOL_LEASE_ENDPOINT",
    "GPU_POOL_RUN_MARK",
    "GPU_POOL_DEBUG",
    "GPU_POOL_CONFIG",
)
#: Server settings that `local://` uses too.
_WITHOUT_SERVER: Final = frozenset({"GPU_BACKEND", "GPU_POOL_STATE_DIR", "GPU_POOL_SOCKET", "GPU_SIMULATED_OUTSIDERS"})
_ENDPOINTS: Final = (
    "GPU_POOL_ENDPOINT",
    "GPU_STATS_SERVICE_ENDPOINTS",
    "GPU_SERVICE_ENDPOINTS",
    "GPU_SERVICE_ENDPOINT",
)


@dataclass(frozen=True)
class Setting:
    name: str
    #: The value in use; for a secret, whether it is set.
    value: str
    #: `environment`, the other name of the variable, `.env`, a configuration file, or `default`.
    source: str
    #: `client`, `command line`, `server`, or `server and local://`; `nobody` for an unknown name.
    used_by: str
    problem: str | None = None


def all_settings() -> list[Setting]:
    found = [*_client_settings(), *_command_line_settings(), *_server_settings()]
    names = {setting.name for setting in found}
    return [*found, *_configuration_files(), *_unknown(names | set(map(alias_of, names)))]


def _configuration_files() -> Iterator[Setting]:
    """What is wrong in them, by file."""
    for file in files():
        found = [problem for problem in problems_in_files() if problem.startswith(str(file))]
        if found or os.path.exists(file):  # noqa: PTH110  # where it cannot be seen, it is none of ours
            yield Setting(str(file), "", "configuration file", "client", "; ".join(found) or None)


# --- the client's ---


def _client_settings() -> Iterator[Setting]:
    problems: list[str] = []
    manager = MultiEndpointConfigurationManager(complain=problems.append)
    endpoints = ", ".join(f"{each.endpoint_id}={each.url}" for each in chosen_endpoints((), manager))
    environment = Environment(complain=problems.append)
    values = {variable.name: variable.read(environment) for variable in VARIABLES}
    in_force = next((name for name in _ENDPOINTS if environment.text(name)), None)
    for name in _ENDPOINTS:
        value = endpoints if name == in_force or (in_force is None and name == _ENDPOINTS[-1]) else ""
        if value == "" and _source(name, {}) != "default":
            value = f"not used: {in_force} comes first"
        yield Setting(name, value, _source(name, {}), "client", _problem_of(name, problems))
    for name, found in values.items():
        shown = _secret(found) if name in SECRETS else str(found)
        yield Setting(name, shown, _source(name, {}), "client", _problem_of(name, problems))
    yield _fingerprints()


def _fingerprints() -> Setting:
    problems: list[str] = []
    pins = Environment(complain=problems.append).get(FINGERPRINTS, None, parse_fingerprints) or ()
    problem = _problem_of(FINGERPRINTS, problems)
    return Setting(FINGERPRINTS, f"{len(pins)} fingerprints", _source(FINGERPRINTS, {}), "client", problem)


def _command_line_settings() -> Iterator[Setting]:
    yield Setting("GPU_POOL_ADMIN_KEY", _secret(admin_key()), _source("GPU_POOL_ADMIN_KEY", {}), "command line")
    name = "GPU_POOL_ALLOW_INSECURE_KEY"
    problems: list[str] = []
    allowed = str(allows_insecure_key(Environment(complain=problems.append))).lower()
    yield Setting(name, allowed, _source(name, {}), "command line", _problem_of(name, problems))
    name, default = SSH_VARIABLE, "ssh"
    yield Setting(name, os.environ.get(name, "").strip() or default, _source(name, {}), "command line")


# --- the server's ---


def _server_settings() -> Iterator[Setting]:
    problems: list[str] = []
    environment = read_environment(problems.append)
    settings = ServerSettings.from_environment(environment, problems.append)
    for field in fields(settings):
        name, value = field.name.upper(), getattr(settings, field.name)
        shown = _secret(value) if name in SECRETS else _shown(value)
        problem = _problem_of(name, problems) or _problem_of(alias_of(name), problems)
        if name == STATE_DIRECTORY:
            shown, problem = _state_directory(value)
        elif name == POLICY:
            shown, problem = _policy(value)
        used_by = "server and local://" if name in _WITHOUT_SERVER else "server"
        yield Setting(name, shown, _source(name, environment), used_by, problem)
    for problem in problems:
        if problem.startswith(".env"):
            yield Setting(".env", "", ".env", "server", problem)


def _state_directory(chosen: str | None) -> tuple[str, str | None]:
    """The directory in use, and what is wrong with it; makes none."""
    try:
        return str(locate(chosen).path), None
    except LedgerUnusableError as error:
        return _shown(chosen), str(error)


def _policy(chosen: str | None) -> tuple[str, str | None]:
    """The file that counts, and what is wrong with it."""
    path = policy_path(chosen)
    if path is None:
        return _shown(chosen), None
    shown = str(path) if chosen is None else f"{path}, which comes first" if str(path) != chosen else chosen
    try:
        parse_policy(read_text(path), str(path))
    except PolicyError as error:
        return shown, str(error)
    return shown, None


# --- unknown variables ---


def _unknown(known: set[str]) -> Iterator[Setting]:
    for name in sorted(os.environ):
        if name in known or name in _KNOWN_OTHERS or not name.startswith("GPU_"):
            continue
        close = get_close_matches(name, known, n=1, cutoff=0.85)
        if close or name.startswith("GPU_POOL_"):
            hint = f"; did you mean {close[0]}?" if close else ""
            yield Setting(name, "not shown", "environment", "nobody", f"unknown setting{hint}")


# --- helpers ---


def _source(name: str, with_file: Mapping[str, str]) -> str:
    alias = alias_of(name)
    if alias != name and os.environ.get(alias, "").strip():
        return alias
    if os.environ.get(name, "").strip():
        return "environment"
    if name in KEYS.values() and (found := from_file(name)) is not None:
        return str(found.file)
    if alias != name and with_file.get(alias, "").strip():
        return f".env, {alias}"
    return ".env" if with_file.get(name, "").strip() else "default"


def _problem_of(name: str, problems: list[str]) -> str | None:
    found = [problem for problem in problems if problem.startswith((f"{name}=", f"{name}:", f"{name} "))]
    return "; ".join(found) or None


def _secret(value: object) -> str:
    if isinstance(value, tuple):
        return f"{len(value)} keys, not shown" if value else "none"
    return "set, not shown" if value else "none"


def _shown(value: object) -> str:
    if value is None:
        return "not set"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
