"""The schemas of the lease API: they check the bodies of requests, and describe answers in OpenAPI.

A request body holds the fields of core `Requirements` and a few more. The answers come from `api/lease_rows.py`; tests
check that both agree.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeVar, get_args
from urllib.parse import parse_qs

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, ValidationError, WithJsonSchema

from gpu_worker_pool.core.events import Origin
from gpu_worker_pool.core.readings import LARGEST_MB
from gpu_worker_pool.core.requirements import ANY_GPU, Requirements
from gpu_worker_pool.environment import one_of
from gpu_worker_pool.gpu_server.responses import Refusal
from gpu_worker_pool.gpu_server.schemas import Holder  # noqa: TC001  # pydantic reads the annotation
from gpu_worker_pool.hardware.origin import LONGEST_NAME
from gpu_worker_pool.lease_variables import GPUNaming

ID_PATTERN: Final = r"^[A-Za-z0-9._:-]{1,64}$"
TOKEN_PATTERN: Final = r"^[!-~]{16,200}$"  # noqa: S105  # a pattern, not a secret
MOST_WAIT_SECONDS: Final = 30.0
GPU_NAMES_DESCRIPTION: Final = (
    "How `CUDA_VISIBLE_DEVICES` in the answer's `env` names GPUs; MIG devices are always named by UUID."
)

_WORKER: Final = r"^[A-Za-z0-9._:-]{0,64}$"
# These texts appear on terminals, where control characters would take effect.
_TEXT: Final = r"^[^\x00-\x1f\x7f-\x9f]*$"
_NAME: Final = (
    r"^ *[^\x00-\x20\x7f-\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"  # not a blank of any alphabet
    r"[^\x00-\x1f\x7f-\x9f]*$"
)
# Also without marks that change the direction of the text around them.
_PRINTABLE_NAME: Final = (
    r"^[^\x00-\x20\x7f-\xa0\u1680\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff]"
    r"[^\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]*$"
)

_PATTERNS: Final = {
    ID_PATTERN: "1 to 64 of letters, digits and . _ : -",
    _WORKER: "up to 64 of letters, digits and . _ : -",
    _TEXT: "without control characters",
}


def _whole(number: object) -> object:
    """In JSON, 1.0 is a whole number."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


Percent = Annotated[float, Field(ge=0, le=100)]
Megabytes = Annotated[float, Field(gt=0, le=LARGEST_MB)]
GPUName = (
    Annotated[int, Field(ge=0, le=2**31 - 1), BeforeValidator(_whole)]
    | Annotated[str, Field(min_length=1, max_length=80, pattern=_NAME)]
)
#: What `Requirements` checks across fields, for OpenAPI.
_SHARE_NEEDS_MEMORY: Final[dict[str, JsonValue]] = {
    "anyOf": [
        {"properties": {"share": {"const": False}}},
        {"properties": {"memory_mb": {"type": "number"}}, "required": ["memory_mb"]},
    ]
}


