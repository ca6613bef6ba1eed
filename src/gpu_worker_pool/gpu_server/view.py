"""What the server shows of its host: the newest sample as every route tells it. The bytes are built once a sample."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from gpu_worker_pool.gpu_server.rows import count_body, stats_body, summary_body
from gpu_worker_pool.hardware.readers.nvidia_smi import nvidia_smi_available
from gpu_worker_pool.hardware.sampler import TAKE_OVER_INTERVALS, Sampler, boot_time
from gpu_worker_pool.hardware.samples import DriverAnswer, DriverFailure, Sample
from gpu_worker_pool.hardware.visibility import Visibility, VisibilityFilter

if TYPE_CHECKING:
    from collections.abc import Callable

Status = Literal["healthy", "degraded", "unhealthy"]
Kind = Literal["stats", "summary", "count"]

#: However long the interval, this old may a sample be and still be told.
USABLE_SECONDS = 15.0


class Answer(NamedTuple):
    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Shown:
    """One sample as it is shown: what is visible of it, and the routes' bodies but for the age at their end."""

    sample: Sample
    answer: DriverAnswer
    visibility: Visibility
    bodies: dict[Kind, bytes]


@dataclass(frozen=True, slots=True)
class Health:
    status: Status
    #: Why it is not healthy, for people and for programs.
    cause: str | None = None
    code: str | None = None
    #: Of the newest sample that told something; None before there was one.
    sample_age_seconds: float | None = None


class HostView:
    """Fed by the sampler's thread, asked by the event loop's."""

    def __init__(self, visible_devices: str | None, interval_seconds: float) -> None:
        self.filter = VisibilityFilter(visible_devices)
        self.usable_seconds = max(USABLE_SECONDS, TAKE_OVER_INTERVALS * interval_seconds)
        #: When a sample is late, though not yet too old to be told.
        self._late_seconds = TAKE_OVER_INTERVALS * interval_seconds + 1.0
        self.shown: Shown | None = None
        self.nvidia_smi_available = False
        self._sampler: Sampler | None = None
        self._listeners: list[Callable[[Shown], object]] = []

    def follow(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def on_shown(self, listener: Callable[[Shown], object]) -> None:
        """`listener` is called in the sampler's thread."""
        self._listeners.append(listener)

    def take(self, sample: Sample) -> None:
        self.nvidia_smi_available = nvidia_smi_available()
        if isinstance(sample.answer, DriverFailure):
            return
        visibility = self.filter.apply(sample.answer.gpus)
        self.shown = Shown(
            sample,
            sample.answer,
            visibility,
            {
                "stats": _open_ended(stats_body(sample, sample.answer, visibility.gpus)),
                "summary": _open_ended(summary_body(sample, visibility.gpus)),
                "count": _open_ended(count_body(sample, visibility.gpus)),
            },
        )
        for listener in self._listeners:
            listener(self.shown)

    # --- what routes ask ---

    def answer(self, kind: Kind) -> Answer:
        shown = self.shown
        if shown is not None:
            age = boot_time() - shown.sample.begun_at
            if age <= self.usable_seconds:
                return Answer(200, b'%b,"sample_age_seconds":%.3f}' % (shown.bodies[kind], age))
        health = self.health()
        return Answer(503, json.dumps({"detail": health.cause, "error": health.code}).encode())

    def health(self) -> Health:
        seen = self._sampler.seen if self._sampler is not None else None
        if seen is None:
            return Health("unhealthy", "the server is starting", "no_sample_yet")
        now = boot_time()
        age = None if seen.good is None else max(now - seen.good.begun_at, 0.0)
        status: Status = "degraded" if age is not None and age <= self.usable_seconds else "unhealthy"
        last_begun_at = seen.last.begun_at if seen.last is not None else seen.probing_since
        is_late = last_begun_at is not None and now - last_begun_at > self._late_seconds
        if is_late and seen.probing_since is not None:
            waited = now - seen.probing_since
            return Health(status, f"the driver has not answered for {waited:.1f} s", "driver_hangs", age)
        if seen.last is None:
            return Health(status, "no sample was taken yet", "no_sample_yet", age)
        if isinstance(seen.last.answer, DriverFailure):
            return Health(status, seen.last.answer.message, seen.last.answer.code, age)
        if is_late:
            return Health(status, f"the last sample is {age:.1f} s old", "sample_late", age)
        return Health("healthy", None, None, age)

    def history(self) -> tuple[Sample, ...]:
        # One step of the interpreter, so that no sample comes in between.
        return () if self._sampler is None else tuple(self._sampler.history)

    def last_sample(self) -> Sample | None:
        return None if self._sampler is None else self._sampler.seen.last


def _open_ended(body: dict[str, Any]) -> bytes:
    """Without the last brace: the age comes behind it when somebody asks."""
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()[:-1]


def now_text() -> str:
    return datetime.now().isoformat()
