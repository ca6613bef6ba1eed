"""The shapes of the lease API: what may be asked, checked to the letter, and what is answered, for OpenAPI.

Answers are made in `bodies`, not from these.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, ValidationError

from gpu_worker_pool.core.readings import LARGEST_MB
from gpu_worker_pool.core.requirements import ANY_GPU, Requirements
from gpu_worker_pool.gpu_server.security import Refusal

ID_PATTERN: Final = r"^[A-Za-z0-9._:-]{1,64}$"
#: Of the asker's own making, or ours.
TOKEN_PATTERN: Final = r"^[!-~]{16,200}$"  # noqa: S105  # a shape, no secret
MOST_WAIT_SECONDS: Final = 30.0

_WORKER: Final = r"^[A-Za-z0-9._:-]{0,64}$"
# Others read them, on terminals too, which control characters would drive.
_TEXT: Final = r"^[^\x00-\x1f\x7f-\x9f]*$"
_NAME: Final = (
    r"^ *[^\x00-\x20\x7f-\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"  # no blank of any alphabet
    r"[^\x00-\x1f\x7f-\x9f]*$"
)

_PATTERNS: Final = {
    ID_PATTERN: "1 to 64 of letters, digits and . _ : -",
    _WORKER: "up to 64 of letters, digits and . _ : -",
    _TEXT: "without control characters",
}


def _whole(number: object) -> object:
    """To JSON, 1.0 is a whole number."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


Percent = Annotated[float, Field(ge=0, le=100)]
Megabytes = Annotated[float, Field(gt=0, le=LARGEST_MB)]
GPUName = (
    Annotated[int, Field(ge=0, le=2**31 - 1), BeforeValidator(_whole)]
    | Annotated[str, Field(min_length=1, max_length=80, pattern=_NAME)]
)


_SENSE: Final[dict[str, JsonValue]] = {
    "anyOf": [
        {"properties": {"share": {"const": False}}},
        {"properties": {"memory_mb": {"type": "number"}}, "required": ["memory_mb"]},
    ]
}