class RequirementsBody(BaseModel):
    """The fields of `Requirements`: which GPUs a request accepts, and how many."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        json_schema_extra={**_SHARE_NEEDS_MEMORY, "examples": [{}, {"count": 2, "gpu_model": "A100"}]},
    )

    count: Annotated[int, Field(ge=1, le=1024), BeforeValidator(_whole)] = Field(
        1, description="How many GPUs; all or none."
    )
    memory_mb: Megabytes | None = Field(None, description="Memory to reserve on each of them.")
    share: bool = Field(False, description="Whether others may use the rest of the GPU; needs `memory_mb`.")
    min_free_memory_mb: Megabytes | None = Field(None, description="Memory that must be free when it is granted.")
    gpu_model: Annotated[str, Field(min_length=1, max_length=100, pattern=_NAME)] | None = Field(
        None, description="Part of the GPU's name, in upper or lower case."
    )
    only: list[GPUName] | None = Field(
        None, min_length=1, max_length=64, description="Indices or UUIDs of the GPUs to choose from."
    )
    exclude: list[GPUName] | None = Field(None, max_length=64, description="Indices or UUIDs of GPUs not to use.")
    priority: Annotated[int, Field(ge=-1000, le=1000), BeforeValidator(_whole)] = Field(
        0, description="Higher goes first."
    )
    policy: Literal["thresholds", "idle"] = Field(
        "thresholds",
        description="`idle` accepts only GPUs on which no process without a lease computes, and without unexplained "
        "memory in use.",
    )
    memory_threshold: Percent | None = Field(
        None, description="Memory usage must be below this; 80 by default, and without limit for `idle` and `share`."
    )
    utilization_threshold: Percent | None = Field(
        None, description="Utilization must be below this; 90 by default, and without limit for `idle` and `share`."
    )

    def requirements(self) -> Requirements:
        """Raises a `ValueError` for fields that contradict each other."""
        given = {name: getattr(self, name) for name in self.model_fields_set & _REQUIREMENTS}
        return Requirements(**given) if given else ANY_GPU


Name = Annotated[str, Field(max_length=LONGEST_NAME, pattern=_PRINTABLE_NAME)]


class HolderBody(BaseModel):
    """Who requests a GPU, as the client says it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    user: Name | None = Field(None, description="The name of its user.")
    host: Name | None = Field(None, description="The name of its host.")
    pid: Annotated[int, Field(ge=1, le=2**31 - 1), BeforeValidator(_whole)] | None = Field(None)
    program: Name | None = Field(None, description="The name of its script or program, without arguments.")

    def origin(self) -> Origin:
        return Origin(self.user, self.host, self.pid, self.program)


class EnclosingLease(BaseModel):
    """A lease of yours, of which the new one becomes a part."""

    model_config = ConfigDict(strict=True, extra="forbid")

    lease_id: Annotated[str, Field(pattern=ID_PATTERN)] = Field(description="The lease inside which you run.")
    token: Annotated[str, Field(pattern=TOKEN_PATTERN)] | None = Field(
        None, description="Its token, as proof that it is yours; not needed by its user over the Unix socket."
    )


class LeaseRequest(RequirementsBody):
    """A request for GPUs. Repeating it with the same `request_id` and the same requirements keeps its position."""

    model_config = ConfigDict(
        json_schema_extra={
            **_SHARE_NEEDS_MEMORY,
            "examples": [
                {"request_id": "train-7", "worker_id": "trainer", "ttl_seconds": 60, "wait_seconds": 4},
                {"count": 2, "gpu_model": "A100", "policy": "idle", "priority": 5, "label": "nightly run"},
                {"memory_mb": 8192, "share": True},
            ],
        }
    )

    request_id: Annotated[str, Field(pattern=ID_PATTERN)] | None = Field(
        None, description="Names the request, so that it can be repeated. The server makes one up if it is left out."
    )
    worker_id: Annotated[str, Field(pattern=_WORKER)] | None = Field(
        None, description="Who requests it, for people to read."
    )
    ttl_seconds: float = Field(60.0, ge=2, le=3600, description="How long the lease lives without being renewed.")
    wait_seconds: float = Field(0.0, ge=0, le=MOST_WAIT_SECONDS, description="How long to wait for the answer.")
    label: Annotated[str, Field(max_length=200, pattern=_TEXT)] | None = Field(None, description="For people to read.")
    holder: (
        Annotated[HolderBody, WithJsonSchema(HolderBody.model_json_schema())] | None  # OpenAPI has no `$defs`
    ) = Field(None, description="Who requests it: shown to others as said, beside `verified: false`.")
    may_keep: bool = Field(
        True, description="Whether GPUs may be reserved here for a request that others would overtake forever."
    )
    gpu_names: GPUNaming = Field("index", description=GPU_NAMES_DESCRIPTION)
    within: Annotated[EnclosingLease, WithJsonSchema(EnclosingLease.model_json_schema())] | None = Field(
        None, description="Grant a part of this lease. Requests inside a lease divide its GPUs and wait for each other."
    )


