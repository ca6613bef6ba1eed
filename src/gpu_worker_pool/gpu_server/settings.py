"""The server's settings: the documented variables, from the environment or a `.env` file in the working directory.

A bad value is logged and its default used: a typo in a profile should not keep a server from starting.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, get_args

from dotenv import dotenv_values

from gpu_worker_pool.config import LOCAL_ENDPOINT, EndpointConfig, parse_endpoints, read_servers
from gpu_worker_pool.core.settings import Strategy
from gpu_worker_pool.environment import Environment, number, one_of, parse_bool, plain_text, printable, refused
from gpu_worker_pool.gpu_server.keys import parse_keys
from gpu_worker_pool.hardware.readers.choose import check_backend, complete_backend, read_outsiders
from gpu_worker_pool.host_socket import parse_socket

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpu_worker_pool.environment import Parser

T = TypeVar("T")

logger: logging.Logger = logging.getLogger(__name__)

LOG_LEVELS: Final = ("debug", "info", "warning", "error", "critical")
DEFAULT_LOG_FORMAT: Final = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"
DEFAULT_DESCRIPTION: Final = "A server that provides GPU statistics including memory usage and utilization"
#: Paths that `DOCS_URL` and `REDOC_URL` must not take.
OWN_PATHS: Final = (
    "",
    "/",
    "/config",
    "/dashboard",
    "/events",
    "/fleet",
    "/fleet/link",
    "/gpu/count",
    "/gpu/history",
    "/gpu/stats",
    "/gpu/summary",
    "/health",
    "/leases",
    "/metrics",
    "/openapi.json",
    "/queue",
)
#: More would not fit on the page.
MOST_PEERS: Final = 64
#: The name of a host of a fleet.
FLEET_HOST: Final = re.compile(r"[A-Za-z0-9._-]{1,40}")
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,253}|\[?[0-9A-Fa-f:.]+\]?")
_PATH: Final = re.compile(r"(?:/[A-Za-z0-9._~-]+)+")


def alias_of(name: str) -> str:
    """The other name of a variable with a bare name, which wins: conda and others set `HOST` for themselves."""
    return name if name.startswith(("GPU_", "CUDA_")) else f"GPU_POOL_SERVER_{name}"


def _name_in(env: Mapping[str, str], name: str) -> str:
    alias = alias_of(name)
    return alias if env.get(alias, "").strip() else name


def read_environment(complain: Callable[[str], object] = logger.error) -> dict[str, str]:
    """The process's variables; a `.env` file in the working directory adds those that are not set."""
    try:
        found = Path(".env").stat()
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & stat.S_IWOTH:
            # In a folder such as /tmp it may be anyone's, and name keys that open this server.
            raise PermissionError(errno.EPERM, "another user can write it")
        from_file = {name: value for name, value in dotenv_values(".env").items() if value is not None}
    except FileNotFoundError:
        from_file = {}
    except (OSError, UnicodeDecodeError) as error:
        complain(f".env cannot be read ({error}): ignoring it")
        from_file = {}
    return from_file | dict(os.environ)


# --- the documented helpers: a variable that is not set, or cannot be used, has its default ---


def get_bool_env(key: str, default: bool, environ: Mapping[str, str] | None = None) -> bool:
    """`true`, `1`, `yes`, `on` and their opposites, in any case."""
    return _environment(environ).get(key, default, parse_bool)


def get_float_env(key: str, default: float, environ: Mapping[str, str] | None = None) -> float:
    return _environment(environ).get(key, default, number(float))


def get_int_env(key: str, default: int, environ: Mapping[str, str] | None = None) -> int:
    return _environment(environ).get(key, default, number(int))


def _environment(environ: Mapping[str, str] | None) -> Environment:
    return Environment(read_environment() if environ is None else environ, logger.error)


# --- parsers of single settings ---


def _parse_log_level(text: str, name: str) -> str:
    return one_of(LOG_LEVELS, text.lower(), name)


def _parse_prefix(text: str, name: str) -> str:
    return "" if text == "/" else _parse_path(text.rstrip("/"), name)


def _parse_path(text: str, name: str) -> str:
    if not _PATH.fullmatch(text):
        raise refused(name, "a path such as /docs", text)
    return text


def _parse_log_format(text: str, name: str) -> str:
    if text != "json":
        try:
            logging.Formatter(text).format(logging.LogRecord("name", logging.INFO, "path", 1, "message", (), None))
        except (KeyError, TypeError, ValueError) as error:
            raise refused(name, f"json or a format of Python's logging ({error!r:.100})", text) from None
    return text


