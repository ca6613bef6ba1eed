"""The core decides who gets which GPU. It does no I/O, reads no clock, draws no random number and writes no log.

docs/ARCHITECTURE.md lists its rules, and the file that each of them lives in.
"""

from gpu_worker_pool.core.allocator import GPUAllocator as GPUAllocator
from gpu_worker_pool.core.assignments import HeldGPU as HeldGPU
from gpu_worker_pool.core.assignments import Lease as Lease
from gpu_worker_pool.core.assignments import LeaseUse as LeaseUse
from gpu_worker_pool.core.assignments import LeaveAsked as LeaveAsked
from gpu_worker_pool.core.assignments import Quarantine as Quarantine
from gpu_worker_pool.core.assignments import WorkerAssignmentTracker as WorkerAssignmentTracker
from gpu_worker_pool.core.effects import Effect as Effect
from gpu_worker_pool.core.effects import Ended as Ended
from gpu_worker_pool.core.effects import Granted as Granted
from gpu_worker_pool.core.effects import LeaseEnded as LeaseEnded
from gpu_worker_pool.core.effects import ReadingWanted as ReadingWanted
from gpu_worker_pool.core.effects import WakeAt as WakeAt
from gpu_worker_pool.core.events import Cancelled as Cancelled
from gpu_worker_pool.core.events import Event as Event
from gpu_worker_pool.core.events import FleetOrdered as FleetOrdered
from gpu_worker_pool.core.events import GPUsVanished as GPUsVanished
from gpu_worker_pool.core.events import GrantRefused as GrantRefused
from gpu_worker_pool.core.events import HolderGone as HolderGone
from gpu_worker_pool.core.events import LeaveRequested as LeaveRequested
from gpu_worker_pool.core.events import Observed as Observed
from gpu_worker_pool.core.events import Origin as Origin
from gpu_worker_pool.core.events import PolicyRead as PolicyRead
from gpu_worker_pool.core.events import PollAbandoned as PollAbandoned
from gpu_worker_pool.core.events import QuarantineEnded as QuarantineEnded
from gpu_worker_pool.core.events import Released as Released
from gpu_worker_pool.core.events import Renewed as Renewed
from gpu_worker_pool.core.events import Request as Request
from gpu_worker_pool.core.events import Requested as Requested
from gpu_worker_pool.core.events import Resumed as Resumed
from gpu_worker_pool.core.events import Stopped as Stopped
from gpu_worker_pool.core.events import Ticked as Ticked
from gpu_worker_pool.core.events import TurnCame as TurnCame
from gpu_worker_pool.core.events import Unreachable as Unreachable
from gpu_worker_pool.core.events import UseSeen as UseSeen
from gpu_worker_pool.core.explanation import Explanation as Explanation
from gpu_worker_pool.core.explanation import GPUExplanation as GPUExplanation
from gpu_worker_pool.core.explanation import explain as explain
from gpu_worker_pool.core.explanation import explain_requirements as explain_requirements
from gpu_worker_pool.core.fleet_order import FleetOrder as FleetOrder
from gpu_worker_pool.core.gpus import GPUResourceState as GPUResourceState
from gpu_worker_pool.core.moves import LeaseState as LeaseState
from gpu_worker_pool.core.moves import RequestState as RequestState
from gpu_worker_pool.core.obstacles import Obstacle as Obstacle
from gpu_worker_pool.core.obstacles import ObstacleKind as ObstacleKind
from gpu_worker_pool.core.policy import Policy as Policy
from gpu_worker_pool.core.pool import Pool as Pool
from gpu_worker_pool.core.queue import Waiter as Waiter
from gpu_worker_pool.core.queue import WorkerQueue as WorkerQueue
from gpu_worker_pool.core.readings import ProcessReading as ProcessReading
from gpu_worker_pool.core.readings import Reading as Reading
from gpu_worker_pool.core.remembered import Outcome as Outcome
from gpu_worker_pool.core.requirements import ANY_GPU as ANY_GPU
from gpu_worker_pool.core.requirements import Requirements as Requirements
from gpu_worker_pool.core.saved import restore as restore
from gpu_worker_pool.core.saved import save as save
from gpu_worker_pool.core.settings import PoolSettings as PoolSettings
from gpu_worker_pool.core.settings import Strategy as Strategy

# The former names of four exports, so that programs which import them keep working.
Wishes, PLAIN, StoppedListening, explain_wishes = Requirements, ANY_GPU, PollAbandoned, explain_requirements
