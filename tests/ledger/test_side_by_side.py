"""Random histories of ledgers side by side: a few in every test run, very many in `make test-long`."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from gpu_worker_pool.ledger import transactions, usage_recorder
from tests.ledger.side_by_side import Converging, SideBySide

MACHINES = [SideBySide, Converging]


def examine(machine: type[RuleBasedStateMachine], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that most of what has ended must be looked up in the file."""
    monkeypatch.setattr(transactions, "MOST_OUTCOMES", 3)
    # Usage records are moved to their file by whoever comes first, each time with a stamp: not the same in two ledgers.
    monkeypatch.setattr(usage_recorder, "RECORD_SECONDS", math.inf)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("machine", MACHINES)
def test_every_ledger_answers_as_memory_does(machine: type[RuleBasedStateMachine]) -> None:
    examine(machine, examples=12, steps=25)


@pytest.mark.long
@pytest.mark.parametrize("machine", MACHINES)
def test_every_ledger_answers_as_memory_does_over_very_many_steps(machine: type[RuleBasedStateMachine]) -> None:
    examine(machine, examples=600, steps=60)
