"""Whether a lease is still its holder's: by its server's word, and by the clock alone where nobody is awake."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import threading
from datetime import datetime

import pytest

from gpu_worker_pool.core import ANY_GPU
from gpu_worker_pool.leases.lifetime import End, LeaseLife
from gpu_worker_pool.leases.values import HeldLease, LeaseAsk, LeasedGPU
from gpu_worker_pool.models import GlobalGPUAssignment, GPUAssignment, make_assignment


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def life(clock: Clock) -> LeaseLife:
    return LeaseLife(10.0, 100.0, clock)


def test_it_is_lost_one_ttl_after_the_last_renewal_was_sent(life: LeaseLife, clock: Clock) -> None:
    clock.now = 109.9
    assert not life.is_lost
    life.renewed(105.0)
    clock.now = 114.9
    assert not life.is_lost
    clock.now = 115.0
    assert life.is_lost
    assert "could not be renewed for 10 s" in life.reason


def test_what_was_lost_stays_lost_whatever_is_heard_later(life: LeaseLife, clock: Clock) -> None:
    clock.now = 110.0
    assert life.is_lost
    life.renewed(109.0)
    assert life.is_lost
    assert not life.end(End.RELEASED)
    assert not life.is_released


def test_an_answer_to_an_older_message_does_not_shorten_it(life: LeaseLife, clock: Clock) -> None:
    life.renewed(108.0)
    life.renewed(104.0)
    assert life.held_until == 118.0


def test_what_was_released_is_never_lost(life: LeaseLife, clock: Clock) -> None:
    assert life.end(End.RELEASED)
    clock.now = 1000.0
    assert not life.is_lost
    assert life.is_released
    assert not life.end(End.LOST, "too late")
    assert not life.is_lost


def test_its_server_s_word_counts_at_once(life: LeaseLife) -> None:
    assert life.end(End.LOST, "an administrator took it")
    assert life.is_lost
    assert life.reason == "an administrator took it"


async def test_whoever_waits_is_told_from_any_thread(life: LeaseLife) -> None:
    waiting = [asyncio.create_task(life.wait()) for _ in range(3)]
    await asyncio.sleep(0.01)
    waiting[0].cancel()
    threading.Thread(target=life.end, args=(End.LOST, "gone")).start()
    async with asyncio.timeout(5):
        await asyncio.gather(*waiting[1:])
        await life.wait()
    assert waiting[0].cancelled()
    assert life._listeners == []


async def test_whoever_waits_for_what_was_released_waits_for_ever(life: LeaseLife) -> None:
    life.end(End.RELEASED)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await life.wait()


def test_a_forked_child_says_what_was_known_at_the_fork(clock: Clock) -> None:
    life, lost = LeaseLife(10.0, 100.0, clock), LeaseLife(10.0, 100.0, clock)
    lost.end(End.LOST)
    child = os.fork()
    if child == 0:
        clock.now = 1000.0
        os._exit(0 if (life.is_lost, lost.is_lost) == (False, True) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --- as the holder sees it ---


def held(life: LeaseLife, *gpus: LeasedGPU) -> HeldLease:
    ask = LeaseAsk.new("worker-1", ANY_GPU, None, life.ttl_seconds)
    return HeldLease("server", "lease-7", 12, gpus or (LeasedGPU(3, "GPU-1", "H100"),), ask, life)


def assigned(life: LeaseLife, endpoint_id: str = "", *gpus: LeasedGPU) -> GPUAssignment:
    now, lease = datetime.now(), held(life, *gpus)
    return make_assignment(
        endpoint_id, lease.gpus, "worker-1", now, fence=12, lease_id="lease-7", expires_at=now, lease_health=life
    )


def test_an_assignment_with_a_lease(life: LeaseLife) -> None:
    assignment = assigned(life)
    assert type(assignment) is GPUAssignment
    assert (assignment.gpu_id, assignment.lease_id, assignment.fence) == (3, "lease-7", 12)
    assert assignment.env == {
        "CUDA_VISIBLE_DEVICES": "3",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NVIDIA_VISIBLE_DEVICES": "3",
        "GPU_POOL_LEASE_ID": "lease-7",
    }
    assert (assignment.lost, assignment.lost_reason) == (False, None)
    life.end(End.LOST, "gone")
    assert (assignment.lost, assignment.lost_reason) == (True, "gone")


def test_an_assignment_of_many_endpoints_with_a_lease(life: LeaseLife) -> None:
    assignment = assigned(life, "lab", LeasedGPU(1, "GPU-1", "H100"), LeasedGPU(2, "GPU-2", "H100"))
    assert isinstance(assignment, GlobalGPUAssignment)
    assert assignment.gpu_ids == ("lab:1", "lab:2")
    assert assignment.env["CUDA_VISIBLE_DEVICES"] == "1,2"


def test_mig_devices_are_named_by_their_uuids(life: LeaseLife) -> None:
    both = assigned(life, "", LeasedGPU(0, "MIG-1", "H100 MIG 3g.40gb"), LeasedGPU(0, "MIG-2", "H100 MIG 3g.40gb"))
    assert both.gpu_ids == (0, 0)
    assert both.env["CUDA_VISIBLE_DEVICES"] == both.env["NVIDIA_VISIBLE_DEVICES"] == "MIG-1,MIG-2"


def test_copies_know_what_becomes_of_the_lease_and_another_process_does_not(life: LeaseLife) -> None:
    assignment = assigned(life)
    copies = [copy.copy(assignment), copy.deepcopy(assignment)]
    elsewhere = pickle.loads(pickle.dumps(assignment))  # noqa: S301  # our own
    life.end(End.LOST)
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
