"""Rule 3 for several GPUs: those that are linked best, where the driver tells which are."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from gpu_worker_pool.core import Granted, Pool, PoolSettings, Released, Request, Requested, Requirements
from gpu_worker_pool.testing import gpu, snapshot

NVLINK, SWITCH, SOCKET, OTHER_SOCKET = 0, 10, 40, 50
#: Two sockets with two switches each, and two GPUs at each switch; GPUs 1 and 6 have a bridge.
HOST = [
    [
        NVLINK
        if a == b or {a, b} == {1, 6}
        else SWITCH
        if a // 2 == b // 2
        else SOCKET
        if a // 4 == b // 4
        else OTHER_SOCKET
        for b in range(8)
    ]
    for a in range(8)
]


def pool_of(distances: list[list[int]] | None, size: int = 8) -> Pool:
    pool = Pool(PoolSettings())
    readings = [gpu(each, distances=() if distances is None else tuple(distances[each])) for each in range(size)]
    pool.apply(snapshot(readings, at=0.0), 0.0)
    return pool


def granted(pool: Pool, name: str, now: float = 1.0, **requirements: object) -> tuple[int, ...]:
    (effect,) = pool.apply(Requested(Request(name, Requirements(**requirements))), now)  # type: ignore[arg-type]
    assert isinstance(effect, Granted)
    return tuple(sorted(int(gpu_id) for gpu_id in effect.lease.gpu_ids))


def test_a_bridge_comes_before_a_switch_and_a_switch_before_a_socket() -> None:
    pool = pool_of(HOST)
    assert granted(pool, "a", count=2) == (1, 6)
    assert granted(pool, "b", count=2) == (2, 3)
    assert granted(pool, "c", count=2) == (4, 5)
    assert granted(pool, "d", count=2) == (0, 7), "what is left"


def test_one_gpu_goes_by_its_rank_alone() -> None:
    assert granted(pool_of(HOST), "a") == (0,)


def test_four_are_of_one_socket() -> None:
    pool = pool_of(HOST)
    assert granted(pool, "a", count=2, only=("1", "2")) == (1, 2)
    assert granted(pool, "b", count=4) == (4, 5, 6, 7)


def test_requests_that_say_more_than_how_many_are_served_by_it_too() -> None:
    assert granted(pool_of(HOST), "a", count=2, exclude=("6",)) == (0, 1)
    assert granted(pool_of(HOST), "a", count=2, policy="idle") == (1, 6)


def test_what_is_not_known_is_not_guessed() -> None:
    assert granted(pool_of(None), "a", count=2) == (0, 1)
    pool = Pool(PoolSettings())
    readings = [gpu(0), gpu(1, distances=(50, 0, 10)), gpu(2, distances=(None, 10, 0))]
    pool.apply(snapshot(readings, at=0.0), 0.0)
    assert granted(pool, "a", count=2) == (1, 2)


def test_shares_go_to_the_fullest_cards_first() -> None:
    pool = pool_of(HOST)
    for name, index in (("a", "3"), ("b", "4")):
        assert granted(pool, name, memory_mb=10_000, share=True, only=(index,)) == (int(index),)
    assert granted(pool, "c", count=2, memory_mb=10_000, share=True) == (3, 4)


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_no_other_free_gpus_of_a_tree_are_nearer_to_each_other(count: int) -> None:
    """On hosts without a bridge across; whichever GPUs are free."""
    tree = [
        [SWITCH if a // 2 == b // 2 else SOCKET if a // 4 == b // 4 else OTHER_SOCKET for b in range(8)]
        for a in range(8)
    ]
    draw = random.Random(count)
    for round_ in range(20):
        pool = pool_of(tree)
        busy = draw.sample(range(8), draw.randrange(8 - count))
        for each in busy:
            granted(pool, f"busy {each}", only=(str(each),))
        chosen = granted(pool, f"round {round_}", count=count)
        farthest = max(tree[a][b] for a, b in combinations(chosen, 2))
        free = [each for each in range(8) if each not in busy]
        least = min(max(tree[a][b] for a, b in combinations(others, 2)) for others in combinations(free, count))
        assert farthest == least, (busy, chosen)


def test_who_waited_gets_them_too() -> None:
    pool = pool_of(HOST)
    held = {}
    for each in range(8):
        (effect,) = pool.apply(Requested(Request(str(each), Requirements(only=(str(each),)))), 1.0)
        assert isinstance(effect, Granted)
        held[each] = effect.lease.lease_id
    pool.apply(Requested(Request("pair", Requirements(count=2))), 2.0)
    pool.apply(Requested(Request("four", Requirements(count=4, priority=1))), 2.0)
    served = []
    for now, each in enumerate((0, 2, 3, 6, 7, 4, 5, 1), 3):
        served += [effect for effect in pool.apply(Released(held[each]), float(now)) if isinstance(effect, Granted)]
    names = [effect.lease.request.request_id for effect in served]
    assert sorted(names) == ["four", "pair"]
