"""The client's settings, from arguments and environment variables; it connects to nothing.

A bad argument raises a `ValueError`. A bad variable is logged, and its default is used (`environment.py` says why).
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
from typing import Any, Generic, Literal, NamedTuple, Protocol, Self, TypeGuard, TypeVar, get_args

from gpu_worker_pool.core.settings import Strategy
from gpu_worker_pool.environment import Environment, one_of
from gpu_worker_pool.lease_variables import GPUNaming

logger: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")

#: What assigns GPUs: servers with leases, or this process alone.
Coordination = Literal["auto", "leases", "local"]

DEFAULT_SERVICE_ENDPOINT = "http://localhost:8080"
SHORTEST_LEASE_TTL, LONGEST_LEASE_TTL = 2.0, 3600.0

#: This host's GPUs without a server.
LOCAL_ENDPOINT = "local://"


# --- numbers and choices: a validator returns the value, or raises a ValueError that names it ---


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


def validate_gpu_names(value: object, name: str = "gpu_names") -> GPUNaming:
    choices: tuple[GPUNaming, ...] = get_args(GPUNaming)
    return one_of(choices, value, name)


def validate_api_key(value: object, name: str = "api_key") -> str:
    """The error never shows the value: a key with a typo is almost a key."""
    if isinstance(value, str) and _KEY_PATTERN.fullmatch(value):
        return value
    what = "a text with others" if isinstance(value, str) else f"a value of type {type(value).__name__}"
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
    #: Normalized: lower-case scheme and host, no default port, no trailing slash.
    url: str


def is_private_url(url: str) -> bool:
    """Whether others on the network cannot read it: https, or this host."""
    return not url.startswith("http://") or is_loopback_url(url)


def is_loopback_url(url: str) -> bool:
    host = host_of(url)
    if not host:
        return url == LOCAL_ENDPOINT
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):  # a host name: unknown
        return ipaddress.ip_address(host).is_loopback
    return False


def host_of(url: str) -> str:
    """A name or an address, without the brackets of IPv6; empty for `local://`."""
    match = _URL.fullmatch(url)
    return match["host"].lower().strip("[]") if match is not None else ""


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
_KEY_PATTERN = re.compile(r"[!-~]{1,512}")
_URL = re.compile(
    r"(?P<scheme>https?)://"
    r"(?P<host>[a-z0-9][a-z0-9._-]*|\[(?P<ipv6>[0-9a-f:.]+)\])"
    r"(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<path>(?:/[\w.~!$&'()*+,;=:%-]*)*)",
    re.ASCII | re.IGNORECASE,
)
_DEFAULT_PORTS = {"http": 80, "https": 443}


def read_servers(name: str, text: str, complain: Callable[[str], object]) -> list[EndpointConfig]:
    """Those of a variable that can be used: a typo in one of them does not hide the others."""
    endpoints, problems = _read_endpoints(text, name)
    servers = [endpoint for endpoint in endpoints if endpoint.url != LOCAL_ENDPOINT]
    if len(servers) < len(endpoints):
        problems.append(f"{name}: local:// cannot be one of several endpoints; a client has it as GPU_SERVICE_ENDPOINT")
    for problem in problems:
        complain(f"{problem[:300]}; ignoring it")
    return servers


def _read_endpoints(value: object, name: str) -> tuple[tuple[EndpointConfig, ...], list[str]]:
    """The valid entries, and the problem of each bad one."""
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
    """Each entry, and a form to show that contains no password."""
    if isinstance(value, str):
        parts = value.split(",")
        last_secret = max((i for i, part in enumerate(parts) if "@" in part), default=-1)
        for i, part in enumerate(parts):
            if part.strip():
                # This may be the first half of a password that contains a comma.
                yield part.strip(), f"entry {i + 1}" if i < last_secret else _shown(part)
    else:
        for entry in value if isinstance(value, Iterable) else [value]:
            if isinstance(entry, str):
                yield entry.strip(), _shown(entry)
            else:
                yield "", f"a value of type {type(entry).__name__}"


def _shown(entry: str) -> str:
    before, at, rest = entry.strip().rpartition("@")
    # A query may contain a key.
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
    # Also in the path: a slash in a password makes the rest look like a path.
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
        raise ValueError(f"port {port} is not valid")
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
            # A number separates ids that still collide, such as http://host:443 and https://host.
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


@dataclass(frozen=True)
class _Variable(Generic[T]):
    name: str
    default: T
    convert: Callable[[str], object]
    validate: Callable[[object, str], T]

    def read(self, environment: Environment) -> T:
        return environment.get(self.name, self.default, self._parse)

    def _parse(self, text: str, name: str) -> T:
        value: object = text
        with contextlib.suppress(ValueError):  # the validator gives the better error
            value = self.convert(text)
        return self.validate(value, name)


_MEMORY_THRESHOLD = _Variable("GPU_MEMORY_THRESHOLD_PERCENT", 80.0, float, validate_threshold)
_UTILIZATION_THRESHOLD = _Variable("GPU_UTILIZATION_THRESHOLD_PERCENT", 90.0, float, validate_threshold)
_POLLING_INTERVAL: _Variable[float] = _Variable("GPU_POLLING_INTERVAL", 5, float, validate_polling_interval)
_STRATEGY: _Variable[Strategy] = _Variable(
    "GPU_LOAD_BALANCING_STRATEGY", "availability", str.lower, validate_load_balancing_strategy
)
_ENDPOINT_TIMEOUT = _Variable("GPU_ENDPOINT_TIMEOUT", 10.0, float, validate_timeout)
_ENDPOINT_MAX_RETRIES = _Variable("GPU_ENDPOINT_MAX_RETRIES", 3, int, validate_max_retries)
_HEALTH_CHECK_INTERVAL: _Variable[float] = _Variable(
    "GPU_ENDPOINT_HEALTH_CHECK_INTERVAL", 30, float, validate_polling_interval
)
_COORDINATION: _Variable[Coordination] = _Variable("GPU_POOL_COORDINATION", "auto", str.lower, validate_coordination)
_LEASE_TTL = _Variable("GPU_POOL_LEASE_TTL", 60.0, float, validate_lease_ttl)
_GPU_NAMES: _Variable[GPUNaming] = _Variable("GPU_POOL_GPU_NAMES", "index", str.lower, validate_gpu_names)
_API_KEY: _Variable[str | None] = _Variable("GPU_POOL_API_KEY", None, str, validate_api_key)
#: All but the endpoints.
VARIABLES: tuple[_Variable[Any], ...] = (
    *(_MEMORY_THRESHOLD, _UTILIZATION_THRESHOLD, _POLLING_INTERVAL, _STRATEGY, _ENDPOINT_TIMEOUT),
    *(_ENDPOINT_MAX_RETRIES, _HEALTH_CHECK_INTERVAL, _COORDINATION, _LEASE_TTL, _GPU_NAMES, _API_KEY),
)


#: One server or several, such as those of a fleet; the documented variables count where it is not set.
ENDPOINT_VARIABLE = "GPU_POOL_ENDPOINT"


class EnvironmentConfigurationManager:
    """Settings of one endpoint, read from the environment at every call."""

    def __init__(
        self, environ: Mapping[str, str] | None = None, complain: Callable[[str], object] = logger.error
    ) -> None:
        self._environment = Environment(environ, complain)

    def get_service_endpoint(self) -> str:
        return self._get_single_endpoint().url

    def get_memory_threshold(self) -> float:
        return _MEMORY_THRESHOLD.read(self._environment)

    def get_utilization_threshold(self) -> float:
        return _UTILIZATION_THRESHOLD.read(self._environment)

    def get_polling_interval(self) -> float:
        """Seconds: an int where whole."""
        return _POLLING_INTERVAL.read(self._environment)

    def _get_single_endpoint(self) -> EndpointConfig:
        def checked(text: str, name: str) -> str:
            parse_endpoint(text, name)
            return text

        default = self._environment.get("GPU_SERVICE_ENDPOINT", DEFAULT_SERVICE_ENDPOINT, checked)
        if "," in self._environment.text(ENDPOINT_VARIABLE):  # a list: `MultiEndpointConfigurationManager` reads it
            return parse_endpoint(default)
        return parse_endpoint(self._environment.get(ENDPOINT_VARIABLE, default, checked))


class MultiEndpointConfigurationManager(EnvironmentConfigurationManager):
    """Settings of one or several endpoints, read from the environment at every call."""

    def get_service_endpoints(self) -> list[EndpointConfig]:
        return self._get_multiple_endpoints() or [self._get_single_endpoint()]

    def is_multi_endpoint_mode(self) -> bool:
        return bool(self._get_multiple_endpoints())

    def is_endpoint_configured(self) -> bool:
        """Whether a variable names endpoints, valid or not."""
        return any(map(self._environment.text, (*self._ENDPOINT_LISTS, "GPU_SERVICE_ENDPOINT")))

    def get_load_balancing_strategy(self) -> Strategy:
        return _STRATEGY.read(self._environment)

    def get_endpoint_timeout(self) -> float:
        return _ENDPOINT_TIMEOUT.read(self._environment)

    def get_endpoint_max_retries(self) -> int:
        return _ENDPOINT_MAX_RETRIES.read(self._environment)

    def get_endpoint_health_check_interval(self) -> float:
        return _HEALTH_CHECK_INTERVAL.read(self._environment)

    def get_coordination(self) -> Coordination:
        return _COORDINATION.read(self._environment)

    def get_lease_ttl(self) -> float:
        return _LEASE_TTL.read(self._environment)

    def get_gpu_names(self) -> GPUNaming:
        return _GPU_NAMES.read(self._environment)

    def get_api_key(self) -> str | None:
        return _API_KEY.read(self._environment)

    #: The first with a valid URL wins.
    _ENDPOINT_LISTS = (ENDPOINT_VARIABLE, "GPU_STATS_SERVICE_ENDPOINTS", "GPU_SERVICE_ENDPOINTS")

    def _get_multiple_endpoints(self) -> list[EndpointConfig]:
        for variable in self._ENDPOINT_LISTS:
            if variable == ENDPOINT_VARIABLE and (text := self._environment.text(variable)) and "," not in text:
                return []  # the only server
            servers = read_servers(variable, self._environment.text(variable), self._environment.complain)
            if servers:
                return servers
        return []


# --- arguments and environment together ---


@dataclass(frozen=True)
class PoolConfig:
    """The checked settings of a client."""

    endpoints: tuple[EndpointConfig, ...]
    multi_endpoint: bool
    #: No endpoint was configured, so the client may try another port.
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
    #: How `assignment.env` names GPUs.
    gpu_names: GPUNaming
    #: Secret: never shown in text, logs or errors.
    api_key: str | None = field(repr=False)
    allow_insecure_key: bool

    def pool_id(self, endpoint_id: str) -> str:
        """The id of an endpoint in the pool: empty with a single endpoint, whose GPUs have plain indices."""
        return endpoint_id if self.multi_endpoint else ""

    @classmethod
    def resolve(
        cls,
        *,
        service_endpoint: str | None = None,
        service_endpoints: str | Iterable[str] | None = None,
        worker_timeout: float = 300.0,
        request_timeout: float = 30.0,
        allow_insecure_key: bool = False,
        environ: Mapping[str, str] | None = None,
        **others: object,
    ) -> Self:
        """Arguments, those of the client, override variables; what is missing or None is read from `environ`."""
        environment, env = Environment(environ, logger.error), MultiEndpointConfigurationManager(environ)

        def pick(name: str, variable: _Variable[T]) -> T:
            value = others.pop(name, None)
            return variable.read(environment) if value is None else variable.validate(value, name)

        endpoint_is_default = False
        if service_endpoints is not None:
            endpoints, multi_endpoint = parse_endpoints(service_endpoints), True
        elif service_endpoint is not None:
            endpoints, multi_endpoint = (parse_endpoint(service_endpoint),), False
        else:
            endpoints, multi_endpoint = tuple(env.get_service_endpoints()), env.is_multi_endpoint_mode()
            endpoint_is_default = not env.is_endpoint_configured()
        resolved = cls(
            endpoints=endpoints,
            multi_endpoint=multi_endpoint,
            endpoint_is_default=endpoint_is_default,
            load_balancing_strategy=pick("load_balancing_strategy", _STRATEGY),
            memory_threshold=pick("memory_threshold", _MEMORY_THRESHOLD),
            utilization_threshold=pick("utilization_threshold", _UTILIZATION_THRESHOLD),
            polling_interval=pick("polling_interval", _POLLING_INTERVAL),
            worker_timeout=validate_timeout(worker_timeout, "worker_timeout"),
            request_timeout=validate_timeout(request_timeout, "request_timeout"),
            endpoint_timeout=pick("endpoint_timeout", _ENDPOINT_TIMEOUT),
            endpoint_max_retries=pick("endpoint_max_retries", _ENDPOINT_MAX_RETRIES),
            endpoint_health_check_interval=pick("endpoint_health_check_interval", _HEALTH_CHECK_INTERVAL),
            coordination=pick("coordination", _COORDINATION),
            lease_ttl=pick("lease_ttl", _LEASE_TTL),
            gpu_names=pick("gpu_names", _GPU_NAMES),
            api_key=pick("api_key", _API_KEY),
            allow_insecure_key=validate_flag(allow_insecure_key, "allow_insecure_key"),
        )
        if others:
            raise TypeError(f"there is no setting {', '.join(others)}")
        return resolved
