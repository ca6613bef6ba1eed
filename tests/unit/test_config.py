"""Settings: what the documents say they default to, what wins over what, and what happens to nonsense."""

import logging
import math
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpu_worker_pool.config import (
    ConfigurationManager,
    EndpointConfig,
    EnvironmentConfigurationManager,
    MultiEndpointConfigurationManager,
    PoolConfig,
    is_loopback_url,
    is_private_url,
    parse_endpoint,
    parse_endpoints,
    validate_api_key,
    validate_coordination,
    validate_flag,
    validate_lease_ttl,
    validate_load_balancing_strategy,
    validate_max_retries,
    validate_polling_interval,
    validate_threshold,
    validate_timeout,
)


def ids(*entries: str) -> list[str]:
    return [endpoint.endpoint_id for endpoint in parse_endpoints(entries)]


def urls(*entries: str) -> list[str]:
    return [endpoint.url for endpoint in parse_endpoints(entries)]


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert {(record.name, record.levelno) for record in caplog.records} <= {("gpu_worker_pool.config", logging.ERROR)}
    return [record.getMessage() for record in caplog.records]


# --- validators ---

NOT_NUMBERS: list[object] = [math.nan, math.inf, -math.inf, True, None, "75", b"75", [75], 10**400]


@pytest.mark.parametrize("value", [0, 0.0, 75, 75.5, 100])
def test_thresholds(value: float) -> None:
    assert validate_threshold(value) == value
    assert type(validate_threshold(value)) is float


@pytest.mark.parametrize("value", [*NOT_NUMBERS, -0.1, 100.1])
def test_refused_thresholds(value: object) -> None:
    with pytest.raises(ValueError, match="memory_threshold must be a number from 0 to 100, not ") as caught:
        validate_threshold(value, "memory_threshold")
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [0.001, 1, 30.0])
def test_timeouts(value: float) -> None:
    assert validate_timeout(value) == value
    assert type(validate_timeout(value)) is float


@pytest.mark.parametrize("validate", [validate_timeout, validate_polling_interval])
@pytest.mark.parametrize("value", [*NOT_NUMBERS, 0, -1])
def test_refused_durations(validate: Any, value: object) -> None:
    with pytest.raises(ValueError, match="wait must be a number of seconds above 0, not ") as caught:
        validate(value, "wait")
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [2, 2.0, 60, 3600.0])
def test_lease_ttls(value: float) -> None:
    assert validate_lease_ttl(value) == value
    assert type(validate_lease_ttl(value)) is float


@pytest.mark.parametrize("value", [*NOT_NUMBERS, 1.9, 0, -1, 3600.1])
def test_refused_lease_ttls(value: object) -> None:
    with pytest.raises(ValueError, match="lease_ttl must be a number of seconds from 2 to 3600, not ") as caught:
        validate_lease_ttl(value)
    assert repr(value) in str(caught.value)


def test_coordination() -> None:
    assert [validate_coordination(value) for value in ("auto", "leases", "local")] == ["auto", "leases", "local"]
    for wrong in ("Leases", "", None, True, ["auto"]):
        with pytest.raises(ValueError, match="coordination must be one of auto, leases, local, not "):
            validate_coordination(wrong)


def test_flags() -> None:
    assert validate_flag(value=True) is True
    for wrong in (1, 0, "true", None):
        with pytest.raises(ValueError, match="allow_insecure_key must be True or False, not "):
            validate_flag(wrong)


def test_keys_are_checked_and_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    assert validate_api_key("a-secret") == "a-secret"
    for wrong in ("two words", "line\nline", "ümlaut", "x" * 513, b"bytes", 7, None):
        with pytest.raises(ValueError, match="api_key must be a key") as caught:
            validate_api_key(wrong)
        assert not isinstance(wrong, str) or wrong not in str(caught.value)
    resolved = PoolConfig.resolve(environ={"GPU_POOL_API_KEY": "two words"})
    assert resolved.api_key is None
    (told,) = errors(caplog)
    assert told.startswith(
        "GPU_POOL_API_KEY must be a key of 1 to 512 ASCII characters without blanks, not a text with others"
    )
    assert told.endswith("; ignoring it")
    assert "a-secret" not in repr(PoolConfig.resolve(api_key="a-secret", environ={}))


