"""The OpenAPI schema against a live server: Schemathesis tries valid and invalid requests and finds no error."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.server_process import ServerProcess

from gpu_worker_pool import __version__

ROUTES = {
    "/",
    "/config",
    "/gpu/stats",
    "/gpu/count",
    "/gpu/summary",
    "/gpu/history",
    "/health",
    "/livez",
    "/readyz",
    "/metrics",
    "/events",
}
#: Of leases, with what can be done to each; these have parameters and change something.
LEASE_ROUTES = {
    "/leases": {"get", "post"},
    "/leases/{lease_id}": {"get", "delete"},
    "/leases/{lease_id}/renew": {"post"},
    "/leases/{lease_id}/yield": {"post"},
    "/queue": {"get"},
    "/explain": {"post"},
    "/queue/{request_id}": {"get", "delete"},
    "/fleet": {"get"},
    "/fleet/link": {"get"},
    "/fleet/hosts/{host}": {"delete"},
    "/fleet/hosts/{host}/drain": {"post"},
    "/fleet/hosts/{host}/undrain": {"post"},
}
OPERATIONS = len(ROUTES) + sum(len(methods) for methods in LEASE_ROUTES.values())
#: What may wait for half a minute is not waited for.
HOOKS = """
import schemathesis

@schemathesis.hook
def before_call(context, case, kwargs):
    wait = case.body.get("wait_seconds") if isinstance(case.body, dict) else None
    if isinstance(wait, (int, float)) and 0.1 < wait <= 30:
        case.body["wait_seconds"] = 0.1

