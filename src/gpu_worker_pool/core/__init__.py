"""The core decides who gets which GPU. It does no I/O, reads no clock, draws no random number and writes no log.

| rule | says | lives in |
| --- | --- | --- |
| 1 | when a GPU is eligible | `obstacles` |
| 2 | one worker per GPU, unless all of them declare memory and share | `obstacles.lease_obstacles` |
| 3 | which GPU is best, and which endpoint | `gpus.GPUResourceState.rank`, `allocator`, `balancing` |
| 4 | who is first, and the bound on being overtaken | `queue`, `assigning`, `reservation` |
| 5 | impossible requests fail at once | `allocator.GPUAllocator.impossible` |
| 6 | every request ends exactly once | `moves.REQUEST_MOVES`, `Pool._end_request` |
| 7 | a cancelled request gives back what it was granted | `Pool._cancelled` |
| 8 | a released GPU goes to the next waiter at once | `Pool._end_lease`, `Pool._want_readings`, `reservation` |
| 9 | ids are remembered | `Pool._requested`, `legality`, `remembered` |
| 10 | time in which no process served the ledger does not count | `Pool._resumed`, `saved`, `replication` |
| 11 | quarantine | `Pool._quarantine`, `evidence` |
| 12 | why a request waits | `explanation` |
"""

from gpu_worker_pool.core.allocator import GPUAllocator
from gpu_worker_pool.core.assignments import HeldGPU, Lease, Quarantine, WorkerAssignmentTracker
from gpu_worker_pool.core.effects import Effect, Ended, Granted, LeaseEnded, ReadingWanted, WakeAt
from gpu_worker_pool.core.events import (
    Cancelled,
    Event,
    GPUsVanished,
    HolderGone,
    Observed,
    PollAbandoned,
    QuarantineEnded,
    Released,
    Renewed,
    Request,
    Requested,
    Resumed,
    Stopped,
    Ticked,
    Unreachable,
)
from gpu_worker_pool.core.explanation import Explanation, GPUExplanation, explain, explain_requirements
from gpu_worker_pool.core.gpus import GPUResourceState
from gpu_worker_pool.core.invariants import check_invariants
from gpu_worker_pool.core.moves import LeaseState, RequestState
from gpu_worker_pool.core.obstacles import Obstacle, ObstacleKind
from gpu_worker_pool.core.pool import Pool
from gpu_worker_pool.core.queue import Waiter, WorkerQueue
from gpu_worker_pool.core.readings import ProcessReading, Reading
from gpu_worker_pool.core.remembered import Outcome
from gpu_worker_pool.core.requirements import ANY_GPU, Requirements
from gpu_worker_pool.core.saved import restore, save
from gpu_worker_pool.core.settings import PoolSettings, Strategy

# The former names of four exports, so that programs which import them keep working.
Wishes, PLAIN, StoppedListening, explain_wishes = Requirements, ANY_GPU, PollAbandoned, explain_requirements

__all__ = [
    "ANY_GPU",
    "PLAIN",
    "Cancelled",
    "Effect",
    "Ended",
    "Event",
    "Explanation",
    "GPUAllocator",
    "GPUExplanation",
    "GPUResourceState",
    "GPUsVanished",
    "Granted",
    "HeldGPU",
    "HolderGone",
    "Lease",
    "LeaseEnded",
    "LeaseState",
    "Observed",
    "Obstacle",
    "ObstacleKind",
    "Outcome",
    "PollAbandoned",
    "Pool",
    "PoolSettings",
    "ProcessReading",
    "Quarantine",
    "QuarantineEnded",
    "Reading",
    "ReadingWanted",
    "Released",
    "Renewed",
    "Request",
    "RequestState",
    "Requested",
    "Requirements",
    "Resumed",
    "Stopped",
    "StoppedListening",
    "Strategy",
    "Ticked",
    "Unreachable",
    "Waiter",
    "WakeAt",
    "Wishes",
    "WorkerAssignmentTracker",
    "WorkerQueue",
    "check_invariants",
    "explain",
    "explain_requirements",
    "explain_wishes",
    "restore",
    "save",
]
