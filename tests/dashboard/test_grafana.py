"""docs/grafana/, against the /metrics of a real server: names, labels and values of labels."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.dashboard.looking import queue_up, take
from tests.server_process import ServerProcess
from tests.waiting import eventually

FOLDER = Path(__file__).parents[2] / "docs" / "grafana"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))
RULES: list[dict[str, Any]] = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
#: What Prometheus adds to whatever it scrapes.
ADDED = {"instance", "job"}

Metrics = dict[str, list[dict[str, str]]]


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Metrics]:
    """By name, the labels of each line; of a server with somebody who holds and somebody who waits."""
    with ServerProcess(tmp_path_factory.mktemp("grafana"), GPU_BACKEND="simulated:1") as server:
        take(server, worker_id="holder")
        queue_up(server, worker_id="waiter")

        def scrape() -> Metrics:
            found: Metrics = {"up": [{}]}
            for family in text_string_to_metric_families(server.get("/metrics").body.decode()):
                for sample in family.samples:
                    found.setdefault(sample.name, []).append(sample.labels)
            # Its holder is known to be idle, or not, once there was a reading.
            assert "gpu_pool_gpu_lease_idle_seconds" in found
            return found

        yield eventually(scrape)


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
        assert set(rule["annotations"]) == {"summary", "description"}


def test_there_is_an_alert_for_each_thing_that_people_must_know() -> None:
    assert {rule["alert"] for rule in RULES} >= {"GPULost", "GPUSampleTooOld", "GPUQueueTooLong", "GPUHolderIdle"}


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


PROMTOOL = shutil.which("promtool")


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed: apt-get install prometheus")
def test_prometheus_understands_the_rules() -> None:
    assert PROMTOOL is not None
    command = [PROMTOOL, "check", "rules", FOLDER / "alerts.yml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
