"""Random histories over the pool: a few in every test run, very many in `make test-long`."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.unit.core.histories import FairlyShared, Histories, ImpatientBypass, InProcess, OnALedger, UnderAPolicy

MACHINES = [InProcess, OnALedger, ImpatientBypass, UnderAPolicy, FairlyShared]
STEPS = 50


def examine(machine: type[Histories], examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.timeout(600)  # seconds if it passes; Hypothesis takes up to five minutes to shorten a history that fails
@pytest.mark.parametrize("machine", MACHINES)
def test_every_invariant_holds_after_every_step(machine: type[Histories]) -> None:
    examine(machine, examples=60)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", MACHINES)
def test_every_invariant_holds_over_very_many_steps(machine: type[Histories]) -> None:
    examine(machine, examples=5_000)  # about 40 steps each: a million for all machines together
