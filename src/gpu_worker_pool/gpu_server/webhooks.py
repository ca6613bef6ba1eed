"""Sends events of leases to the webhooks of the policy. Nothing waits for it, and no grant depends on it.

Of the servers that share a ledger, the one with the lock sends. Each address has its own bounded queue; a message that
cannot be delivered is tried again a few times and then dropped. Events while no server runs are not sent.
"""

from __future__ import annotations

import asyncio
import fcntl
import hmac
import json
import logging
import os
import random
import time
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, Final

from yarl import URL

from gpu_worker_pool.api.lease_rows import name_of_account
from gpu_worker_pool.api.transport import exchange, make_session
from gpu_worker_pool.core.assignments import Lease
from gpu_worker_pool.core.backoff import backoff_seconds
from gpu_worker_pool.core.moves import LeaseState
from gpu_worker_pool.core.remembered import Outcome
from gpu_worker_pool.errors import GPUWorkerPoolError
from gpu_worker_pool.hardware.origin import host_name
from gpu_worker_pool.ledger.records import moment
from gpu_worker_pool.state_directory import share_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import aiohttp

    from gpu_worker_pool.broker.broker import Change
    from gpu_worker_pool.core.policy import Policy, Webhook

logger: logging.Logger = logging.getLogger(__name__)

#: Messages that wait for one address; beyond that, the oldest are dropped.
MOST_WAITING: Final = 1000
TRIES: Final = 6
LONGEST_PAUSE_SECONDS: Final = 60.0
TIMEOUT_SECONDS: Final = 10.0
LOCK_NAME: Final = "webhooks.lock"
SIGNATURE: Final = "X-GPU-Pool-Signature"
TIMESTAMP: Final = "X-GPU-Pool-Timestamp"
_MOST_REPLY_BYTES: Final = 64 * 1024


