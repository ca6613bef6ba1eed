"""A requirement is said once, in `core.requirements.Requirements`: signatures and documents list the same ones."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from gpu_worker_pool import GPUWorkerPoolClient, sync
from gpu_worker_pool.core.requirements import ANY_GPU, Declared, Requirements, make_requirements
from gpu_worker_pool.worker_pool_manager import WorkerPoolManager

DOCS = Path(__file__).parents[2] / "docs"
#: In Python, the client has the thresholds.
OF_THE_CLIENT = {"memory_threshold", "utilization_threshold"}
#: How long it takes: of the request, not of its requirements, so that equal requests may differ in it.
DECLARED = set(Declared._fields)
NAMES = {each.name for each in fields(Requirements) if each.init}


@pytest.mark.parametrize("kind", [GPUWorkerPoolClient, sync.GPUWorkerPoolClient, WorkerPoolManager])
def test_every_requirement_is_an_argument_of_request_gpu(kind: type) -> None:
    arguments = inspect.signature(kind.request_gpu).parameters
    assert arguments.keys() - {"self", "timeout", "label"} == (NAMES - OF_THE_CLIENT) | DECLARED
    made = inspect.signature(make_requirements).parameters
    assert {name: argument.default for name, argument in arguments.items() if name in made} == {
        name: argument.default for name, argument in made.items()
    }


def test_every_argument_reaches_the_core() -> None:
    assert make_requirements() is ANY_GPU
    given = {
        "count": 2,
        "memory_mb": 1.0,
        "share": True,
        "min_free_memory_mb": 2.0,
        "gpu_model": "a",
        "only": [1],
        "exclude": [2],
        "priority": 3,
        "policy": "idle",
    }
    assert given.keys() == inspect.signature(make_requirements).parameters.keys()
    made = make_requirements(**given)  # type: ignore[arg-type]
    assert made == Requirements(2, 1.0, True, 2.0, "a", ("1",), ("2",), "idle", priority=3)


@pytest.mark.parametrize(
    ("page", "heading", "names"),
    [
        ("API.md", "### request_gpu", (NAMES - OF_THE_CLIENT) | DECLARED),
        ("SERVER.md", "### `POST /leases`", NAMES | DECLARED),
    ],
)
def test_every_requirement_is_in_the_documents_table(page: str, heading: str, names: set[str]) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    start = re.search(rf"^{re.escape(heading)}", text, re.MULTILINE)
    assert start is not None, heading
    section = re.split(r"^#{2,4} ", text[start.end() :], maxsplit=1, flags=re.MULTILINE)[0]
    first_cells = re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)
    assert names - {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)} == set()
