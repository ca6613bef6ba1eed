"""The client's pages and programs, run against live servers: every Python block, every configuration, every example.

Our own pages get an event loop, a started `client` where they use one, and host names that lead to this machine. The
contract's pages, where they are at hand, are run the same way; they also leave their imports to the reader.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from dotenv import dotenv_values
from tests.acceptance.run_blocks import Outcome, is_left_to_the_reader
from tests.server_process import ServerProcess

from gpu_worker_pool import GPUWorkerPoolClient, config, errors, models
from gpu_worker_pool.config import PoolConfig

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "spec"
OUR_PAGES = {"README.md": ROOT / "README.md"} | {
    name: ROOT / "docs" / name for name in ("API.md", "LEASES.md", "MIGRATION_GUIDE.md", "RECIPES.md")
}
#: What was asked for. It lies beside the project for those who develop it, and is not part of it.
CONTRACT = {name: SHARED / name for name in ("API.md", "MIGRATION_GUIDE.md", "MULTI_ENDPOINT_DESIGN.md")}
API = OUR_PAGES["API.md"].read_text(encoding="utf-8")
GUIDE = OUR_PAGES["MIGRATION_GUIDE.md"].read_text(encoding="utf-8")

#: What the contract's blocks take for granted.
CONTRACT_PRELUDE = """\
import asyncio
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Callable, Dict, List, Optional
from gpu_worker_pool import *
from gpu_worker_pool.config import EnvironmentConfigurationManager
"""
#: What makes no sense with one endpoint, unless the block asks first.
NEEDS_MANY = re.compile(
    r"trigger_endpoint_recovery|queue_request_for_retry|add_endpoint|remove_endpoint|total_endpoints|in endpoints:"
)
ASKS_FIRST = re.compile(r"if endpoints:|is_multi_endpoint_mode\(\)|isinstance\(status|hasattr\(status")
#: Blocks that catch errors to print them must not have had any to catch.
COMPLAINTS = re.compile(
    r"Unexpected error|allocation failed|unavailable|timed out|within timeout|no server answers|every GPU is taken"
    r"|Traceback|Exception ignored|never retrieved|never awaited|did not end in time|ResourceWarning|faster"
)


class Block(NamedTuple):
    page: str
    language: str
    heading: str
    text: str

    def __str__(self) -> str:
        return re.sub(r"\W+", "-", f"{self.page.partition('.')[0]} {self.heading}").strip("-")


def blocks_of(page: str, text: str) -> list[Block]:
    found = []
    heading = ""
    pattern = r"^#+ (?P<heading>[^\n]+)$|^(?P<indent> *)```(?P<language>\w+)\n(?P<text>.*?)^(?P=indent)```$"
    for match in re.finditer(pattern, text, re.M | re.S):
        # A comment in a shell's block is no heading: such blocks are matched whole, from their first line on.
        if match["heading"]:
            heading = match["heading"]
        else:
            found.append(Block(page, match["language"], heading, textwrap.dedent(match["text"])))
    return found


def is_signature(block: Block) -> bool:
    return block.text.startswith("def __init__(self")


def pieces(block: Block) -> list[Block]:
    """One block of the contract goes on with a client after the end of its `async with`: its two halves are two."""
    first, mark, second = block.text.partition("# Monitor pool utilization\n")
    return [block] if not mark else [block._replace(text=first), block._replace(text=mark + second)]


def python_blocks(pages: Mapping[str, Path]) -> list[Block]:
    read = [(name, path.read_text(encoding="utf-8")) for name, path in pages.items() if path.exists()]
    return [
        piece
        for name, text in read
        for block in blocks_of(name, text)
        if block.language == "python" and not is_signature(block)
        for piece in pieces(block)
    ]


def as_python(block: Block) -> Block:
    """What a shell's `export` lines are for a client. That it is really tried, the runner sees to."""
    text = re.sub(r"\s+#.*$", "", block.text, flags=re.M)
    variables = dict(re.findall(r'^export (\w+)="([^"]*)"$', text, re.M))
    assert variables, block
    return block._replace(
        text=f"from gpu_worker_pool import GPUWorkerPoolClient\nclient = GPUWorkerPoolClient(environ={variables!r})\n"
    )


