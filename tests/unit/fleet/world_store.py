"""The database of a fleet's world: it can be down, and a failover can lose its last commits."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from gpu_worker_pool.fleet.store import TABLES, CommitsLost, Delete, Deposed, Office, Put, StoreUnavailable

OFFICE_SECONDS = 2.0


class WorldStore:
    """Shared by all candidates; `failover` loses its last commits."""

    def __init__(self) -> None:
        self.now = 0.0
        self.is_up = True
        self.state: dict[str, Any] = {"epoch": 0, "revision": 0, "owner": "", "until": -1.0}
        self.rows: dict[str, dict[str, Mapping[str, Any]]] = {table: {} for table in TABLES}
        self.history: deque[tuple[dict[str, Any], dict[str, dict[str, Mapping[str, Any]]]]] = deque(maxlen=6)
        self.unknown: bool | None = None
        #: How often commits were lost, and whether they were not written again yet.
        self.losses = 0
        self.lacks_commits = False

    def _check(self) -> None:
        if not self.is_up:
            raise StoreUnavailable("it is down")

    def _commit(self) -> None:
        self.history.append((dict(self.state), {table: dict(rows) for table, rows in self.rows.items()}))

    def failover(self) -> None:
        if self.history:
            self.state, self.rows = self.history.popleft()
            self.history.clear()
            self.losses += 1
            self.lacks_commits = True

    def stand(self, name: str, lowest_epoch: int) -> Office | None:
        self._check()
        if self.state["until"] > self.now:
            return None
        self._commit()
        self.lacks_commits = False  # nobody knows of them any more
        self.state["epoch"] = max(self.state["epoch"], lowest_epoch) + 1
        self.state["revision"] += 1
        self.state.update(owner=name, until=self.now + OFFICE_SECONDS)
        return Office(self.state["epoch"], self.state["revision"])

    def renew(self, office: Office, name: str) -> None:
        self._check()
        if (self.state["epoch"], self.state["owner"]) != (office.epoch, name):
            if self.state["epoch"] < office.epoch:
                raise CommitsLost(revision=self.state["revision"])
            raise Deposed(epoch=self.state["epoch"])
        self.state["until"] = self.now + OFFICE_SECONDS

    def load(self) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
        self._check()
        loaded: Mapping[str, Mapping[str, Mapping[str, Any]]] = json.loads(json.dumps(self.rows))
        return loaded

    def write(self, office: Office, changes: Sequence[Put | Delete], name: str) -> Office:
        self._check()
        if self.state["epoch"] > office.epoch or (self.state["epoch"] == office.epoch and self.state["owner"] != name):
            raise Deposed(epoch=self.state["epoch"])
        if (self.state["epoch"], self.state["revision"]) != (office.epoch, office.revision):
            raise CommitsLost(revision=self.state["revision"])
        self._commit()
        for change in changes:
            if isinstance(change, Put):
                self.rows[change.table][change.key] = json.loads(json.dumps(change.document))
            else:
                self.rows[change.table].pop(change.key, None)
        self.state["revision"] += 1
        return Office(office.epoch, self.state["revision"])

    def rewrite(self, office: Office, everything: Mapping[str, Mapping[str, Mapping[str, Any]]], name: str) -> Office:
        self._check()
        if self.state["epoch"] > office.epoch:
            raise Deposed(epoch=self.state["epoch"])
        self._commit()
        self.lacks_commits = False
        self.rows = deepcopy({table: dict(everything.get(table, {})) for table in TABLES})
        self.state["revision"] = max(self.state["revision"], office.revision) + 1
        self.state.update(epoch=office.epoch, owner=name, until=self.now + OFFICE_SECONDS)
        return Office(office.epoch, self.state["revision"])