@schemathesis.hook
def map_path_parameters(context, path_parameters):
    # Every other one ends with what a regular expression, a log or a terminal may trip over.
    for name, value in (path_parameters or {}).items():
        if isinstance(value, str) and len(value) % 2:
            path_parameters[name] = value + "\\n\\r\\x00\\x1b\\x7f\\x85\\u2028\\u202e"[len(value) // 2 % 8]
    return path_parameters
"""
#: Generated clients call their functions so.
OPERATION_IDS = {
    "get_home": "GET /",
    "get_config": "GET /config",
    "get_gpu_stats": "GET /gpu/stats",
    "get_gpu_count": "GET /gpu/count",
    "get_gpu_summary": "GET /gpu/summary",
    "get_gpu_history": "GET /gpu/history",
    "get_health": "GET /health",
    "get_liveness": "GET /livez",
    "get_readiness": "GET /readyz",
    "get_metrics": "GET /metrics",
    "stream_events": "GET /events",
    "acquire_lease": "POST /leases",
    "list_leases": "GET /leases",
    "get_lease": "GET /leases/{lease_id}",
    "renew_lease": "POST /leases/{lease_id}/renew",
    "yield_lease": "POST /leases/{lease_id}/yield",
    "release_lease": "DELETE /leases/{lease_id}",
    "list_queue": "GET /queue",
    "explain_request": "GET /queue/{request_id}",
    "cancel_request": "DELETE /queue/{request_id}",
    "explain_requirements": "POST /explain",
    "get_fleet": "GET /fleet",
    "link_to_fleet": "GET /fleet/link",
    "drain_host": "POST /fleet/hosts/{host}/drain",
    "undrain_host": "POST /fleet/hosts/{host}/undrain",
    "remove_host": "DELETE /fleet/hosts/{host}",
}
CONTROL_CHARACTERS = ("%00", "%0A", "%0D", "%1B%5B2J", "%7F", "%C2%85", "%E2%80%A8", "%E2%80%AE")
#: Never ends, so that Schemathesis would wait for ever; it has tests of its own here.
ENDLESS = "/events"


def schemathesis(server: ServerProcess, folder: Path, *arguments: str) -> str:
    """What it found, which is nothing; raises with its report otherwise."""
    command = [
        str(Path(sys.executable).with_name("schemathesis")),
        "run",
        f"{server.url}/openapi.json",
        f"--exclude-path={server.prefix}{ENDLESS}",
        "--checks=all",
        "--max-examples=30",
        "--seed=1",
        "--request-timeout=10",
        "--continue-on-failure",
        "--warnings=off",
        *arguments,
    ]
    (folder / "hooks.py").write_text(HOOKS)
    environment = os.environ | {"SCHEMATHESIS_HOOKS": "hooks"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def summary(report: str) -> tuple[int, int]:
    """How many operations were tested, with how many cases."""
    tested = re.search(r"Tested: (\d+)", report)
    generated = re.search(r"(\d+) generated", report)
    assert tested is not None, report
    assert generated is not None, report
    return int(tested[1]), int(generated[1])


@pytest.mark.timeout(180)
def test_nothing_is_found_on_a_server_that_is_well(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, GPU_BACKEND="simulated:3,seed=7", ACCESS_LOG="false") as server:
        tested, cases = summary(schemathesis(server, tmp_path))
        assert tested == OPERATIONS - 1
        assert cases > 500
        assert server.get("/health").json["status"] == "healthy"
        assert "Traceback" not in server.log


@pytest.mark.timeout(180)
def test_nothing_is_found_on_a_server_without_a_driver_or_under_a_prefix(tmp_path: Path) -> None:
    with ServerProcess(
        tmp_path, GPU_BACKEND="nvidia-smi", PATH=str(tmp_path), API_PREFIX="/host1", ACCESS_LOG="false"
    ) as server:
        # A 503 is an error of the server, and here the right answer; its body is checked like every other.
        excluded = "--exclude-checks=not_a_server_error,positive_data_acceptance"
        tested, _ = summary(schemathesis(server, tmp_path, excluded))
        assert tested == OPERATIONS - 1
        assert "Traceback" not in server.log


@pytest.fixture(scope="module")
def schema_and_port(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with ServerProcess(tmp_path_factory.mktemp("schema"), GPU_BACKEND="simulated:1") as server:
        yield server.get("/openapi.json").json, server.port


def test_every_route_is_in_the_schema(schema_and_port: Any) -> None:
    schema, _ = schema_and_port
    assert schema["paths"].keys() == ROUTES | LEASE_ROUTES.keys()
    assert schema["info"]["title"] == "GPU Statistics Server"
    assert schema["info"]["version"] == "1.0.0"
    assert schema["info"]["description"].startswith("A server that provides GPU statistics")
    # Those are the documented defaults of TITLE and VERSION; the lease API says what it is.
    leases, *others = schema["tags"]
    assert leases["name"] == "leases"
    assert [tag["name"] for tag in others] == ["gpus", "server"]
    assert {name for each in schema["paths"].values() for one in each.values() for name in one["tags"]} == {
        tag["name"] for tag in schema["tags"]
    }
    assert f"gpu-worker-pool {__version__}" in leases["description"]
    assert all(operation["tags"] == ["leases"] for path in LEASE_ROUTES for operation in schema["paths"][path].values())
    for path, operations in schema["paths"].items():
        assert operations.keys() == LEASE_ROUTES.get(path, {"get"}), path
    for path in ("/gpu/stats", "/gpu/count", "/gpu/summary", "/gpu/history"):
        problem = schema["paths"][path]["get"]["responses"]["503"]["content"]["application/json"]["schema"]
        assert problem == {"$ref": "#/components/schemas/Problem"}


def test_operations_have_names_that_stay_and_every_reference_leads_somewhere(schema_and_port: Any) -> None:
    schema, _ = schema_and_port
    assert {
        operation["operationId"]: f"{method.upper()} {path}"
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
    } == OPERATION_IDS
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(schema)))
    assert references <= schema["components"]["schemas"].keys()
    assert {"LeaseRequest", "HolderBody", "EnclosingLease", "RequirementsBody"} <= references
    assert "$defs" not in json.dumps(schema)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("DELETE", "/gpu/stats", 405),
        ("GET", "/gpu/history?limit=x", 422),
        ("GET", "/leases/lease-9", 404),
        ("POST", "/leases", 415),
        ("GET", "/leases%0A", 404),
    ],
)
def test_every_error_is_a_problem_for_those_who_know_them(
    schema_and_port: Any, method: str, path: str, status: int
) -> None:
    _, port = schema_and_port
    for accept, kind in (
        ("application/problem+json, application/json;q=0.5", "application/problem+json"),
        ("*/*", "application/json"),
    ):
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
            connection.request(method, path, headers={"Accept": accept})
            reply = connection.getresponse()
            assert (reply.status, reply.getheader("content-type")) == (status, kind)
            body = json.loads(reply.read())
        assert body["status"] == status
        assert body["type"] == f"urn:gpu-worker-pool:{body['error']}"
        assert body["title"]
        assert body["detail"]


def test_the_stream_is_described_as_what_it_is(schema_and_port: Any) -> None:
    schema, port = schema_and_port
    operation = schema["paths"][ENDLESS]["get"]
    assert operation["responses"].keys() == {"200"}
    assert operation["responses"]["200"]["content"].keys() == {"text/event-stream"}
    assert "snapshot" in operation["description"]
    assert "health" in operation["description"]
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request("GET", ENDLESS)
        reply = connection.getresponse()
        assert (reply.status, reply.getheader("content-type")) == (200, "text/event-stream; charset=utf-8")
        assert reply.getheader("cache-control") == "no-store"
        assert reply.readline() == b"retry: 2000\n"
        reply.close()
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request("POST", ENDLESS)
        assert connection.getresponse().status == 405


@pytest.mark.parametrize("media_type", ["text/plain", "application/openmetrics-text"])
def test_the_metrics_are_described_in_both_formats(schema_and_port: Any, media_type: str) -> None:
    schema, port = schema_and_port
    assert media_type in schema["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request("GET", "/metrics", headers={"Accept": media_type})
        reply = connection.getresponse()
        assert (reply.getheader("content-type") or "").split(";")[0] == media_type
        reply.close()


@pytest.mark.parametrize("path", sorted(ROUTES))
def test_head_ends_and_leaves_the_connection_usable(schema_and_port: Any, path: str) -> None:
    _, port = schema_and_port
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=3)) as connection:
        connection.request("HEAD", path)
        head = connection.getresponse()
        assert (head.status, head.read()) == (200, b"")
        connection.request("GET", "/health")
        reply = connection.getresponse()
        assert reply.status == 200
        reply.close()


@pytest.mark.parametrize("character", CONTROL_CHARACTERS)
def test_paths_with_control_characters_do_not_exist(schema_and_port: Any, character: str) -> None:
    schema, port = schema_and_port
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        for path, operations in schema["paths"].items():
            for method in operations:
                for asked in (path.replace("{", "").replace("}", "") + character, f"{path[:2]}{character}{path[2:]}"):
                    connection.request(method.upper(), asked.replace("{", "").replace("}", ""))
                    reply = connection.getresponse()
                    assert reply.status in (404, 422), (method, asked, reply.read())
                    assert b"detail" in reply.read()