@pytest.mark.parametrize(
    ("url", "is_loopback", "is_private"),
    [
        ("http://localhost:8000", True, True),
        ("http://127.0.0.1", True, True),
        ("http://127.8.9.10:1/path", True, True),
        ("http://[::1]:8000", True, True),
        ("https://gpu-server", False, True),
        ("local://", True, True),
        ("http://gpu-server", False, False),
        ("http://10.0.0.1", False, False),
        ("http://localhost.example.org", False, False),
        ("http://[2001:db8::1]", False, False),
    ],
)
def test_where_nobody_in_between_reads_along(url: str, is_loopback: bool, is_private: bool) -> None:
    assert (is_loopback_url(url), is_private_url(url)) == (is_loopback, is_private)


@pytest.mark.parametrize(("value", "kind"), [(5, int), (5.0, int), (0.5, float)])
def test_whole_polling_intervals_are_ints(value: float, kind: type) -> None:
    assert validate_polling_interval(value) == value
    assert type(validate_polling_interval(value)) is kind


@pytest.mark.parametrize("value", [0, 3])
def test_max_retries(value: int) -> None:
    assert validate_max_retries(value) == value


@pytest.mark.parametrize("value", [-1, 3.0, True, None, "3", math.nan])
def test_refused_max_retries(value: object) -> None:
    with pytest.raises(ValueError, match="endpoint_max_retries must be a whole number of at least 0, not "):
        validate_max_retries(value)


@pytest.mark.parametrize("value", ["availability", "round_robin", "weighted", "pack"])
def test_strategies(value: str) -> None:
    assert validate_load_balancing_strategy(value) == value


@pytest.mark.parametrize("value", ["", "random", "Weighted", None, 1])
def test_refused_strategies(value: object) -> None:
    with pytest.raises(ValueError, match="must be one of availability, round_robin, weighted, pack, not "):
        validate_load_balancing_strategy(value)


# --- endpoints ---


