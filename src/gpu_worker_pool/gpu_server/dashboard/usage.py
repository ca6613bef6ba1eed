"""What the page shows of usage: by person, in the last day and the last month."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.api.lease_rows import person_of
from gpu_worker_pool.ledger.report import ALL, Row, Span, UsageSums

if TYPE_CHECKING:
    from gpu_worker_pool.broker.broker import LeaseBroker

SPANS: Final = {"day": 86_400.0, "month": 30 * 86_400.0}
#: Reading a month of records takes a while, and every open page may ask.
CACHE_SECONDS: Final = 60.0
#: Further people are only shown as a sum.
MOST_PEOPLE: Final = 50


class UsageView:
    """Belongs to the event loop of a server."""

    def __init__(self, broker: LeaseBroker) -> None:
        self._broker = broker
        self._lock = asyncio.Lock()
        self._known: dict[str, Any] = {}
        self._known_until = 0.0

    async def body(self) -> dict[str, Any]:
        """Raises what the broker raises where the ledger cannot be used."""
        async with self._lock:
            if time.monotonic() >= self._known_until:
                self._known = await self._read()
                self._known_until = time.monotonic() + CACHE_SECONDS
            return self._known

    async def _read(self) -> dict[str, Any]:
        now = time.time()
        sums = {
            name: (UsageSums("user", span, person_of), UsageSums("user", span, lambda _: ALL))
            for name, span in ((name, Span(now - seconds, now)) for name, seconds in SPANS.items())
        }

        def add(record: dict[str, Any]) -> bool:
            for each in sums.values():
                for summary in each:
                    summary.add(record)
            return False  # a month of records may need a gigabyte

        usage = await self._broker.usage(now - max(SPANS.values()), add)

        def body() -> dict[str, Any]:
            for held in usage.records:
                add(held)
            return {name: _body(*each) for name, each in sums.items()}

        return await asyncio.to_thread(body)


def _body(people: UsageSums, everyone: UsageSums) -> dict[str, Any]:
    rows = people.rows()
    return {
        "people": [row.as_json() for row in rows[:MOST_PEOPLE]],
        "all": next(iter(everyone.rows()), Row(ALL)).as_json(),
        "not_shown": max(len(rows) - MOST_PEOPLE, 0),
    }
