"""The server's settings: the documented variables, from the environment or a `.env` file in the working directory.

A bad value is logged and its default used: a typo in a profile should not keep a server from starting.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

from dotenv import dotenv_values

from gpu_worker_pool.environment import Environment, number, one_of, parse_bool, plain_text, printable, refused
from gpu_worker_pool.gpu_server.peer_list import read_peers
from gpu_worker_pool.hardware.readers.choose import check_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpu_worker_pool.config import EndpointConfig

logger = logging.getLogger(__name__)

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
#: Shorter ones can be guessed.
SHORTEST_KEY: Final = 16
_KEY: Final = re.compile(r"[!-~]+")
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,253}|\[?[0-9A-Fa-f:.]+\]?")
_PATH: Final = re.compile(r"(?:/[A-Za-z0-9._~-]+)+")


def read_environment(complain: Callable[[str], object] = logger.error) -> dict[str, str]:
    """The process's variables; a `.env` file in the working directory adds those that are not set."""
    try:
        from_file = {name: value for name, value in dotenv_values(".env").items() if value is not None}
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


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(re.split(r"[\s,]+", text.strip(" ,"))))


def _get_keys(name: str, env: Mapping[str, str], complain: Callable[[str], object]) -> tuple[str, ...]:
    """The usable keys; of the others only the number is logged, as they may be secrets all the same."""
    text = env.get(name, "").strip()
    keys = _words(text) if text else []
    good = tuple(key for key in keys if len(key) >= SHORTEST_KEY and _KEY.fullmatch(key))
    if len(good) < len(keys):
        complain(
            f"{name}: {len(keys) - len(good)} of {len(keys)} keys cannot be used (expected {SHORTEST_KEY} or more "
            "ASCII characters, commas or blanks between keys): ignoring them"
        )
    return good


# --- all of them ---


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The settings of the server; every value was checked."""

    host: str = "0.0.0.0"  # noqa: S104  # the documented default
    port: int = 8000
    reload: bool = True
    log_level: str = "info"
    access_log: bool = True
    workers: int = 1
    title: str = "GPU Statistics Server"
    description: str = DEFAULT_DESCRIPTION
    version: str = "1.0.0"
    docs_url: str = "/docs"
    redoc_url: str = "/redoc"
    enable_cors: bool = True
    api_prefix: str = ""
    refresh_interval: float = 1.0
    max_history: int = 100
    #: A format of the standard library, or `json` for one JSON object per line.
    log_format: str = DEFAULT_LOG_FORMAT
    #: None where the variable is not set: all GPUs are shown. Empty: none.
    cuda_visible_devices: str | None = None
    gpu_backend: str = "auto"
    #: Where readings and leases are stored; None: the default.
    gpu_pool_state_dir: str | None = None
    #: Keys for callers on other hosts, and for administrators: secrets, shown nowhere.
    gpu_pool_api_keys: tuple[str, ...] = field(default=(), repr=False)
    gpu_pool_admin_keys: tuple[str, ...] = field(default=(), repr=False)
    #: Whether programs on this host need no key.
    gpu_pool_open_on_loopback: bool = True
    #: Further names that programs on this host may use for it.
    gpu_pool_hosts: tuple[str, ...] = ()
    #: After how many seconds without load a holder counts as idle.
    gpu_pool_idle_after: float = 1800.0
    #: How many waiting requests one key, or all programs on this host together, may have.
    gpu_pool_most_waiting: int = 1000
    #: Servers of other hosts that the live page also shows.
    gpu_pool_peers: tuple[EndpointConfig, ...] = ()

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str] | None = None, complain: Callable[[str], object] = logger.error
    ) -> Self:
        """`complain` is called with a message for every value that cannot be used."""
        env = read_environment(complain) if environ is None else environ

        get = Environment(env, complain).get
        workers = get("WORKERS", cls.workers, number(int, 1, 1024))
        docs_url = get("DOCS_URL", cls.docs_url, _parse_path)
        redoc_url = get("REDOC_URL", cls.redoc_url, _parse_path)
        api_prefix = get("API_PREFIX", cls.api_prefix, _parse_prefix)
        taken = {api_prefix + path for path in OWN_PATHS}
        if docs_url == redoc_url or {docs_url, redoc_url} & taken:
            complain(
                f"DOCS_URL={docs_url!r} and REDOC_URL={redoc_url!r} must differ from each other and from the other "
                f"routes: using {cls.docs_url!r} and {cls.redoc_url!r}"
            )
            docs_url, redoc_url = cls.docs_url, cls.redoc_url
        visible = env.get("CUDA_VISIBLE_DEVICES")
        return cls(
            host=get("HOST", cls.host, plain_text),
            port=get("PORT", cls.port, number(int, 0, 65535)),
            # uvicorn supports one of the two; a server with workers is not for development.
            reload=get("RELOAD", cls.reload, parse_bool) and workers == 1,
            log_level=get("LOG_LEVEL", cls.log_level, _parse_log_level),
            access_log=get("ACCESS_LOG", cls.access_log, parse_bool),
            workers=workers,
            title=get("TITLE", cls.title, plain_text),
            description=get("DESCRIPTION", cls.description, plain_text),
            version=get("VERSION", cls.version, plain_text),
            docs_url=docs_url,
            redoc_url=redoc_url,
            enable_cors=get("ENABLE_CORS", cls.enable_cors, parse_bool),
            api_prefix=api_prefix,
            refresh_interval=get("REFRESH_INTERVAL", cls.refresh_interval, number(float, 0.05, 3600)),
            max_history=get("MAX_HISTORY", cls.max_history, number(int, 1, 10_000)),
            log_format=get("LOG_FORMAT", cls.log_format, _parse_log_format),
            cuda_visible_devices=None if visible is None else printable(visible),
            gpu_pool_state_dir=get("GPU_POOL_STATE_DIR", cls.gpu_pool_state_dir, plain_text),
            gpu_backend=get("GPU_BACKEND", cls.gpu_backend, check_backend),
            gpu_pool_api_keys=_get_keys("GPU_POOL_API_KEYS", env, complain),
            gpu_pool_admin_keys=_get_keys("GPU_POOL_ADMIN_KEYS", env, complain),
            gpu_pool_open_on_loopback=get("GPU_POOL_OPEN_ON_LOOPBACK", cls.gpu_pool_open_on_loopback, parse_bool),
            gpu_pool_hosts=get("GPU_POOL_HOSTS", cls.gpu_pool_hosts, _parse_hosts),
            gpu_pool_idle_after=get("GPU_POOL_IDLE_AFTER", cls.gpu_pool_idle_after, number(float, 1, 1e9)),
            gpu_pool_most_waiting=get("GPU_POOL_MOST_WAITING", cls.gpu_pool_most_waiting, number(int, 1, 1_000_000)),
            gpu_pool_peers=read_peers("GPU_POOL_PEERS", env.get("GPU_POOL_PEERS", ""), complain),
        )
