"""The numbers the rules depend on. Nothing here decides anything."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Literal, get_args

from gpu_worker_pool.core.record import frozen

#: Where users or keys are known.
FAIR_SHARE_HALF_LIFE_SECONDS = 86_400.0

Strategy = Literal["availability", "round_robin", "weighted", "pack"]


@frozen
class PoolSettings:
    #: A GPU is available strictly below these (D14), unless a request names its own.
    memory_threshold_percent: float = 80.0
    utilization_threshold_percent: float = 90.0
    #: The interval of readings; they are stale after three intervals, at least 15 s.
    poll_seconds: float = 5.0
    #: How an endpoint is picked when several can serve (rule 3).
    strategy: Strategy = "availability"
    #: How long others may overtake a waiter that requests more, or something rarer (rule 4).
    max_bypass_seconds: float = 60.0
    #: The half-life of an account's use in the order of requests; None: only priority and arrival count.
    fair_share_half_life_seconds: float | None = None
    #: A request that has waited longer than this goes before those of its priority that have not, whatever was used.
    fair_share_age_seconds: float = 7 * 86_400.0
    #: How long an offer waits for a client between two polls, and a waiter whose client hung up stays (rule 9).
    offer_ttl_seconds: float = 10.0
    #: How long after its last poll a waiter keeps its place (rule 9).
    queue_ttl_seconds: float = 30.0
    #: How long ended requests are remembered, and how many at most (rule 9).
    remember_seconds: float = 24 * 3600.0
    remember_at_most: int | None = None
    #: Whether released leases are remembered too; not needed where request ids are never repeated.
    remembers_releases: bool = True
    #: How many of one account may wait at once.
    most_waiting_of_an_account: int | None = None
    #: Whether waiters of different accounts form different classes: a limit may keep one of them back.
    tells_accounts_apart: bool = False
    #: How many leases and waiting requests one account may have together, and all accounts.
    most_leases_of_an_account: int | None = None
    most_leases: int | None = None
    #: What leases and waiters without their own TTL get after an outage of the ledger (rule 10).
    default_ttl_seconds: float = 60.0
    #: How much longer than the holder the pool waits before it calls a lease expired (rule 11). It also makes up
    #: for outages that are too short to be noticed (rule 10).
    expiry_grace_seconds: float = 2.0
    #: How often the processes that serve a ledger leave a stamp in it (rule 10).
    stamp_seconds: float = 0.5
    #: The shortest quarantine after an expiry (rule 11).
    quarantine_seconds: float = 5.0
    #: How long after a release a GPU that does not look free yet still counts as about to be (rule 4).
    settle_seconds: float = 5.0
    #: How far above its level before the grant memory may be and still count as returned (rule 11).
    returned_memory_slack_mb: float = 256.0
    #: The same where a GPU reports only percentages.
    returned_memory_slack_percent: float = 1.0
    #: Under `policy="idle"`: what graphics processes may use together, and what may be used by no visible process
    #: (the larger of the two), before the GPU counts as in use (rule 1).
    idle_graphics_mb: float = 1024.0
    idle_unexplained_mb: float = 1024.0
    idle_unexplained_percent: float = 5.0
    #: When a fresh reading is wanted, counted from the release, while a request waits (rule 8).
    reading_delays_seconds: tuple[float, ...] = (0.0, 0.1, 0.3, 1.0)
    #: The host of the GPUs: explanations name the host of a holder where it is another one.
    host: str = ""

    def __post_init__(self) -> None:
        if self.strategy not in get_args(Strategy):
            raise ValueError(f"strategy must be {', '.join(get_args(Strategy))}, not {self.strategy!r}")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not 0 <= value < math.inf:
                raise ValueError(f"{field.name} must be a number of at least 0, not {value!r}")
        if self.fair_share_half_life_seconds == 0:
            raise ValueError("fair_share_half_life_seconds must be above 0, or None for no fair share")
        if not self.reading_delays_seconds or any(not 0 <= delay < math.inf for delay in self.reading_delays_seconds):
            raise ValueError(f"reading_delays_seconds must hold numbers, not {self.reading_delays_seconds!r}")

    @property
    def reading_max_age_seconds(self) -> float:
        return max(3 * self.poll_seconds, 15.0)


def host_settings(
    poll_seconds: float,
    most_waiting_of_an_account: int | None = None,
    most_leases_of_an_account: int | None = None,
    most_leases: int | None = None,
) -> PoolSettings:
    """For the ledger of a host, whose processes must agree: it knows accounts, so their use counts."""
    return PoolSettings(
        poll_seconds=poll_seconds,
        most_waiting_of_an_account=most_waiting_of_an_account,
        most_leases_of_an_account=most_leases_of_an_account,
        most_leases=most_leases,
        fair_share_half_life_seconds=FAIR_SHARE_HALF_LIFE_SECONDS,
    )
