"""The limits of a policy: refused at once, or kept back while others go on; a change of the policy counts at once."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_worker_pool.core import (
    Effect,
    Ended,
    Granted,
    HolderGone,
    PolicyRead,
    PoolSettings,
    Released,
    Renewed,
    Request,
    Requested,
    RequestState,
    Requirements,
    Ticked,
    explain,
)
from gpu_worker_pool.core.policy import Limits, Policy
from gpu_worker_pool.errors import PolicyLimitError
from gpu_worker_pool.testing import History, gpus, snapshot

SETTINGS = PoolSettings(tells_accounts_apart=True, max_bypass_seconds=10.0)


class Table:
    def __init__(self, number: int, policy: Policy | None = None, **more: Any) -> None:
        self.now = 0.0
        self.number = number
        self.history = History(SETTINGS)
        self.apply(PolicyRead(policy or Policy(everyone=Limits(most_gpus=2), **more)))
        self.read()

    @property
    def pool(self) -> Any:
        return self.history.pool

    def apply(self, event: Any) -> list[str]:
        """What was granted, by request, or how requests ended."""
        return [text for effect in self.history.apply(event, self.now) if (text := self._shown(effect))]

    @staticmethod
    def _shown(effect: Effect) -> str:
        match effect:
            case Granted(lease):
                return f"{lease.request.request_id}: {', '.join(lease.gpu_ids)}"
            case Ended(request_id, state, _):
                return f"{request_id} {state.value}"
        return ""

    def read(self) -> list[str]:
        self.now += 1.0
        shown = gpus(self.number, memory_total_mb=80_000.0)
        return self.apply(snapshot(shown, at=self.now))

    def ask(self, name: str, account: str = "key:ada", *, groups: Any = None, **requirements: Any) -> list[str]:
        request = Request(name, Requirements(**requirements), ttl_seconds=1e6, account=account, groups=groups)
        return self.apply(Requested(request))

    def release(self, lease_id: str) -> list[str]:
        return self.apply(Released(lease_id)) + self.read()

    def why(self, name: str) -> str:
        found = explain(self.pool, name, self.now)
        assert found is not None
        return found.verdict


def test_who_holds_the_most_waits_while_gpus_are_free_and_others_are_served() -> None:
    table = Table(4)
    assert table.ask("a1") == ["a1: 0"]
    assert table.ask("a2") == ["a2: 1"]
    assert table.ask("a3") == []
    assert table.why("a3") == "kept back by the policy: account ada holds 2 GPUs, its limit"
    assert table.ask("b1", "key:bob") == ["b1: 2"]
    # The lease that ends makes room, whichever GPU it was on.
    assert table.release("lease-1") == ["a3: 3"]


def test_a_request_for_several_waits_until_all_of_them_are_allowed() -> None:
    table = Table(4)
    table.ask("a1")
    assert table.ask("two", count=2) == []
    assert table.why("two") == "kept back by the policy: account ada holds one GPU of the 2 it may hold"
    assert table.release("lease-1") == ["two: 1, 2"]


def test_what_can_never_be_allowed_is_refused_at_once() -> None:
    table = Table(4, Policy(everyone=Limits(most_gpus=2, highest_priority=0)))
    assert table.ask("many", count=3) == ["many rejected"]
    assert table.ask("urgent", priority=1) == ["urgent rejected"]
    outcome = table.pool.requests["urgent"]
    assert outcome.reasons == ("account ada may ask for priority 0 at most, not 1",)
    assert table.pool.requests["many"].reasons == ("account ada may hold 2 GPUs at most, not 3",)
    # Also if it would have been the first of all to be served.
    assert table.ask("b", "key:bob", priority=-1) == ["b: 0"]


def test_an_account_that_may_hold_nothing_is_told_so() -> None:
    table = Table(4, Policy(accounts={"loopback": Limits(most_gpus=0)}))
    assert table.ask("n1", "loopback") == ["n1 rejected"]
    reason = "the account of programs on this host without a key may hold no GPU"
    assert table.pool.requests["n1"].reasons == (reason,)
    assert table.ask("a1") == ["a1: 0"]


def test_what_is_kept_back_gets_no_reservation_and_blocks_nobody() -> None:
    table = Table(3, Policy(accounts={"key:ada": Limits(most_gpus=2)}))
    table.ask("a1")
    table.ask("b1", "key:bob")
    table.ask("b2", "key:bob")
    assert table.ask("two", count=2) == []
    table.now += SETTINGS.max_bypass_seconds
    table.read()
    assert table.ask("b3", "key:bob") == []
    assert table.pool.reserved_for is None
    assert table.release("lease-2") == ["b3: 1"]


def test_a_reservation_ends_when_its_account_reaches_its_limit() -> None:
    table = Table(3, Policy(accounts={"key:ada": Limits(most_gpus=2)}))
    for name in ("b1", "b2", "b3"):
        table.ask(name, "key:bob")
    table.ask("two", count=2)
    table.ask("b4", "key:bob")
    table.now += SETTINGS.max_bypass_seconds
    table.read()
    assert table.pool.reserved_for is not None
    # Its account asks for another one with a higher priority, which passes the reservation.
    table.ask("a1", priority=1)
    assert table.release("lease-1") == ["a1: 0"]
    assert table.pool.reserved_for.request.request_id == "b4", "the next one, which no limit keeps back"
    assert table.release("lease-2") == ["b4: 1"]


def test_shares_of_one_gpu_count_once_and_another_share_of_it_is_allowed() -> None:
    table = Table(3, Policy(everyone=Limits(most_gpus=1)))
    share = {"share": True, "memory_mb": 30_000.0}
    assert table.ask("s1", **share) == ["s1: 0"]
    assert table.ask("s2", **share) == ["s2: 0"]
    assert table.ask("s3", **share) == [], "it does not fit on the GPU that the account holds"
    assert table.ask("whole") == []
    assert table.release("lease-1") == ["s3: 0"]
    table.release("lease-2")
    assert table.release("lease-3") == ["whole: 1"]


def test_a_lease_in_quarantine_is_still_held() -> None:
    table = Table(2, Policy(everyone=Limits(most_gpus=1)))
    table.ask("a1")
    table.ask("a2")
    assert table.apply(HolderGone("lease-1")) == []
    assert table.read() == []
    table.now += SETTINGS.quarantine_seconds
    assert table.read() == ["a2: 1"]


def test_how_many_may_wait() -> None:
    table = Table(1, Policy(everyone=Limits(most_waiting=1)))
    table.ask("a1")
    table.ask("a2")
    with pytest.raises(PolicyLimitError, match="account ada may have one waiting request at most"):
        table.ask("a3")
    assert table.ask("a2") == [], "it waits already"
    assert table.ask("b1", "key:bob") == []


def test_groups_count_where_the_account_says_nothing() -> None:
    policy = Policy(accounts={"user:7": Limits(most_gpus=3)}, groups={"students": Limits(most_gpus=1)})
    table = Table(4, policy)
    assert table.ask("a1", "user:8", groups=("students",)) == ["a1: 0"]
    assert table.ask("a2", "user:8", groups=("students",)) == []
    assert table.ask("b1", "user:7", groups=("students",), count=3) == ["b1: 1, 2, 3"]


def test_a_new_policy_counts_at_once() -> None:
    table = Table(4)
    table.ask("a1", count=2)
    table.ask("a2")
    table.ask("a3", count=2)
    assert table.apply(PolicyRead(Policy(everyone=Limits(most_gpus=3)))) == ["a2: 2"]
    assert table.apply(PolicyRead(Policy(everyone=Limits(most_gpus=1)))) == ["a3 rejected"]
    assert len(table.pool.leases) == 2, "what is held stays"
    assert table.pool.requests["a3"].state is RequestState.REJECTED


def test_without_an_account_and_inside_a_lease_nothing_is_limited() -> None:
    table = Table(4, Policy(everyone=Limits(most_gpus=1, most_waiting=1, highest_priority=0)))
    assert table.ask("n1", "", count=3, priority=5) == ["n1: 0, 1, 2"]
    request = Request("in", Requirements(priority=3), ttl_seconds=60.0, account="key:ada", within="lease-1")
    assert table.apply(Requested(request)) == ["in: 0"]
    assert table.apply(Ticked()) == []


def test_the_longest_time_ends_a_lease_however_often_it_is_renewed() -> None:
    table = Table(1, Policy(everyone=Limits(longest_seconds=100.0)))
    request = Request("a", ttl_seconds=60.0, account="key:ada")
    table.apply(Requested(request))
    for _ in range(2):
        table.now += 45.0
        table.apply(Renewed("lease-1"))
    (lease,) = table.pool.leases
    assert lease.expires_at == lease.ends_at == lease.granted_at + 100.0
    table.now = lease.ends_at + SETTINGS.expiry_grace_seconds
    table.apply(Ticked())
    assert table.pool.leases.lookup("lease-1").quarantine.reason == "it reached the policy's time limit of 1 min 40 s"


def test_a_shorter_limit_of_its_own_counts_and_a_longer_one_is_refused() -> None:
    table = Table(2, Policy(everyone=Limits(longest_seconds=100.0)))
    table.apply(Requested(Request("a", ttl_seconds=60.0, account="key:ada", max_seconds=30.0)))
    assert [lease.expires_at - lease.granted_at for lease in table.pool.leases] == [30.0]
    table.apply(Requested(Request("b", ttl_seconds=60.0, account="key:ada", max_seconds=500.0)))
    assert table.pool.requests["b"].reasons == ("account ada may hold GPUs for 1 min 40 s, not 8 min 20 s",)
