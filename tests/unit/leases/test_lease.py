"""Whether a lease is still its holder's: by its server's word, and by the clock alone where nobody is awake."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import threading
from datetime import datetime

import pytest
from tests.fakes.lease_service import FakeLeaseService, new_request

from gpu_worker_pool.leases.lease import HeldLease, LeasedGPU, LeaseEnd
from gpu_worker_pool.models import GlobalGPUAssignment, GPUAssignment, make_assignment


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lease(clock: Clock) -> HeldLease:
    return held(clock)


def held(clock: Clock) -> HeldLease:
    return HeldLease(FakeLeaseService(), new_request(10.0), "lease-7", 12, (), 100.0, now=clock)


def test_it_is_lost_one_ttl_after_the_last_renewal_was_sent(lease: HeldLease, clock: Clock) -> None:
    clock.now = 109.9
    assert not lease.is_lost
    lease.renewed(105.0)
    clock.now = 114.9
    assert not lease.is_lost
    clock.now = 115.0
    assert lease.is_lost
    assert "could not be renewed for 10 s" in lease.reason


def test_what_was_lost_stays_lost_whatever_is_heard_later(lease: HeldLease, clock: Clock) -> None:
    clock.now = 110.0
    assert lease.is_lost
    lease.renewed(109.0)
    assert lease.is_lost
    assert not lease.end(LeaseEnd.RELEASED)
    assert not lease.is_released


def test_an_answer_to_an_older_message_does_not_shorten_it(lease: HeldLease, clock: Clock) -> None:
    lease.renewed(108.0)
    lease.renewed(104.0)
    assert lease.held_until == 118.0


def test_what_was_released_is_never_lost(lease: HeldLease, clock: Clock) -> None:
    assert lease.end(LeaseEnd.RELEASED)
    clock.now = 1000.0
    assert not lease.is_lost
    assert lease.is_released
    assert not lease.end(LeaseEnd.LOST, "too late")
    assert not lease.is_lost


def test_its_server_s_word_counts_at_once(lease: HeldLease) -> None:
    assert lease.end(LeaseEnd.LOST, "an administrator took it")
    assert lease.is_lost
    assert lease.reason == "an administrator took it"


async def test_whoever_waits_is_told_from_any_thread(lease: HeldLease) -> None:
    waiting = [asyncio.create_task(lease.wait()) for _ in range(3)]
    await asyncio.sleep(0.01)
    waiting[0].cancel()
    threading.Thread(target=lease.end, args=(LeaseEnd.LOST, "gone")).start()
    async with asyncio.timeout(5):
        await asyncio.gather(*waiting[1:])
        await lease.wait()
    assert waiting[0].cancelled()
    assert lease._listeners == []


async def test_whoever_waits_for_what_was_released_waits_for_ever(lease: HeldLease) -> None:
    lease.end(LeaseEnd.RELEASED)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await lease.wait()


def test_a_forked_child_says_what_was_known_at_the_fork(clock: Clock) -> None:
    lease, lost = held(clock), held(clock)
    lost.end(LeaseEnd.LOST)
    child = os.fork()
    if child == 0:
        clock.now = 1000.0
        os._exit(0 if (lease.is_lost, lost.is_lost) == (False, True) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --- as the holder sees it ---


def assigned(lease: HeldLease, endpoint_id: str = "", *gpus: LeasedGPU) -> GPUAssignment:
    now, gpus = datetime.now(), gpus or (LeasedGPU(3, "GPU-1", "H100"),)
    return make_assignment(
        endpoint_id, gpus, "worker-1", now, fence=12, lease_id="lease-7", expires_at=now, lease_health=lease
    )


def test_an_assignment_with_a_lease(lease: HeldLease) -> None:
    assignment = assigned(lease)
    assert type(assignment) is GPUAssignment
    assert (assignment.gpu_id, assignment.lease_id, assignment.fence) == (3, "lease-7", 12)
    assert assignment.env == {
        "CUDA_VISIBLE_DEVICES": "3",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NVIDIA_VISIBLE_DEVICES": "GPU-1",
        "GPU_POOL_LEASE_ID": "lease-7",
    }
    assert (assignment.lost, assignment.lost_reason) == (False, None)
    lease.end(LeaseEnd.LOST, "gone")
    assert (assignment.lost, assignment.lost_reason) == (True, "gone")


def test_an_assignment_of_many_endpoints_with_a_lease(lease: HeldLease) -> None:
    assignment = assigned(lease, "lab", LeasedGPU(1, "GPU-1", "H100"), LeasedGPU(2, "GPU-2", "H100"))
    assert isinstance(assignment, GlobalGPUAssignment)
    assert assignment.gpu_ids == ("lab:1", "lab:2")
    assert assignment.env["CUDA_VISIBLE_DEVICES"] == "1,2"


def test_mig_devices_are_named_by_their_uuids(lease: HeldLease) -> None:
    both = assigned(lease, "", LeasedGPU(0, "MIG-1", "H100 MIG 3g.40gb"), LeasedGPU(0, "MIG-2", "H100 MIG 3g.40gb"))
    assert both.gpu_ids == (0, 0)
    assert both.env["CUDA_VISIBLE_DEVICES"] == both.env["NVIDIA_VISIBLE_DEVICES"] == "MIG-1,MIG-2"


def test_copies_know_what_becomes_of_the_lease_and_another_process_does_not(lease: HeldLease) -> None:
    assignment = assigned(lease)
    copies = [copy.copy(assignment), copy.deepcopy(assignment)]
    elsewhere = pickle.loads(pickle.dumps(assignment))  # noqa: S301  # our own
    lease.end(LeaseEnd.LOST)
    assert [one.lost for one in copies] == [True, True]
    assert elsewhere == assignment
    assert not elsewhere.lost
    assert elsewhere._lease_health is None, "nobody would tell it there, and the clock alone must not"
    assert elsewhere.env == assignment.env


async def test_without_a_lease_nothing_is_lost() -> None:
    assignment = GPUAssignment(0, "worker-1", datetime.now())
    assert (assignment.lost, assignment.lost_reason) == (False, None)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await assignment.wait_lost()