def shell_blocks(pages: Mapping[str, Path]) -> list[Block]:
    read = [(name, path.read_text(encoding="utf-8")) for name, path in pages.items() if path.exists()]
    return [as_python(block) for name, text in read for block in blocks_of(name, text) if block.language == "bash"]


OURS = [*python_blocks(OUR_PAGES), *shell_blocks(OUR_PAGES)]
THEIRS = [*python_blocks(CONTRACT), *shell_blocks(CONTRACT)]


# --- servers ---


def named_hosts() -> set[str]:
    """All hosts of the pages, which lead to this machine: it gives leases to those who call it by its name only."""
    texts = [*(block.text for block in [*OURS, *THEIRS]), *ONE.values(), *MANY.values()]
    found = {host for text in texts for host in re.findall(r"https?://([\w.{}-]+)", text)}
    # Some are numbered: http://gpu-node-{number}:8000
    return {re.sub(r"\{.*", str(number), host) for host in found for number in range(10)}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    folder = tmp_path_factory.mktemp("servers")
    environment = {"GPU_BACKEND": "simulated:4", "ACCESS_LOG": "false", "GPU_POOL_HOSTS": ",".join(named_hosts())}
    with (
        ServerProcess(folder / "first", **environment) as first,
        ServerProcess(folder / "second", **environment) as second,
    ):
        yield [first, second]


class Secure(NamedTuple):
    port: int
    certificate: Path


@pytest.fixture(scope="module")
def secure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    """The same over https, for the host that the pages name."""
    folder = tmp_path_factory.mktemp("secure")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "1", "-subj", "/CN=gpu-service.company.com"]
    command += ["-addext", "subjectAltName=DNS:gpu-service.company.com,DNS:gpu-service.com"]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    arguments = ["-m", "uvicorn", "gpu_worker_pool.gpu_server:app", "--host", "127.0.0.1", "--port", "{port}"]
    arguments += ["--ssl-keyfile", str(key), "--ssl-certfile", str(certificate)]
    hosts = ",".join(named_hosts())
    server = ServerProcess(folder, arguments=arguments, wait=False, GPU_BACKEND="simulated:4", GPU_POOL_HOSTS=hosts)
    with server:
        deadline = time.monotonic() + 30
        while "Uvicorn running on" not in server.log:  # which it says when it listens
            assert time.monotonic() < deadline, server.log
            time.sleep(0.05)
        yield Secure(server.port, certificate)


def clean_environment(**own: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("GPU_")} | own


ONE = {"service_endpoint": "http://gpu-server:8000"}
MANY = {"service_endpoints": "server1=http://server1:8000,server2=http://server2:8000"}


def run_all(
    blocks: list[Block], client: Mapping[str, str], servers: list[ServerProcess], secure: Secure, prelude: str = ""
) -> list[Outcome]:
    job = {
        "blocks": [block.text for block in blocks],
        "ports": {"http": [server.port for server in servers], "https": [secure.port]},
        "client": client,
        "prelude": prelude,
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.acceptance.run_blocks"],
        cwd=ROOT,
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=clean_environment(
            SSL_CERT_FILE=str(secure.certificate),
            PYTHONPATH=str(ROOT / "tests" / "fakes" / "modules"),  # libraries that blocks name and we do not need
            # For blocks that use `local://`.
            GPU_BACKEND="simulated:4",
            GPU_POOL_STATE_DIR=str(servers[0].folder / "without-a-server"),
        ),
    )
    assert done.returncode == 0, done.stderr
    outcomes: list[Outcome] = json.loads(done.stdout)
    assert len(outcomes) == len(blocks)
    return outcomes


def needs_what_is_not_there(block: Block) -> bool:
    """The blocking client and the decorator have their examples here before they are written."""
    modules = re.findall(r"^from (gpu_worker_pool\.\w+) import", block.text, re.M)
    return any(find_spec(module) is None for module in modules)


