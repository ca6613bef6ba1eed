"""Options that several commands have: wishes, how long to wait, which endpoints, and JSON."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import click

from gpu_worker_pool.cli.quantities import Duration, GPUNames, MemorySize, Percent
from gpu_worker_pool.cli.running.lease_spec import Patience

#: What click calls; with which arguments is for its options to say.
Command = Callable[..., Any]

#: As the lease API has it: others read it, on terminals too. Bytes that are no UTF-8 come as surrogates.
_TEXT: Final = re.compile(r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{0,200}")


def _applied(command: Command, options: list[Callable[[Command], Command]]) -> Command:
    # click lists the options of a command in the order in which the last decorator comes first.
    for option in reversed(options):
        command = option(command)
    return command


#: By the names that the core has for them.
_REQUIREMENTS: Final[dict[str, Callable[[Command], Command]]] = {
    "count": click.option(
        "-n",
        "--count",
        "-g",
        "--gpus",
        "count",
        type=click.IntRange(1, 1024),
        default=1,
        show_default=True,
        metavar="N",
        help="How many GPUs, all of one host.",
    ),
    "memory_mb": click.option(
        "--memory", "memory_mb", type=MemorySize(), help="Reserve so much on each GPU: 8GiB, 24GB, 8000MB."
    ),
    "share": click.option("--share", is_flag=True, help="Others may have the rest of the GPU; needs --memory."),
    "min_free_memory_mb": click.option(
        "--min-free-memory",
        "min_free_memory_mb",
        type=MemorySize(),
        help="So much must be free when the GPU is granted.",
    ),
    "gpu_model": click.option("--model", "gpu_model", metavar="NAME", help="Part of the GPU's name, such as A100."),
    "only": click.option("--only", type=GPUNames(), multiple=True, help="Only these: numbers or UUIDs, with commas."),
    "exclude": click.option("--exclude", type=GPUNames(), multiple=True, help="None of these."),
    "priority": click.option(
        "--priority",
        type=click.IntRange(-1000, 1000),
        default=0,
        show_default=True,
        metavar="N",
        help="Higher goes first.",
    ),
    "policy": click.option("--idle", "policy", is_flag=True, help="Only GPUs with no foreign process at all on them."),
    "memory_threshold": click.option(
        "--max-memory-usage",
        "memory_threshold",
        type=Percent(),
        help="Only GPUs whose memory is less full.  [default: 80]",
    ),
    "utilization_threshold": click.option(
        "--max-gpu-utilization",
        "utilization_threshold",
        type=Percent(),
        help="Only GPUs that are less busy.  [default: 90]",
    ),
}


def wish_options(command: Command) -> Command:
    """Adds `requirement_options` to the command: keyword arguments of the core's `Requirements`, loaded later."""

    @wraps(command)
    def with_wishes(**given: Any) -> Any:
        requirement_options = {name: given.pop(name) for name in _REQUIREMENTS}
        for name in ("only", "exclude"):
            requirement_options[name] = [each for names in requirement_options[name] for each in names] or None
        requirement_options["policy"] = "idle" if requirement_options["policy"] else "thresholds"
        model = requirement_options["gpu_model"]
        if model is not None and not (model.strip() and _TEXT.fullmatch(model)):
            raise click.UsageError("--model must be part of a GPU's name, such as A100.")
        if requirement_options["share"] and requirement_options["memory_mb"] is None:
            raise click.UsageError("--share needs --memory: say how much of the GPU is yours, such as --memory 8GiB.")
        return command(requirement_options=requirement_options, **given)

    return _applied(with_wishes, [*_REQUIREMENTS.values()])


def lease_options(command: Command) -> Command:
    """Gives the command `patience`, `label` and `ttl`."""

    @wraps(command)
    def with_patience(**given: Any) -> Any:
        timeout, no_wait, label = given.pop("timeout"), given.pop("no_wait"), given["label"]
        if no_wait and timeout is not None:
            raise click.UsageError("--no-wait and --timeout contradict each other: give one of them.")
        if label is not None and not _TEXT.fullmatch(label):
            raise click.UsageError("--label must be at most 200 characters, all of them printable.")
        return command(patience=Patience(timeout, no_wait), **given)

    return _applied(
        with_patience,
        [
            click.option(
                "--timeout", type=Duration(), help="Wait no longer: 90s, 5m, 2h (then status 124).  [default: for ever]"
            ),
            click.option("--no-wait", is_flag=True, help="Do not wait at all (status 75 if nothing is free now)."),
            click.option("--label", metavar="TEXT", help="For others to read, who wonder who has the GPU."),
            click.option(
                "--ttl",
                type=Duration(2.0, 3600.0),
                help="How long the lease outlives whoever keeps it: 2s to 1h.  [default: 60s]",
            ),
        ],
    )


endpoint_option: Callable[[Command], Command] = click.option(
    "-e",
    "--endpoint",
    "endpoints",
    multiple=True,
    metavar="URL",
    help="A GPU server, or local:// for this host without one; may be given several times.  "
    "[default: GPU_STATS_SERVICE_ENDPOINTS, GPU_SERVICE_ENDPOINTS or GPU_SERVICE_ENDPOINT, else local://]",
)

json_option: Callable[[Command], Command] = click.option(
    "--json", "as_json", is_flag=True, help="For programs: JSON, documented and stable."
)