def _parse_hosts(text: str, name: str) -> tuple[str, ...]:
    hosts = _words(text)
    if not all(map(_HOST_NAME.fullmatch, hosts)):
        raise refused(name, "names of this host without a port, such as gpu1.example.org", text)
    return tuple(host.strip("[]") for host in hosts)


def _parse_database(text: str, name: str) -> str:
    from gpu_worker_pool.fleet.database_url import check_url  # a server without a fleet loads nothing of it

    return check_url(text, name)


def _parse_candidates(text: str, name: str) -> tuple[str, ...]:
    try:
        found = tuple(each.url.rstrip("/") for each in parse_endpoints(text, name))
    except ValueError as error:
        raise ValueError(str(error)) from None
    if LOCAL_ENDPOINT in found:
        raise refused(name, "addresses of servers with --fleet, such as http://gpu-1:8000", text)
    return found


def _parse_strategy(text: str, name: str) -> Strategy:
    return one_of(get_args(Strategy), text.lower(), name)


def _parse_own_url(text: str, name: str) -> str:
    found = _parse_candidates(text, name)
    if len(found) != 1:
        raise refused(name, "one address of this server, such as http://gpu-1:8000", text)
    return found[0]


def _parse_host_name(text: str, name: str) -> str:
    if not FLEET_HOST.fullmatch(text):
        raise refused(name, "1 to 40 of letters, digits and . _ -", text)
    return text


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(re.split(r"[\s,]+", text.strip(" ,"))))


def read_peers(name: str, text: str, complain: Callable[[str], object]) -> tuple[EndpointConfig, ...]:
    """The usable ones, written like a client's endpoints."""
    if "@" in text:
        # No part of it is shown, as any part may be the password.
        complain(f"{name}: a URL in it holds a user name or password, which is not supported: ignoring all peers")
        return ()
    peers = read_servers(name, text, complain)
    if len(peers) > MOST_PEERS:
        complain(f"{name} names {len(peers)} servers: showing the first {MOST_PEERS}")
    return tuple(peers[:MOST_PEERS])


# --- all of them ---


