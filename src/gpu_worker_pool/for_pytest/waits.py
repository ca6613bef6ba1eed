"""The report of pytest: how long each test waited for its GPU."""

from __future__ import annotations

from typing import Any, Final

from gpu_worker_pool.wording import spoken_seconds

#: Properties of a test, also in the XML report.
WAIT_PROPERTY: Final = "gpu_pool_wait_seconds"
GPUS_PROPERTY: Final = "gpu_pool_gpus"
#: Without -v: shorter waits, and more of them, are only counted.
SHOWN_SECONDS: Final = 0.05
MOST_SHOWN: Final = 20


def write_waits(terminal: Any, reports: list[Any]) -> None:
    """How long each test waited for its GPU, the longest first."""
    waits: dict[str, tuple[float, str]] = {}
    for report in reports:
        properties = dict(getattr(report, "user_properties", ()))
        if WAIT_PROPERTY in properties:
            waits[report.nodeid] = (float(properties[WAIT_PROPERTY]), str(properties.get(GPUS_PROPERTY, "none")))
    is_verbose = terminal.config.option.verbose > 0
    ranked = sorted(waits.items(), key=lambda each: -each[1][0])
    shown = ranked if is_verbose else [each for each in ranked if each[1][0] >= SHOWN_SECONDS][:MOST_SHOWN]
    numbers = {gpu for _, used in waits.values() for gpu in used.split(",") if used != "none"}
    gpus = ", ".join(sorted(numbers, key=lambda number: (len(number), number)))
    terminal.section("gpu-pool: waits for GPUs", sep="-")
    for nodeid, (seconds, used) in shown:
        terminal.write_line(f"{seconds:8.2f} s  GPU {used:<5} {nodeid}")
    total = sum(seconds for seconds, _ in waits.values())
    without = sum(used == "none" for _, used in waits.values())
    missing = f"; {without} without a GPU" if without else ""
    rest = len(waits) - len(shown)
    left = f"; {rest} shorter wait{'s' if rest != 1 else ''} not shown (-v shows all)" if rest else ""
    terminal.write_line(
        f"{len(waits)} test{'s' if len(waits) != 1 else ''} on GPU {gpus or 'none'}, "
        f"waited {spoken_seconds(total)} in all{missing}{left}"
    )