_REQUIREMENTS: Final = frozenset(RequirementsBody.model_fields)


Body = TypeVar("Body", bound=RequirementsBody)


def parse_body(shape: type[Body], body: bytes) -> tuple[Body, Requirements]:
    """Raises a `Refusal` that lists everything that is wrong."""
    try:
        parsed = shape.model_validate_json(body)
        return parsed, parsed.requirements()
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)[:20]
        raise invalid(*map(_sentence, problems)) from None
    except ValueError as error:
        raise invalid(str(error)) from None


def gpu_naming(query: bytes) -> GPUNaming:
    """Of a renewal, which has no body. Other parameters are ignored, as on every route."""
    if not query:
        return "index"
    try:
        given = parse_qs(query.decode("latin-1"), keep_blank_values=True, max_num_fields=100)
        found = given.get("gpu_names", ["index"])[-1]
        return one_of(get_args(GPUNaming), found, "gpu_names")
    except ValueError as error:
        raise invalid(str(error)) from None


def invalid(*reasons: str) -> Refusal:
    return Refusal(422, "invalid", f"this request is invalid: {'; '.join(reasons)}", reasons)


def _sentence(problem: Any) -> str:
    # The field and the position in a list, without pydantic's names for the types that it tried.
    loc = problem["loc"]
    is_nested = loc[:1] == ("holder",)
    where = ".".join(str(part) for depth, part in enumerate(loc) if depth == 0 or is_nested or isinstance(part, int))
    said = str(problem["msg"])
    if problem["type"] == "extra_forbidden":
        said = "there is no such field"
    elif problem["type"] == "string_pattern_mismatch":
        said = f"must be {_PATTERNS.get(problem['ctx']['pattern'], 'printable and not blank')}"
    return f"{where[:100]}: {said}" if where else said


# --- answers ---

_MOMENT: Final = "2026-05-04T10:30:00.123Z"


class LeasedGPUSchema(BaseModel):
    gpu_id: int = Field(description="The driver's index when it was granted.", examples=[0])
    uuid: str | None = Field(description="Identifies the card or the MIG device.", examples=["GPU-6ec5c1a2"])
    name: str = Field(examples=["NVIDIA GeForce RTX 3090"])


class LeaseFacts(BaseModel):
    lease_id: str = Field(examples=["lease-12"])
    request_id: str = Field(examples=["train-7"])
    worker_id: str = Field(examples=["trainer"])
    fence: int = Field(description="Grows with every grant: a lower one was granted earlier.", examples=[12])
    gpus: list[LeasedGPUSchema]
    granted_at: str = Field(description="For people to read.", examples=[_MOMENT])
    expires_at: str | None = Field(description="For people to read; null: it does not expire.", examples=[_MOMENT])
    expires_in_seconds: float | None = Field(description="Use this for calculations.", examples=[59.998])
    ttl_seconds: float | None = Field(examples=[60.0])
    state: Literal["offered", "held", "quarantined"] = Field(examples=["held"])
    label: str | None = Field(examples=["nightly run"])
    memory_mb: float | None = Field(examples=[None])
    share: bool = Field(examples=[False])
    within: str | None = Field(description="The lease of which it is a part.", examples=[None])


class LeaseSchema(LeaseFacts):
    """While it is renewed, these GPUs are granted to no other request."""

    env: dict[str, str] = Field(
        description="For the environment of the program that will use the GPUs.",
        examples=[
            {
                "CUDA_VISIBLE_DEVICES": "0",
                "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
                "NVIDIA_VISIBLE_DEVICES": "GPU-6ec5c1a2",
                "GPU_POOL_LEASE_ID": "lease-12",
            }
        ],
    )


