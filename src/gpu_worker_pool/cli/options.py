"""The options that several commands share: requirements, wait limit, endpoints, and JSON."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import click

from gpu_worker_pool.cli.quantities import Duration, GPUNames, MemorySize, Percent
from gpu_worker_pool.wording import NOT_TEXT

Command = Callable[..., Any]

#: As in the lease API: printable, since other users see it. Invalid UTF-8 arrives as surrogates.
_TEXT: Final = re.compile(rf"[^{NOT_TEXT}\ud800-\udfff]{{0,200}}")


def is_text_for_others(text: str) -> bool:
    """Whether others can be shown it."""
    return _TEXT.fullmatch(text) is not None


def _applied(command: Command, options: list[Callable[[Command], Command]]) -> Command:
    # click lists the last decorator first.
    for option in reversed(options):
        command = option(command)
    return command


def _policy_options(command: Command) -> Command:
    choice = click.option(
        "--policy",
        type=click.Choice(["idle", "thresholds"]),
        help="How free a GPU must be: idle, no process outside the pool computes on it; or thresholds, by its memory "
        "usage and utilization.  [default: idle; thresholds with --share, --max-memory-usage or "
        "--max-gpu-utilization]",
    )
    return choice(click.option("--idle", is_flag=True, help="The same as --policy idle.")(command))


#: By field of the core's `Requirements`; a test checks that none is missing.
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
        help="Number of GPUs, all on one host.",
    ),
    "memory_mb": click.option(
        "--memory", "memory_mb", type=MemorySize(), help="Memory to reserve on each GPU: 8GiB, 24GB, 8000MB."
    ),
    "share": click.option("--share", is_flag=True, help="Let other requests use the rest of the GPU; needs --memory."),
    "min_free_memory_mb": click.option(
        "--min-free-memory",
        "min_free_memory_mb",
        type=MemorySize(),
        help="Memory that must be free when the GPU is granted.",
    ),
    "gpu_model": click.option("--model", "gpu_model", metavar="NAME", help="Part of the GPU's name, such as A100."),
    "only": click.option("--only", type=GPUNames(), multiple=True, help="Only these: indices or UUIDs, with commas."),
    "exclude": click.option("--exclude", type=GPUNames(), multiple=True, help="None of these GPUs."),
    "priority": click.option(
        "--priority",
        type=click.IntRange(-1000, 1000),
        default=0,
        show_default=True,
        metavar="N",
        help="Higher priorities are served first.",
    ),
    "policy": _policy_options,
    "memory_threshold": click.option(
        "--max-memory-usage",
        "memory_threshold",
        type=Percent(),
        help="Only GPUs whose memory usage is below this.  [default: 80 with --policy thresholds]",
    ),
    "utilization_threshold": click.option(
        "--max-gpu-utilization",
        "utilization_threshold",
        type=Percent(),
        help="Only GPUs whose utilization is below this.  [default: 90 with --policy thresholds]",
    ),
}


def requirements_options(command: Command) -> Command:
    """Passes `requirement_options` to the command: keyword arguments of the core's `Requirements`."""

    @wraps(command)
    def with_requirements(**given: Any) -> Any:
        requirement_options = {name: given.pop(name) for name in _REQUIREMENTS}
        for name in ("only", "exclude"):
            requirement_options[name] = [each for names in requirement_options[name] for each in names] or None
        requirement_options["policy"] = _policy(requirement_options, is_idle=given.pop("idle"))
        model = requirement_options["gpu_model"]
        if model is not None and not (model.strip() and is_text_for_others(model)):
            raise click.UsageError("--model must be part of a GPU's name, such as A100.")
        if requirement_options["share"] and requirement_options["memory_mb"] is None:
            raise click.UsageError("--share needs --memory: say how much of the GPU you need, such as --memory 8GiB.")
        return command(requirement_options=requirement_options, **given)

    return _applied(with_requirements, [*_REQUIREMENTS.values()])


def _policy(requirement_options: dict[str, Any], *, is_idle: bool) -> str:
    policy: str | None = requirement_options["policy"]
    if is_idle and policy == "thresholds":
        raise click.UsageError("--idle and --policy thresholds exclude each other: give only one of them.")
    if policy is not None or is_idle:
        return policy or "idle"
    thresholds = (requirement_options["memory_threshold"], requirement_options["utilization_threshold"])
    return "thresholds" if requirement_options["share"] or thresholds != (None, None) else "idle"


