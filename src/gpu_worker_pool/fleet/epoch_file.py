"""A host's memory of its fleet, in a file beside its ledger: the last dispatcher, and where the candidates are."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

logger: logging.Logger = logging.getLogger(__name__)


class EpochFile:
    """Raises an `OSError` if an epoch cannot be written: it must be durable before the host obeys it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.epoch: int = 0
        self.epoch_owner: str = ""
        self.candidates: tuple[str, ...] = ()
        self.ledger_id: str = ""
        self._read()

    def of_ledger(self, ledger_id: str) -> None:
        """A new ledger has obeyed no dispatcher yet."""
        if self.ledger_id and self.ledger_id != ledger_id:
            self.epoch, self.epoch_owner = 0, ""
        self.ledger_id = ledger_id

    def store_epoch(self, epoch: int, owner: str) -> None:
        before = self.epoch, self.epoch_owner
        self.epoch, self.epoch_owner = epoch, owner
        try:
            self._write()
        except OSError:
            self.epoch, self.epoch_owner = before
            raise

    def store_candidates(self, candidates: tuple[str, ...]) -> None:
        if candidates != self.candidates:
            self.candidates = candidates
            with suppress(OSError):  # they are sent again
                self._write()

    def _read(self) -> None:
        try:
            found: Any = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{self.path} cannot be read: {error}; without it, an old dispatcher could be obeyed"
            ) from None
        if not isinstance(found, dict) or not isinstance(found.get("epoch"), int):
            raise ValueError(f"{self.path} is damaged; without it, an old dispatcher could be obeyed")
        self.epoch, self.epoch_owner = found["epoch"], str(found.get("epoch_owner", ""))
        self.ledger_id = str(found.get("ledger_id", ""))
        self.candidates = tuple(map(str, found.get("candidates", ())))[:64]

    def _write(self) -> None:
        row = {
            "epoch": self.epoch,
            "epoch_owner": self.epoch_owner,
            "ledger_id": self.ledger_id,
            "candidates": list(self.candidates),
        }
        descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=f"{self.path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(row, file)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(self.path)
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except BaseException:
            with suppress(OSError):
                Path(name).unlink()
            raise