class Webhooks:
    """Belongs to the event loop of a server."""

    def __init__(self, policy: Callable[[], Policy], directory: str | None) -> None:
        self._policy = policy
        self._lock_path = None if directory is None else Path(directory, LOCK_NAME)
        self._lock: int | None = None
        self._session: aiohttp.ClientSession | None = None
        self._queues: dict[str, asyncio.Queue[tuple[Webhook, bytes]]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._dropped = 0

    # --- what happens ---

    def on_change(self, change: Change) -> None:
        if not self._policy().webhooks:
            return
        before, after = change.before, change.after
        if isinstance(after, Lease):
            if after.state is LeaseState.HELD and not (isinstance(before, Lease) and before.state is LeaseState.HELD):
                self.send("granted", after)
            elif after.state is LeaseState.QUARANTINED and not _is_quarantined(before):
                self.send("lost", after, after.quarantine.reason if after.quarantine is not None else "")
        elif isinstance(after, Outcome) and after.lease is not None and after.lease.state is LeaseState.HELD:
            event = "ended" if after.lease_state is LeaseState.RELEASED else "lost"
            self.send(event, after.lease, "; ".join(after.reasons))

    def send(self, event: str, lease: Lease, reason: str = "") -> None:
        """Queue the message for each address that wants this event."""
        wanted = [webhook for webhook in self._policy().webhooks if event in webhook.events]
        if not wanted or not self._is_sender():
            return
        values = _values(event, lease, reason)
        for webhook in wanted:
            self._enqueue(webhook, _body(webhook, values))

    def _enqueue(self, webhook: Webhook, body: bytes) -> None:
        queue = self._queues.get(webhook.url)
        if queue is None:
            queue = self._queues[webhook.url] = asyncio.Queue(MOST_WAITING)
            self._tasks[webhook.url] = asyncio.get_running_loop().create_task(self._deliver_all(webhook.url, queue))
        if queue.full():
            queue.get_nowait()
            self._dropped += 1
            if self._dropped == 1 or self._dropped % MOST_WAITING == 0:
                logger.warning("webhook %s is too slow: %d messages were dropped", _shown(webhook.url), self._dropped)
        queue.put_nowait((webhook, body))

    def _is_sender(self) -> bool:
        """Whether this process is the one that sends; it stays that until it ends."""
        if self._lock is None and self._lock_path is not None:
            try:
                descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except OSError as error:
                logger.warning("webhooks: %s cannot be opened: %s", self._lock_path, error.strerror)
                return False
            try:
                if os.fstat(descriptor).st_uid == os.geteuid():
                    share_file(descriptor, self._lock_path.parent)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                return False
            self._lock = descriptor
        return self._lock is not None

    # --- sending ---

    async def _deliver_all(self, url: str, queue: asyncio.Queue[tuple[Webhook, bytes]]) -> None:
        is_failing = False
        while True:
            webhook, body = await queue.get()
            for attempt in range(TRIES):
                problem = await self._deliver(webhook, body)
                if problem is None:
                    if is_failing:
                        logger.info("webhook %s works again", _shown(url))
                    is_failing = False
                    break
                if not is_failing:
                    is_failing = True
                    logger.warning("webhook %s: %s; trying again", _shown(url), problem)
                if attempt + 1 < TRIES:
                    pause = backoff_seconds(attempt, random.random(), longest=LONGEST_PAUSE_SECONDS)  # noqa: S311
                    await asyncio.sleep(pause + 0.5)
            else:
                logger.warning("webhook %s: a message was dropped after %d tries", _shown(url), TRIES)

    async def _deliver(self, webhook: Webhook, body: bytes) -> str | None:
        """Why it was not delivered."""
        headers = {"Content-Type": "application/json" if _is_json(body) else "text/plain; charset=utf-8"}
        if webhook.secret_file is not None:
            try:
                secret = (await asyncio.to_thread(Path(webhook.secret_file).read_bytes)).strip()
            except OSError as error:
                return f"{webhook.secret_file} cannot be read: {error.strerror}"
            if not secret:
                return f"{webhook.secret_file} is empty"
            headers |= signed(secret, body, time.time())
        if self._session is None:
            self._session = make_session(limit_per_host=2)
        url = URL(webhook.url)
        try:
            reply = await exchange(
                self._session,
                "POST",
                url,
                timeout_seconds=TIMEOUT_SECONDS,
                body=body,
                headers=headers,
                most_bytes=_MOST_REPLY_BYTES,
            )
        except (GPUWorkerPoolError, ValueError) as error:
            return str(error).replace(str(url), _shown(webhook.url))
        return None if 200 <= reply.status < 300 else f"it answered {reply.status}"

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._session is not None:
            await self._session.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def signed(secret: bytes, body: bytes, at: float) -> dict[str, str]:
    """The headers that prove to a receiver that the message is ours, and not an old one."""
    timestamp = str(int(at))
    digest = hmac.new(secret, f"{timestamp}.".encode() + body, "sha256").hexdigest()
    return {TIMESTAMP: timestamp, SIGNATURE: f"sha256={digest}"}


def _values(event: str, lease: Lease, reason: str) -> dict[str, Any]:
    request = lease.request
    origin = request.origin
    return {
        "event": event,
        "time": moment(time.time()),
        "host": host_name(),
        "lease_id": lease.lease_id,
        "request_id": request.request_id,
        "worker_id": request.worker_id,
        "account": name_of_account(request.account, None if origin is None else origin.user),
        "user": None if origin is None else origin.user,
        "program": None if origin is None else origin.program,
        "label": request.label,
        "gpus": [held.index for held in lease.held],
        "reason": reason,
    }


def _body(webhook: Webhook, values: Mapping[str, Any]) -> bytes:
    if webhook.template is None:
        return json.dumps(values, separators=(",", ":")).encode()
    texts = {name: _text(value) for name, value in values.items()}
    if webhook.template.lstrip().startswith(("{", "[")):
        # Within JSON: a quote in a label must not end the string that contains it.
        texts = {name: json.dumps(text)[1:-1] for name, text in texts.items()}
    return Template(webhook.template).safe_substitute(texts).encode()


def _text(value: object) -> str:
    if value is None:
        return ""
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _is_json(body: bytes) -> bool:
    return body.lstrip()[:1] in (b"{", b"[")


def _is_quarantined(before: object) -> bool:
    return isinstance(before, Lease) and before.state is LeaseState.QUARANTINED


def _shown(url: str) -> str:
    """Without its path and query, which may hold a secret."""
    return str(URL(url).origin())
