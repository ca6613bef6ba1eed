"""What others are told of a holder or a waiter, and how a process that waits for itself is told so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_worker_pool.broker.waiting import EXPLAINED_CLASSES, describe, describe_queue
from gpu_worker_pool.core import Lease, Origin, Pool, PoolSettings, Request, Requested, explain, explain_requirements
from gpu_worker_pool.core.origins import is_same_process, name_of, vouched
from gpu_worker_pool.testing import gpus, snapshot

ADA = Origin("ada", "gpu-1", 4242, "train.py", is_verified=True)


@pytest.mark.parametrize(
    ("origin", "name"),
    [
        (None, "worker-1"),
        (ADA, "ada's train.py (pid 4242)"),
        (replace(ADA, host="lap-7"), "ada's train.py (pid 4242 on lap-7)"),
        (replace(ADA, is_verified=False), "ada's train.py (pid 4242, unverified)"),
        (Origin("ada", "lap-7", 4242, "train.py"), "ada's train.py (pid 4242 on lap-7, unverified)"),
        (Origin("ada", is_verified=True), "ada"),
        (Origin(program="train.py", is_verified=True), "train.py"),
        (Origin(pid=7, is_verified=True), "worker-1 (pid 7)"),
        (Origin(), "worker-1 (unverified)"),
    ],
)
def test_the_name_for_others(origin: Origin | None, name: str) -> None:
    assert name_of(Request("r", worker_id="worker-1", origin=origin), "gpu-1") == name


@pytest.mark.parametrize(
    ("account", "worker_id", "origin", "name"),
    [
        ("key:physics", "", None, "physics"),
        ("key:physics", "worker-1", None, "physics's worker-1"),
        ("key:physics", "worker-1", replace(ADA, is_verified=False), "ada's train.py (pid 4242, unverified)"),
        ("key-1f0c22", "", None, "r"),
        ("loopback", "", None, "r"),
    ],
)
def test_the_name_of_a_key_is_what_others_see_of_a_client_that_says_nothing(
    account: str, worker_id: str, origin: Origin | None, name: str
) -> None:
    assert name_of(Request("r", worker_id=worker_id, origin=origin, account=account), "gpu-1") == name


def test_what_the_kernel_knows_counts_more_than_what_is_said() -> None:
    said = Origin("root", "elsewhere", 1, "train.py")
    assert vouched(said, user="eve", host="gpu-1", pid=66) == Origin("eve", "gpu-1", 66, "train.py", is_verified=True)
    assert vouched(None, user="eve", host="gpu-1", pid=None) == Origin("eve", "gpu-1", is_verified=True)


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (Request("a", process="b/1/7/0.5"), Request("b", process="b/1/7/0.5"), True),
        (Request("a", process="b/1/7/0.5"), Request("b", process="b/1/7/0.6"), False),
        (Request("a", origin=ADA), Request("b", origin=replace(ADA, program="other.py", is_verified=False)), True),
        (Request("a", process="b/1/7/0.5", origin=ADA), Request("b", origin=ADA), True),
        # Two `gpu-pool wait` of one shell.
        (Request("a", process="b/1/7/0.5", origin=ADA), Request("b", process="b/1/8/9.5", origin=ADA), True),
        # Two containers that share the host's name.
        (Request("a", process="b/1/7/0.5", origin=ADA), Request("b", process="b/2/7/0.5", origin=ADA), False),
        (Request("a", origin=ADA), Request("b", origin=replace(ADA, pid=4243)), False),
        (Request("a", origin=ADA), Request("b", origin=replace(ADA, host="gpu-2")), False),
        (Request("a", origin=ADA), Request("b", origin=replace(ADA, user="eve")), False),
        (Request("a", origin=replace(ADA, pid=None)), Request("b", origin=replace(ADA, pid=None)), False),
        (Request("a"), Request("b"), False),
    ],
)
def test_which_requests_are_of_one_process(one: Request, other: Request, is_same: bool) -> None:
    assert is_same_process(one, other) is is_same
    assert is_same_process(other, one) is is_same


def pool_of(*requests: Request, count: int = 1) -> Pool:
    """All at one moment; as many as there are GPUs hold one."""
    pool = Pool(PoolSettings(host="gpu-1"))
    pool.apply(snapshot(gpus(count), at=0.0), 0.0)
    for request in requests:
        pool.apply(Requested(request), 0.0)
    return pool


def test_a_process_that_waits_for_itself_is_told_so_and_others_are_told_who() -> None:
    mine, theirs = Request("again", origin=ADA), Request("other", origin=replace(ADA, pid=77))
    pool = pool_of(Request("held", worker_id="worker-30e16e-1", origin=ADA), mine, theirs)
    told = explain(pool, "again", 9.0)
    assert told is not None
    assert str(told).splitlines() == [
        "one GPU: next in line; of 1 GPU: 1 held; this very process (pid 4242) holds it: release it first",
        "  GPU 0: held by this very process (pid 4242) for 9 s; release it first",
    ]
    told = explain(pool, "other", 9.0)
    assert told is not None
    assert str(told).splitlines() == [
        "one GPU: number 2 in line; of 1 GPU: 1 held",
        "  GPU 0: held by ada's train.py (pid 4242) for 9 s",
    ]
    # As a client explains what one of its workers would wait for.
    told = explain_requirements(pool, mine.requirements, 9.0, Request("", origin=ADA))
    assert "this very process (pid 4242) holds it" in told.summary
    assert "this very process" not in str(explain_requirements(pool, mine.requirements, 9.0))


def test_of_several_gpus_it_is_told_how_many_are_its_own() -> None:
    requests = [Request("a", origin=ADA), Request("b", origin=replace(ADA, pid=1)), Request("c", origin=ADA)]
    told = explain(pool_of(*requests, Request("d", origin=ADA), count=3), "d", 1.0)
    assert told is not None
    assert told.summary == (
        "one GPU: next in line; of 3 GPUs: 3 held; this very process (pid 4242) holds 2 of them: release them first"
    )


def test_in_the_list_of_all_each_waiter_is_told_its_own_reasons() -> None:
    """Equal requests share one explanation, but not with the holder's own process."""
    own = [Request(f"own-{number}", origin=ADA) for number in range(EXPLAINED_CLASSES + 5)]
    others = [Request("other-1", origin=replace(ADA, pid=1)), Request("other-2")]
    pool = pool_of(Request("held", origin=ADA), own[0], others[0], *own[1:], others[1])
    for waiting in describe_queue(pool, 5.0):
        is_own = waiting.request.request_id.startswith("own")
        assert ("this very process (pid 4242)" in waiting.reasons[0]) is is_own
        assert ("held by this very process (pid 4242)" in waiting.reasons[1]) is is_own
        assert ("held by ada's train.py (pid 4242)" in waiting.reasons[1]) is not is_own
        alone = describe(pool, waiting.request.request_id, 5.0)
        assert alone is not None
        assert alone.reasons == waiting.reasons


def test_a_request_may_be_repeated_by_another_process_and_the_first_is_shown() -> None:
    pool = pool_of(Request("held", origin=ADA))
    pool.apply(Requested(Request("held", origin=replace(ADA, pid=99))), 1.0)
    lease = pool.requests["held"]
    assert isinstance(lease, Lease)
    assert lease.request.origin == ADA
