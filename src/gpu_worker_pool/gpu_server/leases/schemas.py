"""The schemas of the lease API: they check the bodies of requests, and describe answers in OpenAPI.

A request body holds the fields of core `Requirements` and a few more. The answers come from `api/lease_rows.py`; tests
check that both agree.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, get_args
from urllib.parse import parse_qs

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, ValidationError

from gpu_worker_pool.core.events import Origin
from gpu_worker_pool.core.readings import LARGEST_MB
from gpu_worker_pool.core.requirements import ANY_GPU, Requirements
from gpu_worker_pool.environment import one_of
from gpu_worker_pool.gpu_server.responses import Refusal
from gpu_worker_pool.gpu_server.schemas import RFC9457, Holder  # pydantic reads the annotation
from gpu_worker_pool.hardware.origin import LONGEST_NAME
from gpu_worker_pool.lease_variables import GPUNaming
from gpu_worker_pool.wording import NOT_TEXT

ID_PATTERN: Final = r"^[A-Za-z0-9._:-]{1,64}$"
TOKEN_PATTERN: Final = r"^[!-~]{16,200}$"  # noqa: S105  # a pattern, not a secret
MOST_WAIT_SECONDS: Final = 30.0
#: Else a card could have millions of holders.
SMALLEST_SHARE_MB: Final = 1.0
#: No job is longer than ten years.
LONGEST_SECONDS: Final = 10 * 366 * 86_400.0
GPU_NAMES_DESCRIPTION: Final = (
    "How `CUDA_VISIBLE_DEVICES` in the answer's `env` names GPUs; MIG devices are always named by UUID."
)

_WORKER: Final = r"^[A-Za-z0-9._:-]{0,64}$"
_TEXT: Final = rf"^[^{NOT_TEXT}]*$"
_NAME: Final = (
    r"^ *[^\x00-\x20\x7f-\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"  # not a blank of any alphabet
    rf"[^{NOT_TEXT}]*$"
)
# Also without invisible characters.
_PRINTABLE_NAME: Final = (
    r"^[^\x00-\x20\x7f-\xa0\u1680\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff]"
    rf"[^{NOT_TEXT}\u200b-\u200f\u2060-\u206f\ufeff]*$"
)

_PATTERNS: Final = {
    ID_PATTERN: "1 to 64 of letters, digits and . _ : -",
    _WORKER: "up to 64 of letters, digits and . _ : -",
    _TEXT: "without control characters, line separators and marks of the writing direction",
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
    # Not `anyOf`, which generators of clients take for a choice between types.
    "if": {"properties": {"share": {"const": True}}, "required": ["share"]},
    "then": {"properties": {"memory_mb": {"type": "number"}}, "required": ["memory_mb"]},
}


class RequirementsBody(BaseModel):
    """The fields of `Requirements`: which GPUs a request accepts, and how many."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        json_schema_extra={**_SHARE_NEEDS_MEMORY, "examples": [{}, {"count": 2, "gpu_model": "A100"}]},
    )

    count: Annotated[int, Field(ge=1, le=1024), BeforeValidator(_whole)] = Field(
        1, description="How many GPUs; all or none."
    )
    memory_mb: Annotated[float, Field(ge=SMALLEST_SHARE_MB, le=LARGEST_MB)] | None = Field(
        None, description="Memory to reserve on each of them."
    )
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

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    user: Name | None = Field(None, description="The name of its user.")
    host: Name | None = Field(None, description="The name of its host.")
    pid: Annotated[int, Field(ge=1, le=2**31 - 1), BeforeValidator(_whole)] | None = Field(None)
    program: Name | None = Field(None, description="The name of its script or program, without arguments.")

    def origin(self) -> Origin:
        return Origin(self.user, self.host, self.pid, self.program)


class EnclosingLease(BaseModel):
    """A lease of yours, of which the new one becomes a part."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    lease_id: Annotated[str, Field(pattern=ID_PATTERN)] = Field(description="The lease inside which you run.")
    token: Annotated[str, Field(pattern=TOKEN_PATTERN)] | None = Field(
        None, description="Its token, as proof that it is yours; not needed by its user over the Unix socket."
    )


class LeaseRequest(RequirementsBody):
    """A request for GPUs. Repeating it with the same `request_id` and the same requirements keeps its position."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
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
    expected_seconds: float | None = Field(
        None,
        gt=0,
        le=LONGEST_SECONDS,
        description="How long the GPUs will be used, as far as you know. Never enforced: others may be let in before a "
        "reserved host is free, and large requests wait less. Too long does no harm.",
    )
    max_seconds: float | None = Field(
        None,
        gt=0,
        le=LONGEST_SECONDS,
        description="When the lease ends at the latest, counted from the grant; renewing never extends it beyond. "
        "Counts as `expected_seconds`, too.",
    )
    ask: bool = Field(False, description="Ask the holders in its way to give their GPUs back; no holder is forced.")
    wait_seconds: float = Field(0.0, ge=0, le=MOST_WAIT_SECONDS, description="How long to wait for the answer.")
    label: Annotated[str, Field(max_length=200, pattern=_TEXT)] | None = Field(None, description="For people to read.")
    holder: HolderBody | None = Field(
        None, description="Who requests it: shown to others as said, beside `verified: false`."
    )
    may_keep: bool = Field(
        True, description="Whether GPUs may be reserved here for a request that others would overtake forever."
    )
    gpu_names: GPUNaming = Field("index", description=GPU_NAMES_DESCRIPTION)
    on_this_host: bool = Field(
        False, description="In a fleet: only GPUs of this server's host, whose indices `only` and `exclude` mean."
    )
    within: EnclosingLease | None = Field(
        None, description="Grant a part of this lease. Requests inside a lease divide its GPUs and wait for each other."
    )


