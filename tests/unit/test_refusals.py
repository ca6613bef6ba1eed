"""The errors of requests that were not granted, where no server has said why."""

from __future__ import annotations

from gpu_worker_pool.client.refusals import Refusals
from gpu_worker_pool.core import Ended, Origin, Pool, Request, Requested, RequestState
from gpu_worker_pool.errors import WorkerTimeoutError
from gpu_worker_pool.testing import gpus, snapshot


def test_a_process_that_waited_for_itself_is_told_so() -> None:
    mine = Origin("ada", "gpu-1", 4242, "train.py")
    pool = Pool()
    pool.apply(snapshot(gpus(1), at=0.0), 0.0)
    pool.apply(Requested(Request("held", worker_id="worker-1", origin=mine)), 0.0)
    refused = Ended("again", RequestState.TIMED_OUT)
    for origin, told in ((mine, "this very process (pid 4242) for 0 s; release it first"), (None, "ada's train.py")):
        request = Request("again", worker_id="worker-2", origin=origin)
        error = Refusals(lambda: "").error_of(pool, request, refused, 1.0)
        assert isinstance(error, WorkerTimeoutError)
        assert f"GPU 0: held by {told}" in str(error)
