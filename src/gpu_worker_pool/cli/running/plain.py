"""`gpu-pool run -- COMMAND` without options: what its options are by default, without the parser that would say so.

It is what loops and makefiles call again and again, and the parser takes as long to load as all else of this process.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.cli.running.command import CommandOnGPU, check_command
from gpu_worker_pool.cli.running.lease_spec import LeaseSpec
from gpu_worker_pool.cli.running.progress import Progress
from gpu_worker_pool.hardware.origin import program_of_command, worker_name

if TYPE_CHECKING:
    from collections.abc import Sequence

#: As `requirements_options` passes them if none is given.
REQUIREMENTS: Final[dict[str, Any]] = {
    "count": 1,
    "memory_mb": None,
    "share": False,
    "min_free_memory_mb": None,
    "gpu_model": None,
    "only": None,
    "exclude": None,
    "priority": 0,
    "policy": "idle",
    "memory_threshold": None,
    "utilization_threshold": None,
}


def plain_spec(command: Sequence[str]) -> LeaseSpec:
    return LeaseSpec(
        dict(REQUIREMENTS),
        [],
        None,
        False,
        None,
        None,
        worker_id=worker_name(command[0]),
        program=program_of_command(command),
        pid=os.getpid(),
    )


def run_plain(command: Sequence[str]) -> int:
    """Returns the exit status."""
    check_command(command)
    return CommandOnGPU(
        command,
        plain_spec(command),
        Progress(),
        by_uuid=False,
        terminates_when_lost=False,
        yield_signal=None,
        notify=None,
        more_variables={},
    ).run()
