"""The lease thread: it renews in time, gives back whatever happens, and reports what is lost."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
from tests.fakes.lease_service import FakeLeaseService, new_request
from tests.waiting import eventually

from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.errors import (
    LeaseEndedError,
    NetworkRetryableError,
    PoolStoppedError,
    ServiceRefusedError,
    StaleAssignmentError,
    UnknownLeaseError,
)
from gpu_worker_pool.leases.lease import HeldLease, LeaseEnd
from gpu_worker_pool.leases.lease_thread import LeaseThread


@pytest.fixture
def lost() -> list[tuple[HeldLease, str]]:
    """Leases that were told to be lost, and in which thread."""
    return []


@pytest.fixture
def thread(lost: list[tuple[HeldLease, str]]) -> Iterator[LeaseThread]:
    before = threading.active_count()
    started = LeaseThread(lambda lease: lost.append((lease, threading.current_thread().name)))
    started.start()
    yield started
    started.request_stop().result(timeout=10)
    started.join()
    assert threading.active_count() == before


def hold(thread: LeaseThread, service: FakeLeaseService, ttl_seconds: float = 60.0) -> HeldLease:
    lease = service.lease(new_request(ttl_seconds), boot_time())
    thread.call(thread.engine.hold, lease)
    return lease


def test_a_lease_is_renewed_every_third_of_its_life(thread: LeaseThread, lost: list[object]) -> None:
    service = FakeLeaseService()
    begun = boot_time()
    lease = hold(thread, service, ttl_seconds=3.0)
    eventually(lambda: service.count("renew") >= 3)
    assert service.count("renew") <= boot_time() - begun
    assert not lease.is_lost
    assert lost == []


def test_a_stop_does_not_wait_for_what_will_not_end(thread: LeaseThread) -> None:
    is_asked = threading.Event()

    async def withdraw() -> None:
        """As a request does: told to end, it gives up its place first, at a server that does not answer."""
        try:
            is_asked.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()

    thread.call(thread.engine.work_on, withdraw())
    is_asked.wait(10)
    thread.request_stop().result(timeout=30)


def test_a_renewal_that_fails_is_tried_again_in_time(thread: LeaseThread, lost: list[object]) -> None:
    service = FakeLeaseService(failing={"renew": NetworkRetryableError("no way")})
    lease = hold(thread, service, ttl_seconds=2.0)
    eventually(lambda: service.count("renew") >= 3)
    assert not lease.is_lost
    service.failing.clear()
    time.sleep(2.0)
    assert not lease.is_lost
    assert lost == []


def test_it_is_lost_one_ttl_after_the_last_renewal(thread: LeaseThread, lost: list[tuple[HeldLease, str]]) -> None:
    service = FakeLeaseService(failing={"renew": NetworkRetryableError("no way")})
    begun = time.monotonic()
    lease = hold(thread, service, ttl_seconds=1.0)
    eventually(lambda: lost)
    assert 0.95 <= time.monotonic() - begun <= 1.8
    assert lost == [(lease, "gpu-pool leases")]
    assert lease.is_lost
    asked = service.count("renew")
    time.sleep(0.5)
    assert service.count("renew") == asked, "what is lost is not asked for any more"


@pytest.mark.parametrize("error", [LeaseEndedError("it has ended"), UnknownLeaseError("there is none")])
def test_its_server_s_word_counts_at_once(
    thread: LeaseThread, lost: list[tuple[HeldLease, str]], error: Exception
) -> None:
    service = FakeLeaseService(failing={"renew": error})
    lease = hold(thread, service, ttl_seconds=1.2)
    eventually(lambda: lost, within_seconds=1.0)
    assert service.count("renew") == 1
    assert lease.reason == str(error)


def test_a_refusal_that_is_not_the_ledger_s_is_no_loss(thread: LeaseThread, lost: list[object]) -> None:
    """A proxy that answers 403, or a key that is being exchanged."""
    service = FakeLeaseService(failing={"renew": ServiceRefusedError("go away", status=403)})
    lease = hold(thread, service, ttl_seconds=3.0)
    eventually(lambda: service.count("renew") >= 3)
    service.failing.clear()
    time.sleep(0.5)
    assert not lease.is_lost
    assert lost == []


def test_a_renewal_that_fails_as_nobody_expected_is_told_once_and_tried_again(
    thread: LeaseThread, lost: list[tuple[HeldLease, str]], caplog: pytest.LogCaptureFixture
) -> None:
    service = FakeLeaseService(failing={"renew": ZeroDivisionError("oops")})
    kept, lease = hold(thread, service, ttl_seconds=60.0), hold(thread, service, ttl_seconds=1.0)
    eventually(lambda: lost)
    assert lost == [(lease, "gpu-pool leases")]
    assert service.count("renew") >= 3
    assert not kept.is_lost
    (bug,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert bug.getMessage() == f"renewing {lease.shown} failed"


def test_one_that_answers_slowly_delays_no_other(thread: LeaseThread) -> None:
    slow, quick = FakeLeaseService(delay_seconds=30.0), FakeLeaseService()
    for _ in range(20):
        hold(thread, slow, ttl_seconds=1.0)
    lease = hold(thread, quick, ttl_seconds=0.6)
    time.sleep(1.5)
    assert not lease.is_lost


def test_whoever_is_told_of_losses_and_fails_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: HeldLease) -> None:
        raise ZeroDivisionError

    thread = LeaseThread(fail)
    thread.start()
    service = FakeLeaseService(failing={"renew": LeaseEndedError("gone")})
    leases = [hold(thread, service, ttl_seconds=0.6) for _ in range(2)]
    eventually(lambda: all(lease.has_ended for lease in leases))
    eventually(lambda: caplog.text.count("reporting the loss of") == 2)
    thread.request_stop().result(timeout=10)
    thread.join()


# --- giving back ---


def release(thread: LeaseThread, lease: HeldLease) -> None:
    thread.do(partial(thread.engine.release, lease)).result(timeout=10)


def test_releasing_ends_the_renewals_and_twice_is_harmless(thread: LeaseThread, lost: list[object]) -> None:
    service = FakeLeaseService()
    lease = hold(thread, service, ttl_seconds=0.6)
    release(thread, lease)
    release(thread, lease)
    assert service.count("release") == 1
    renewed = service.count("renew")
    time.sleep(0.5)
    assert service.count("renew") == renewed
    assert not lease.is_lost
    assert lost == []


def test_releasing_what_was_lost_says_so(thread: LeaseThread) -> None:
    service = FakeLeaseService()
    lease = hold(thread, service)
    lease.end(LeaseEnd.LOST, "an administrator took it")
    with pytest.raises(StaleAssignmentError, match="an administrator took it"):
        release(thread, lease)
    assert service.count("release") == 0
    other = hold(thread, service)
    service.failing["release"] = LeaseEndedError("it was lost before")
    with pytest.raises(StaleAssignmentError, match="it was lost before"):
        release(thread, other)


def test_a_server_that_is_away_does_not_keep_a_holder(thread: LeaseThread, caplog: pytest.LogCaptureFixture) -> None:
    service = FakeLeaseService(failing={"release": NetworkRetryableError("no way")})
    lease = hold(thread, service)
    release(thread, lease)
    assert "could not be given back" in caplog.text
    eventually(lambda: service.count("release") >= 2)
    service.failing.clear()
    eventually(lambda: not service.held)


def test_what_is_let_go_is_neither_renewed_nor_released(thread: LeaseThread, lost: list[object]) -> None:
    service = FakeLeaseService()
    lease = hold(thread, service, ttl_seconds=0.6)
    thread.call(thread.engine.let_expire, lease)
    eventually(lambda: lease.is_lost)
    renewed = service.count("renew")
    time.sleep(0.5)
    assert service.count("renew") == renewed
    assert service.count("release") == 0
    assert lost == [], "nobody is left to be told"


# --- the end ---


def test_a_stop_gives_everything_back(caplog: pytest.LogCaptureFixture) -> None:
    lost: list[HeldLease] = []
    thread = LeaseThread(lost.append)
    thread.start()
    service = FakeLeaseService()
    thread.close_with(service.close)
    leases = [hold(thread, service) for _ in range(3)]
    thread.request_stop().result(timeout=10)
    thread.join()
    assert service.held == {}
    assert [name for name, _ in service.calls] == ["release"] * 3 + ["close"]
    assert all(lease.is_lost and "stopped" in lease.reason for lease in leases)
    assert lost == [], "whoever stops it knows"
    assert not thread.call(print)
    with pytest.raises(PoolStoppedError):
        thread.do(service.close).result(timeout=1)
    assert caplog.records == []


def test_what_a_stop_gives_back_is_no_loss_to_be_told(thread: LeaseThread, lost: list[object]) -> None:
    """Also if a renewal is answered in the same moment."""
    is_asked, answer = threading.Event(), asyncio.Event()

    class Dawdling(FakeLeaseService):
        async def renew(self, lease: HeldLease, *, timeout_seconds: float) -> None:
            is_asked.set()
            await answer.wait()
            await super().renew(lease, timeout_seconds=timeout_seconds)

    lease = hold(thread, Dawdling(), ttl_seconds=1.5)
    is_asked.wait(10)
    thread.call(time.sleep, 0.1)  # what follows happens to it at once
    stopped = thread.request_stop()
    thread.call(answer.set)
    stopped.result(timeout=10)
    assert lease.is_lost, "its holder may ask"
    assert lost == []


def test_a_stop_does_not_wait_for_a_server_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gpu_worker_pool.leases.engine.STOP_SECONDS", 0.3)
    thread = LeaseThread(lambda _: None)
    thread.start()
    service = FakeLeaseService(delay_seconds=30.0)
    hold(thread, service)
    begun = time.monotonic()
    thread.request_stop().result(timeout=10)
    thread.join()
    assert time.monotonic() - begun < 3
    assert "they will expire" in caplog.text


async def test_what_is_done_is_done_to_its_end_whoever_waits_for_it(thread: LeaseThread) -> None:
    service = FakeLeaseService(delay_seconds=0.1)
    lease = hold(thread, service)
    releasing = asyncio.wrap_future(thread.do(partial(thread.engine.release, lease)))
    await asyncio.sleep(0.02)
    releasing.cancel()
    await asyncio.sleep(0.3)
    assert service.held == {}


def test_a_forked_child_has_no_lease_thread(thread: LeaseThread) -> None:
    service = FakeLeaseService()
    lease = hold(thread, service, ttl_seconds=0.6)
    eventually(lambda: service.count("renew"))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert not thread.is_here
            assert not thread.call(print, "never")
            thread.request_stop()
            thread.join()
            thread.exit()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    renewed = service.count("renew")
    eventually(lambda: service.count("renew") > renewed)
    assert not lease.is_lost


def test_threads_and_sockets_end_with_it() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # the shortest way
    for _ in range(5):
        thread = LeaseThread(lambda _: None)
        thread.start()
        thread.request_stop().result(timeout=10)
        thread.join()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert logging.getLogger("gpu_worker_pool.leases.keeper").level == logging.NOTSET
