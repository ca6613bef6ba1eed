"""How many wrong keys are too many, and for whom."""

from __future__ import annotations

import pytest

from gpu_worker_pool.gpu_server.wrong_keys import BURST, MOST_ADDRESSES, WrongKeys
from gpu_worker_pool.testing import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1000.0)


def test_a_few_are_mistakes_and_one_a_second_stays_one(clock: FakeClock) -> None:
    wrong = WrongKeys(clock.now)
    assert [wrong.seconds_to_wait("192.0.2.1") for _ in range(BURST)] == [0] * BURST
    assert wrong.seconds_to_wait("192.0.2.1") == 1
    assert wrong.seconds_to_wait("192.0.2.2") == 0, "each address for itself"
    for _ in range(100):
        clock.advance(1.0)
        assert wrong.seconds_to_wait("192.0.2.1") == 0
    assert wrong.seconds_to_wait("192.0.2.1") == 1


def test_who_goes_on_need_not_wait_longer_than_others(clock: FakeClock) -> None:
    wrong = WrongKeys(clock.now)
    assert max(wrong.seconds_to_wait("192.0.2.1") for _ in range(1000)) == 1


def test_one_host_has_many_addresses_of_ipv6(clock: FakeClock) -> None:
    wrong = WrongKeys(clock.now)
    assert any(wrong.seconds_to_wait(f"2001:db8::{number:x}") for number in range(BURST + 1))
    assert wrong.seconds_to_wait("2001:db8:0:1::1") == 0
    assert any(wrong.seconds_to_wait(address) for address in ["192.0.2.9", "::ffff:192.0.2.9"] * BURST)


def test_no_more_addresses_are_remembered_than_a_number(clock: FakeClock) -> None:
    wrong = WrongKeys(clock.now)
    for number in range(MOST_ADDRESSES + 500):
        wrong.seconds_to_wait(f"10.0.{number >> 8}.{number & 255}")
    assert len(wrong._counts) == MOST_ADDRESSES
