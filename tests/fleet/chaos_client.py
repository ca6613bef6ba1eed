"""A client of a fleet that takes GPUs, renews and releases them over plain HTTP, and writes down what it was told.

`python -m tests.fleet.chaos_client URLS FOLDER SEED KEY TTL`; ends after what it is at when standard input closes.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

WAIT_SECONDS = 2.0
#: Of a server that is silent.
SILENT_SECONDS = 4.0
#: How long one request is tried, whatever happens.
LONGEST_SECONDS = 150.0
RELEASE_SECONDS = 30.0
#: What says that a lease is over.
ENDED = (403, 404, 409)


class Client:
    def __init__(self, urls: str, folder: str, seed: str, key: str, ttl: str) -> None:
        self._addresses = [(urlsplit(url).hostname or "", urlsplit(url).port or 80) for url in urls.split(",")]
        self._file = os.open(Path(folder, f"client-{os.getpid()}.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._draw = random.Random(seed)
        self._key, self._ttl = key, float(ttl)
        self._at = self._draw.randrange(len(self._addresses))
        self._connection: http.client.HTTPConnection | None = None
        self.is_over = threading.Event()

    def note(self, what: str, request: str, **more: object) -> None:
        line = json.dumps({"what": what, "request": request, "at": time.monotonic(), **more})
        os.write(self._file, f"{line}\n".encode())

    def ask(self, method: str, path: str, token: str, body: Any = None) -> tuple[int, Any] | None:
        """None: this server is silent; the next one is asked from now on."""
        headers = {"X-Lease-Token": token, "Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            if self._connection is None:
                self._connection = http.client.HTTPConnection(*self._addresses[self._at], timeout=SILENT_SECONDS)
            self._connection.request(method, path, None if body is None else json.dumps(body), headers)
            reply = self._connection.getresponse()
            return reply.status, json.loads(reply.read() or b"{}")
        except (OSError, http.client.HTTPException, ValueError):
            self.turn()
            return None

    def turn(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._at = (self._at + 1) % len(self._addresses)

    def run(self) -> None:
        serial = 0
        while not self.is_over.is_set():
            serial += 1
            chance = self._draw.random()
            self.one(f"c{os.getpid()}-{serial}", 4 if chance < 0.03 else 2 if chance < 0.1 else 1)
            if self._draw.random() < 0.05:
                self.turn()

    def one(self, request: str, count: int) -> None:
        token = f"token-{request}-{self._draw.random()}"
        self.note("asked", request, count=count)
        found = self.acquire(request, count, token)
        if found is None:
            return
        lease_id, valid_until = found
        hold = self._draw.uniform(0.5, 1.5 * self._ttl) if self._draw.random() < 0.1 else self._draw.uniform(0, 0.05)
        if not self.hold(request, lease_id, token, valid_until, time.monotonic() + hold):
            return
        self.note("releasing", request)
        given_up = time.monotonic() + RELEASE_SECONDS
        while time.monotonic() < given_up:
            reply = self.ask("DELETE", f"/leases/{lease_id}", token)
            if reply is not None and reply[0] in (200, *ENDED):
                self.note("released", request, status=reply[0])
                return
            time.sleep(0.1)
        self.note("release failed", request)

    def acquire(self, request: str, count: int, token: str) -> tuple[str, float] | None:
        body = {"request_id": request, "count": count, "ttl_seconds": self._ttl, "wait_seconds": WAIT_SECONDS}
        given_up = time.monotonic() + LONGEST_SECONDS
        while time.monotonic() < given_up:
            sent_at = time.monotonic()
            reply = self.ask("POST", "/leases", token, body)
            if reply is None:
                self.note("silent", request, sent_at=sent_at)
                continue
            status, said = reply
            if status in (200, 201):
                valid_until = sent_at + self._ttl
                gpus = [f"{said['host']}/{gpu['uuid']}" for gpu in said["gpus"]]
                self.note(
                    "granted", request, gpus=gpus, fence=said["fence"], lease=said["lease_id"], valid_until=valid_until
                )
                return said["lease_id"], valid_until
            if status == 202:
                self.note("waiting", request, sent_at=sent_at, position=said.get("position"))
            elif status >= 500 or status == 429:
                self.note("later", request, status=status, said=said)
                time.sleep(0.2)
                self.turn()
            else:
                self.note("refused", request, status=status, said=said)
                return None
        self.note("given up", request)
        return None

    def hold(self, request: str, lease_id: str, token: str, valid_until: float, until: float) -> bool:
        """Whether it is still held at the end."""
        renew_at = time.monotonic() + self._ttl / 4
        while time.monotonic() < until:
            if time.monotonic() >= valid_until:
                self.note("overdue", request)
                return False
            if time.monotonic() < renew_at:
                time.sleep(max(0.0, min(renew_at, until) - time.monotonic()))
                continue
            sent_at = time.monotonic()
            reply = self.ask("POST", f"/leases/{lease_id}/renew", token)
            if reply is not None and reply[0] == 200:
                valid_until = max(valid_until, sent_at + self._ttl)
                self.note("renewed", request, valid_until=valid_until)
                renew_at = sent_at + self._ttl / 4
            elif reply is not None and reply[0] in ENDED:
                self.note("lost", request, status=reply[0], said=reply[1], valid_until=valid_until)
                return False
            else:
                self.turn()
                renew_at = time.monotonic() + 0.2
        return time.monotonic() < valid_until


def main() -> None:
    client = Client(*sys.argv[1:])

    def watch() -> None:
        sys.stdin.read()
        client.is_over.set()

    threading.Thread(target=watch, daemon=True).start()
    client.run()


if __name__ == "__main__":
    main()