def check_page(blocks: list[Block], mode: str, servers: list[ServerProcess], secure: Secure, prelude: str = "") -> None:
    blocks = [block for block in blocks if not needs_what_is_not_there(block)]
    refused: list[Block] = []
    if mode == "one":
        # The others make their own clients, or none: once is enough.
        blocks = [block for block in blocks if is_left_to_the_reader("client", block.text)]
        refused = [block for block in blocks if NEEDS_MANY.search(block.text) and not ASKS_FIRST.search(block.text)]
    assert blocks
    outcomes = run_all(blocks, ONE if mode == "one" else MANY, servers, secure, prelude)
    wrong = [
        f"--- {block}\n{block.text}\n>>> {outcome['output']}"
        for block, outcome in zip(blocks, outcomes, strict=True)
        if outcome["ok"] == (block in refused) or (block not in refused and COMPLAINTS.search(outcome["output"]))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("page", "mode"),
    [
        ("README.md", "many"),
        ("API.md", "one"),
        ("API.md", "many"),
        ("LEASES.md", "many"),
        ("MIGRATION_GUIDE.md", "one"),
        ("MIGRATION_GUIDE.md", "many"),
    ],
)
def test_our_pages(servers: list[ServerProcess], secure_server: Secure, page: str, mode: str) -> None:
    check_page([block for block in OURS if block.page == page], mode, servers, secure_server)


@pytest.mark.timeout(300)
@pytest.mark.skipif(not SHARED.exists(), reason="the contract is not part of the project")
@pytest.mark.parametrize(
    ("page", "mode"),
    [
        ("API.md", "one"),
        ("API.md", "many"),
        ("MIGRATION_GUIDE.md", "one"),
        ("MIGRATION_GUIDE.md", "many"),
        ("MULTI_ENDPOINT_DESIGN.md", "many"),
    ],
)
def test_pages_of_the_contract(servers: list[ServerProcess], secure_server: Secure, page: str, mode: str) -> None:
    blocks = [block for block in THEIRS if block.page == page]
    check_page(blocks, mode, servers, secure_server, CONTRACT_PRELUDE)


def test_there_are_blocks_to_run() -> None:
    assert len(OURS) >= 50
    if SHARED.exists():
        assert len(THEIRS) >= 60


def test_a_block_that_does_not_run_is_found(servers: list[ServerProcess], secure_server: Secure) -> None:
    texts = [
        "assert (await client.request_gpu()).gpu_id.startswith(('server1:', 'server2:'))",
        "await client.request_a_gpu()",
        "raise SystemExit(3)",
        "from gpu_worker_pool import GPUWorkerPoolClient\nclient = GPUWorkerPoolClient(memory_threshold=800)",
        "def broken(:",
        "if client.is_running:\n    return\nraise ValueError",
    ]
    blocks = [Block("", "python", "", text) for text in texts]
    outcomes = run_all(blocks, MANY, servers, secure_server)
    assert [outcome["ok"] for outcome in outcomes] == [True, False, False, False, False, True]


# --- signatures the contract shows ---


@pytest.mark.skipif(not SHARED.exists(), reason="the contract is not part of the project")
def test_signatures_of_the_contract() -> None:
    shown = [
        block for block in blocks_of("API.md", CONTRACT["API.md"].read_text(encoding="utf-8")) if is_signature(block)
    ]
    assert len(shown) == 2
    for block in shown:
        names: dict[str, Any] = {}
        exec(f"from __future__ import annotations\n{block.text.rstrip()}: ...", names)  # noqa: S102
        documented = inspect.signature(names["__init__"]).parameters
        real = inspect.signature(
            GPUWorkerPoolClient.__init__ if "service_endpoint" in documented else manager()
        ).parameters
        assert list(real)[: len(documented)] == list(documented)
        assert {name: real[name].default for name in documented} == {
            name: parameter.default for name, parameter in documented.items()
        }


def manager() -> Any:
    from gpu_worker_pool import GPUContextManager

    return GPUContextManager.__init__


# --- programs in examples/ ---


def run_program(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", f"examples/{name}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env=clean_environment(PYTHONIOENCODING="utf-8", **environment),
        encoding="utf-8",
    )
    # That this machine is busy is no news of the program's.
    done.stderr = re.sub(r"^Executing <.* took [\d.]+ seconds\n", "", done.stderr, flags=re.M)
    return done


