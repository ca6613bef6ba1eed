"""Rules 1 and 2: every reason why a request cannot have a GPU, with its numbers. Without one, the GPU is eligible."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from gpu_worker_pool.core.origins import is_same_process, name_of, own_process
from gpu_worker_pool.core.outsiders import (
    allowed_memory_mb,
    foreign_processes,
    graphics_that_count,
    unexplained_memory_mb,
)
from gpu_worker_pool.core.record import record
from gpu_worker_pool.core.requirements import names_gpu
from gpu_worker_pool.wording import spoken_mb

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from gpu_worker_pool.core.assignments import HeldGPU, Lease
    from gpu_worker_pool.core.events import Request
    from gpu_worker_pool.core.gpus import GPUResourceState
    from gpu_worker_pool.core.readings import Reading
    from gpu_worker_pool.core.requirements import Requirements
    from gpu_worker_pool.core.settings import PoolSettings


class ObstacleKind(StrEnum):
    # These never pass.
    WRONG_MODEL = "wrong_model"
    NOT_AMONG_ONLY = "not_among_only"
    EXCLUDED = "excluded"
    TOO_SMALL = "too_small"
    THRESHOLD_IS_ZERO = "threshold_is_zero"
    MIG_DEVICE = "mig_device"
    # What is known of the GPU.
    NOT_SEEN = "not_seen"
    READING_TOO_OLD = "reading_too_old"
    READING_BEFORE_RELEASE = "reading_before_release"
    UNHEALTHY = "unhealthy"
    # What it is doing.
    MEMORY_UNKNOWN = "memory_unknown"
    MEMORY_IN_USE = "memory_in_use"
    UTILIZATION_UNKNOWN = "utilization_unknown"
    UTILIZED = "utilized"
    FOREIGN_PROCESS = "foreign_process"
    PROCESSES_UNKNOWN = "processes_unknown"
    UNEXPLAINED_MEMORY = "unexplained_memory"
    TOO_LITTLE_FREE = "too_little_free"
    # Leases and reservations.
    HELD = "held"
    QUARANTINED = "quarantined"
    LEASED_ELSEWHERE = "promised_elsewhere"
    TOO_LITTLE_LEFT = "too_little_left"
    RESERVED = "kept"
    LIMIT = "limit"


@record
class Obstacle:
    kind: ObstacleKind
    text: str
    #: The measured value and its limit, where there are such.
    actual: float | None = None
    limit: float | None = None
    #: The process that requests the GPU holds it itself.
    is_own: bool = False
    #: The process it is about, without numbers that change, so that a summary of a waiting request stays the same.
    process: str | None = None

    def __str__(self) -> str:
        return self.text


def obstacles(
    gpu: GPUResourceState,
    requirements: Requirements,
    settings: PoolSettings,
    now: float,
    request: Request | None = None,
) -> Iterator[Obstacle]:
    """Why this request cannot have this GPU now; `request`, if it is known, says which process wants it."""
    reading = gpu.reading
    if reading is None:
        yield Obstacle(ObstacleKind.NOT_SEEN, "missing from the last reading")
        return
    yield from lasting_obstacles(reading, requirements, settings)
    yield from age_obstacles(gpu, settings, now)
    if gpu.endpoint.begun_at <= gpu.read_after:
        yield Obstacle(ObstacleKind.READING_BEFORE_RELEASE, "not read since its last lease ended")
    # Leases before readings: the load of a held GPU is its holder's.
    yield from lease_obstacles(gpu, requirements, settings, now, request)
    yield from reading_obstacles(reading, requirements, settings, gpu.before_leases(), now)


def by_index(why_not: Mapping[str, list[int]]) -> str:
    """The reasons with their GPUs: by index, as the order in which GPUs became known differs between processes."""
    in_order = sorted((sorted(indices), text) for text, indices in why_not.items())
    return "; ".join(f"GPU {', '.join(map(str, indices))}: {text}" for indices, text in in_order)


def age_obstacles(gpu: GPUResourceState, settings: PoolSettings, now: float) -> Iterator[Obstacle]:
    age, limit = now - gpu.endpoint.begun_at, settings.reading_max_age_seconds
    if age > limit:
        yield Obstacle(ObstacleKind.READING_TOO_OLD, f"last read {age:.1f} s ago, more than {limit:g} s", age, limit)


def lasting_obstacles(reading: Reading, requirements: Requirements, settings: PoolSettings) -> Iterator[Obstacle]:
    """Why this GPU could never serve the request, whatever it is doing (rule 5)."""
    yield from choice_obstacles(reading, requirements)
    yield from size_obstacles(reading, requirements)
    if reading.has_unified_memory and not reading.reports_processes:
        # Else such a request would wait for ever: nothing will ever show that the GPU is free.
        text = "its memory is the host's, and its driver cannot list processes, so nothing shows whether it is "
        if not reading.reports_utilization:
            yield Obstacle(ObstacleKind.PROCESSES_UNKNOWN, f"{text}free")
        elif requirements.policy == "idle":
            yield Obstacle(ObstacleKind.PROCESSES_UNKNOWN, f"{text}idle; policy thresholds goes by its utilization")
    for name, limit in (
        ("memory", memory_limit(requirements, settings)),
        ("utilization", utilization_limit(requirements, settings)),
    ):
        if limit is not None and limit <= 0:
            yield Obstacle(ObstacleKind.THRESHOLD_IS_ZERO, f"nothing is below a {name} threshold of 0 %", None, 0.0)


def size_obstacles(reading: Reading, requirements: Requirements) -> Iterator[Obstacle]:
    needed, total = requirements.needed_memory_mb, reading.memory_total_mb
    if total is not None and needed > total:
        yield Obstacle(
            ObstacleKind.TOO_SMALL, f"has {total:.10g} MB in all, {needed:.10g} MB are needed", total, needed
        )


def choice_obstacles(reading: Reading, requirements: Requirements) -> Iterator[Obstacle]:
    """Why the request does not accept this GPU, whatever it is doing and however much memory it has."""
    model = requirements.gpu_model
    if model is not None and model.casefold() not in reading.name.casefold():
        yield Obstacle(ObstacleKind.WRONG_MODEL, f"{reading.name}, not {model}")
    if requirements.only is not None and not any(names_gpu(name, reading) for name in requirements.only):
        yield Obstacle(ObstacleKind.NOT_AMONG_ONLY, f"not among {_few(requirements.only)}")
    if any(names_gpu(name, reading) for name in requirements.exclude):
        yield Obstacle(ObstacleKind.EXCLUDED, "excluded")
    if reading.is_mig_device and requirements.count > 1:
        yield Obstacle(ObstacleKind.MIG_DEVICE, "a MIG device, of which a process can use only one")


def reading_obstacles(
    reading: Reading,
    requirements: Requirements,
    settings: PoolSettings,
    before: HeldGPU | None = None,
    now: float | None = None,
) -> Iterator[Obstacle]:
    """Reasons in the reading itself. `before`: the GPU before its first holder; None without a lease."""
    if reading.fault is not None:
        yield Obstacle(ObstacleKind.UNHEALTHY, f"unhealthy: {reading.fault}")

    is_idle_wanted = requirements.policy == "idle"
    used = reading.memory_usage_percent
    limit = memory_limit(requirements, settings)
    if used is None:
        # Of unified memory idle needs to know nothing.
        if not (is_idle_wanted and reading.has_unified_memory and limit is None):
            yield Obstacle(ObstacleKind.MEMORY_UNKNOWN, "does not report its memory usage")
    elif limit is not None and used >= limit:
        what = "host memory" if reading.has_unified_memory else "memory"
        yield Obstacle(ObstacleKind.MEMORY_IN_USE, f"{what} {used:.1f} % used, not below {limit:g} %", used, limit)

    utilization = reading.utilization_percent
    limit = utilization_limit(requirements, settings)
    if utilization is not None:
        if limit is not None and utilization >= limit:
            text = f"utilization {utilization:.1f} %, not below {limit:g} %"
            yield Obstacle(ObstacleKind.UTILIZED, text, utilization, limit)
    elif reading.reports_utilization:
        yield Obstacle(ObstacleKind.UTILIZATION_UNKNOWN, "its utilization could not be read")

    if is_idle_wanted or utilization is None:
        is_utilization_unknowable = utilization is None and not reading.reports_utilization
        if is_idle_wanted or is_utilization_unknowable:
            # Memory cannot stand in for processes where utilization cannot be reported, nor where it is the host's.
            are_needed = is_utilization_unknowable or reading.has_unified_memory
            yield from _process_obstacles(reading, before, now, are_needed=are_needed)
        if is_idle_wanted:
            yield from _idle_obstacles(reading, before, settings, now)

    yield from free_memory_obstacles(reading, requirements)


def free_memory_obstacles(reading: Reading, requirements: Requirements) -> Iterator[Obstacle]:
    if requirements.min_free_memory_mb is not None:
        free, needed = reading.memory_free_mb, requirements.min_free_memory_mb
        if free is None:
            yield Obstacle(ObstacleKind.MEMORY_UNKNOWN, "does not report its free memory")
        elif free < needed:
            text = f"{free:.0f} MB free, {needed:.10g} MB wanted"
            yield Obstacle(ObstacleKind.TOO_LITTLE_FREE, text, free, needed)


def _process_obstacles(
    reading: Reading, before: HeldGPU | None, now: float | None, *, are_needed: bool
) -> Iterator[Obstacle]:
    foreign = foreign_processes(reading, before)
    for process in foreign or ():
        text = f"in use by {process.described(now)}"
        yield Obstacle(ObstacleKind.FOREIGN_PROCESS, text, process=str(process))
    if reading.unnamed_processes:
        number = reading.unnamed_processes
        what = "a process" if number == 1 else f"{number} processes"
        yield Obstacle(ObstacleKind.FOREIGN_PROCESS, f"in use by {what}", process=what)
    elif foreign is None and are_needed:
        yield Obstacle(ObstacleKind.PROCESSES_UNKNOWN, "its processes cannot be seen")


def _idle_obstacles(
    reading: Reading, before: HeldGPU | None, settings: PoolSettings, now: float | None
) -> Iterator[Obstacle]:
    """What else may show that a GPU is in use: graphics, and memory that no process explains."""
    for process in graphics_that_count(reading, settings):
        text = f"in use for graphics by {process.described(now)}"
        yield Obstacle(ObstacleKind.FOREIGN_PROCESS, text, process=str(process))
    if reading.has_unified_memory:
        return
    if before is None:
        unexplained, percent = unexplained_memory_mb(reading), reading.memory_usage_percent
    elif foreign_processes(reading, before) is None:
        # Memory is the holders' since; only what was in use before them may be foreign.
        unexplained, percent = before.memory_used_mb, before.memory_usage_percent
        if unexplained is None and percent is None:
            yield Obstacle(ObstacleKind.PROCESSES_UNKNOWN, "its processes cannot be seen")
            return
    else:
        return
    if unexplained is not None:
        allowed = allowed_memory_mb(reading, settings)
        if unexplained >= allowed:
            text = f"{spoken_mb(unexplained)} in use by no visible process; {spoken_mb(allowed)} are allowed"
            yield Obstacle(ObstacleKind.UNEXPLAINED_MEMORY, text, unexplained, allowed)
    elif percent is not None and (before is not None or reading.memory_used_mb is None):
        allowed = settings.idle_unexplained_percent
        if percent >= allowed:
            text = f"memory {percent:.1f} % in use by no visible process; {allowed:g} % are allowed"
            yield Obstacle(ObstacleKind.UNEXPLAINED_MEMORY, text, percent, allowed)


def lease_obstacles(
    gpu: GPUResourceState,
    requirements: Requirements,
    settings: PoolSettings,
    now: float,
    request: Request | None = None,
) -> Iterator[Obstacle]:
    """Leases of others. Rule 2: one worker per GPU, unless all of them declare memory and share."""
    if gpu.reading is not None and gpu.reading.is_leased_elsewhere:
        yield Obstacle(ObstacleKind.LEASED_ELSEWHERE, "leased by its server to another client")
    holders = gpu.holders().unshared if requirements.share else gpu.leases.values()
    yield from holder_obstacles(holders, requirements, settings, now, request)
    needed = requirements.memory_mb
    if needed is not None:
        yield from left_memory_obstacles(gpu.memory_left_mb(), needed)


def holder_obstacles(
    leases: Iterable[Lease],
    requirements: Requirements,
    settings: PoolSettings,
    now: float,
    request: Request | None = None,
) -> Iterator[Obstacle]:
    """`request`: who asks; a holder that is the same process is named as such."""
    for lease in leases:
        if requirements.share and lease.is_shareable:
            continue
        if lease.quarantine is not None:
            since = now - lease.quarantine.since
            holder = name_of(lease.request, settings.host)
            text = f"in quarantine for {since:.0f} s: {lease.quarantine.reason} ({holder})"
            yield Obstacle(ObstacleKind.QUARANTINED, text)
        elif request is not None and is_same_process(lease.request, request):
            held = f"held by {own_process(request)} for {now - lease.granted_at:.0f} s; release it first"
            yield Obstacle(ObstacleKind.HELD, held, is_own=True)
        else:
            held = f"held by {name_of(lease.request, settings.host)} for {now - lease.granted_at:.0f} s"
            yield Obstacle(ObstacleKind.HELD, held)


def left_memory_obstacles(left: float | None, needed: float) -> Iterator[Obstacle]:
    if left is None:
        yield Obstacle(ObstacleKind.MEMORY_UNKNOWN, "does not report how much memory is left")
    elif left < needed:
        text = f"{max(left, 0):.0f} MB left, {needed:.10g} MB wanted"
        yield Obstacle(ObstacleKind.TOO_LITTLE_LEFT, text, left, needed)


def _few(names: tuple[str, ...]) -> str:
    """Shortened, because the text is stored for every GPU."""
    return ", ".join(names if len(names) <= 8 else (*names[:7], f"{len(names) - 7} more"))


def memory_limit(requirements: Requirements, settings: PoolSettings) -> float | None:
    """Requests that share, or want an idle GPU, have no thresholds but their own."""
    if requirements.memory_threshold is not None:
        return requirements.memory_threshold
    return None if requirements.share or requirements.policy == "idle" else settings.memory_threshold_percent


def utilization_limit(requirements: Requirements, settings: PoolSettings) -> float | None:
    if requirements.utilization_threshold is not None:
        return requirements.utilization_threshold
    return None if requirements.share or requirements.policy == "idle" else settings.utilization_threshold_percent