def lease_options(command: Command) -> Command:
    """The options of `run` and `wait`: passes `spec`, `progress` and `uuids` to the command."""

    @wraps(command)
    def with_spec(
        *,
        requirement_options: dict[str, Any],
        endpoints: tuple[str, ...],
        timeout: float | None,
        no_wait: bool,
        label: str | None,
        ttl: float | None,
        expect: float | None,
        max_time: float | None,
        grace: float,
        ask: bool,
        private: bool,
        with_reasons: bool,
        quiet: bool,
        is_here: bool,
        **given: Any,
    ) -> Any:
        from gpu_worker_pool.cli.running.lease_spec import LeaseSpec
        from gpu_worker_pool.cli.running.progress import Progress

        if no_wait and timeout is not None:
            raise click.UsageError("--no-wait and --timeout exclude each other: give only one of them.")
        if label is not None and not is_text_for_others(label):
            raise click.UsageError("--label must be at most 200 characters, all of them printable.")
        spec = LeaseSpec(
            requirement_options,
            list(endpoints),
            timeout,
            no_wait,
            label,
            ttl,
            is_private=private,
            is_here=is_here,
            expected_seconds=expect,
            max_seconds=max_time,
            grace_seconds=grace,
            asks=ask,
        )
        if private:
            # Also here: the command inherits it, so that it finds the lease in which it runs.
            from gpu_worker_pool.cli.local_state import use_own_directory

            use_own_directory()
        return command(spec=spec, progress=Progress(is_wanted=not quiet, with_reasons=with_reasons), **given)

    with_options = _applied(
        with_spec,
        [
            click.option(
                "--timeout", type=Duration(), help="Longest wait: 90s, 5m, 2h (then status 124).  [default: no limit]"
            ),
            click.option("--no-wait", is_flag=True, help="Do not wait at all (status 75 if nothing is free now)."),
            click.option("--label", metavar="TEXT", help="Shown to other users beside the lease."),
            click.option(
                "--ttl",
                type=Duration(2.0, 3600.0),
                help="How long the lease lasts without renewal: 2s to 1h.  [default: 60s]",
            ),
            click.option(
                "--expect",
                type=Duration(1.0),
                help="How long you will use the GPU, as far as you know: 40m, 2h. Never enforced; shortens the wait.",
            ),
            click.option(
                "--max-time",
                type=Duration(1.0),
                help="Longest time on the GPU, enforced: 8h. COMMAND gets SIGTERM before its end, within --grace.",
            ),
            click.option(
                "--grace",
                type=Duration(0.0),
                default="30s",
                show_default=True,
                help="How long before the end of --max-time COMMAND gets SIGTERM; at the end, SIGKILL.",
            ),
            click.option(
                "--ask",
                is_flag=True,
                help="While waiting, ask the holders in the way to give their GPUs back; no holder is forced.",
            ),
            click.option(
                "--private",
                is_flag=True,
                help="Coordinate only your own jobs, in a ledger that other users do not use.",
            ),
            click.option("--uuids", is_flag=True, help="Name GPUs by UUID instead of by index."),
            click.option(
                "--explain", "with_reasons", is_flag=True, help="While waiting, print the reason for every GPU."
            ),
            click.option("-q", "--quiet", is_flag=True, help="Print nothing while waiting."),
            endpoint_option,
            click.option(
                "--here", "is_here", is_flag=True, help="The endpoint's GPUs are this host's, as behind a tunnel."
            ),
        ],
    )
    return requirements_options(with_options)


endpoint_option: Callable[[Command], Command] = click.option(
    "-e",
    "--endpoint",
    "endpoints",
    multiple=True,
    metavar="URL",
    help="A GPU server, or local:// for this host's GPUs without a server; may be repeated.  "
    "[default: GPU_POOL_ENDPOINT, GPU_STATS_SERVICE_ENDPOINTS, GPU_SERVICE_ENDPOINTS or GPU_SERVICE_ENDPOINT, "
    "else local://]",
)

json_option: Callable[[Command], Command] = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON, documented and stable, for programs."
)
