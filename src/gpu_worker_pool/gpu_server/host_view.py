"""What the server shows of its host: the newest sample as JSON, and its health. Belongs to the event loop's thread."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from gpu_worker_pool.api.gpu_rows import count_body, history_row, stats_body, summary_body
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.gpu_server.responses import Reply, as_json, problem
from gpu_worker_pool.hardware.readers.nvidia_smi import nvidia_smi_available
from gpu_worker_pool.hardware.sampler import TAKE_OVER_INTERVALS, LatestSamples
from gpu_worker_pool.hardware.samples import DriverAnswer, DriverFailure
from gpu_worker_pool.hardware.visibility import Visibility, VisibilityFilter

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_worker_pool.api.gpu_rows import Promises
    from gpu_worker_pool.hardware.samples import HostSample

Status = Literal["healthy", "degraded", "unhealthy"]
Kind = Literal["stats", "summary", "count"]

#: A sample up to this old is shown, however short the interval is.
USABLE_SECONDS: Final = 15.0

_BODIES: Final[dict[Kind, Callable[[HostSample, Any, Promises], dict[str, Any]]]] = {
    "stats": stats_body,
    "summary": summary_body,
    "count": count_body,
}


@dataclass(frozen=True, slots=True)
class Shown:
    """One sample and its leases. A body is built for the first request and reused for the others."""

    sample: HostSample
    visibility: Visibility
    see_leases: Callable[[], Promises]
    _bodies: dict[Kind, bytes] = field(default_factory=dict)

    def body(self, kind: Kind, now: float) -> bytes:
        opening = self._bodies.get(kind)
        if opening is None:
            body = _BODIES[kind](self.sample, self.visibility.gpus, self.see_leases())
            # Without the last brace: each answer adds the present age.
            opening = self._bodies[kind] = as_json(body)[:-1]
        return b'%b,"sample_age_seconds":%.3f}' % (opening, max(now - self.sample.begun_at, 0.0))


@dataclass(frozen=True, slots=True)
class Health:
    status: Status
    #: Why it is not healthy, for people and for programs.
    cause: str | None = None
    code: str | None = None
    #: Of the newest good sample; None before there was one.
    sample_age_seconds: float | None = None


class HostView:
    """`see` returns the state of the sampler, `see_leases` the leases by GPU."""

    def __init__(
        self,
        see: Callable[[], LatestSamples],
        *,
        visible_devices: str | None = None,
        interval_seconds: float = 1.0,
        max_history: int = 100,
        clock: Callable[[], float] = boot_time,
        see_leases: Callable[[], Promises] = lambda: None,
    ) -> None:
        self.filter: VisibilityFilter = VisibilityFilter(visible_devices)
        self.shown: Shown | None = None
        #: The rows of `/gpu/history` by GPU, for each good sample, oldest first.
        self.history: deque[dict[str, bytes]] = deque(maxlen=max_history)
        self.nvidia_smi_available: bool = nvidia_smi_available()
        self._see = see
        self._see_promises = see_leases
        self._clock = clock
        self._usable_seconds = max(USABLE_SECONDS, TAKE_OVER_INTERVALS * interval_seconds)
        self._expected_seconds = TAKE_OVER_INTERVALS * interval_seconds + 1.0

    def take(self, sample: HostSample) -> None:
        if isinstance(sample.answer, DriverAnswer):
            self.shown = Shown(sample, self.filter.apply(sample.answer.gpus), self._see_promises)
            gpus = self.shown.visibility.gpus
            self.history.append({gpu.identity: as_json(history_row(sample, gpu)) for gpu in gpus})
        else:
            self.nvidia_smi_available = nvidia_smi_available()

    def promises_changed(self) -> None:
        """Discards the bodies: they show the leases as they were."""
        if self.shown is not None:
            self.shown = replace(self.shown, _bodies={})

    def usable(self) -> Shown | None:
        """The newest good sample, unless it is too old."""
        shown = self.shown
        is_usable = shown is not None and self._clock() - shown.sample.begun_at <= self._usable_seconds
        return shown if is_usable else None

    def answer(self, kind: Kind) -> Reply:
        shown = self.usable()
        return self.problem() if shown is None else Reply(200, shown.body(kind, self._clock()))

    def problem(self) -> Reply:
        health = self.health()
        return problem(503, health.code, health.cause)

    def last_sample(self) -> HostSample | None:
        return self._see().last

    def health(self) -> Health:
        seen, now = self._see(), self._clock()
        age = None if self.shown is None else max(now - self.shown.sample.begun_at, 0.0)
        status: Status = "degraded" if age is not None and age <= self._usable_seconds else "unhealthy"
        waiting_since = seen.probing_since if seen.last is None else seen.last.begun_at
        # A driver that is always slow is not late.
        usual_seconds = 0.0 if seen.last is None else seen.last.took_seconds
        late_seconds = min(self._expected_seconds + 2 * usual_seconds, self._usable_seconds)
        is_late = waiting_since is not None and now - waiting_since > late_seconds
        if is_late and seen.probing_since is not None:
            waited = now - seen.probing_since
            return Health(status, f"the driver has not answered for {waited:.1f} s", "driver_hangs", age)
        if isinstance(failure := seen.last.answer if seen.last else None, DriverFailure):
            return Health(status, failure.message, failure.code, age)
        if age is None:
            return Health(status, "no sample was taken yet", "no_sample_yet", age)
        if is_late or status == "unhealthy":
            return Health(status, f"the last sample is {age:.1f} s old", "sample_late", age)
        return Health("healthy", None, None, age)