def test_every_program_and_file_is_run_here() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    files = sorted(path.name for path in (ROOT / "examples").iterdir() if path.is_file() and path.name != "__init__.py")
    assert files == [
        "aggressive.env",
        "balanced.env",
        "basic_usage.py",
        "config_examples.py",
        "conservative.env",
        "multi_endpoint_usage.py",
        "optuna_study.py",  # run by tests/integrations/test_optuna.py: it needs Optuna
    ]
    assert [name for name in files if f'"{name}"' not in text] == []


def test_basic_usage(servers: list[ServerProcess]) -> None:
    done = run_program("basic_usage.py", GPU_SERVICE_ENDPOINT=servers[0].url)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "4 of 4 GPUs are available"
    assert lines[1] == "  GPU 0, Simulated GPU 24GB: memory 0.0 %, utilization 0 %"
    # The one that was granted longest ago: the server remembers who else has used it.
    assert (found := re.fullmatch(r"worker-\w+-1 has GPU (\d)", lines[5]))
    assert lines[6] == f"  a child sees CUDA_VISIBLE_DEVICES = {found[1]}"
    assert lines[7] == "9 workers were served, no two of them by one GPU at a time"
    assert re.fullmatch(r"GPU \d has 8 GiB free and runs nothing", lines[8])
    assert lines[9].startswith("refused at once: ")
    assert len(lines) == 10


def test_basic_usage_with_many_endpoints(servers: list[ServerProcess]) -> None:
    done = run_program("basic_usage.py", GPU_STATS_SERVICE_ENDPOINTS=",".join(server.url for server in servers))
    assert (done.returncode, done.stderr) == (0, "")
    assert "8 of 8 GPUs are available" in done.stdout


@pytest.mark.parametrize("name", ["basic_usage.py", "multi_endpoint_usage.py"])
def test_a_program_says_that_no_server_answers(name: str, tmp_path: Path) -> None:
    source = (ROOT / "examples" / name).read_text(encoding="utf-8")
    impatient = tmp_path / name
    impatient.write_text(source.replace("TIMEOUT_SECONDS = 30.0", "TIMEOUT_SECONDS = 0.5"), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, impatient],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env=clean_environment(GPU_STATS_SERVICE_ENDPOINTS="http://127.0.0.1:9"),
    )
    assert done.returncode == 1
    assert "no GPU server answers" in done.stderr
    assert "connection refused" in done.stderr


def test_multi_endpoint_usage(servers: list[ServerProcess], tmp_path: Path) -> None:
    with ServerProcess(tmp_path, GPU_BACKEND="simulated:2") as small:
        urls = f"big={servers[0].url},small={small.url}"
        done = run_program("multi_endpoint_usage.py", GPU_STATS_SERVICE_ENDPOINTS=urls)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "2 of 2 servers answer"
    assert re.fullmatch(r"  big: 4 of 4 GPUs available, \d+\.\d ms", lines[1])
    assert re.match(r"big:(\d) is GPU \1 of big: {'CUDA_VISIBLE_DEVICES': '\1'", lines[3])
    assert lines[4:6] == ["=== Error Recovery Status ===", "Degradation Status: None (2/2 endpoints healthy)"]
    shares = {name: int(big) for name, big in re.findall(r"^(\w+): big (\d+) \(\d+%\), small", done.stdout, re.M)}
    # A GPU that was leased is free again when it was read anew: its server may lose a turn by that.
    assert shares == {
        "availability": pytest.approx(12, abs=1),
        "round_robin": pytest.approx(6, abs=1),
        "weighted": pytest.approx(8, abs=1),
    }


def test_multi_endpoint_usage_says_that_there_is_one_endpoint_only(servers: list[ServerProcess]) -> None:
    done = run_program("multi_endpoint_usage.py", GPU_SERVICE_ENDPOINT=servers[0].url)
    assert done.returncode == 2
    assert "GPU_STATS_SERVICE_ENDPOINTS" in done.stderr


