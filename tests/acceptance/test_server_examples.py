"""docs/SERVER.md, run: its commands, programs and answers against a live server, its tables against what it shows.

Of what the page says only the host and the port are rewritten.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from pydantic import BaseModel
from tests.fakes.nvidia_smi import FakeNvidiaSMI, healthy_gpu
from tests.server_process import ServerProcess
from tests.waiting import eventually

import gpu_worker_pool
from gpu_worker_pool.gpu_server import ServerSettings, responses, schemas, security
from gpu_worker_pool.gpu_server.leases import schemas as lease_schemas
from gpu_worker_pool.gpu_server.settings import read_environment
from gpu_worker_pool.hardware.readers.choose import make_reader

PAGE = (Path(__file__).parents[2] / "docs" / "SERVER.md").read_text(encoding="utf-8")
#: What the page is about: two cards, one of them at work.
FIRST_UUID, SECOND_UUID = "GPU-6ec5c1a2-4a1f-4d0b-9f57-0d6c2f6c1b10", "GPU-0b7a9d44-93c5-4a57-8a3e-5f1f5b1d7e21"
#: Differ from one moment, or one machine, to the next.
VOLATILE = (
    "timestamp",
    "sample_age_seconds",
    "user",
    "running_seconds",
    "idle_obstacles",
    "host",
    "port",
    "reload",
    "gpu_backend",
    "lease_id",
    "fence",
    "granted_at",
    "expires_at",
    "expires_in_seconds",
    "waited_seconds",
    "GPU_POOL_LEASE_ID",
    "token",
)


class Block(NamedTuple):
    language: str
    text: str
    heading: str
    number: int


def blocks_of(page: str) -> list[Block]:
    found = []
    heading = ""
    for match in re.finditer(r"^#+ (?P<heading>[^\n]+)$|^```(?P<language>\w+)\n(?P<text>.*?)^```$", page, re.M | re.S):
        if match["heading"]:
            heading = match["heading"]
        else:
            found.append(Block(match["language"], match["text"], heading, len(found)))
    return found


BLOCKS = blocks_of(PAGE)


def of_language(language: str) -> list[Any]:
    blocks = [block for block in BLOCKS if block.language == language]
    assert blocks, f"the page has no {language}"
    return [pytest.param(block, id=re.sub(r"\W+", "-", block.heading).strip("-")) for block in blocks]


def section(heading: str) -> str:
    """From a heading to the next one of any level."""
    found = re.search(rf"^#+ {re.escape(heading)}$(.*?)(?=^#|\Z)", PAGE, re.M | re.S)
    assert found is not None, heading
    return found[1]


def table_rows(text: str) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in re.findall(r"^\|(.+)\|$", text, re.M)]
    return [row for row in rows if not set("".join(row)) <= set("-| ")]


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def at(server: ServerProcess, text: str) -> str:
    return text.replace("localhost:8000", f"127.0.0.1:{server.port}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("page")
    fake = FakeNvidiaSMI(folder)
    common = {"name": "NVIDIA GeForce RTX 3090", "driver_version": "570.86.15", "power_limit": "350.00"}
    fake.set_gpus(
        healthy_gpu(
            0,
            uuid=FIRST_UUID,
            memory_used="6144",
            memory_free="18180",
            utilization_gpu="40",
            temperature_gpu="61",
            power_draw="240.50",
            **common,
        ),
        healthy_gpu(
            1,
            uuid=SECOND_UUID,
            memory_used="12",
            memory_free="24312",
            utilization_gpu="0",
            temperature_gpu="33",
            power_draw="18.25",
            **common,
        ),
    )
    fake.set_processes((FIRST_UUID, 4242, "python", 6000))
    with ServerProcess(folder, GPU_BACKEND="nvidia-smi", **fake.env) as started:
        yield started


def kind(key: str, value: Any) -> str:
    # There is no pid 4242 here, or it is somebody else's: its user and its age may be unknown.
    if key == "running_seconds" and value is None:
        return "float"
    if isinstance(value, list):
        return f"{len(value)} entries"
    return "text" if value is None or isinstance(value, str) else type(value).__name__


def settled(value: Any) -> Any:
    """With no value where it is volatile; but a number is not a text."""
    if isinstance(value, dict):
        return {key: kind(key, entry) if key in VOLATILE else settled(entry) for key, entry in value.items()}
    return [settled(entry) for entry in value] if isinstance(value, list) else value


# --- curl ---


@pytest.mark.parametrize("block", of_language("bash"))
def test_curl(server: ServerProcess, block: Block) -> None:
    for name in ("curl", "jq"):
        if name in block.text:
            tool(name)
    done = subprocess.run(
        [tool("bash"), "-euo", "pipefail", "-c", at(server, block.text)],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    if "token" in answer:
        # The page's other answers are of a server on which nothing is promised.
        token = {"X-Lease-Token": answer["token"]}
        assert server.ask("DELETE", f"/leases/{answer['lease_id']}", headers=token).status == 200
    if "jq .gpu_filtering" in block.text:
        assert answer == server.get("/config").json["gpu_filtering"]
        return
    (following,) = BLOCKS[block.number + 1 : block.number + 2]
    assert (following.language, following.heading) == ("json", block.heading), "the answer comes behind the command"
    assert settled(answer) == settled(json.loads(following.text))


def test_the_answer_of_a_failing_server(tmp_path: Path) -> None:
    (example,) = [json.loads(block.text) for block in BLOCKS if block.heading == "When the driver fails"]
    with ServerProcess(tmp_path, GPU_BACKEND="nvidia-smi", PATH=str(tmp_path)) as failing:
        for path in ("/gpu/stats", "/gpu/count", "/gpu/summary", "/gpu/history"):
            reply = failing.get(path)
            assert (reply.status, reply.json) == (503, example), path


# --- programs ---


def starts_a_server(text: str) -> bool:
    return "uvicorn.run(" in text or "serve(" in text


@pytest.mark.parametrize("block", of_language("python"))
def test_python(server: ServerProcess, block: Block, tmp_path: Path) -> None:
    program = tmp_path / "gpu_server.py"
    if starts_a_server(block.text):
        # RELOAD has its default where the program leaves it to the environment.
        own = ServerProcess(tmp_path, arguments=[str(program)], GPU_BACKEND="simulated:3", RELOAD="")
        text = re.sub(r'host="[\d.]+", port=\d+', f'host="127.0.0.1", port={own.port}', block.text)
        program.write_text(text, encoding="utf-8")
        with own:
            assert own.get("/gpu/count").json["gpu_count"] == 3
            is_reloading = "reload=True" in text or "from_environment" in text
            assert ("Started reloader process" in own.log) == is_reloading
            status, seconds = own.terminate()
            assert status in (0, -15), own.log
            assert seconds < 5
            assert "Traceback" not in own.log
        return
    program.write_text(at(server, block.text), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MY_")}
    command = [sys.executable, "-W", "error", program]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env=environment | {"PYTHONIOENCODING": "utf-8"},
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    if "requests" in block.text:
        lines = done.stdout.splitlines()
        assert re.fullmatch(r"2 GPUs, as of \d+\.\d s ago", lines[0])
        assert lines[1:] == [
            "GPU 0: NVIDIA GeForce RTX 3090",
            "  memory: 6144 of 24576 MB (25.0 %)",
            "  utilization: 40 %",
            "  temperature: 61 °C",
            "  power: 240.5 of 350.0 W",
            "GPU 1: NVIDIA GeForce RTX 3090",
            "  memory: 12 of 24576 MB (0.05 %)",
            "  utilization: 0 %",
            "  temperature: 33 °C",
            "  power: 18.25 of 350.0 W",
            "server: healthy, nvidia-smi available: True",
        ]
    else:
        assert done.stdout.split() == ["False", "2.5", "3"]


def test_python_example_says_why_there_are_no_readings(tmp_path: Path) -> None:
    (block,) = [block for block in BLOCKS if block.language == "python" and "requests" in block.text]
    with ServerProcess(tmp_path, GPU_BACKEND="nvidia-smi", PATH=str(tmp_path)) as failing:
        done = subprocess.run(
            [sys.executable, "-c", at(failing, block.text)], capture_output=True, text=True, timeout=30, check=False
        )
    assert done.stdout.splitlines() == [
        "no readings: nvidia-smi was not found: install the NVIDIA driver, or add the tool's folder to PATH.",
        "server: unhealthy, nvidia-smi available: False",
    ]


@pytest.fixture(scope="session")
def axios(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which `require("axios")` works."""
    npm = tool("npm")
    folder = tmp_path_factory.mktemp("axios")
    command = [npm, "install", "--no-audit", "--no-fund", "--no-save", "--ignore-scripts", "axios@1"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("npm could not install axios within a minute")
    if done.returncode != 0:
        pytest.skip(f"npm could not install axios: {done.stderr.strip()[-200:]}")
    return folder


@pytest.mark.timeout(120)
def test_javascript(server: ServerProcess, axios: Path, tmp_path: Path) -> None:
    (block,) = [block for block in BLOCKS if block.language == "javascript"]
    expected = [
        "2 GPUs, 12.52 % of their memory in use",
        "average utilization: 20 %",
        "GPU 0: NVIDIA GeForce RTX 3090, 40 %",
        "GPU 1: NVIDIA GeForce RTX 3090, 0 %",
        "server: healthy, nvidia-smi available: true",
    ]

    def run(other: ServerProcess) -> subprocess.CompletedProcess[str]:
        program = axios / "example.js"
        program.write_text(at(other, block.text), encoding="utf-8")
        return subprocess.run([tool("node"), program], capture_output=True, text=True, timeout=30, check=False)

    done = run(server)
    assert (done.returncode, done.stdout.splitlines()) == (0, expected), done.stderr
    with ServerProcess(tmp_path, GPU_BACKEND="nvidia-smi", PATH=str(tmp_path)) as failing:
        done = run(failing)
    assert done.returncode == 1
    assert done.stderr.startswith("no readings: nvidia-smi was not found")


# --- commands that start it ---


def test_commands_that_start_it(tmp_path: Path) -> None:
    """All on the page that this machine can run; each in turn, with the port rewritten."""
    uvicorn = [line[2:] for line in section("By uvicorn").splitlines() if line.startswith("$ ")]
    simulated = [line[2:] for line in section("Try it without a GPU").splitlines() if line.startswith("$ ")]
    filtered = [line[2:] for line in section("CUDA_VISIBLE_DEVICES").splitlines() if line.startswith("$ CUDA")]
    assert (len(uvicorn), len(simulated), len(filtered)) == (3, 1, 1)
    for number, line in enumerate(uvicorn + simulated + filtered):
        *_, line = line.split("$ ")
        words = line.split()
        settings = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
        arguments = [word for word in words if not re.match(r"[A-Z_]+=", word)]
        if arguments[0] == "uvicorn":
            arguments = ["-m", "uvicorn", *arguments[1:]]
            arguments[arguments.index("--port") + 1] = "{port}"
            assert arguments.count("0.0.0.0") in (0, 1)
        else:
            assert arguments.pop(0) == "python"
        environment = {"GPU_BACKEND": "simulated:4"} | settings
        with ServerProcess(tmp_path / str(number), arguments=arguments, **environment) as started:
            expected = 2 if "CUDA_VISIBLE_DEVICES" in settings else 4
            assert started.get("/gpu/count").json["gpu_count"] == expected, line


def test_what_bare_uvicorn_does_not_heed_is_as_the_page_says(tmp_path: Path) -> None:
    arguments = ["-m", "uvicorn", "gpu_worker_pool.gpu_server:app", "--port", "{port}"]
    own = {"HOST": "192.0.2.1", "PORT": "1", "WORKERS": "3", "ACCESS_LOG": "false", "LOG_FORMAT": "json"}
    with ServerProcess(tmp_path, arguments=arguments, GPU_BACKEND="simulated:1", **own) as started:
        config = started.get("/config").json["server"]
        assert (config["host"], config["port"], config["workers"]) == ("192.0.2.1", 1, 3)
        assert '"GET /config HTTP/1.1" 200' in eventually(lambda: started.log if "/config" in started.log else "")
        lines = started.log.splitlines()
    ours = [json.loads(line) for line in lines if line.startswith("{")]
    assert {entry["logger"] for entry in ours} == {"gpu_worker_pool.gpu_server.application"}
    assert any(line.startswith("INFO:     Uvicorn running on") for line in lines)


def test_uvicorn_refuses_to_reload_an_object(tmp_path: Path) -> None:
    program = tmp_path / "serve.py"
    program.write_text(
        "import uvicorn\nfrom gpu_worker_pool.gpu_server import app\n"
        "if __name__ == '__main__':\n    uvicorn.run(app, port=0, reload=True)\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode != 0
    assert "import string" in done.stderr


# --- files ---


@pytest.mark.parametrize("block", of_language("env"))
def test_env_files(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    (tmp_path / ".env").write_text(block.text)
    monkeypatch.chdir(tmp_path)
    names = [line.partition("=")[0] for line in block.text.splitlines()]
    for name in names:
        monkeypatch.delenv(name, raising=False)
    settings = ServerSettings.from_environment(read_environment())
    assert caplog.records == []
    changed = [name for name in names if getattr(settings, name.lower()) != getattr(ServerSettings, name.lower())]
    assert changed == [
        name
        for name in names
        if f"{name}={getattr(ServerSettings, name.lower())}".lower() not in (block.text.lower().splitlines())
    ]


def test_systemd_unit(tmp_path: Path) -> None:
    """Of the recipes; `gpu-pool setup` writes the server's, and `tests/cli/test_setup.py` verifies that."""
    (text,) = re.findall(
        r"^```ini\n(.*?)^```$", (Path(__file__).parents[2] / "docs" / "RECIPES.md").read_text(), re.M | re.S
    )
    unit = tmp_path / "chat.service"
    unit.write_text(text.replace("/usr/local/bin/gpu-pool", sys.executable).replace("User=ada", "User=root"))
    done = subprocess.run(
        [tool("systemd-analyze"), "verify", "--man=no", unit], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_yaml_names_metrics_that_exist(server: ServerProcess) -> None:
    scrape, alerts = [yaml.safe_load(block.text) for block in BLOCKS if block.language == "yaml"]
    (job,) = scrape["scrape_configs"]
    assert "metrics_path" not in job, "the default, /metrics, is ours"
    shown = metric_names(server)
    for rule in alerts["groups"][0]["rules"]:
        (name,) = re.findall(r"\bgpu_pool_\w+", rule["expr"])
        assert name in shown


# --- tables ---


def metric_names(server: ServerProcess) -> set[str]:
    return set(re.findall(r"^# TYPE (\w+)", server.get("/metrics").body.decode(), re.M))


def test_every_metric_is_in_its_table(server: ServerProcess) -> None:
    rows = table_rows(section("`/metrics`: for Prometheus"))[1:]
    assert {row[0].strip("`") for row in rows} == metric_names(server)
    body = server.get("/metrics").body.decode()
    labels = re.findall(r"`(\w+)`", next(row[1] for row in rows if row[0] == "`gpu_pool_gpu_info`"))
    (line, _) = re.findall(r"^gpu_pool_gpu_info\{(.*)\} 1\.0$", body, re.M)
    assert set(re.findall(r"(\w+)=", line)) == set(labels)


def test_every_variable_is_in_its_table_with_its_default() -> None:
    rows = {row[0].strip("`"): row for row in table_rows(section("Configuration"))[1:]}
    fields = {name.upper(): getattr(ServerSettings, name) for name in ServerSettings.__dataclass_fields__}
    assert rows.keys() == fields.keys()
    del fields["GPU_POOL_STATE_DIR"]  # its default is a search, and has a section of its own
    for name, default in fields.items():
        said = rows[name][1].strip("`")
        shown = {"true": True, "false": False, "empty": "", "not set": None, "none": ()}.get(said, said)
        assert shown == default or said == str(default), name


def test_every_field_of_a_request_is_in_its_table_with_its_default() -> None:
    rows = [row for row in table_rows(section("`POST /leases`: request a lease")) if len(row) == 4][1:]
    names = [(name, row[1].split(", ")) for row in rows for name in re.findall(r"`(\w+)`", row[0])]
    fields = lease_schemas.LeaseRequest.model_fields
    assert sorted(name for name, _ in names) == sorted(fields)
    for name, defaults in names:
        default = fields[name].default
        said = {text.strip("`") for text in defaults}
        if default is not None:
            assert {str(default).lower(), f"{default:g}" if isinstance(default, float) else ""} & said, name


def test_every_refusal_is_in_its_table() -> None:
    """Each with its status: those that are told, and no others."""
    said = {
        (int(row[0]), code) for row in table_rows(section("Refusals"))[1:] for code in re.findall(r"`(\w+)`", row[1])
    }
    assert said == refusals_in_code()


def refusals_in_code() -> set[tuple[int, str]]:
    found = {(status, code) for _, status, code in responses._REFUSALS}
    package = Path(gpu_worker_pool.__file__).parent / "gpu_server"
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            given = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            if node.func.id == "Refusal" and len(given) >= 2:
                found.add((given[0], given[1]))
            elif node.func.id == "_unauthorized":
                error = node.args[0]  # a text, or the name of one
                text = getattr(security, error.id) if isinstance(error, ast.Name) else ast.literal_eval(error)
                found.add((401, text))
    return {(status, code) for status, code in found if isinstance(code, str)}


def names_in_tables(heading: str) -> set[str]:
    cells = " ".join(row[0] for row in table_rows(section(heading)))
    return set(re.findall(r"(\w+)(?=[.`[])", cells))


STATS = "`/gpu/stats`: all details of each GPU"
ASKING = "`POST /leases`: request a lease"
#: Where the fields of an answer are explained; what other routes share with `/gpu/stats` is explained there.
EXPLAINED: list[tuple[type[BaseModel], tuple[str, ...]]] = [
    (schemas.Home, ("`/`: overview",)),
    (schemas.Stats, (STATS,)),
    (schemas.GPU, (STATS,)),
    (schemas.Memory, (STATS,)),
    (schemas.Power, (STATS,)),
    (schemas.Process, (STATS,)),
    (schemas.MIGDevice, (STATS,)),
    (schemas.Count, (STATS,)),
    (schemas.Summary, (STATS, "`/gpu/summary`: short form, for allocators")),
    (schemas.SummaryRow, (STATS, "`/gpu/summary`: short form, for allocators")),
    (schemas.HistorySchema, (STATS, "`/gpu/history`: the last readings")),
    (schemas.GPUHistorySchema, (STATS, "`/gpu/history`: the last readings")),
    (schemas.HistoryReading, (STATS, "`/gpu/history`: the last readings")),
    (schemas.HealthBody, ("`/health`: health check",)),
    (schemas.FilteringConfig, ("`/config`: configuration",)),
    (schemas.LeasesConfig, ("`/config`: configuration",)),
    (schemas.Promise, (STATS,)),
    (lease_schemas.GrantedLease, (ASKING,)),
    (lease_schemas.LeaseRowSchema, (ASKING, "`GET /leases` and `GET /queue`: list")),
]


@pytest.mark.parametrize(("model", "headings"), EXPLAINED)
def test_every_field_is_explained(model: type[BaseModel], headings: tuple[str, ...]) -> None:
    explained = set().union(*map(names_in_tables, headings))
    # The rows themselves: each has a table, or a line, of its own.
    assert model.model_fields.keys() - explained - {"gpus", "gpus_summary"} == set()


def test_every_code_is_in_its_table() -> None:
    package = Path(gpu_worker_pool.__file__).parent
    files = [package / "errors.py", package / "gpu_server" / "host_view.py", *(package / "hardware").rglob("*.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    code = re.compile(r"[a-z_]+_(?:not_found|denied|not_loaded|mismatch|hangs|error|late|yet)")
    assert {row[0].strip("`") for row in table_rows(section("Codes"))[1:]} == set(filter(code.fullmatch, texts))


def test_simulated_hosts_are_as_the_page_says() -> None:
    for text, count in (("simulated", 4), ("simulated:0", 0), ("simulated:10000", 10_000)):
        assert len(make_reader(text, lambda: 0.0).read().gpus) == count
    for row in table_rows(section("Try it without a GPU"))[1:]:
        assert len(make_reader(row[2].strip("`"), lambda: 0.0).read().gpus) == 4
    with pytest.raises(ValueError, match="seed=7 and ,linger"):
        make_reader("simulated:4,linger=2.5,seed=7", lambda: 0.0)
