"""Every requirement of the core has its option, and the option reaches the lease spec."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
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
from gpu_worker_pool.cli.running import remote_command
from gpu_worker_pool.cli.running.lease_spec import LeaseSpec
from gpu_worker_pool.core.requirements import Requirements


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """A command that is called here sets up logging for the whole process."""
    logger = logging.getLogger("gpu_worker_pool")
    before = logger.handlers[:], logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate = before[:2]
    logger.setLevel(before[2])


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


def test_no_option_means_the_defaults_and_an_idle_gpu() -> None:
    assert requirements_of() == Requirements(policy="idle")


@pytest.mark.parametrize(
    ("words", "policy"),
    [
        ("", "idle"),
        ("-n 2 --model A100 --memory 8GiB", "idle"),
        ("--idle", "idle"),
        ("--policy idle", "idle"),
        ("--policy thresholds", "thresholds"),
        ("--max-memory-usage 50", "thresholds"),
        ("--max-gpu-utilization 0", "thresholds"),
        ("--idle --max-memory-usage 50", "idle"),
        ("--policy idle --idle --max-gpu-utilization 5", "idle"),
        ("--memory 8GiB --share", "thresholds"),
        ("--memory 8GiB --share --idle", "idle"),
        ("--memory 8GiB --share --policy idle", "idle"),
    ],
)
def test_which_policy_options_choose(words: str, policy: str) -> None:
    assert requirements_of(*words.split()).policy == policy


@pytest.mark.parametrize("words", ["--idle --policy thresholds", "--policy thresholds --idle", "--policy free"])
def test_policies_that_exclude_each_other(words: str) -> None:
    done = CliRunner().invoke(gpu_pool, ["explain", *words.split()])
    assert done.exit_code == 2
    assert "--policy" in done.output


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


@pytest.mark.parametrize(
    ("words", "target", "command"),
    [
        (["true"], None, ("true",)),
        (["--ssh", "python", "train.py"], "", ("python", "train.py")),
        (["--ssh", "--", "python"], "", ("python",)),
        (["--ssh=ana@gpu-1", "python"], "ana@gpu-1", ("python",)),
        (["--ssh", "-q", "python"], "", ("python",)),
        (["--label", "--ssh", "python", "--ssh"], None, ("python", "--ssh")),
        (["-qn", "1", "--ssh", "python"], "", ("python",)),
        (["-n1", "--ssh", "python"], "", ("python",)),
        (["--", "--ssh", "x"], None, ("--ssh", "x")),
    ],
)
def test_the_word_after_ssh_is_the_command(
    words: list[str], target: str | None, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[tuple[str, ...], LeaseSpec]] = []

    def capture(command: tuple[str, ...], spec: LeaseSpec, *_: object, **__: object) -> NoReturn:
        found.append((command, spec))
        raise click.Abort

    monkeypatch.setenv("GPU_POOL_SSH", "true")
    monkeypatch.setattr(run_module, "check_command", lambda _: None)
    monkeypatch.setattr(run_module, "CommandOnGPU", capture)
    monkeypatch.setattr(remote_command, "CommandOverSSH", capture)
    done = CliRunner().invoke(gpu_pool, ["run", *words])
    assert found, done.output
    assert (found[0][0], found[0][1].ssh_target) == (command, target)


def test_ssh_and_here_exclude_each_other() -> None:
    done = CliRunner().invoke(gpu_pool, ["run", "--ssh", "--here", "true"])
    assert done.exit_code == 2
    assert "exclude each other" in done.output
    done = CliRunner().invoke(gpu_pool, ["run", "--ssh=-oProxyCommand=x", "true"])
    assert done.exit_code == 2
    assert "--ssh must be a host, or user@host" in done.output


@pytest.mark.parametrize("reason", ["\x1b[2J", "two\nlines", "x" * 201, "\udcff"])
def test_a_reason_that_a_holder_cannot_be_shown_is_refused(reason: str) -> None:
    done = CliRunner().invoke(gpu_pool, ["yield", "lease-1", "--reason", reason])
    assert done.exit_code == 2
    assert "--reason must be at most 200 characters, all of them printable" in done.output