def test_config_examples(servers: list[ServerProcess]) -> None:
    done = run_program("config_examples.py", GPU_SERVICE_ENDPOINT=servers[0].url)
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("conservative", "balanced", "aggressive"):
        assert re.search(rf"^{name}\.env: .*\n  valid\n  4 of 4 GPUs would be available now$", done.stdout, re.M)


def test_config_examples_on_a_bad_file(tmp_path: Path) -> None:
    file = tmp_path / "my.env"
    file.write_text("GPU_MEMORY_THRESHOLD_PERCENT=eighty\nGPU_MEMORY_TRESHOLD=0.8\n")
    done = run_program("config_examples.py", str(file))
    assert done.returncode == 1
    assert "not valid" in done.stdout
    assert "'eighty'" in done.stdout
    assert "GPU_MEMORY_TRESHOLD is not a variable" in done.stdout


#: Memory, utilization, polling interval: the ranges that the contract recommends.
RANGES = {
    "conservative.env": ((70, 75), (75, 80), (10, 60)),
    "balanced.env": ((80, 85), (85, 90), (3, 5)),
    "aggressive.env": ((85, 90), (90, 95), (1, 2)),
}


@pytest.mark.parametrize("name", RANGES)
def test_configuration_files(name: str, caplog: pytest.LogCaptureFixture) -> None:
    settings = {key: value or "" for key, value in dotenv_values(ROOT / "examples" / name).items()}
    resolved = PoolConfig.resolve(environ=settings)
    assert caplog.records == []
    values = (resolved.memory_threshold, resolved.utilization_threshold, resolved.polling_interval)
    for value, (lowest, highest) in zip(values, RANGES[name], strict=True):
        assert lowest <= value <= highest