@pytest.mark.parametrize(
    ("text", "endpoint_id", "url"),
    [
        ("http://gpu-server-1:8000", "gpu-server-1_8000", "http://gpu-server-1:8000"),
        ("https://gpu-service.company.com", "gpu-service.company.com_443", "https://gpu-service.company.com"),
        ("http://10.0.0.1", "10.0.0.1_80", "http://10.0.0.1"),
        ("HTTP://GPU1:8000/", "gpu1_8000", "http://gpu1:8000"),
        ("http://gpu1:80", "gpu1_80", "http://gpu1"),
        ("https://gpu1:443/", "gpu1_443", "https://gpu1"),
        ("https://gpu1:80", "gpu1_80", "https://gpu1:80"),
        ("http://gpu1:08000", "gpu1_8000", "http://gpu1:8000"),
        ("http://gpu1:8000/API/v1/", "gpu1_8000", "http://gpu1:8000/API/v1"),
        ("http://gpu1/a=b,c:d", "gpu1_80", "http://gpu1/a=b,c:d"),
        ("http://[::1]:8000", "--1_8000", "http://[::1]:8000"),
        ("http://[FE80:0:0:0:0:0:0:1]", "fe80--1_80", "http://[fe80::1]"),
        ("http://docker_host:8000", "docker_host_8000", "http://docker_host:8000"),
        (" http://gpu1:8000\n", "gpu1_8000", "http://gpu1:8000"),
        ("lab=http://gpu1:8000", "lab", "http://gpu1:8000"),
        (" Lab-1.x_y = http://gpu1:8000/x=y ", "Lab-1.x_y", "http://gpu1:8000/x=y"),
        ("local://", "local", "local://"),
        ("LOCAL://", "local", "local://"),
        ("here=local://", "here", "local://"),
    ],
)
def test_one_endpoint(text: str, endpoint_id: str, url: str) -> None:
    assert parse_endpoint(text) == EndpointConfig(endpoint_id, url)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "gpu1",
        "gpu1:8000",
        "//gpu1:8000",
        "ftp://gpu1",
        "file:///etc/passwd",
        "local://elsewhere",
        "http://",
        "http://:8000",
        "http:///path",
        "http://gpu1:",
        "http://gpu1:0",
        "http://gpu1:65536",
        "http://gpu1:٣",
        "http://gpu1:-1",
        "http://gpu1:eighty",
        "http://gpu 1",
        "http://gpu1/a b",
        "http://gpu1\n:80",
        "http://gpü",
        "http\u017f://gpu1",
        "http://-gpu1",
        "http://gpu1\\evil",
        "http://::1:8000",
        "http://[::1",
        "http://[::1]x:80",
        "http://x[::1]:80",
        "http://[1.2.3.4]",
        "http://[:::]",
        "http://gpu1?key=value",
        "http://gpu1/#top",
        "http://gpu1:8000,http://gpu2:8000",
        "=http://gpu1",
        "a:b=http://gpu1",
        "a b=http://gpu1",
        f"{'a' * 65}=http://gpu1",
        "lab=",
        "lab=gpu1",
        "lab=rat=http://gpu1",
    ],
)
def test_refused_urls(text: str) -> None:
    with pytest.raises(ValueError, match=r"^service_endpoint: .* cannot be used: ") as caught:
        parse_endpoint(text)
    shown = text.strip() if "?" not in text else "http://gpu1?***"
    assert repr(shown) in str(caught.value)


def test_the_error_says_what_was_expected() -> None:
    with pytest.raises(ValueError, match="cannot be used") as caught:
        parse_endpoint("gpu1:8000")
    assert str(caught.value) == (
        "service_endpoint: 'gpu1:8000' cannot be used: "
        "expected a URL such as http://gpu-server:8000, https://host/path or local://"
    )


@pytest.mark.parametrize("value", [None, 8000, b"http://root:hunter2@gpu1", [None], [["http://gpu1"]], object()])
def test_what_is_no_text_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="cannot be used") as caught:
        parse_endpoints(value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "http://root:hunter2@gpu1:8000",
        "http://root:hunter2@",
        "http://hunter2@gpu1",
        "root:hunter2@gpu1",
        "lab=http://root:hunter2@gpu1",
        "http//root:hunter2=@gpu1",
        "http://root:12/hunter2@gpu1",
        "http://root:?hunter2@gpu1",
        "http://root:#hunter2@gpu1",
        "http://root:hun@ter2@gpu1",
        "http://root:hunter2,34@gpu1",
        "http://gpu1?key=hunter2",
        "http://gpu1?key=@hunter2",
    ],
)
def test_a_password_is_refused_and_never_shown(text: str, caplog: pytest.LogCaptureFixture) -> None:
    for parse in (parse_endpoint, parse_endpoints):
        with pytest.raises(ValueError, match="cannot be used") as caught:
            parse(text)
        assert "unter2" not in str(caught.value)
        assert "root" not in str(caught.value)
        assert caught.value.__context__ is None
    environ = {"GPU_SERVICE_ENDPOINT": text, "GPU_SERVICE_ENDPOINTS": f"http://ok:1,{text}"}
    config = MultiEndpointConfigurationManager(environ)
    assert config.get_service_endpoint() == "http://localhost:8080"
    assert config.get_service_endpoints() == [EndpointConfig("ok_1", "http://ok:1")]
    assert errors(caplog)
    assert "unter2" not in caplog.text


