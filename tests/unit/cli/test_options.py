"""Options of several commands, and what they come to."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import click
from click.testing import CliRunner

from gpu_worker_pool.cli.options import requirements_options
from gpu_worker_pool.core.requirements import Requirements


def requirements_of(*arguments: str) -> Requirements:
    found: list[dict[str, Any]] = []

    @click.command()
    @requirements_options
    def command(*, requirement_options: dict[str, Any]) -> None:
        found.append(requirement_options)

    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 0, done.output
    assert found[0].keys() == {each.name for each in fields(Requirements) if each.init}, "every wish has its option"
    return Requirements(**found[0])


def test_nothing_is_wished_for_but_what_was_said() -> None:
    assert requirements_of() == Requirements()


def test_every_wish() -> None:
    words = "-n 2 --memory 8GiB --share --min-free-memory 4GiB --model A100 --only 0,1 --only GPU-6 --exclude 3"
    more = "--priority 5 --idle --max-memory-usage 10 --max-gpu-utilization 5"
    assert requirements_of(*words.split(), *more.split()) == Requirements(
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