class TestConfigurationValidator:
    """Imported as the documents do, from the project's folder."""

    @pytest.fixture
    def validator(self) -> Any:
        from examples.config_examples import ConfigurationValidator

        return ConfigurationValidator()

    @pytest.mark.parametrize("pair", [(75.0, 85.0), (80, 90), (70, 70)])
    def test_good_thresholds(self, validator: Any, pair: tuple[float, float]) -> None:
        assert validator.validate_thresholds(*pair) == {"valid": True, "errors": [], "warnings": []}

    @pytest.mark.parametrize("pair", [(-1, 90), (80, 101), ("80", 90), (float("nan"), 90), (True, 90)])
    def test_thresholds_that_the_client_refuses(self, validator: Any, pair: tuple[Any, Any]) -> None:
        result = validator.validate_thresholds(*pair)
        assert (result["valid"], len(result["errors"])) == (False, 1)
        with pytest.raises(ValueError, match="threshold"):
            PoolConfig.resolve(memory_threshold=pair[0], utilization_threshold=pair[1], environ={})

    @pytest.mark.parametrize(
        ("pair", "hint"),
        [((0.8, 90), "did you mean 80"), ((90, 80), "swapped"), ((0, 90), "ever available"), ((80, 100), "free room")],
    )
    def test_thresholds_that_are_hardly_meant(self, validator: Any, pair: tuple[float, float], hint: str) -> None:
        result = validator.validate_thresholds(*pair)
        assert result["valid"]
        assert result["errors"] == []
        assert [warning for warning in result["warnings"] if hint in warning]

    @pytest.mark.parametrize("url", ["https://gpu-service.com", "http://gpu-server:8000", "big=http://gpu:8000/api"])
    def test_good_endpoints(self, validator: Any, url: str) -> None:
        assert validator.validate_service_endpoint(url) == {"valid": True, "errors": [], "warnings": []}

    @pytest.mark.parametrize(
        ("url", "hint"),
        [
            ("gpu-server:8000", "did you mean http://gpu-server:8000"),
            ('"http://gpu-server:8000"', "quotes"),
            ("http://gpu1:8000,http://gpu2:8000", "service_endpoints"),
            ("ftp://gpu-server", "http://"),
            ("http://me:secret@gpu-server:8000", "password"),
            ("http://gpu-server:99999", "port 99999 is not valid"),
            ("", "http://"),
            (8000, "a string"),
            (None, "a string"),
        ],
    )
    def test_endpoints_that_the_client_refuses(self, validator: Any, url: Any, hint: str) -> None:
        result = validator.validate_service_endpoint(url)
        assert not result["valid"]
        assert [error for error in result["errors"] if hint in error], result
        assert "secret" not in str(result)

    @pytest.mark.parametrize(
        ("url", "hint"),
        [
            (" http://gpu-server:8000 ", "blanks"),
            ("http://gpu-server:8080", "port 8000"),
            ("http://gpu-server", "port 80"),
            ("http://0.0.0.0:8000", "listen on"),
            ("http://gpu-server:8000/gpu/summary", "leave the route out"),
        ],
    )
    def test_endpoints_that_are_hardly_meant(self, validator: Any, url: str, hint: str) -> None:
        result = validator.validate_service_endpoint(url)
        assert result["valid"]
        assert [warning for warning in result["warnings"] if hint in warning], result

    def test_several_endpoints(self, validator: Any) -> None:
        assert validator.validate_service_endpoints("http://gpu1:8000,a=http://gpu2:8000")["valid"]
        for bad in ("", ",", "http://gpu1:8000 http://gpu2:8000", "http://gpu1:8000;http://gpu2:8000", "gpu1:8000"):
            assert not validator.validate_service_endpoints(bad)["valid"], bad

    def test_polling_intervals(self, validator: Any) -> None:
        for good in (1, 5, 2.5, 60):
            assert validator.validate_polling_interval(good) == {"valid": True, "errors": [], "warnings": []}
        for bad in (0, -1, "5", None, float("inf")):
            assert not validator.validate_polling_interval(bad)["valid"]
        assert "milliseconds" in validator.validate_polling_interval(5000)["warnings"][0]
        assert "once per second" in validator.validate_polling_interval(0.1)["warnings"][0]

    def test_an_environment(self, validator: Any) -> None:
        good = {"GPU_STATS_SERVICE_ENDPOINTS": "http://gpu1:8000", "GPU_BACKEND": "simulated", "HOME": "/root"}
        assert validator.validate_environment(good) == {"valid": True, "errors": [], "warnings": []}
        bad = {
            "GPU_LOAD_BALANCING_STRATEGY": "roundrobin",
            "GPU_ENDPOINT_MAX_RETRIES": "2.5",
            "GPU_ENDPOINT_TIMEOUT": "0",
            "GPU_POLLING_INTERVAL": "5s",
        }
        result = validator.validate_environment(bad)
        assert len(result["errors"]) == 4, result
        both = good | {"GPU_SERVICE_ENDPOINT": "http://gpu3:8000"}
        assert "no effect" in validator.validate_environment(both)["warnings"][0]


# --- what the page says is all there is ---


def section(heading: str) -> str:
    """From a heading to the next one of any level."""
    found = re.search(rf"^#+ {re.escape(heading)}$(.*?)(?=^#+ |\Z)", API, re.M | re.S)
    assert found is not None, heading
    return found[1]


def table_rows(text: str) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in re.findall(r"^\|(.+)\|$", text, re.M)]
    return [row for row in rows if not set("".join(row)) <= set("-| ")]


