"""The rows that the server answers have exactly the keys that its OpenAPI schemas list."""

from __future__ import annotations

import json
from types import UnionType
from typing import Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from gpu_worker_pool.api import gpu_rows, lease_rows
from gpu_worker_pool.broker.broker import Waiting
from gpu_worker_pool.broker.usage import LeaseUsage
from gpu_worker_pool.core.assignments import HeldGPU, Lease, Quarantine
from gpu_worker_pool.core.events import Origin, Request
from gpu_worker_pool.core.explanation import Explanation, GPUExplanation
from gpu_worker_pool.core.moves import LeaseState
from gpu_worker_pool.core.obstacles import Obstacle, ObstacleKind
from gpu_worker_pool.core.readings import ProcessReading
from gpu_worker_pool.core.requirements import ANY_GPU
from gpu_worker_pool.gpu_server import schemas
from gpu_worker_pool.gpu_server.leases import schemas as lease_schemas
from gpu_worker_pool.hardware.samples import DriverAnswer, GPUReading, HostSample, MIGReading

PROCESSES = (ProcessReading(7, 1.0, "python", "me", 100.0),)
MIG = MIGReading(uuid="MIG-1", name="1g.5gb", memory_total_mb=100.0, memory_used_mb=1.0, processes=PROCESSES)
GPU = GPUReading(
    index=0, name="A", uuid="GPU-1", processes=PROCESSES, graphics=PROCESSES, mig_enabled=True, mig_devices=(MIG,)
)
SAMPLE = HostSample(1, 0, 0.0, 0.0, "2026-05-04T10:30:00", DriverAnswer((GPU,), "1.0", "simulated"))
ORIGIN = Origin("ada", "gpu-1", 4242, "train.py")
LEASE = Lease(
    "lease-7",
    Request("r", worker_id="w", ttl_seconds=60.0, origin=ORIGIN),
    "",
    ("GPU-1",),
    (HeldGPU("GPU-1", 0, "GPU-1", "A"),),
    7,
    LeaseState.QUARANTINED,
    0.0,
    0.0,
    60.0,
    quarantine=Quarantine("why", 1.0, 2.0),
)
WAITING = Waiting(Request("r", origin=ORIGIN), 1, 2.0, ("why",))
EXPLANATION = Explanation(
    ANY_GPU,
    1,
    2.0,
    (GPUExplanation("GPU-1", "", "A", (Obstacle(ObstacleKind.HELD, "held", 1.0, 2.0),)),),
    (),
    "why",
    is_queued=True,
)
PROMISES = lease_rows.promises_of([LEASE])
AGE = {"sample_age_seconds": 0.0}


@pytest.mark.parametrize(
    ("schema", "row"),
    [
        (lease_schemas.GrantedLease, lease_rows.granted_body(LEASE, "t" * 16, lambda _: 0, "index", 0.25)),
        (lease_schemas.LeaseSchema, lease_rows.lease_body(LEASE, lambda _: 0, "index")),
        (lease_schemas.LeaseRowSchema, lease_rows.lease_row(LEASE, LeaseUsage())),
        (lease_schemas.StillWaitingSchema, lease_rows.waiting_body(WAITING, "t" * 16)),
        (lease_schemas.QueueRow, lease_rows.queue_row(WAITING)),
        (lease_schemas.ExplanationSchema, lease_rows.explanation_body("r", EXPLANATION, lambda _: 0)),
        (schemas.Stats, gpu_rows.stats_body(SAMPLE, (GPU,), PROMISES) | AGE),
        (schemas.Summary, gpu_rows.summary_body(SAMPLE, (GPU,), PROMISES) | AGE),
        (schemas.Count, gpu_rows.count_body(SAMPLE, (GPU,), PROMISES) | AGE),
        (schemas.HistoryReading, gpu_rows.history_row(SAMPLE, GPU)),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_rows_have_the_keys_of_their_schema(schema: type[BaseModel], row: dict[str, Any]) -> None:
    schema.model_validate_json(json.dumps(row))
    compare(schema, row, schema.__name__)


def compare(schema: type[BaseModel], row: dict[str, Any], where: str) -> None:
    assert row.keys() == schema.model_fields.keys(), where
    for name, field in schema.model_fields.items():
        inner = model_in(field.annotation)
        if inner is not None:
            rows = row[name] if isinstance(row[name], list) else [row[name]]
            assert rows, f"{where}.{name}: nothing to compare"
            for each in rows:
                compare(inner, each, f"{where}.{name}")


def model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return annotation if issubclass(annotation, BaseModel) else None
    if get_origin(annotation) in (list, Union, UnionType):
        return next(filter(None, map(model_in, get_args(annotation))), None)
    return None
