"""Moves the records that wait in the ledger to its usage file, and decides when. No grant depends on it."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.ledger.records import add_to_totals
from gpu_worker_pool.ledger.usage_files import UsageFile, parse_record, usage_path

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gpu_worker_pool.ledger.tables import Tables

# All of the ledger logs under one name.
logger: logging.Logger = logging.getLogger("gpu_worker_pool.ledger.sqlite")

#: How long records wait, so that many are written at once; and after a failure.
RECORD_SECONDS: Final = 1.0
RECORD_AGAIN_SECONDS: Final = 10.0
MANY_RECORDS: Final = 64


class UsageRecorder:
    """Belongs to the ledger's thread, except `record_soon`."""

    def __init__(self, ledger: Path, clock: Callable[[], float]) -> None:
        self._file = UsageFile(usage_path(ledger))
        self._clock = clock
        #: When to write the records that wait in the ledger; at first those that other processes have left there, if
        #: they are many: commands that end soon leave the others to the next process.
        self._record_at = -math.inf
        self._leaves_few = True
        self._complaint = ""

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def is_due(self) -> bool:
        return self._clock() >= self._record_at

    def record_soon(self) -> None:
        """Write all records with the next transaction."""
        self._record_at, self._leaves_few = -math.inf, False

    def stored(self, now: float) -> None:
        """Records were stored in the ledger."""
        self._record_at = min(self._record_at, now + RECORD_SECONDS)

    def write(self, tables: Tables) -> bool:
        """Write the records that are due, within a transaction; whether the ledger has changed."""
        if not self.is_due:
            return False
        if self._leaves_few:
            self._leaves_few = False
            if not tables.has_unrecorded(MANY_RECORDS):
                self._record_at = self._clock() + RECORD_SECONDS
                return False
        self._record_at = math.inf
        waiting = tables.unrecorded()
        if not waiting:
            return False
        try:
            self._file.append([record for _, record in waiting])
        except OSError as error:
            lost = tables.forget_unrecorded()
            self._complain(f"{self._file.path} cannot be written: {error.strerror or error}", lost)
            self._record_at = self._clock() + RECORD_AGAIN_SECONDS
            return lost > 0
        self._complaint = ""
        totals = tables.totals()
        add_to_totals(totals, (record for _, line in waiting if (record := parse_record(line)) is not None))
        tables.store_totals(totals)
        tables.recorded(waiting[-1][0])
        self._record_at = self._clock()  # there may be more
        return True

    def _complain(self, complaint: str, lost: int) -> None:
        if complaint != self._complaint or lost:
            self._complaint = complaint
            logger.error("%s; %s", complaint, f"{lost} records were lost" if lost else "its records wait in the ledger")
