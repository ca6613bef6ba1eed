"""Rules 1 and 2: every reason why a request cannot have a GPU, with its numbers. Without one, the GPU is eligible."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from gpu_worker_pool.core.record import record
from gpu_worker_pool.core.requirements import names_gpu

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gpu_worker_pool.core.gpus import GPUResourceState
    from gpu_worker_pool.core.readings import ProcessReading, Reading
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
    TOO_LITTLE_FREE = "too_little_free"
    # Leases and reservations.
    HELD = "held"
    QUARANTINED = "quarantined"
    LEASED_ELSEWHERE = "promised_elsewhere"
    TOO_LITTLE_LEFT = "too_little_left"
    RESERVED = "kept"


@record
class Obstacle:
    kind: ObstacleKind
    text: str
    #: The measured value and its limit, where there are such.
    actual: float | None = None
    limit: float | None = None

    def __str__(self) -> str:
        return self.text


def obstacles(
    gpu: GPUResourceState, requirements: Requirements, settings: PoolSettings, now: float
) -> Iterator[Obstacle]:
    """Why this request cannot have this GPU now."""
    reading = gpu.reading
    if reading is None:
        yield Obstacle(ObstacleKind.NOT_SEEN, "missing from the last reading")
        return
    yield from lasting_obstacles(reading, requirements, settings)
    age = now - gpu.endpoint.begun_at
    if age > settings.reading_max_age_seconds:
        limit = settings.reading_max_age_seconds
        yield Obstacle(ObstacleKind.READING_TOO_OLD, f"last read {age:.1f} s ago, more than {limit:g} s", age, limit)
    if gpu.endpoint.begun_at <= gpu.read_after:
        yield Obstacle(ObstacleKind.READING_BEFORE_RELEASE, "not read since its last lease ended")
    # Leases before readings: the load of a held GPU is its holder's.
    yield from lease_obstacles(gpu, requirements, now)
    yield from reading_obstacles(reading, gpu.foreign_processes(), requirements, settings)


def lasting_obstacles(reading: Reading, requirements: Requirements, settings: PoolSettings) -> Iterator[Obstacle]:
    """Why this GPU could never serve the request, whatever it is doing (rule 5)."""
    model = requirements.gpu_model
    if model is not None and model.casefold() not in reading.name.casefold():
        yield Obstacle(ObstacleKind.WRONG_MODEL, f"{reading.name}, not {model}")
    if requirements.only is not None and not any(names_gpu(name, reading) for name in requirements.only):
        yield Obstacle(ObstacleKind.NOT_AMONG_ONLY, f"not among {_few(requirements.only)}")
    if any(names_gpu(name, reading) for name in requirements.exclude):
        yield Obstacle(ObstacleKind.EXCLUDED, "excluded")
    if reading.is_mig_device and requirements.count > 1:
        yield Obstacle(ObstacleKind.MIG_DEVICE, "a MIG device, of which a process can use only one")
    needed, total = requirements.needed_memory_mb, reading.memory_total_mb
    if total is not None and needed > total:
        yield Obstacle(ObstacleKind.TOO_SMALL, f"has {total:g} MB in all, {needed:g} MB are needed", total, needed)
    for name, limit in (
        ("memory", memory_limit(requirements, settings)),
        ("utilization", utilization_limit(requirements, settings)),
    ):
        if limit is not None and limit <= 0:
            yield Obstacle(ObstacleKind.THRESHOLD_IS_ZERO, f"nothing is below a {name} threshold of 0 %", None, 0.0)


def reading_obstacles(
    reading: Reading, foreign: Iterable[ProcessReading] | None, requirements: Requirements, settings: PoolSettings
) -> Iterator[Obstacle]:
    """Reasons in the reading itself. `foreign` processes are None where processes cannot be seen."""
    if reading.fault is not None:
        yield Obstacle(ObstacleKind.UNHEALTHY, f"unhealthy: {reading.fault}")

    used = reading.memory_usage_percent
    limit = memory_limit(requirements, settings)
    if used is None:
        yield Obstacle(ObstacleKind.MEMORY_UNKNOWN, "does not report its memory usage")
    elif limit is not None and used >= limit:
        yield Obstacle(ObstacleKind.MEMORY_IN_USE, f"memory {used:.1f} % used, not below {limit:g} %", used, limit)

    utilization = reading.utilization_percent
    limit = utilization_limit(requirements, settings)
    if utilization is not None:
        if limit is not None and utilization >= limit:
            text = f"utilization {utilization:.1f} %, not below {limit:g} %"
            yield Obstacle(ObstacleKind.UTILIZED, text, utilization, limit)
    elif reading.reports_utilization:
        yield Obstacle(ObstacleKind.UTILIZATION_UNKNOWN, "its utilization could not be read")

    if requirements.policy == "idle" or (utilization is None and not reading.reports_utilization):
        if foreign is None:
            yield Obstacle(ObstacleKind.PROCESSES_UNKNOWN, "its processes cannot be seen")
        else:
            for process in foreign:
                yield Obstacle(ObstacleKind.FOREIGN_PROCESS, f"in use by {process}")

    if requirements.min_free_memory_mb is not None:
        free, needed = reading.memory_free_mb, requirements.min_free_memory_mb
        if free is None:
            yield Obstacle(ObstacleKind.MEMORY_UNKNOWN, "does not report its free memory")
        elif free < needed:
            text = f"{free:.0f} MB free, {needed:g} MB wanted"
            yield Obstacle(ObstacleKind.TOO_LITTLE_FREE, text, free, needed)


def lease_obstacles(gpu: GPUResourceState, requirements: Requirements, now: float) -> Iterator[Obstacle]:
    """Leases of others. Rule 2: one worker per GPU, unless all of them declare memory and share."""
    if gpu.reading is not None and gpu.reading.is_leased_elsewhere:
        yield Obstacle(ObstacleKind.LEASED_ELSEWHERE, "leased by its server to another client")
    for lease in gpu.leases.values():
        if requirements.share and lease.is_shareable:
            continue
        if lease.quarantine is not None:
            since = now - lease.quarantine.since
            text = f"in quarantine for {since:.0f} s: {lease.quarantine.reason} ({lease.worker})"
            yield Obstacle(ObstacleKind.QUARANTINED, text)
        else:
            yield Obstacle(ObstacleKind.HELD, f"held by {lease.worker} for {now - lease.granted_at:.0f} s")
    needed = requirements.memory_mb
    if needed is not None:
        left = gpu.memory_left_mb()
        if left is None:
            yield Obstacle(ObstacleKind.MEMORY_UNKNOWN, "does not report how much memory is left")
        elif left < needed:
            text = f"{max(left, 0):.0f} MB left, {needed:g} MB wanted"
            yield Obstacle(ObstacleKind.TOO_LITTLE_LEFT, text, left, needed)


def _few(names: tuple[str, ...]) -> str:
    """Shortened, because the text is stored for every GPU."""
    return ", ".join(names if len(names) <= 8 else (*names[:7], f"{len(names) - 7} more"))


def memory_limit(requirements: Requirements, settings: PoolSettings) -> float | None:
    """Requests that share have no thresholds but their own."""
    if requirements.memory_threshold is not None:
        return requirements.memory_threshold
    return None if requirements.share else settings.memory_threshold_percent


def utilization_limit(requirements: Requirements, settings: PoolSettings) -> float | None:
    if requirements.utilization_threshold is not None:
        return requirements.utilization_threshold
    return None if requirements.share else settings.utilization_threshold_percent
