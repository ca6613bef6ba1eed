"""docs/CLI.md: what it says about options, statuses and JSON is what the program does. Its commands are typed elsewhere
(`tests/acceptance/test_console_blocks.py`)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click
import pytest

from gpu_worker_pool.cli.exits import Status
from gpu_worker_pool.cli.program import COMMANDS, gpu_pool
from tests.cli.programs import Programs
from tests.waiting import eventually

PAGE = (Path(__file__).parents[2] / "docs" / "CLI.md").read_text(encoding="utf-8")
SHAPES = dict(re.findall(r"<!-- shape: (\w+) -->\n```json\n(.*?)^```$", PAGE, re.M | re.S))


def shape(value: Any) -> Any:
    """Keys and types; of a list that of its first entry."""
    if isinstance(value, dict):
        return {key: shape(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def assert_alike(documented: Any, real: Any, where: str) -> None:
    """What may be null may be so on either side; an empty list says nothing of what would be in it."""
    if isinstance(documented, dict):
        assert list(documented) == list(real), where
        for key, entry in documented.items():
            assert_alike(entry, real[key], f"{where}.{key}")
    elif isinstance(documented, list):
        assert isinstance(real, list), where
        if documented and real:
            assert_alike(documented[0], real[0], f"{where}[0]")
    else:
        assert documented == real or "NoneType" in (documented, real), f"{where}: {documented}, not {real}"


def test_the_shapes_of_json(programs: Programs) -> None:
    programs.holding("--label", "nightly")
    waiting = programs.start("run", "--", "true")
    eventually(programs.waiting)
    real = {name: programs.json(name) for name in ("leases", "queue", "explain", "status", "config")}
    real["doctor"] = json.loads(programs.call("doctor", "--json").stdout)
    real["release"] = programs.json("release", real["queue"]["queue"][0]["request_id"])
    assert waiting.wait(10) == 1
    programs.environment["GPU_BACKEND"] = "simulated:2"
    real["wait"] = json.loads(programs.run(["bash", "-c", "x=$(gpu-pool wait --json); echo $x"]).stdout)
    assert SHAPES.keys() == real.keys()
    for name, text in SHAPES.items():
        assert_alike(shape(json.loads(text)), shape(real[name]), name)


def test_every_command_has_its_section() -> None:
    headings = " ".join(re.findall(r"^## (.+)$", PAGE, re.M))
    assert [name for name in COMMANDS if name not in headings and name != "demo"] == []
    assert "gpu-pool demo" in PAGE


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_named(name: str) -> None:
    command = gpu_pool.get_command(click.Context(gpu_pool), name)
    assert command is not None
    options = [option for param in command.params if isinstance(param, click.Option) for option in param.opts]
    # What a command has for itself alone is in its help.
    own = {"--interval", "--plain", "--host", "--port", "--access-log", "-q", "--simulate"}
    missing = [option for option in options if option not in own and not re.search(rf"{re.escape(option)}\b", PAGE)]
    assert missing == []


def test_every_status_is_named() -> None:
    table = PAGE.partition("## Exit statuses")[2].partition("```")[0]
    numbers = {int(number) for number in re.findall(r"\b(\d+)\b", table)}
    assert {int(status) for status in Status if status is not Status.BUG} <= numbers
