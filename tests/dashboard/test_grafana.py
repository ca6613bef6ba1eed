"""docs/grafana/, against the /metrics of a real server: names, labels and values of labels."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.dashboard.looking import queue_up, take
from tests.fleet.hosts import FleetServer, FleetServers, make_fleet_tables
from tests.postgres_server import PostgresServer, UnavailableError
from tests.server_process import ServerProcess, free_port
from tests.waiting import eventually

FOLDER = Path(__file__).parents[2] / "docs" / "grafana"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))
RULES: list[dict[str, Any]] = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
#: What Prometheus adds to whatever it scrapes.
ADDED = {"instance", "job"}

Metrics = dict[str, list[dict[str, str]]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """With somebody who holds and somebody who waits."""
    with ServerProcess(tmp_path_factory.mktemp("grafana"), GPU_BACKEND="simulated:1") as started:
        take(started, worker_id="holder")
        queue_up(started, worker_id="waiter")
        yield started


@pytest.fixture(scope="module")
def dispatcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetServer]:
    """Of a fleet of one host."""
    try:
        postgres = PostgresServer()
    except UnavailableError as error:
        pytest.skip(str(error))
    with postgres:
        url = postgres.create_database("fleet")
        make_fleet_tables(url)
        with FleetServers(tmp_path_factory.mktemp("fleet"), url, names=["gpu-1"], candidates=1) as fleet:
            yield fleet.servers[0]


@pytest.fixture(scope="module")
def metrics(server: ServerProcess, dispatcher: FleetServer) -> Metrics:
    """By name, the labels of each line."""

    def scrape() -> Metrics:
        found: Metrics = {"up": [{}]}
        for each in (server, dispatcher):
            for family in text_string_to_metric_families(each.get("/metrics").body.decode()):
                for sample in family.samples:
                    found.setdefault(sample.name, []).append(sample.labels)
        # Its holder is known to be idle, or not, once there was a reading.
        assert "gpu_pool_gpu_lease_idle_seconds" in found
        return found

    return eventually(scrape)


def expressions() -> list[Any]:
    found = [pytest.param(rule["expr"], id=rule["alert"]) for rule in RULES]
    found += [
        pytest.param(target["expr"], id=f"{panel['title']}-{target['refId']}".replace(" ", "-"))
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    ]
    (hosts,) = (each for each in DASHBOARD["templating"]["list"] if each["type"] == "query")
    asked = re.fullmatch(r"label_values\((.+), instance\)", hosts["query"]["query"])
    assert asked is not None
    return [*found, pytest.param(asked[1], id="hosts")]


def selectors(expression: str) -> list[tuple[str, str]]:
    """Each metric, with what is between the braces behind it."""
    return re.findall(r"\b(gpu_pool_\w+|up)\b(?:\{([^}]*)\})?", expression)


@pytest.mark.parametrize("expression", expressions())
def test_every_expression_asks_for_what_exists(metrics: Metrics, expression: str) -> None:
    asked = selectors(expression)
    assert asked, "it asks for something of ours"
    known: set[str] = set(ADDED)
    for name, matchers in asked:
        assert name in metrics, f"there is no {name}"
        known |= {label for labels in metrics[name] for label in labels}
        for label, operator, value in re.findall(r'(\w+)\s*(=~|=|!=|!~)\s*"([^"]*)"', matchers):
            if label not in ADDED:
                assert operator == "="
                assert value in {labels.get(label) for labels in metrics[name]}, f"{name} has no {label} {value}"
    for names in re.findall(r"\b(?:by|on|without|group_left|ignoring)\s*\(([^)]*)\)", expression):
        assert {label.strip() for label in names.split(",") if label.strip()} <= known
    for opening, closing in ("()", "{}", "[]"):
        assert expression.count(opening) == expression.count(closing)


def test_what_is_written_beside_a_line_exists(metrics: Metrics) -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            names = {label for name, _ in selectors(target["expr"]) for labels in metrics[name] for label in labels}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= names | ADDED, panel["title"]
    for rule in RULES:
        names = {label for name, _ in selectors(rule["expr"]) for labels in metrics[name] for label in labels}
        said = " ".join(rule["annotations"].values())
        assert set(re.findall(r"\$labels\.(\w+)", said)) <= names | ADDED, rule["alert"]
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}


def test_the_runbook_says_what_to_do_for_each_alert() -> None:
    text = (FOLDER.parent / "RUNBOOK.md").read_text(encoding="utf-8")
    chapters = {part.partition("\n")[0]: part.partition("\n")[2] for part in text.split("\n## ")[1:]}
    assert chapters.keys() == {rule["alert"] for rule in RULES}
    assert all(chapter.strip() for chapter in chapters.values())
    for rule in RULES:
        assert rule["annotations"]["runbook_url"] == f"docs/RUNBOOK.md#{rule['alert'].lower()}"


def test_there_is_an_alert_for_each_thing_that_people_must_know() -> None:
    assert {rule["alert"] for rule in RULES} >= {
        *("GPULost", "GPUSampleTooOld", "GPUQueueTooLong", "GPUHolderIdle"),
        *("GPUFleetWithoutDispatcher", "GPUFleetDatabaseDown", "GPUFleetHostUnreachable"),
    }


def test_the_dashboard_can_be_imported() -> None:
    """By any Grafana, whatever its Prometheus is called."""
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]} == {"${datasource}"}
    assert DASHBOARD["uid"]
    assert "id" not in DASHBOARD
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + right, place["y"] + down) for right in range(place["w"]) for down in range(place["h"])}
        assert not cells & taken, f"{panel['title']} lies on another one"
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_what_only_grows_is_a_counter_and_the_process_is_described(server: ServerProcess) -> None:
    page = server.get("/metrics").body.decode()
    types = dict(re.findall(r"^# TYPE (\S+) (\w+)$", page, re.MULTILINE))
    counters = {name for name, kind in types.items() if kind == "counter"}
    assert {name for name in types if name.endswith("_total")} == counters
    assert {"process_cpu_seconds_total", "gpu_pool_grants_total"} <= counters
    assert {"process_resident_memory_bytes", "process_open_fds", "process_start_time_seconds"} <= types.keys()
    assert re.search(r'^gpu_pool_build_info\{version="[^"]+"\} 1.0$', page, re.MULTILINE)


PROMTOOL = shutil.which("promtool")


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed: apt-get install prometheus")
def test_prometheus_understands_the_rules() -> None:
    assert PROMTOOL is not None
    command = [PROMTOOL, "check", "rules", FOLDER / "alerts.yml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed: apt-get install prometheus")
def test_prometheus_has_nothing_to_say_against_the_metrics(server: ServerProcess) -> None:
    assert PROMTOOL is not None
    page = server.get("/metrics").body
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=page, capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


PROMETHEUS = shutil.which("prometheus")


@pytest.fixture(scope="module")
def prometheus(
    server: ServerProcess, dispatcher: FleetServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Its address, once it has scraped both servers twice."""
    if PROMETHEUS is None:
        pytest.skip("prometheus is not installed: apt-get install prometheus")
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    targets = [f"127.0.0.1:{each.port}" for each in (server, dispatcher)]
    scraped = {"job_name": "gpu-pool", "static_configs": [{"targets": targets}]}
    config = {"global": {"scrape_interval": "200ms"}, "rule_files": [str(FOLDER / "alerts.yml")]}
    (folder / "prometheus.yml").write_text(json.dumps(config | {"scrape_configs": [scraped]}))
    words = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (
        (folder / "log.txt").open("wb") as log,
        subprocess.Popen([PROMETHEUS, *words, f"--web.listen-address=127.0.0.1:{port}"], stderr=log) as process,
    ):
        try:
            address = f"http://127.0.0.1:{port}"
            eventually(lambda: sum(len(row["values"]) > 2 for row in ask(address, "up[1m]")) == len(targets))
            yield address
        finally:
            process.kill()


def ask(address: str, expression: str) -> list[Any]:
    asked = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"{address}/api/v1/query?{asked}", timeout=10) as reply:
        found = json.load(reply)
    assert found["status"] == "success"
    assert found.get("warnings", []) == []
    rows: list[Any] = found["data"]["result"]
    return rows


@pytest.mark.parametrize("expression", expressions())
def test_a_real_prometheus_answers_every_expression(prometheus: str, expression: str) -> None:
    # Grafana puts these in.
    asked = expression.replace("$instance", ".*").replace("$__rate_interval", "1m")
    rows = ask(prometheus, asked)
    is_alert = expression in {rule["expr"] for rule in RULES}
    assert rows or is_alert or asked.endswith("> 300"), "nothing is shown of a server with a holder and a waiter"
