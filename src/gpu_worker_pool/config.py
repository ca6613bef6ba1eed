"""Settings from arguments and environment variables; it reads one mapping and connects to nothing.

A bad argument is a `ValueError`. A bad variable is logged and its default used: whoever runs a program is not
always who wrote it, and a typo in a profile should not keep it from starting.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, Self, TypeGuard, TypeVar, get_args

from gpu_worker_pool.core.settings import Strategy
from gpu_worker_pool.environment import Environment, one_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Who decides which GPU is whose: servers that offer leases, or this process alone.
Coordination = Literal["auto", "leases", "local"]

DEFAULT_SERVICE_ENDPOINT = "http://localhost:8080"
DEFAULT_LOAD_BALANCING_STRATEGY: Strategy = "availability"
DEFAULT_MEMORY_THRESHOLD = 80.0
DEFAULT_UTILIZATION_THRESHOLD = 90.0
DEFAULT_POLLING_INTERVAL: float = 5
DEFAULT_WORKER_TIMEOUT = 300.0
DEFAULT_REQUEST_TIMEOUT = 30.0
DEFAULT_ENDPOINT_TIMEOUT = 10.0
DEFAULT_ENDPOINT_MAX_RETRIES = 3
DEFAULT_ENDPOINT_HEALTH_CHECK_INTERVAL: float = 30
DEFAULT_COORDINATION: Coordination = "auto"
DEFAULT_LEASE_TTL = 60.0
SHORTEST_LEASE_TTL, LONGEST_LEASE_TTL = 2.0, 3600.0

#: Stands for the GPUs of this host without a server.
LOCAL_ENDPOINT = "local://"


# --- numbers and choices: a validator returns the value to use, or raises a ValueError that names it ---


def validate_threshold(value: object, name: str = "threshold") -> float:
    if _is_number(value) and 0 <= value <= 100:
        return float(value)
    raise ValueError(f"{name} must be a number from 0 to 100, not {value!r}")


def validate_timeout(value: object, name: str = "timeout") -> float:
    # The upper bound refuses infinity, and integers that no float can hold.
    if _is_number(value) and 0 < value <= sys.float_info.max:
        return float(value)
    raise ValueError(f"{name} must be a number of seconds above 0, not {value!r}")


def validate_polling_interval(value: object, name: str = "polling_interval") -> float:
    seconds = validate_timeout(value, name)
    # Documented as an int; fractions are an extension.
    return int(seconds) if seconds.is_integer() else seconds


def validate_max_retries(value: object, name: str = "endpoint_max_retries") -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ValueError(f"{name} must be a whole number of at least 0, not {value!r}")


def validate_load_balancing_strategy(value: object, name: str = "load_balancing_strategy") -> Strategy:
    strategies: tuple[Strategy, ...] = get_args(Strategy)
    return one_of(strategies, value, name)


def validate_coordination(value: object, name: str = "coordination") -> Coordination:
    choices: tuple[Coordination, ...] = get_args(Coordination)
    return one_of(choices, value, name)


def validate_lease_ttl(value: object, name: str = "lease_ttl") -> float:
    if _is_number(value) and SHORTEST_LEASE_TTL <= value <= LONGEST_LEASE_TTL:
        return float(value)
    limits = f"{SHORTEST_LEASE_TTL:g} to {LONGEST_LEASE_TTL:g}"
    raise ValueError(f"{name} must be a number of seconds from {limits}, not {value!r}")


def validate_api_key(value: object, name: str = "api_key") -> str:
    """Never shows what it was given: a key with a typo in it is nearly a key."""
    if isinstance(value, str) and _API_KEY.fullmatch(value):
        return value
    what = "one with other characters" if isinstance(value, str) else f"a value of type {type(value).__name__}"
    raise ValueError(f"{name} must be a key of 1 to 512 ASCII characters without blanks, not {what}")


def validate_flag(value: object, name: str = "allow_insecure_key") -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError(f"{name} must be True or False, not {value!r}")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


# --- endpoints: `URL` or `name=URL` ---


@dataclass(frozen=True)
class EndpointConfig:
    #: Without a colon, so that `global_gpu_id.split(":")` works.
    endpoint_id: str
    #: In one spelling only: lower-case scheme and host, no default port, no trailing slash.
    url: str


def is_private_url(url: str) -> bool:
    """Whether nobody in between can read along: https, or this host."""
    return not url.startswith("http://") or is_loopback_url(url)


def is_loopback_url(url: str) -> bool:
    match = _URL.fullmatch(url)
    if match is None:
        return url == LOCAL_ENDPOINT
    host = match["host"].lower()
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):  # a name, and who knows where it leads
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return False


def parse_endpoint(text: str, name: str = "service_endpoint") -> EndpointConfig:
    return parse_endpoints([text], name)[0]


def parse_endpoints(value: str | Iterable[str], name: str = "service_endpoints") -> tuple[EndpointConfig, ...]:
    """Read a list or a string with commas; the same URL twice is one endpoint."""
    endpoints, problems = _read_endpoints(value, name)
    if problems:
        raise ValueError(problems[0])
    if not endpoints:
        raise ValueError(f"{name} must have at least one URL such as http://gpu-server:8000, not {value!r}")
    return endpoints


class _Address(NamedTuple):
    url: str
    host_and_port: str
    path: str


_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_API_KEY = re.compile(r"[!-~]{1,512}")
_URL = re.compile(
    r"(?P<scheme>https?)://"
    r"(?P<host>[a-z0-9][a-z0-9._-]*|\[(?P<ipv6>[0-9a-f:.]+)\])"
    r"(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<path>(?:/[\w.~!$&'()*+,;=:%-]*)*)",
    re.ASCII | re.IGNORECASE,
)
_DEFAULT_PORTS = {"http": 80, "https": 443}


def _read_endpoints(value: object, name: str) -> tuple[tuple[EndpointConfig, ...], list[str]]:
    """The good entries, and for each bad one what is wrong with it."""
    names: dict[_Address, str | None] = {}
    problems = []
    for entry, shown in _entries(value):
        try:
            address, given_name = _parse_entry(entry)
            _check_name(given_name, address, names)
        except ValueError as reason:
            problems.append(f"{name}: {shown} cannot be used: {reason}")
        else:
            names[address] = given_name or names.get(address)
    return tuple(_identified(names)), problems


def _entries(value: object) -> Iterator[tuple[str, str]]:
    """Each entry, and how to show it to people: never with a password in it."""
    if isinstance(value, str):
        parts = value.split(",")
        last_secret = max((i for i, part in enumerate(parts) if "@" in part), default=-1)
        for i, part in enumerate(parts):
            if part.strip():
                # A password may have had a comma in it, and this be its first half.
                yield part.strip(), f"entry {i + 1}" if i < last_secret else _shown(part)
    else:
        for entry in value if isinstance(value, Iterable) else [value]:
            if isinstance(entry, str):
                yield entry.strip(), _shown(entry)
            else:
                yield "", f"a value of type {type(entry).__name__}"


def _shown(entry: str) -> str:
    before, at, rest = entry.strip().rpartition("@")
    # People put keys into queries, too.
    rest = "" if "?" in before else re.sub(r"\?.*", "?***", rest, flags=re.DOTALL)
    return repr(f"***@{rest}" if at else rest)


def _parse_entry(entry: str) -> tuple[_Address, str | None]:
    name, equals, url = entry.partition("=")
    if not equals or "://" in name:
        return _parse_url(entry), None
    if not _NAME.fullmatch(name.strip()):
        raise ValueError("its name must be 1 to 64 letters, digits, dots, dashes or underscores")
    return _parse_url(url.strip()), name.strip()


def _check_name(name: str | None, address: _Address, names: Mapping[_Address, str | None]) -> None:
    known = names.get(address)
    if name and known and name != known:
        raise ValueError(f"the same URL is already named {known!r}")
    if name and name != known and name in names.values():
        raise ValueError(f"the name {name!r} is already taken by another URL")


def _parse_url(text: str) -> _Address:
    # Also in a path, because a slash in a password makes it look like one.
    if "@" in text:
        raise ValueError("a URL must not hold a user name or password; use an API key instead")
    if text.lower() == LOCAL_ENDPOINT:
        return _Address(LOCAL_ENDPOINT, "local", "")
    match = _URL.fullmatch(text)
    if not match:
        raise ValueError("expected a URL such as http://gpu-server:8000, https://host/path or local://")
    scheme, host, path = match["scheme"].lower(), match["host"].lower(), match["path"].rstrip("/")
    port = int(match["port"] or _DEFAULT_PORTS[scheme])
    if "://" in path:
        raise ValueError("it looks like several URLs in one")
    if not 0 < port < 65536:
        raise ValueError(f"there is no port {port}")
    if match["ipv6"]:
        host = f"[{ipaddress.IPv6Address(match['ipv6'])}]"
    shown_port = "" if port == _DEFAULT_PORTS[scheme] else f":{port}"
    host_id = host.strip("[]").replace(":", "-")
    return _Address(f"{scheme}://{host}{shown_port}{path}", f"{host_id}_{port}", path)


def _identified(names: Mapping[_Address, str | None]) -> Iterator[EndpointConfig]:
    uses = Counter(address.host_and_port for address, name in names.items() if name is None)
    taken = {name for name in names.values() if name is not None}
    for address, name in names.items():
        if name is None:
            wanted = address.host_and_port
            if uses[wanted] > 1:
                wanted += re.sub(r"[^A-Za-z0-9.-]+", "_", address.path)
            # A number tells apart what still collides, such as http://host:443 and https://host.
            candidates = itertools.chain([wanted], (f"{wanted}_{number}" for number in itertools.count(2)))
            name = next(candidate for candidate in candidates if candidate not in taken)
            taken.add(name)
        yield EndpointConfig(name, address.url)


# --- the environment ---


class ConfigurationManager(Protocol):
    def get_service_endpoint(self) -> str: ...
    def get_memory_threshold(self) -> float: ...
    def get_utilization_threshold(self) -> float: ...
    def get_polling_interval(self) -> float: ...


class EnvironmentConfigurationManager:
    """Settings of one endpoint, read from the environment at every call."""

    def __init__(
        self, environ: Mapping[str, str] | None = None, complain: Callable[[str], object] = logger.error
    ) -> None:
        self._environment = Environment(environ, complain)

    def get_service_endpoint(self) -> str:
        return self._get_single_endpoint().url

    def get_memory_threshold(self) -> float:
        return self._get("GPU_MEMORY_THRESHOLD_PERCENT", DEFAULT_MEMORY_THRESHOLD, float, validate_threshold)

    def get_utilization_threshold(self) -> float:
        return self._get("GPU_UTILIZATION_THRESHOLD_PERCENT", DEFAULT_UTILIZATION_THRESHOLD, float, validate_threshold)

    def get_polling_interval(self) -> float:
        """Seconds: an int where whole."""
        return self._get("GPU_POLLING_INTERVAL", DEFAULT_POLLING_INTERVAL, float, validate_polling_interval)

    def _get_single_endpoint(self) -> EndpointConfig:
        def checked(text: str, name: str) -> str:
            parse_endpoint(text, name)
            return text

        return parse_endpoint(self._environment.get("GPU_SERVICE_ENDPOINT", DEFAULT_SERVICE_ENDPOINT, checked))

    def _get(
        self, variable: str, default: T, convert: Callable[[str], object], validate: Callable[[object, str], T]
    ) -> T:
        def parse(text: str, name: str) -> T:
            value: object = text
            with contextlib.suppress(ValueError):  # the validator says better what was expected
                value = convert(text)
            return validate(value, name)

        return self._environment.get(variable, default, parse)


class MultiEndpointConfigurationManager(EnvironmentConfigurationManager):
    """Settings of one or several endpoints, read from the environment at every call."""

    def get_service_endpoints(self) -> list[EndpointConfig]:
        return self._get_multiple_endpoints() or [self._get_single_endpoint()]

    def is_multi_endpoint_mode(self) -> bool:
        return bool(self._get_multiple_endpoints())

    def is_endpoint_configured(self) -> bool:
        """Whether anything, good or bad, was said about endpoints."""
        return any(map(self._environment.text, (*self._ENDPOINT_LISTS, "GPU_SERVICE_ENDPOINT")))

    def get_load_balancing_strategy(self) -> Strategy:
        return self._get(
            "GPU_LOAD_BALANCING_STRATEGY",
            DEFAULT_LOAD_BALANCING_STRATEGY,
            str.lower,
            validate_load_balancing_strategy,
        )

    def get_endpoint_timeout(self) -> float:
        return self._get("GPU_ENDPOINT_TIMEOUT", DEFAULT_ENDPOINT_TIMEOUT, float, validate_timeout)

    def get_endpoint_max_retries(self) -> int:
        return self._get("GPU_ENDPOINT_MAX_RETRIES", DEFAULT_ENDPOINT_MAX_RETRIES, int, validate_max_retries)

    def get_endpoint_health_check_interval(self) -> float:
        return self._get(
            "GPU_ENDPOINT_HEALTH_CHECK_INTERVAL",
            DEFAULT_ENDPOINT_HEALTH_CHECK_INTERVAL,
            float,
            validate_polling_interval,
        )

    def get_coordination(self) -> Coordination:
        return self._get("GPU_POOL_COORDINATION", DEFAULT_COORDINATION, str.lower, validate_coordination)

    def get_lease_ttl(self) -> float:
        return self._get("GPU_POOL_LEASE_TTL", DEFAULT_LEASE_TTL, float, validate_lease_ttl)

    def get_api_key(self) -> str | None:
        return self._environment.get("GPU_POOL_API_KEY", None, validate_api_key)

    #: The first that names a good URL wins.
    _ENDPOINT_LISTS = ("GPU_STATS_SERVICE_ENDPOINTS", "GPU_SERVICE_ENDPOINTS")

    def _get_multiple_endpoints(self) -> list[EndpointConfig]:
        for variable in self._ENDPOINT_LISTS:
            endpoints, problems = _read_endpoints(self._environment.text(variable), variable)
            if any(endpoint.url == LOCAL_ENDPOINT for endpoint in endpoints):
                problems.append(f"{variable}: local:// cannot be one of several; set GPU_SERVICE_ENDPOINT to it")
                endpoints = tuple(endpoint for endpoint in endpoints if endpoint.url != LOCAL_ENDPOINT)
            for problem in problems:
                self._environment.complain(f"{problem}; ignoring it")
            if endpoints:
                return list(endpoints)
        return []


# --- arguments and environment together ---


@dataclass(frozen=True)
class PoolConfig:
    """What a client goes by; every value was checked."""

    endpoints: tuple[EndpointConfig, ...]
    multi_endpoint: bool
    #: Nobody named an endpoint, so that others may be tried in its place.
    endpoint_is_default: bool
    load_balancing_strategy: Strategy
    memory_threshold: float
    utilization_threshold: float
    polling_interval: float
    worker_timeout: float
    request_timeout: float
    endpoint_timeout: float
    endpoint_max_retries: int
    endpoint_health_check_interval: float
    coordination: Coordination
    lease_ttl: float
    #: A secret: in no text, log or error.
    api_key: str | None = field(repr=False)
    allow_insecure_key: bool

    def pool_id(self, endpoint_id: str) -> str:
        """How the pool knows an endpoint: with one alone, GPUs are known by their numbers, and it by no name."""
        return endpoint_id if self.multi_endpoint else ""

    @classmethod
    def resolve(
        cls,
        *,
        service_endpoint: str | None = None,
        service_endpoints: str | Iterable[str] | None = None,
        load_balancing_strategy: str | None = None,
        memory_threshold: float | None = None,
        utilization_threshold: float | None = None,
        polling_interval: float | None = None,
        worker_timeout: float = DEFAULT_WORKER_TIMEOUT,
        request_timeout: float = DEFAULT_REQUEST_TIMEOUT,
        endpoint_timeout: float | None = None,
        endpoint_max_retries: int | None = None,
        endpoint_health_check_interval: float | None = None,
        coordination: str | None = None,
        lease_ttl: float | None = None,
        api_key: str | None = None,
        allow_insecure_key: bool = False,
        environ: Mapping[str, str] | None = None,
    ) -> Self:
        """An argument wins over every variable; what is left out is read from `environ`."""
        env = MultiEndpointConfigurationManager(environ)

        def pick(name: str, value: object, validate: Callable[[object, str], T], get: Callable[[], T]) -> T:
            return get() if value is None else validate(value, name)

        endpoint_is_default = False
        if service_endpoints is not None:
            endpoints, multi_endpoint = parse_endpoints(service_endpoints), True
        elif service_endpoint is not None:
            endpoints, multi_endpoint = (parse_endpoint(service_endpoint),), False
        else:
            endpoints, multi_endpoint = tuple(env.get_service_endpoints()), env.is_multi_endpoint_mode()
            endpoint_is_default = not env.is_endpoint_configured()
        return cls(
            endpoints=endpoints,
            multi_endpoint=multi_endpoint,
            endpoint_is_default=endpoint_is_default,
            load_balancing_strategy=pick(
                "load_balancing_strategy",
                load_balancing_strategy,
                validate_load_balancing_strategy,
                env.get_load_balancing_strategy,
            ),
            memory_threshold=pick("memory_threshold", memory_threshold, validate_threshold, env.get_memory_threshold),
            utilization_threshold=pick(
                "utilization_threshold",
                utilization_threshold,
                validate_threshold,
                env.get_utilization_threshold,
            ),
            polling_interval=pick(
                "polling_interval", polling_interval, validate_polling_interval, env.get_polling_interval
            ),
            worker_timeout=validate_timeout(worker_timeout, "worker_timeout"),
            request_timeout=validate_timeout(request_timeout, "request_timeout"),
            endpoint_timeout=pick("endpoint_timeout", endpoint_timeout, validate_timeout, env.get_endpoint_timeout),
            endpoint_max_retries=pick(
                "endpoint_max_retries",
                endpoint_max_retries,
                validate_max_retries,
                env.get_endpoint_max_retries,
            ),
            endpoint_health_check_interval=pick(
                "endpoint_health_check_interval",
                endpoint_health_check_interval,
                validate_polling_interval,
                env.get_endpoint_health_check_interval,
            ),
            coordination=pick("coordination", coordination, validate_coordination, env.get_coordination),
            lease_ttl=pick("lease_ttl", lease_ttl, validate_lease_ttl, env.get_lease_ttl),
            api_key=pick("api_key", api_key, validate_api_key, env.get_api_key),
            allow_insecure_key=validate_flag(allow_insecure_key, "allow_insecure_key"),
        )