class RenewalBody(BaseModel):
    """What a holder may say with a renewal."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    is_busy: bool = Field(False, description="The holder is not idle, whatever readings show.")


class YieldBody(BaseModel):
    """What is said to a holder that is asked to give its GPUs back."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    reason: Annotated[str, Field(max_length=200, pattern=_TEXT)] | None = Field(
        None, description="For the holder to read.", examples=["a demo at 3 pm"]
    )


_REQUIREMENTS: Final = frozenset(RequirementsBody.model_fields)


Body = TypeVar("Body", bound=RequirementsBody)
AnyBody = TypeVar("AnyBody", bound=BaseModel)


def parse_body(shape: type[Body], body: bytes) -> tuple[Body, Requirements]:
    """Raises a `Refusal` that lists everything that is wrong."""
    parsed = parse_plain(shape, body)
    try:
        return parsed, parsed.requirements()
    except ValueError as error:
        raise invalid(str(error)) from None


def parse_plain(shape: type[AnyBody], body: bytes) -> AnyBody:
    try:
        return shape.model_validate_json(body)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)[:20]
        raise invalid(*map(_sentence, problems)) from None


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
    ends_in_seconds: float | None = Field(
        description="When `max_seconds` ends it, however often it is renewed; null: never.", examples=[None]
    )
    yield_asked: bool = Field(description="Whether its holder was asked to give it back.", examples=[False])
    yield_reason: str | None = Field(description="Who asked, or why.", examples=[None])
    leave_in_seconds: float | None = Field(
        description="When the policy ends it if it stays idle; null: never.", examples=[None]
    )
    expected_seconds: float | None = Field(examples=[7200.0])
    max_seconds: float | None = Field(examples=[None])
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
    waited_seconds: float = Field(
        ge=0,
        description="How long this answer took the server: the lease expires `waited_seconds` + `expires_in_seconds` "
        "after you sent the request.",
        examples=[0.004],
    )
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
    account: str | None = Field(
        description="For whom it is held: the name of a user or of a key; null where that is unknown.",
        examples=["physics"],
    )
    holder: Holder | None = Field(description="Who holds it; null where that is unknown.")


class Leases(BaseModel):
    leases: list[LeaseRowSchema] = Field(description="Newest last.")


class ReleasedSchema(BaseModel):
    lease_id: str = Field(examples=["lease-12"])
    released: Literal[True]


class AskedSchema(BaseModel):
    lease_id: str = Field(examples=["lease-12"])
    asked: Literal[True]


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
    expected_seconds: float | None = Field(description="How long it will use them, as it says.", examples=[7200.0])
    max_seconds: float | None = Field(description="When its lease will end at the latest.", examples=[None])
    account: str | None = Field(
        description="For whom it waits: the name of a user or of a key; null where that is unknown.",
        examples=["physics"],
    )
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


class Refused(RFC9457):
    detail: str = Field(description="What is wrong and what to do, for people.")
    error: str = Field(description="A code for the cause, for programs.")
    reasons: list[str] | None = Field(None, description="The single reasons, where there are several.")
    state: str | None = Field(None, description="How a request has ended.", examples=["cancelled"])
    lease: Literal["held", "unknown"] | None = Field(
        None,
        description="Of a renewal, with 503. `held`: no process can write the ledger, and the lease has another TTL.",
    )


# --- the fleet ---


class DispatcherSchema(BaseModel):
    host: str = Field(examples=["gpu-1"])
    url: str = Field(examples=["http://gpu-1:8000"])


class FleetHostSchema(BaseModel):
    host: str = Field(examples=["gpu-2"])
    url: str = Field(examples=["http://gpu-2:8000"])
    state: Literal["up", "draining", "unreachable", "incompatible"]
    gpus: int = Field(examples=[8])
    free: int = Field(description="GPUs that are not held, and that readings allow.", examples=[3])
    seen_seconds_ago: float | None = Field(description="Since it last reported.", examples=[0.4])
    version: str


class FleetSchema(BaseModel):
    fleet_id: str | None
    epoch: int = Field(description="Grows with every new dispatcher.", examples=[7])
    dispatcher: DispatcherSchema | None = Field(description="Null while there is none.")
    database: dict[str, Any] = Field(description="How its database is.", examples=[{"state": "up", "seconds": 60.0}])
    hosts: list[FleetHostSchema]
    queue: list[QueueRow]


class AdministeredSchema(BaseModel):
    host: str = Field(examples=["gpu-2"])
    state: Literal["draining", "up", "removed"]
