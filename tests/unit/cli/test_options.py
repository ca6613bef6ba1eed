"""Every requirement of the core has its option, and the option reaches the lease spec."""

from __future__ import annotations

import json
from dataclasses import fields
from types import ModuleType
from typing import Any, NoReturn

import click
import pytest
from click.testing import CliRunner

from gpu_worker_pool.cli.commands import run as run_module
from gpu_worker_pool.cli.commands import wait as wait_module
from gpu_worker_pool.cli.options import requirements_options
from gpu_worker_pool.cli.program import gpu_pool
from gpu_worker_pool.cli.running.lease_spec import LeaseSpec
from gpu_worker_pool.core.requirements import Requirements


def requirements_of(*arguments: str) -> Requirements:
    found: list[dict[str, Any]] = []

    @click.command()
    @requirements_options
    def command(*, requirement_options: dict[str, Any]) -> None:
        found.append(requirement_options)

    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 0, done.output
    assert found[0].keys() == {each.name for each in fields(Requirements) if each.init}, "an option each"
    return Requirements(**found[0])


def test_no_option_means_the_defaults() -> None:
    assert requirements_of() == Requirements()


ALL = [
    "-n",
    "2",
    "--memory",
    "8GiB",
    "--share",
    "--min-free-memory",
    "4GiB",
    "--model",
    "A100",
    "--only",
    "0,1",
    "--only",
    "GPU-6",
    "--exclude",
    "3",
    "--priority",
    "5",
    "--idle",
    "--max-memory-usage",
    "10",
    "--max-gpu-utilization",
    "5",
]
EVERYTHING = Requirements(
    count=2,
    memory_mb=8192.0,
    share=True,
    min_free_memory_mb=4096.0,
    gpu_model="A100",
    only=("0", "1", "GPU-6"),
    exclude=("3",),
    policy="idle",
    memory_threshold=10.0,
    utilization_threshold=5.0,
    priority=5,
)


def test_every_requirement() -> None:
    assert requirements_of(*ALL) == EVERYTHING
    default = Requirements()
    same = [each.name for each in fields(Requirements) if getattr(EVERYTHING, each.name) == getattr(default, each.name)]
    assert same == [], "a new requirement needs an option and a place in this test"


@pytest.mark.parametrize(
    ("module", "waiting", "words"),
    [(run_module, "CommandOnGPU", ["run", *ALL]), (wait_module, "Front", ["wait", *ALL])],
    ids=["run", "wait"],
)
def test_every_requirement_reaches_the_lease_spec(
    module: ModuleType, waiting: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    specs: list[LeaseSpec] = []

    def capture(*arguments: object, **_: object) -> NoReturn:
        specs.extend(each for each in arguments if isinstance(each, LeaseSpec))
        raise click.Abort

    monkeypatch.setattr(module, waiting, capture)
    more = ["--timeout", "90s", "--label", "nightly", "--ttl", "30s", "-e", "http://gpu-1:8000", "--"]
    CliRunner().invoke(gpu_pool, [*words, *more, *(["true"] if words[0] == "run" else [])])
    (spec,) = specs
    assert Requirements(**spec.requirement_options) == EVERYTHING
    assert (spec.timeout_seconds, spec.is_no_wait) == (90.0, False)
    assert (spec.label, spec.ttl_seconds) == ("nightly", 30.0)
    assert spec.endpoints == ["http://gpu-1:8000"]
    assert LeaseSpec(**json.loads(json.dumps(spec._asdict()))) == spec