class GrantedLease(LeaseSchema):
    token: str = Field(description="Secret: renewing and releasing need it, as `X-Lease-Token`.")


class QuarantineSchema(BaseModel):
    reason: str = Field(examples=["its lease was not renewed in time"])
    seconds: float = Field(description="How long it has lasted.", examples=[3.2])


class LeaseRowSchema(LeaseFacts):
    held_seconds: float = Field(description="Since it was granted.", examples=[612.4])
    quarantine: QuarantineSchema | None = Field(
        description="Why its holder has lost it and it cannot be granted again yet."
    )
    memory_used_mb: float | None = Field(
        description="On its GPUs now, less what was in use before it was granted; null where that is not known.",
        examples=[17920.0],
    )
    idle_seconds: float | None = Field(
        description="How long its GPUs have been idle; null where that is not known.", examples=[0.0]
    )
    is_idle: bool = Field(description="Whether that is longer than `GPU_POOL_IDLE_AFTER`.", examples=[False])
    user: str | None = Field(description="The user, where the program acquired it without a server.", examples=[None])
    holder: Holder | None = Field(description="Who holds it; null where that is unknown.")


class Leases(BaseModel):
    leases: list[LeaseRowSchema] = Field(description="Newest last.")


class ReleasedSchema(BaseModel):
    lease_id: str = Field(examples=["lease-12"])
    released: Literal[True]


class WaitingFacts(BaseModel):
    request_id: str = Field(examples=["train-7"])
    position: int = Field(ge=1, description="1 is next; inside a lease, among those inside it.", examples=[1])
    waiting_seconds: float = Field(ge=0, examples=[20.0])
    reasons: list[str] = Field(description="Why it waits.", examples=[["one GPU: next in line; of 1 GPU: 1 held"]])


class StillWaitingSchema(WaitingFacts):
    """Repeat the request with the same `request_id` within half a minute: it keeps its position."""

    token: str = Field(description="Secret: the token of the lease to come; cancelling needs it if you sent one.")


class QueueRow(WaitingFacts):
    worker_id: str = Field(examples=["trainer"])
    label: str | None
    priority: int = Field(examples=[0])
    count: int = Field(examples=[1])
    holder: Holder | None = Field(description="Who waits; null where that is unknown.")
    within: str | None = Field(description="The lease inside which it waits for a part.", examples=[None])


class Queue(BaseModel):
    queue: list[QueueRow] = Field(description="In order: the first is next.")


class ObstacleSchema(BaseModel):
    kind: str = Field(examples=["held"])
    text: str = Field(examples=["held by ada's train.py (pid 4242) for 612 s"])
    actual: float | None = Field(description="The measured number, where there is one.")
    limit: float | None = Field(description="The limit that it is compared with.")


class ExplainedGPU(BaseModel):
    gpu_id: int | None = Field(description="Null while the driver does not report it.", examples=[0])
    uuid: str | None
    name: str | None
    obstacles: list[ObstacleSchema] = Field(description="Why the request cannot have it; empty: it can.")


class ExplanationSchema(BaseModel):
    request_id: str = Field(description="Empty for requirements that were not requested.", examples=["train-7"])
    position: int = Field(ge=1, examples=[1])
    waiting_seconds: float = Field(ge=0, examples=[20.0])
    summary: str = Field(examples=["one GPU: next in line; of 1 GPU: 1 held"])
    impossible: list[str] = Field(description="Why no GPU could ever serve it.")
    gpus: list[ExplainedGPU]


class CancelledSchema(BaseModel):
    request_id: str = Field(examples=["train-7"])
    cancelled: Literal[True]


class Refused(BaseModel):
    detail: str = Field(description="What is wrong and what to do, for people.")
    error: str = Field(description="A code for the cause, for programs.")
    reasons: list[str] | None = Field(None, description="The single reasons, where there are several.")
    state: str | None = Field(None, description="How a request has ended.", examples=["cancelled"])