def names_in(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


def test_every_argument_is_in_its_table_with_its_default() -> None:
    rows = {row[0].strip("`"): row for row in table_rows(section("Constructor"))[1:]}
    real = inspect.signature(GPUWorkerPoolClient).parameters
    assert list(rows) == list(real)
    resolved = PoolConfig.resolve(environ={})
    for name, row in rows.items():
        said = row[1].strip("`").strip('"')
        if name == "service_endpoint":
            assert said == resolved.endpoints[0].url
        elif name in ("on_lease_lost", "on_yield_asked"):
            assert said == str(real[name].default)
        elif name not in ("service_endpoints", "environ"):
            assert said == str(getattr(resolved, name)), name


def test_every_variable_is_in_its_table_with_its_default(caplog: pytest.LogCaptureFixture) -> None:
    source = inspect.getsource(config)
    rows = {row[0].strip("`"): row[1].strip("`") for row in table_rows(section("Variables"))[1:]}
    assert set(rows) == set(re.findall(r'"(GPU_[A-Z_]+)"', source))
    spelled_out = {name: default for name, default in rows.items() if default != "not set"}
    assert PoolConfig.resolve(environ=spelled_out) == dataclasses.replace(
        PoolConfig.resolve(environ={}), endpoint_is_default=False
    )
    assert caplog.records == []


def test_every_method_has_a_section_with_an_example() -> None:
    public = [name for name in vars(GPUWorkerPoolClient) if not name.startswith("_")]
    for name in public:
        assert "```python" in section(name), name


def test_every_wish_is_in_its_table_with_its_default() -> None:
    rows = {row[0].strip("`"): row[1].strip("`") for row in table_rows(section("request_gpu"))[1:] if len(row) == 3}
    real = inspect.signature(GPUWorkerPoolClient.request_gpu).parameters
    expected = {name: parameter.default for name, parameter in real.items() if name not in ("self", "timeout")}
    assert {name: default.strip('"') for name, default in rows.items()} == {
        name: str(default) for name, default in expected.items()
    }


def keys_of(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value) | set().union(*map(keys_of, value.values()))
    return set().union(*map(keys_of, value)) if isinstance(value, list) else set()


async def test_every_key_is_explained(servers: list[ServerProcess]) -> None:
    urls = ",".join([*(f"server{number}={server.url}" for number, server in enumerate(servers)), "http://127.0.0.1:9"])
    async with GPUWorkerPoolClient(service_endpoints=urls, endpoint_max_retries=0, environ={}) as client:
        ids = {"server0", "server1", "127.0.0.1_9"}
        held = await client.request_gpu(label="it")
        metrics = client.get_detailed_metrics()
        assert keys_of(metrics) - ids <= names_in(section("get_detailed_metrics"))
        assert keys_of(client.get_error_recovery_status()) - ids <= names_in(section("get_error_recovery_status"))
        assert keys_of(client.get_health()) - ids <= names_in(section("get_health"))
        assert keys_of(client.get_endpoints_info()) <= names_in(section("get_endpoints_info"))
        # And nothing is explained that is not there.
        first_columns = {
            name for row in table_rows(section("get_detailed_metrics")) for name in names_in(row[0].partition("in ")[0])
        }
        assert first_columns - {"waiting"} <= keys_of(metrics)
        await client.release_gpu(held)


@pytest.mark.parametrize(
    "model",
    [
        models.GPUAssignment,
        models.GlobalGPUAssignment,
        models.PoolStatus,
        models.MultiEndpointPoolStatus,
        models.EndpointInfo,
        models.GPUInfo,
        models.GlobalGPUInfo,
        models.GPUStats,
        models.WorkerInfo,
    ],
)
def test_every_field_is_explained(model: type) -> None:
    inherited = [base for base in model.__mro__[1:] if dataclasses.is_dataclass(base)]
    explained = names_in(section(model.__name__)).union(*(names_in(section(base.__name__)) for base in inherited))
    public = {field.name for field in dataclasses.fields(model) if not field.name.startswith("_")}
    assert public - explained == set()


def test_the_tree_of_errors_is_the_real_one() -> None:
    (tree,) = re.findall(r"```text\n(GPUWorkerPoolError.*?)```", API, re.S)
    shown: dict[str, tuple[str | None, set[str]]] = {}
    ancestors: list[str] = []
    for line in tree.splitlines():
        found = re.match(r"(?P<lead>[│├└─ ]*)(?P<name>\w+) *(?:also (?P<also>\w+))?", line)
        assert found is not None
        depth = len(found["lead"]) // 4
        ancestors = [*ancestors[:depth], found["name"]]
        shown[found["name"]] = (ancestors[-2] if depth else None, {found["also"]} if found["also"] else set())
    real = {
        name: value for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)
    }
    assert shown.keys() == real.keys()
    for name, (parent, also) in shown.items():
        bases = {base.__name__ for base in real[name].__bases__} - {"Exception"}
        assert bases == ({parent} if parent else set()) | also, name
    assert real.keys() - names_in(section("Errors")) <= {
        "GPUWorkerPoolError", "RequestMismatchError", "UnknownLeaseError", "LeaseEndedError", "NotYourLeaseError"
    }  # fmt: skip


