"""The server's settings: the documented variables, from the environment or a `.env` file in the working directory.

A bad value is logged and its default used: a typo in a profile should not keep a server from starting.
"""

from __future__ import annotations

import logging
import math
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self, TypeVar

from dotenv import dotenv_values

from gpu_worker_pool.gpu_server.peer_list import read_peers
from gpu_worker_pool.hardware.readers.choose import check_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpu_worker_pool.config import EndpointConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")
N = TypeVar("N", int, float)

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
_TRUE: Final = frozenset({"true", "1", "yes", "on"})
_FALSE: Final = frozenset({"false", "0", "no", "off"})
#: Shorter ones can be guessed.
SHORTEST_KEY: Final = 16
_KEY: Final = re.compile(r"[!-~]+")
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,253}|\[?[0-9A-Fa-f:.]+\]?")
_PATH: Final = re.compile(r"(?:/[A-Za-z0-9._~-]+)+")


def read_environment(complain: Callable[[str], object] | None = None) -> dict[str, str]:
    """The process's variables, and below them what a `.env` file in the working directory sets."""
    try:
        from_file = {name: value for name, value in dotenv_values(".env").items() if value is not None}
    except (OSError, UnicodeDecodeError) as error:
        (complain or _log_problem)(f".env cannot be read ({error}): doing without")
        from_file = {}
    return from_file | dict(os.environ)


# --- one variable: what is missing or empty has its default, and so has what cannot be understood ---


def get_bool_env(key: str, default: bool, environ: Mapping[str, str] | None = None) -> bool:
    """`true`, `1`, `yes`, `on` and their opposites, in any case."""
    return _get(key, default, environ, _parse_bool, _log_problem)


def get_float_env(key: str, default: float, environ: Mapping[str, str] | None = None) -> float:
    return _get(key, default, environ, _parse_float, _log_problem)


def get_int_env(key: str, default: int, environ: Mapping[str, str] | None = None) -> int:
    return _get(key, default, environ, _parse_int, _log_problem)


def _get(
    key: str,
    default: T,
    environ: Mapping[str, str] | None,
    parse: Callable[[str], T],
    complain: Callable[[str], object],
) -> T:
    text = _printable((read_environment() if environ is None else environ).get(key, "").strip())
    if not text:
        return default
    try:
        return parse(text)
    except ValueError as reason:
        # The value may be anything, also a secret in the wrong place: cut it short, keep it on one line.
        complain(f"{key}={text[:40]!r} cannot be used ({str(reason)[:200]}): using {default!r}")
        return default


def _printable(text: str) -> str:
    """What was no UTF-8 could be sent to nobody."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _log_problem(problem: str) -> None:
    logger.error("%s", problem)


def _parse_bool(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError("expected true or false")


def _parse_int(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        raise ValueError("expected a whole number")
    return int(text)


def _parse_float(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError("expected a number") from None
    if not math.isfinite(number):
        raise ValueError("expected a finite number")
    return number


def _within(parse: Callable[[str], N], lowest: float, highest: float) -> Callable[[str], N]:
    def checked(text: str) -> N:
        number = parse(text)
        if not lowest <= number <= highest:
            raise ValueError(f"expected {lowest} to {highest}")
        return number

    return checked


def _one_of(*choices: str) -> Callable[[str], str]:
    def checked(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}")
        return text.lower()

    return checked


def _parse_prefix(text: str) -> str:
    return "" if text == "/" else _parse_path(text.rstrip("/"))


def _parse_path(text: str) -> str:
    if not _PATH.fullmatch(text):
        raise ValueError("expected a path such as /docs")
    return text


def _parse_log_format(text: str) -> str:
    if text != "json":
        try:
            logging.Formatter(text).format(logging.LogRecord("name", logging.INFO, "path", 1, "message", (), None))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
    return text


def _parse_hosts(text: str) -> tuple[str, ...]:
    names = _words(text)
    for name in names:
        if not _HOST_NAME.fullmatch(name):
            raise ValueError("expected names of this host without a port, such as gpu1.example.org")
    return tuple(name.strip("[]") for name in names)


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
        cls, environ: Mapping[str, str] | None = None, complain: Callable[[str], object] = _log_problem
    ) -> Self:
        """`complain` is told of every value that cannot be used."""
        env = read_environment(complain) if environ is None else environ

        def get(key: str, default: T, parse: Callable[[str], T]) -> T:
            return _get(key, default, env, parse, complain)

        workers = get("WORKERS", cls.workers, _within(_parse_int, 1, 1024))
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
            host=get("HOST", cls.host, str),
            port=get("PORT", cls.port, _within(_parse_int, 0, 65535)),
            # uvicorn can do one of the two; whoever asks for workers does not develop.
            reload=get("RELOAD", cls.reload, _parse_bool) and workers == 1,
            log_level=get("LOG_LEVEL", cls.log_level, _one_of(*LOG_LEVELS)),
            access_log=get("ACCESS_LOG", cls.access_log, _parse_bool),
            workers=workers,
            title=get("TITLE", cls.title, str),
            description=get("DESCRIPTION", cls.description, str),
            version=get("VERSION", cls.version, str),
            docs_url=docs_url,
            redoc_url=redoc_url,
            enable_cors=get("ENABLE_CORS", cls.enable_cors, _parse_bool),
            api_prefix=api_prefix,
            refresh_interval=get("REFRESH_INTERVAL", cls.refresh_interval, _within(_parse_float, 0.05, 3600)),
            max_history=get("MAX_HISTORY", cls.max_history, _within(_parse_int, 1, 10_000)),
            log_format=get("LOG_FORMAT", cls.log_format, _parse_log_format),
            cuda_visible_devices=None if visible is None else _printable(visible),
            gpu_pool_state_dir=get("GPU_POOL_STATE_DIR", cls.gpu_pool_state_dir, str),
            gpu_backend=get("GPU_BACKEND", cls.gpu_backend, check_backend),
            gpu_pool_api_keys=_get_keys("GPU_POOL_API_KEYS", env, complain),
            gpu_pool_admin_keys=_get_keys("GPU_POOL_ADMIN_KEYS", env, complain),
            gpu_pool_open_on_loopback=get("GPU_POOL_OPEN_ON_LOOPBACK", cls.gpu_pool_open_on_loopback, _parse_bool),
            gpu_pool_hosts=get("GPU_POOL_HOSTS", cls.gpu_pool_hosts, _parse_hosts),
            gpu_pool_idle_after=get("GPU_POOL_IDLE_AFTER", cls.gpu_pool_idle_after, _within(_parse_float, 1, 1e9)),
            gpu_pool_most_waiting=get(
                "GPU_POOL_MOST_WAITING", cls.gpu_pool_most_waiting, _within(_parse_int, 1, 1_000_000)
            ),
            gpu_pool_peers=read_peers("GPU_POOL_PEERS", env.get("GPU_POOL_PEERS", ""), complain),
        )
