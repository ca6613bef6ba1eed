"""What the documents say in passing, as they have it."""

from __future__ import annotations

import threading

import pytest

from gpu_worker_pool.client.endpoints import EndpointManager
from gpu_worker_pool.config import parse_endpoints
from gpu_worker_pool.core import Request, Requirements, WorkerQueue
from gpu_worker_pool.core.queue import Waiter
from gpu_worker_pool.gpu_monitor import AsyncGPUMonitor, GPUMonitor
from gpu_worker_pool.hardware.samples import GPUReading
from gpu_worker_pool.hardware.visibility import VisibilityFilter
from gpu_worker_pool.models import GPUInfo, GPUStats


def test_the_monitor_has_both_documented_names() -> None:
    assert AsyncGPUMonitor is GPUMonitor


def test_models_refuse_a_gpu_without_a_name_and_a_count_that_is_not_that_of_the_rows() -> None:
    with pytest.raises(ValueError, match="name must not be empty"):
        GPUInfo(0, "", 1.0, 2.0)
    gpus = [GPUInfo(number, "NVIDIA H100", 1.0, 2.0) for number in range(2)]
    for count in (1, 3):
        with pytest.raises(ValueError, match=f"gpu_count must be 2, the length of gpus_summary, not {count}"):
            GPUStats(count, None, None, None, gpus, None, "2026-01-01T00:00:00")
    assert GPUStats(2, None, None, None, gpus, None, "2026-01-01T00:00:00").gpu_count == 2


def test_a_worker_queue_serves_several_threads() -> None:
    queue, taken, number = WorkerQueue(), [], 400
    start = threading.Barrier(8)

    def put(first: int) -> None:
        start.wait()
        for each in range(first, first + number):
            # Several classes of equal requests, each of which comes and goes.
            request = Request(f"r{each}", Requirements(count=1 + each % 3), account=f"a{each % 2}")
            queue.enqueue(Waiter(request, each, float(each)))

    def take() -> None:
        start.wait()
        while len(taken) < 4 * number:
            if (waiter := queue.dequeue()) is not None:
                taken.append(waiter.request.request_id)

    threads = [threading.Thread(target=put, args=(number * each,), daemon=True) for each in range(4)]
    threads += [threading.Thread(target=take, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(taken) == sorted(f"r{each}" for each in range(4 * number))
    assert (queue.size(), queue.dequeue(), queue.of_account("a0")) == (0, None, 0)


@pytest.mark.parametrize(
    ("name", "endpoint_id"),
    [
        ("server1_8000", "server1_8000"),
        ("server1", "server1_8000"),
        ("SERVER1", "server1_8000"),
        ("server1:8000", "server1_8000"),
        ("http://server1:8000/", "server1_8000"),
        ("fast", "fast"),
        ("server2", None),
        ("http://server2:8001", "server2_8001"),
        ("server", None),
        ("", None),
    ],
)
def test_an_endpoint_is_found_by_its_host_where_only_one_is_there(name: str, endpoint_id: str | None) -> None:
    entries = ["http://server1:8000", "http://server2:8000", "http://server2:8001", "fast=http://server3:8000"]
    assert EndpointManager(parse_endpoints(entries)).id_of(name) == endpoint_id


@pytest.mark.parametrize("value", [",", ",, ,,", " , "])
def test_a_variable_of_separators_names_nothing_and_so_hides_nothing(
    value: str, caplog: pytest.LogCaptureFixture
) -> None:
    gpus = [GPUReading(number, "NVIDIA H100", f"GPU-{number}") for number in range(2)]
    found = VisibilityFilter(value).apply(gpus)
    assert (len(found.gpus), found.is_filtering) == (2, False)
    assert "was found: showing all GPUs" in caplog.text
    assert VisibilityFilter("").apply(gpus).gpus == ()