def test_whoever_gives_a_password_is_told_about_keys() -> None:
    with pytest.raises(ValueError, match="cannot be used") as caught:
        parse_endpoint("http://root:hunter2@gpu1:8000")
    assert str(caught.value) == (
        "service_endpoint: '***@gpu1:8000' cannot be used: "
        "a URL must not hold a user name or password; use an API key instead"
    )


@pytest.mark.parametrize(
    "value",
    [
        "http://gpu1:8000,http://gpu2:8000",
        " http://gpu1:8000 , ,http://gpu2:8000,",
        ["http://gpu1:8000", "http://gpu2:8000"],
        ("http://gpu1:8000", " http://gpu2:8000 "),
        iter(["http://gpu1:8000", "http://gpu2:8000"]),
    ],
)
def test_several_endpoints_in_a_string_or_a_list(value: Any) -> None:
    assert parse_endpoints(value) == (
        EndpointConfig("gpu1_8000", "http://gpu1:8000"),
        EndpointConfig("gpu2_8000", "http://gpu2:8000"),
    )


@pytest.mark.parametrize("value", ["", " ", ",,", [], ()])
def test_no_endpoint_at_all_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="service_endpoints must have at least one URL"):
        parse_endpoints(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("http://a:1,gpu1", "service_endpoints: 'gpu1' cannot be used: "),
        ("http://a:1,http://root:hunter2@gpu1", "service_endpoints: '***@gpu1' cannot be used: "),
        # The comma was in the password.
        ("http://a:1,http://root:hunter2,34@gpu1", "service_endpoints: entry 2 cannot be used: "),
        ([8000], "service_endpoints: a value of type int cannot be used: "),
        ("http://a:65536", "service_endpoints: 'http://a:65536' cannot be used: port 65536 is not valid"),
    ],
)
def test_the_error_names_the_bad_entry(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match="cannot be used") as caught:
        parse_endpoints(value)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("again", ["http://gpu1", "HTTP://GPU1/", "http://gpu1:80", "http://gpu1:80//"])
def test_the_same_url_is_one_endpoint(again: str) -> None:
    assert parse_endpoints(["http://gpu1", again]) == (EndpointConfig("gpu1_80", "http://gpu1"),)


@pytest.mark.parametrize("other", ["https://gpu1", "http://gpu1:81", "http://gpu1/a", "http://gpu1/A", "http://gpu2"])
def test_different_urls_are_different_endpoints(other: str) -> None:
    assert len(parse_endpoints(["http://gpu1", "http://gpu1/b", other])) == 3


def test_the_path_tells_apart_what_shares_host_and_port() -> None:
    assert ids("http://h:1/api/v1", "http://h:1/b:c/", "http://h:2/x") == ["h_1_api_v1", "h_1_b_c", "h_2"]
    assert ids("http://h:1/a", "http://h:1") == ["h_1_a", "h_1"]


def test_a_number_tells_apart_what_is_still_alike() -> None:
    assert ids("https://h", "http://h:443") == ["h_443", "h_443_2"]
    assert ids("http://h:1/a/b", "http://h:1/a_b", "http://h:1/a%b") == ["h_1_a_b", "h_1_a_b_2", "h_1_a_b_3"]
    assert ids("http://h:1/2", "http://h:1", "http://h_1:2") == ["h_1_2", "h_1", "h_1_2_2"]


def test_a_given_name_is_the_id_whatever_the_others_would_like() -> None:
    assert ids("http://h:1", "h_1=http://x") == ["h_1_2", "h_1"]
    assert ids("local://", "local=http://x") == ["local_2", "local"]
    # A named endpoint does not use up its host and port.
    assert ids("a=http://h:1/x", "http://h:1/y") == ["a", "h_1"]


