"""The schemas of the answers, for OpenAPI; a test compares them with what `api/gpu_rows.py` builds."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

Percent = Field(ge=0, le=100)
AGE = Field(ge=0, description="How old the sample is now. Use this for calculations, not `timestamp`.")
TIMESTAMP = Field(description="When the sample was taken: local time without a zone, for people to read.")


class Memory(BaseModel):
    total_mb: float | None
    used_mb: float | None
    free_mb: float | None = Field(description="As the driver reports it: less than total - used, as it reserves some.")
    usage_percent: float | None = Percent


class Power(BaseModel):
    draw_w: float | None
    limit_w: float | None


class Process(BaseModel):
    pid: int
    name: str | None
    user: str | None = Field(description="Null for a process that this host's /proc does not show.")
    memory_used_mb: float | None
    running_seconds: float | None = Field(description="Since it was started; null like `user`.")


class MIGDevice(BaseModel):
    uuid: str
    name: str
    gpu_instance_id: int | None
    compute_instance_id: int | None
    memory: Memory
    fault: str | None
    processes: list[Process] | None


class Holder(BaseModel):
    """Who holds a lease, or waits for one. Each value is null where it is unknown."""

    user: str | None = Field(examples=["ada"])
    host: str | None = Field(description="Where the program runs.", examples=["gpu-1"])
    pid: int | None = Field(examples=[4242])
    program: str | None = Field(description="The name of the script or program.", examples=["train.py"])
    verified: bool = Field(
        description="Whether the user is known for certain (`local://`); false: the client says so.", examples=[True]
    )


class Promise(BaseModel):
    lease_id: str
    worker_id: str
    label: str | None
    state: Literal["offered", "held", "quarantined"]
    user: str | None = Field(description="The user of a program that uses `local://`; null for others.")
    holder: Holder | None = Field(description="Who holds it; null where that is unknown.")
    within: str | None = Field(description="The lease of which it is a part; null for most.")


class GPU(BaseModel):
    gpu_id: int
    name: str
    memory: Memory
    utilization_percent: float | None = Percent
    temperature_c: float | None
    power: Power
    uuid: str | None
    pci_bus_id: str | None
    fault: str | None = Field(description="Why the GPU must not be used; null for a healthy one.")
    reports_utilization: bool = Field(description="False where the device has no such sensor (MIG).")
    ecc_uncorrected_errors: int | None
    recovery_action: str | None = Field(description="What the driver recommends to an administrator, such as `Reset`.")
    processes: list[Process] | None = Field(
        description="Those that compute. Null if the server is not allowed to see them."
    )
    graphics_processes: list[Process] | None = Field(description="Those that only draw; null if they cannot be seen.")
    unified_memory: bool = Field(
        description="The GPU has no memory of its own (GB10, Jetson): `memory` is that of its host."
    )
    mig_enabled: bool
    mig_devices: list[MIGDevice]
    leases: list[Promise] | None = Field(description="Its leases; null where the ledger cannot be read.")
    obstacles: list[str] | None = Field(
        description="Why a request without requirements cannot have it. Empty if it is free; null like `leases`.",
        examples=[["memory 98.0 % used, not below 80 %"]],
    )
    idle_obstacles: list[str] | None = Field(
        description="The same for a request with `policy` idle, as `gpu-pool run` makes it.",
        examples=[["in use by python (pid 4242, ada) with 15.0 GiB for 3 h"]],
    )


class Stats(BaseModel):
    gpu_count: int
    gpus: list[GPU]
    timestamp: str = TIMESTAMP
    backend: str
    driver_version: str | None
    sample_age_seconds: float = AGE


class Count(BaseModel):
    gpu_count: int
    timestamp: str = TIMESTAMP
    sample_age_seconds: float = AGE


class SummaryRow(BaseModel):
    gpu_id: int
    name: str
    memory_usage_percent: float | None = Percent
    utilization_percent: float | None = Percent
    uuid: str | None
    memory_total_mb: float | None
    memory_used_mb: float | None
    fault: str | None
    reports_utilization: bool
    process_count: int | None
    leased: bool = Field(description="Whether it is known to be leased.")
    unified_memory: bool = Field(description="Whether its memory is that of its host.")


class Summary(BaseModel):
    gpu_count: int
    total_memory_mb: float | None
    total_used_memory_mb: float | None
    total_memory_usage_percent: float | None = Percent
    average_utilization_percent: float | None = Percent
    gpus_summary: list[SummaryRow]
    timestamp: str = TIMESTAMP
    sample_age_seconds: float = AGE


class HistoryReading(BaseModel):
    timestamp: str
    memory_used_mb: float | None
    memory_usage_percent: float | None = Percent
    utilization_percent: float | None = Percent
    temperature_c: float | None
    power_draw_w: float | None
    fault: str | None


class GPUHistorySchema(BaseModel):
    gpu_id: int
    name: str
    uuid: str | None
    readings: list[HistoryReading] = Field(description="Oldest first.")


class HistorySchema(BaseModel):
    max_history: int
    sample_age_seconds: float = Field(ge=0, description="Age of the newest sample, however old it is.")
    gpus: list[GPUHistorySchema]


class RFC9457(BaseModel):
    """Problem details; the content type is that of RFC 9457 for callers that accept it."""

    type: str = Field(description="Identifies the kind of problem.", examples=["urn:gpu-worker-pool:driver_hangs"])
    title: str = Field(description="The same in words.", examples=["Driver hangs"])
    status: int = Field(description="The status of the answer.", examples=[503])


class ProblemSchema(RFC9457):
    detail: str = Field(description="What is wrong, for people.")
    error: str | None = Field(description="A code for the cause, for programs.")


class HealthBody(BaseModel):
    status: Literal["healthy", "degraded", "unhealthy"]
    nvidia_smi_available: bool
    timestamp: str
    error: str | None = Field(description="Why it is not healthy.")
    error_code: str | None
    sample_age_seconds: float | None = Field(ge=0, description="Null before the first sample.")
    gpu_count: int | None
    backend: str | None
    driver_version: str | None


class Alive(BaseModel):
    status: Literal["alive"] = "alive"


class Ready(BaseModel):
    status: Literal["ready"] = "ready"


class Home(BaseModel):
    message: str
    version: str
    endpoints: dict[str, str]
    features: list[str]


class ServerConfig(BaseModel):
    host: str
    port: int
    reload: bool
    log_level: str
    access_log: bool
    workers: int


class APIConfig(BaseModel):
    title: str
    version: str
    docs_url: str
    redoc_url: str
    enable_cors: bool
    api_prefix: str


class MonitoringConfig(BaseModel):
    refresh_interval: float
    max_history: int
    gpu_backend: str


class FilteringConfig(BaseModel):
    cuda_visible_devices: str | None = Field(description="As it was set; null if it was not.")
    visible_gpu_ids: list[int] | None
    filtering_active: bool
    total_system_gpus: int | None
    visible_gpu_count: int | None


class LeasesConfig(BaseModel):
    open_to: list[Literal["loopback", "keys", "socket"]]
    idle_after: float
    most_waiting: int
    policy: str | None = Field(description="The policy file; null where nothing is limited.")
    policy_problem: str | None = Field(description="Why the file cannot be used as it is; the one before is in force.")
    most_leases_of_a_caller: int
    most_leases: int


class Config(BaseModel):
    server: ServerConfig
    api: APIConfig
    monitoring: MonitoringConfig
    gpu_filtering: FilteringConfig
    leases: LeasesConfig