class RequirementsBody(BaseModel):
    """Which GPUs will do."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        json_schema_extra={**_SENSE, "examples": [{}, {"count": 2, "gpu_model": "A100"}]},
    )

    count: Annotated[int, Field(ge=1, le=1024), BeforeValidator(_whole)] = Field(
        1, description="How many GPUs; all or none."
    )
    memory_mb: Megabytes | None = Field(None, description="Memory to reserve on each of them.")
    share: bool = Field(False, description="Whether others may have the rest of the GPU; needs `memory_mb`.")
    min_free_memory_mb: Megabytes | None = Field(None, description="Memory that must be free when it is granted.")
    gpu_model: Annotated[str, Field(min_length=1, max_length=100, pattern=_NAME)] | None = Field(
        None, description="Part of the GPU's name, in any case."
    )
    only: list[GPUName] | None = Field(
        None, min_length=1, max_length=64, description="Indices or UUIDs, of which one will do as well as another."
    )
    exclude: list[GPUName] | None = Field(None, max_length=64, description="Indices or UUIDs that will not do.")
    priority: Annotated[int, Field(ge=-1000, le=1000), BeforeValidator(_whole)] = Field(
        0, description="Higher goes first."
    )
    policy: Literal["thresholds", "idle"] = Field(
        "thresholds", description="`idle` wants GPUs with no process at all on them."
    )
    memory_threshold: Percent | None = Field(None, description="Memory usage must be below this; 80 by default.")
    utilization_threshold: Percent | None = Field(None, description="Utilization must be below this; 90 by default.")

    def requirements(self) -> Requirements:
        """Raises a `ValueError` for wishes that make no sense together."""
        if _REQUIREMENTS.isdisjoint(self.model_fields_set):
            return ANY_GPU
        return Requirements(
            count=self.count,
            memory_mb=self.memory_mb,
            share=self.share,
            min_free_memory_mb=self.min_free_memory_mb,
            gpu_model=self.gpu_model,
            only=None if self.only is None else tuple(map(str, self.only)),
            exclude=tuple(map(str, self.exclude or ())),
            policy=self.policy,
            memory_threshold=self.memory_threshold,
            utilization_threshold=self.utilization_threshold,
            priority=self.priority,
        )


class LeaseRequest(RequirementsBody):
    """A wish for GPUs. Asking again with the same `request_id` and the same wishes keeps the place."""

    model_config = ConfigDict(
        json_schema_extra={
            **_SENSE,
            "examples": [
                {"request_id": "train-7", "worker_id": "trainer", "ttl_seconds": 60, "wait_seconds": 4},
                {"count": 2, "gpu_model": "A100", "policy": "idle", "priority": 5, "label": "nightly run"},
                {"memory_mb": 8192, "share": True},
            ],
        },
    )

    request_id: Annotated[str, Field(pattern=ID_PATTERN)] | None = Field(
        None, description="Names the request, and makes it safe to ask again. Made by the server if it is left out."
    )
    worker_id: Annotated[str, Field(pattern=_WORKER)] | None = Field(None, description="Who asks, for others to read.")
    ttl_seconds: float = Field(60.0, ge=2, le=3600, description="How long the lease lives without being renewed.")
    wait_seconds: float = Field(0.0, ge=0, le=MOST_WAIT_SECONDS, description="How long to wait for the answer.")
    label: Annotated[str, Field(max_length=200, pattern=_TEXT)] | None = Field(None, description="For others to read.")
    may_keep: bool = Field(
        True, description="Whether GPUs may be kept free here for a request that others would overtake for ever."
    )


_REQUIREMENTS: Final = RequirementsBody.model_fields.keys()


Body = TypeVar("Body", bound=RequirementsBody)


def read_request(shape: type[Body], body: bytes) -> tuple[Body, Requirements] | Refusal:
    """What was asked for, or what is wrong with it, all of it at once."""
    try:
        asked = shape.model_validate_json(body)
        return asked, asked.requirements()
    except ValidationError as error:
        return nonsense(*(_sentence(problem) for problem in error.errors(include_url=False, include_input=False)[:20]))
    except ValueError as error:
        return nonsense(str(error))


def nonsense(*reasons: str) -> Refusal:
    return Refusal(422, "invalid", f"this request makes no sense: {'; '.join(reasons)}", reasons)


def _sentence(problem: Any) -> str:
    # The field, and the place in a list; not how pydantic calls what it tried there.
    where = ".".join(str(part) for depth, part in enumerate(problem["loc"]) if depth == 0 or isinstance(part, int))
    said = str(problem["msg"])
    if problem["type"] == "extra_forbidden":
        said = "there is no such field"
    elif problem["type"] == "string_pattern_mismatch":
        said = f"must be {_PATTERNS.get(problem['ctx']['pattern'], 'printable and not blank')}"
    return f"{where[:100]}: {said}" if where else said


# --- answers ---

_SECONDS: Final = "2026-05-04T10:30:00.123Z"


class LeasedGPU(BaseModel):
    gpu_id: int = Field(description="The driver's index when it was granted.", examples=[0])
    uuid: str | None = Field(description="Names the card, or the MIG device, for good.", examples=["GPU-6ec5c1a2"])
    name: str = Field(examples=["NVIDIA GeForce RTX 3090"])


class LeaseFacts(BaseModel):
    lease_id: str = Field(examples=["lease-12"])
    request_id: str = Field(examples=["train-7"])
    worker_id: str = Field(examples=["trainer"])
    fence: int = Field(
        description="Grows with every grant: whoever has a lower one was granted earlier.", examples=[12]
    )
    gpus: list[LeasedGPU]
    granted_at: str = Field(description="For people to read.", examples=[_SECONDS])
    expires_at: str | None = Field(description="For people to read; null: not by itself.", examples=[_SECONDS])
    expires_in_seconds: float | None = Field(description="Reckon with this one.", examples=[59.998])
    ttl_seconds: float | None = Field(examples=[60.0])
    state: Literal["offered", "held", "quarantined"] = Field(examples=["held"])
    label: str | None = Field(examples=["nightly run"])
    memory_mb: float | None = Field(examples=[None])
    share: bool = Field(examples=[False])


class Lease(LeaseFacts):
    """A promise: nobody else gets these GPUs while it is renewed."""

    env: dict[str, str] = Field(
        description="For the environment of the program that will use the GPUs.",
        examples=[{"CUDA_VISIBLE_DEVICES": "GPU-6ec5c1a2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}],
    )


class GrantedLease(Lease):
    token: str = Field(description="Secret: renewing and releasing need it, as `X-Lease-Token`.")


class Quarantine(BaseModel):
    reason: str = Field(examples=["its lease was not renewed in time"])
    seconds: float = Field(description="For how long it has been.", examples=[3.2])


class LeaseRow(LeaseFacts):
    held_seconds: float = Field(description="Since it was granted.", examples=[612.4])
    quarantine: Quarantine | None = Field(description="Why it is no longer its holder's and not yet anybody else's.")
    memory_used_mb: float | None = Field(
        description="On its GPUs now, less what was there before it was granted; null where that is not known.",
        examples=[17920.0],
    )
    idle_seconds: float | None = Field(
        description="For how long its GPUs have had nothing to do; null where that is not known.", examples=[0.0]
    )
    is_idle: bool = Field(description="Whether that is longer than `GPU_POOL_IDLE_AFTER`.", examples=[False])
    user: str | None = Field(description="Whose it is, of a program that asks without a server.", examples=[None])


class Leases(BaseModel):
    leases: list[LeaseRow] = Field(description="Newest last.")


class Released(BaseModel):
    lease_id: str = Field(examples=["lease-12"])
    released: Literal[True]


class StillWaiting(BaseModel):
    """Ask again with the same `request_id`: it keeps its place. Half a minute without asking gives it up."""

    request_id: str = Field(examples=["train-7"])
    position: int = Field(ge=1, description="1 is next.", examples=[1])
    waiting_seconds: float = Field(ge=0, examples=[20.0])
    reasons: list[str] = Field(description="Why it waits.", examples=[["one GPU: next in line; of 1 GPU: 1 held"]])
    token: str = Field(description="Secret: the token of the lease to come; cancelling needs it where it was sent.")


class QueueRow(BaseModel):
    request_id: str = Field(examples=["train-7"])
    worker_id: str = Field(examples=["trainer"])
    position: int = Field(ge=1, examples=[1])
    waiting_seconds: float = Field(ge=0, examples=[20.0])
    reasons: list[str]
    label: str | None
    priority: int = Field(examples=[0])
    count: int = Field(examples=[1])


class Queue(BaseModel):
    queue: list[QueueRow] = Field(description="In order: the first is next.")


class Obstacle(BaseModel):
    kind: str = Field(examples=["held"])
    text: str = Field(examples=["held by trainer for 612 s"])
    actual: float | None = Field(description="The number that is, where there is one.")
    limit: float | None = Field(description="The number that it had to be below or above.")


class ExplainedGPU(BaseModel):
    gpu_id: int | None = Field(description="Null while it is not seen.", examples=[0])
    uuid: str | None
    name: str | None
    obstacles: list[Obstacle] = Field(description="What keeps it from the request; empty where nothing does.")


class Explanation(BaseModel):
    request_id: str = Field(description="Empty where nobody has asked for it.", examples=["train-7"])
    position: int = Field(ge=1, examples=[1])
    waiting_seconds: float = Field(ge=0, examples=[20.0])
    summary: str = Field(examples=["one GPU: next in line; of 1 GPU: 1 held"])
    impossible: list[str] = Field(description="Why no GPU could ever serve it.")
    gpus: list[ExplainedGPU]


class Cancelled(BaseModel):
    request_id: str = Field(examples=["train-7"])
    cancelled: Literal[True]


class Refused(BaseModel):
    detail: str = Field(description="What is wrong and what to do, for people.")
    error: str = Field(description="Which of a few known causes it is, for programs.")
    reasons: list[str] | None = Field(None, description="Each for itself, where there are several.")
    state: str | None = Field(None, description="How a request has ended.", examples=["cancelled"])