def test_a_name_is_kept_when_the_url_comes_again_without_it() -> None:
    assert parse_endpoints("a=http://h,http://h/") == (EndpointConfig("a", "http://h"),)
    assert parse_endpoints("http://h/,a=http://h") == (EndpointConfig("a", "http://h"),)
    assert parse_endpoints("a=http://h,a=http://h/") == (EndpointConfig("a", "http://h"),)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("a=http://x,a=http://y", "the name 'a' is already taken by another URL"),
        ("a=http://x,http://y,a=http://y", "the name 'a' is already taken by another URL"),
        ("a=http://x,b=http://x/", "the same URL is already named 'a'"),
    ],
)
def test_contradicting_names_are_refused(value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_endpoints(value)


HOSTS = st.sampled_from(["h", "H", "h_80", "h_80_x", "10.0.0.1", "a--1", "[a::1]", "[::1]", "[0:0::1]"])
PORTS = st.sampled_from(["", ":80", ":443", ":81", ":080"])
PATHS = st.sampled_from(["", "/", "/x", "/x/", "/x_", "/X", "/81", "/x/y", "/x:y", "/x_y", "/_2", "/2", "//"])
SCHEMES = st.sampled_from(["http", "https", "HTTP"])
URLS = st.builds("{}://{}{}{}".format, SCHEMES, HOSTS, PORTS, PATHS) | st.just("local://")
NAMES = st.sampled_from(["h_80", "h_80_2", "h_80_x", "h_443", "local", "a--1_80"])


@given(st.lists(URLS, min_size=1), st.dictionaries(NAMES, URLS))
def test_any_urls_have_ids_that_are_unique_and_without_a_colon(entries: list[str], named: dict[str, str]) -> None:
    # One name a URL: two are an error of their own.
    names = {parse_endpoint(url).url: (name, url) for name, url in named.items()}
    endpoints = parse_endpoints([*entries, *(f"{name}={url}" for name, url in names.values())])
    found = [endpoint.endpoint_id for endpoint in endpoints]
    assert len(set(found)) == len(found)
    assert not any(":" in endpoint_id or not endpoint_id for endpoint_id in found)
    assert {endpoint.url for endpoint in endpoints} == {parse_endpoint(url).url for url in entries} | set(names)
    for endpoint in endpoints:
        assert parse_endpoint(endpoint.url).url == endpoint.url
        if endpoint.url in names:
            assert endpoint.endpoint_id == names[endpoint.url][0]


@given(st.text() | st.from_regex(r"\w*=?https?://[\w:.\[\]/@?#,=]*", fullmatch=True))
@example("http://[::1%]")
def test_any_text_is_an_endpoint_or_a_value_error(text: str) -> None:
    for parse in (parse_endpoint, parse_endpoints, lambda text: parse_endpoints(text.split())):
        try:
            parse(text)
        except ValueError as error:
            assert str(error)  # noqa: PT017 - that it may be raised is not that it must be
    MultiEndpointConfigurationManager({"GPU_SERVICE_ENDPOINTS": text}).get_service_endpoints()


# --- the environment ---

#: getter: (variable, default, good texts and their values, bad texts and how they are shown)
VARIABLES: dict[str, tuple[str, Any, dict[str, Any], dict[str, str]]] = {
    "get_service_endpoint": (
        "GPU_SERVICE_ENDPOINT",
        "http://localhost:8080",
        {"https://gpu-service.company.com/": "https://gpu-service.company.com", "local://": "local://"},
        {"gpu1": "'gpu1'", "http://a:1,http://b:1": "'http://a:1,http://b:1'"},
    ),
    "get_memory_threshold": (
        "GPU_MEMORY_THRESHOLD_PERCENT",
        80.0,
        {"75.0": 75.0, "75": 75.0, " 0 ": 0.0, "1e2": 100.0},
        {"-1": "-1.0", "101": "101.0", "nan": "nan", "inf": "inf", "lots": "'lots'", "75%": "'75%'"},
    ),
    "get_utilization_threshold": (
        "GPU_UTILIZATION_THRESHOLD_PERCENT",
        90.0,
        {"85.0": 85.0, "100": 100.0},
        {"-1": "-1.0", "101": "101.0", "nan": "nan", "-inf": "-inf", "lots": "'lots'"},
    ),
    "get_polling_interval": (
        "GPU_POLLING_INTERVAL",
        5,
        {"3": 3, "3.0": 3, "0.5": 0.5},
        {"0": "0.0", "-1": "-1.0", "nan": "nan", "inf": "inf", "often": "'often'", "5s": "'5s'"},
    ),
    "get_load_balancing_strategy": (
        "GPU_LOAD_BALANCING_STRATEGY",
        "availability",
        {"round_robin": "round_robin", " Weighted ": "weighted"},
        {"random": "'random'"},
    ),
    "get_endpoint_timeout": (
        "GPU_ENDPOINT_TIMEOUT",
        10.0,
        {"15.0": 15.0, "15": 15.0},
        {"0": "0.0", "-1": "-1.0", "nan": "nan", "inf": "inf", "x": "'x'"},
    ),
    "get_endpoint_max_retries": (
        "GPU_ENDPOINT_MAX_RETRIES",
        3,
        {"5": 5, "0": 0},
        {"-1": "-1", "2.5": "'2.5'", "3.0": "'3.0'", "many": "'many'"},
    ),
    "get_endpoint_health_check_interval": (
        "GPU_ENDPOINT_HEALTH_CHECK_INTERVAL",
        30,
        {"60": 60, "1.5": 1.5},
        {"0": "0.0", "nan": "nan", "x": "'x'"},
    ),
}

every_variable = pytest.mark.parametrize("getter", VARIABLES)


def get(getter: str, environ: dict[str, str]) -> Any:
    return getattr(MultiEndpointConfigurationManager(environ), getter)()


@every_variable
@pytest.mark.parametrize("text", [None, "", "  "])
def test_unset_and_empty_variables_mean_the_default(
    getter: str, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    variable, default, _, _ = VARIABLES[getter]
    value = get(getter, {} if text is None else {variable: text})
    assert (value, type(value)) == (default, type(default))
    assert errors(caplog) == []


@every_variable
def test_a_variable_is_read(getter: str, caplog: pytest.LogCaptureFixture) -> None:
    variable, _, good, _ = VARIABLES[getter]
    for text, expected in good.items():
        value = get(getter, {variable: text})
        assert (value, type(value)) == (expected, type(expected))
    assert errors(caplog) == []


@every_variable
def test_a_bad_variable_is_logged_once_and_its_default_used(getter: str, caplog: pytest.LogCaptureFixture) -> None:
    variable, default, _, bad = VARIABLES[getter]
    environ: dict[str, str] = {}
    config = MultiEndpointConfigurationManager(environ)
    for text, shown in bad.items():
        environ[variable] = text
        caplog.clear()
        assert [getattr(config, getter)() for _ in range(3)] == [default] * 3
        (message,) = errors(caplog)
        assert message.startswith(variable)
        assert f" {shown}" in message
        assert message.endswith(f"; using the default {default!r}")


def test_the_log_says_what_was_expected(caplog: pytest.LogCaptureFixture) -> None:
    get("get_memory_threshold", {"GPU_MEMORY_THRESHOLD_PERCENT": "lots"})
    assert errors(caplog) == [
        "GPU_MEMORY_THRESHOLD_PERCENT must be a number from 0 to 100, not 'lots'; using the default 80.0"
    ]


def test_the_environment_is_read_at_call_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPU_MEMORY_THRESHOLD_PERCENT", raising=False)
    config: ConfigurationManager = EnvironmentConfigurationManager()
    assert config.get_memory_threshold() == 80.0
    monkeypatch.setenv("GPU_MEMORY_THRESHOLD_PERCENT", "75")
    assert config.get_memory_threshold() == 75.0


A, B, C = (EndpointConfig(f"{host}_1", f"http://{host}:1") for host in "abc")
DEFAULT = EndpointConfig("localhost_8080", "http://localhost:8080")


@pytest.mark.parametrize(
    ("stats", "plural", "singular", "expected", "multi"),
    [
        ("", "", "", [DEFAULT], False),
        ("", "", "http://a:1", [A], False),
        ("", "http://b:1", "http://a:1", [B], True),
        ("http://c:1", "http://b:1", "http://a:1", [C], True),
        ("http://c:1,http://b:1", "", "", [C, B], True),
        ("  ", "http://b:1", "", [B], True),
        ("nonsense", "http://b:1", "", [B], True),
        ("nonsense", "rubbish", "http://a:1", [A], False),
        ("nonsense", "rubbish", "trash", [DEFAULT], False),
        ("nonsense,http://c:1", "http://b:1", "", [C], True),
    ],
)
def test_the_first_list_of_endpoints_wins(
    stats: str, plural: str, singular: str, expected: list[EndpointConfig], multi: bool
) -> None:
    environ = {
        "GPU_STATS_SERVICE_ENDPOINTS": stats,
        "GPU_SERVICE_ENDPOINTS": plural,
        "GPU_SERVICE_ENDPOINT": singular,
    }
    config = MultiEndpointConfigurationManager(environ)
    assert config.get_service_endpoints() == expected
    assert config.is_multi_endpoint_mode() is multi
    resolved = PoolConfig.resolve(environ=environ)
    assert resolved.endpoints == tuple(expected)
    assert resolved.multi_endpoint is multi
    assert resolved.endpoint_is_default is not any(text.strip() for text in environ.values())


def test_bad_urls_in_a_list_are_dropped_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    config = MultiEndpointConfigurationManager(
        {"GPU_STATS_SERVICE_ENDPOINTS": "ftp://x,a=http://a:1,a=http://b:1,c_1=http://c:1"}
    )
    for _ in range(3):
        assert config.get_service_endpoints() == [EndpointConfig("a", "http://a:1"), C]
        assert config.is_multi_endpoint_mode()
    not_a_url, taken = errors(caplog)
    assert not_a_url == (
        "GPU_STATS_SERVICE_ENDPOINTS: 'ftp://x' cannot be used: "
        "expected a URL such as http://gpu-server:8000, https://host/path or local://; ignoring it"
    )
    assert taken == (
        "GPU_STATS_SERVICE_ENDPOINTS: 'a=http://b:1' cannot be used: "
        "the name 'a' is already taken by another URL; ignoring it"
    )


# --- arguments and environment together ---


def test_everything_has_its_documented_default() -> None:
    assert PoolConfig.resolve(environ={}) == PoolConfig(
        endpoints=(DEFAULT,),
        multi_endpoint=False,
        endpoint_is_default=True,
        load_balancing_strategy="availability",
        memory_threshold=80.0,
        utilization_threshold=90.0,
        polling_interval=5,
        worker_timeout=300.0,
        request_timeout=30.0,
        endpoint_timeout=10.0,
        endpoint_max_retries=3,
        endpoint_health_check_interval=30,
        coordination="auto",
        lease_ttl=60.0,
        gpu_names="index",
        api_key=None,
        allow_insecure_key=False,
    )


def test_settings_are_frozen() -> None:
    resolved = PoolConfig.resolve(environ={})
    with pytest.raises(FrozenInstanceError):
        resolved.polling_interval = 1  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        resolved.endpoints[0].url = "http://elsewhere"  # type: ignore[misc]


FULL_ENVIRONMENT = {
    "GPU_STATS_SERVICE_ENDPOINTS": "http://a:1,http://b:1",
    "GPU_SERVICE_ENDPOINT": "http://c:1",
    "GPU_LOAD_BALANCING_STRATEGY": "weighted",
    "GPU_MEMORY_THRESHOLD_PERCENT": "70",
    "GPU_UTILIZATION_THRESHOLD_PERCENT": "71",
    "GPU_POLLING_INTERVAL": "7",
    "GPU_ENDPOINT_TIMEOUT": "8",
    "GPU_ENDPOINT_MAX_RETRIES": "9",
    "GPU_ENDPOINT_HEALTH_CHECK_INTERVAL": "11",
    "GPU_POOL_COORDINATION": "Leases",
    "GPU_POOL_LEASE_TTL": "30",
    "GPU_POOL_GPU_NAMES": "UUID",
    "GPU_POOL_API_KEY": "a-secret",
}


def test_the_environment_fills_in_what_is_not_given() -> None:
    assert PoolConfig.resolve(environ=FULL_ENVIRONMENT) == PoolConfig(
        endpoints=(A, B),
        multi_endpoint=True,
        endpoint_is_default=False,
        load_balancing_strategy="weighted",
        memory_threshold=70.0,
        utilization_threshold=71.0,
        polling_interval=7,
        worker_timeout=300.0,
        request_timeout=30.0,
        endpoint_timeout=8.0,
        endpoint_max_retries=9,
        endpoint_health_check_interval=11,
        coordination="leases",
        lease_ttl=30.0,
        gpu_names="uuid",
        api_key="a-secret",
        allow_insecure_key=False,
    )


def test_an_argument_wins_over_every_variable(caplog: pytest.LogCaptureFixture) -> None:
    arguments: dict[str, Any] = {
        "load_balancing_strategy": "round_robin",
        "memory_threshold": 0,
        "utilization_threshold": 61.5,
        "polling_interval": 0.25,
        "worker_timeout": 600.0,
        "request_timeout": 5.0,
        "endpoint_timeout": 1.0,
        "endpoint_max_retries": 0,
        "endpoint_health_check_interval": 2.5,
        "coordination": "local",
        "lease_ttl": 2,
        "gpu_names": "uuid",
        "api_key": "another-secret",
    }
    # What is overridden is not even looked at.
    environ = dict.fromkeys(FULL_ENVIRONMENT, "nonsense")
    resolved = PoolConfig.resolve(service_endpoint="http://a:1", **arguments, environ=environ)
    for name, value in arguments.items():
        assert getattr(resolved, name) == value
    assert resolved.endpoints == (A,)
    assert errors(caplog) == []


@pytest.mark.parametrize(
    ("arguments", "expected", "multi"),
    [
        ({"service_endpoint": "http://c:1"}, (C,), False),
        ({"service_endpoints": "http://c:1"}, (C,), True),
        ({"service_endpoints": ["http://c:1", "http://a:1"]}, (C, A), True),
        ({"service_endpoint": "http://a:1", "service_endpoints": "http://c:1"}, (C,), True),
        ({}, (A, B), True),
    ],
)
def test_the_mode_follows_from_how_endpoints_were_given(
    arguments: dict[str, Any], expected: tuple[EndpointConfig, ...], multi: bool
) -> None:
    resolved = PoolConfig.resolve(**arguments, environ=FULL_ENVIRONMENT)
    assert resolved.endpoints == expected
    assert resolved.multi_endpoint is multi
    assert not resolved.endpoint_is_default


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("service_endpoint", "gpu1"),
        ("service_endpoint", ""),
        ("service_endpoints", ""),
        ("service_endpoints", []),
        ("service_endpoints", "http://a:1,gpu1"),
        ("service_endpoints", 8000),
        ("load_balancing_strategy", "random"),
        ("memory_threshold", 101),
        ("memory_threshold", "75"),
        ("utilization_threshold", math.nan),
        ("polling_interval", 0),
        ("worker_timeout", -1),
        ("worker_timeout", None),
        ("request_timeout", math.inf),
        ("endpoint_timeout", 0),
        ("endpoint_max_retries", 1.5),
        ("endpoint_health_check_interval", 0),
    ],
)
def test_a_bad_argument_is_a_value_error_that_names_it(name: str, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=f"^{name}( must|:) "):
        PoolConfig.resolve(**{name: value}, environ={})
    assert errors(caplog) == []
