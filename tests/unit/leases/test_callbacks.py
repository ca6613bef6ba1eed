"""The thread of `on_lease_lost`: every loss is told, one after the other, and then it ends."""

from __future__ import annotations

import sys
import threading
from datetime import datetime

import pytest
from tests.waiting import eventually

from gpu_worker_pool import GPUAssignment
from gpu_worker_pool.client.loss_callback import LeaseCallback


def assignments(count: int) -> list[GPUAssignment]:
    return [GPUAssignment(number, f"worker-{number}", datetime.now()) for number in range(count)]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "gpu-pool on_lease_lost"]


def test_losses_are_told_in_order_and_then_the_thread_ends() -> None:
    may_begin, told, lost = threading.Event(), [], assignments(20)

    def callback(assignment: GPUAssignment) -> None:
        may_begin.wait()
        told.append(assignment)

    telling = LeaseCallback(callback)
    for assignment in lost:
        telling.tell(assignment)
    telling.end()
    assert told == []
    assert len(threads()) == 1
    may_begin.set()
    eventually(lambda: not threads())
    assert told == lost


def test_there_is_no_thread_before_the_first_loss() -> None:
    telling = LeaseCallback(print)
    assert threads() == []
    telling.end()
    assert threads() == []


@pytest.mark.parametrize("fail", [lambda: 1 // 0, sys.exit])
def test_one_that_fails_is_logged_and_the_next_loss_told(fail: object, caplog: pytest.LogCaptureFixture) -> None:
    told, lost = [], assignments(3)

    def callback(assignment: GPUAssignment) -> None:
        told.append(assignment)
        fail()  # type: ignore[operator]

    telling = LeaseCallback(callback)
    for assignment in lost:
        telling.tell(assignment)
    telling.end()
    eventually(lambda: not threads())
    assert told == lost
    assert [record.getMessage() for record in caplog.records] == [
        f"on_lease_lost failed for worker-{number}" for number in range(3)
    ]