def _variable(default: T, parse: Parser[T]) -> T:
    """A field that is read from the variable of its name."""
    made: T = field(default=default, metadata={"parse": parse})
    return made


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The settings of the server, named like their variables; every value was checked."""

    host: str = _variable("0.0.0.0", plain_text)  # noqa: S104  # the documented default
    port: int = _variable(8000, number(int, 0, 65535))
    reload: bool = _variable(True, parse_bool)
    log_level: str = _variable("info", _parse_log_level)
    access_log: bool = _variable(True, parse_bool)
    workers: int = _variable(1, number(int, 1, 1024))
    title: str = _variable("GPU Statistics Server", plain_text)
    description: str = _variable(DEFAULT_DESCRIPTION, plain_text)
    version: str = _variable("1.0.0", plain_text)
    docs_url: str = _variable("/docs", _parse_path)
    redoc_url: str = _variable("/redoc", _parse_path)
    enable_cors: bool = _variable(True, parse_bool)
    api_prefix: str = _variable("", _parse_prefix)
    refresh_interval: float = _variable(1.0, number(float, 0.05, 3600))
    max_history: int = _variable(100, number(int, 1, 10_000))
    #: A format of the standard library, or `json` for one JSON object per line.
    log_format: str = _variable(DEFAULT_LOG_FORMAT, _parse_log_format)
    #: None where the variable is not set: all GPUs are shown. Empty: none.
    cuda_visible_devices: str | None = None
    gpu_backend: str = _variable("auto", check_backend)
    #: Idle outsiders on simulated GPUs, such as `0:15GiB`.
    gpu_simulated_outsiders: str | None = None
    #: Where readings and leases are stored; None: the default.
    gpu_pool_state_dir: str | None = _variable(None, plain_text)
    #: The Unix socket to listen on, besides TCP; None: there is none.
    gpu_pool_socket: str | None = _variable(None, parse_socket)
    #: Files in PEM format, to serve https instead of http: both, or neither.
    gpu_pool_tls_cert: str | None = _variable(None, plain_text)
    gpu_pool_tls_key: str | None = _variable(None, plain_text)
    #: Keys, or `name:key`, for callers on other hosts, and for administrators: secrets, shown nowhere.
    gpu_pool_api_keys: tuple[str, ...] = field(default=(), repr=False)
    gpu_pool_admin_keys: tuple[str, ...] = field(default=(), repr=False)
    #: A file with more of the former, which is read again when it changes.
    gpu_pool_api_keys_file: str | None = _variable(None, plain_text)
    #: Whether programs on this host need no key.
    gpu_pool_open_on_loopback: bool = _variable(True, parse_bool)
    #: Further names that programs on this host may use for it.
    gpu_pool_hosts: tuple[str, ...] = _variable((), _parse_hosts)
    #: After how many seconds without load a holder counts as idle.
    gpu_pool_idle_after: float = _variable(1800.0, number(float, 1, 1e9))
    #: How many waiting requests one key, one user of the socket, or all other programs on this host may have.
    gpu_pool_most_waiting: int = _variable(1000, number(int, 1, 1_000_000))
    #: The policy file, if this host has none in `/etc/gpu-pool`.
    gpu_pool_policy: str | None = _variable(None, plain_text)
    #: How many leases and waiting requests such a caller may have together, and all callers.
    gpu_pool_most_leases_of_a_caller: int = _variable(2000, number(int, 1, 1_000_000))
    gpu_pool_most_leases: int = _variable(10_000, number(int, 1, 1_000_000))
    #: The database of a fleet, which makes this server one of those that may be its dispatcher. It may hold a password.
    gpu_pool_fleet_database: str | None = field(default=None, repr=False, metadata={"parse": _parse_database})
    #: Candidates of a fleet that this host joins.
    gpu_pool_fleet_join: tuple[str, ...] = _variable((), _parse_candidates)
    #: A file with the fleet's key.
    gpu_pool_fleet_key_file: str | None = _variable(None, plain_text)
    #: Whether links to other hosts may be plain http, which others on the network can read.
    gpu_pool_fleet_insecure: bool = _variable(False, parse_bool)
    #: How the fleet picks the host where several can serve, while this server is its dispatcher.
    gpu_pool_fleet_strategy: Strategy = field(default="pack", metadata={"parse": _parse_strategy})
    #: This host's name in the fleet; None: its hostname.
    gpu_pool_host_name: str | None = _variable(None, _parse_host_name)
    #: The address at which others reach this server; None: where it listens.
    gpu_pool_url: str | None = _variable(None, _parse_own_url)
    #: Servers of other hosts that the live page also shows.
    gpu_pool_peers: tuple[EndpointConfig, ...] = ()

    @property
    def is_in_fleet(self) -> bool:
        return self.gpu_pool_fleet_database is not None or bool(self.gpu_pool_fleet_join)

    @property
    def backend(self) -> str:
        """`gpu_backend` with the simulated outsiders."""
        return complete_backend(self.gpu_backend, self.gpu_simulated_outsiders)

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str] | None = None, complain: Callable[[str], object] = logger.error
    ) -> Self:
        """`complain` is called with a message for every value that cannot be used."""
        env = read_environment(complain) if environ is None else environ
        environment = Environment(env, complain)
        get = environment.get
        read: dict[str, Any] = {
            each.name: get(_name_in(env, each.name.upper()), each.default, each.metadata["parse"])
            for each in fields(cls)
            if "parse" in each.metadata
        }
        # uvicorn supports one of the two; a server with workers is not for development.
        read["reload"] &= read["workers"] == 1
        docs_url, redoc_url = read["docs_url"], read["redoc_url"]
        taken = {read["api_prefix"] + path for path in OWN_PATHS}
        if docs_url == redoc_url or {docs_url, redoc_url} & taken:
            complain(
                f"DOCS_URL={docs_url!r} and REDOC_URL={redoc_url!r} must differ from each other and from the other "
                f"routes: using {cls.docs_url!r} and {cls.redoc_url!r}"
            )
            del read["docs_url"], read["redoc_url"]
        if (visible := env.get("CUDA_VISIBLE_DEVICES")) is not None:
            read["cuda_visible_devices"] = printable(visible)
        return cls(
            **read,
            gpu_simulated_outsiders=read_outsiders(read["gpu_backend"], environment),
            gpu_pool_api_keys=parse_keys("GPU_POOL_API_KEYS", env.get("GPU_POOL_API_KEYS", ""), complain),
            gpu_pool_admin_keys=parse_keys("GPU_POOL_ADMIN_KEYS", env.get("GPU_POOL_ADMIN_KEYS", ""), complain),
            gpu_pool_peers=read_peers("GPU_POOL_PEERS", env.get("GPU_POOL_PEERS", ""), complain),
        )