def test_methods_of_the_configuration_classes_are_explained() -> None:
    for kind in (config.EnvironmentConfigurationManager, config.MultiEndpointConfigurationManager):
        public = {name for name in vars(kind) if not name.startswith("_")}
        assert public <= set(re.findall(r"`(\w+)\(\)`", section(kind.__name__)))


def test_the_numbers_of_failing_are_those_of_the_code() -> None:
    from gpu_worker_pool.api import json_values
    from gpu_worker_pool.client import client
    from gpu_worker_pool.client import monitor as gpu_monitor
    from gpu_worker_pool.core.backoff import backoff_seconds
    from gpu_worker_pool.core.breaker import Breaker
    from gpu_worker_pool.core.settings import PoolSettings

    text = section("When a server fails")
    breaker, almost = Breaker(), 1 - 1e-9
    assert f"for {breaker.open_seconds:g} s, doubled" in text
    assert f"up to {breaker.longest_open_seconds:g} s" in text
    bounds = [round(backoff_seconds(attempt, almost), 3) for attempt in range(6)]
    assert bounds == [0.5, 1, 2, 4, 8, 10]
    assert "0.5 s, then 1 s, 2 s, 4 s, 8 s and 10 s" in text
    assert f"up to {gpu_monitor.LONGEST_RETRY_SECONDS:g} s are waited for" in text
    assert f"all of them within {gpu_monitor.RETURN_SECONDS:g} s" in text
    assert gpu_monitor.RETURN_POLL_SECONDS == 1
    assert json_values.LARGEST_BODY_BYTES == 8 * 1024 * 1024
    assert (
        PoolSettings(poll_seconds=1).reading_max_age_seconds,
        PoolSettings(poll_seconds=10).reading_max_age_seconds,
    ) == (15, 30)
    assert f"up to {client.FIRST_ANSWERS_SECONDS:g} seconds" in section("start")
    assert f"only for {PoolSettings().max_bypass_seconds:g} seconds" in section("request_gpu")


def test_every_event_is_in_the_table_of_the_log() -> None:
    package = ROOT / "src" / "gpu_worker_pool"
    said = set(re.findall(r'`event="(\w+)"`', section("Logging")))
    files = [path for folder in ("", "client", "leases") for path in (package / folder).glob("*.py")]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    assert said == {event for text in texts.values() for event in re.findall(r'"event": "(\w+)"', text)}
    loggers = {row[0].strip("`") for row in table_rows(section("Logging"))[1:]} - {""}
    assert loggers <= {
        given or ".".join(path.relative_to(package.parent).with_suffix("").parts)
        for path, text in texts.items()
        for given in re.findall(r'getLogger\((?:__name__|"([\w.]+)")\)', text)
    }


#: By words of the contract, where our guide has it.
SCENARIOS = {
    "Adding Redundancy": "A second server for redundancy",
    "Scaling Horizontally": "Many identical hosts",
    "Heterogeneous Clusters": "Different hosts",
    "Geographic Distribution": "Distant hosts",
    "Not Detecting Multi-Endpoint Mode": "`is_multi_endpoint_mode()` is `False`",
    "Breaking Existing Code": 'Code expects a number and gets `"server1:0"`',
    "Endpoints Not Connecting": "An endpoint is not healthy",
    "Uneven Load Distribution": "One server gets everything",
    "Performance Degradation": "Everything is slower than before",
}


def test_the_guide_covers_every_scenario_and_trouble_of_the_contract() -> None:
    ours = re.findall(r"^### (.+)$", GUIDE, re.M)
    assert [heading for heading in SCENARIOS.values() if heading not in ours] == []
    if CONTRACT["MIGRATION_GUIDE.md"].exists():
        theirs = re.findall(
            r"^### (?:Scenario \d|Issue): (.+)$", CONTRACT["MIGRATION_GUIDE.md"].read_text("utf-8"), re.M
        )
        assert [heading for heading in theirs if not any(words in heading for words in SCENARIOS)] == []
        assert len(theirs) == len(SCENARIOS)
