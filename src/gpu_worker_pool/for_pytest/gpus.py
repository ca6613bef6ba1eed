"""The GPU of one process that runs tests: acquired for a test, kept for the next one, given back while others need it.

It is given back when no test needs it, and between two tests while others wait; and the process never waits for a
second GPU while it holds one. So any number of processes and runs finish, with one GPU for all of them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import pytest

from gpu_worker_pool.errors import (
    DriverError,
    GPUWorkerPoolError,
    ImpossibleRequestError,
    LedgerUnusableError,
    ServiceRefusedError,
    ServiceUnavailableTimeoutError,
    WorkerTimeoutError,
)
from gpu_worker_pool.for_pytest.cuda import free_cached_memory, is_cuda_loaded
from gpu_worker_pool.for_pytest.options import fail, options_of, seconds_of
from gpu_worker_pool.for_pytest.waits import GPUS_PROPERTY, WAIT_PROPERTY
from gpu_worker_pool.leases.own_lease import OwnLeases

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpu_worker_pool.leases.lease import HeldLease
    from gpu_worker_pool.models import GPUAssignment

#: The GPU is given back when no test has needed it for this long; between two tests far less time passes.
IDLE_SECONDS: Final = 0.25
#: How often to ask whether others wait.
QUEUE_LOOK_SECONDS: Final = 0.25
#: After this, the terminal shows that a worker waits.
SAID_AFTER_SECONDS: Final = 5.0
#: A framework that allocates most of the memory at once, and keeps it, leaves none for the next worker on this GPU.
_MODEST: Final = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}


class _NoGPUError(Exception):
    """No GPU can be had for this test."""


class GPUsOfTests:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._is_per_test = config.option.gpu_pool_scope == "test"
        self._is_skipping = config.option.gpu_pool_missing == "skip"
        self._timeout_seconds = seconds_of(config.option.gpu_pool_timeout)
        #: Guards what follows: a timer gives back what is idle.
        self._lock = threading.RLock()
        self._leases: OwnLeases | None = None
        self._held: HeldLease | None = None
        self._held_options: dict[str, Any] = {}
        self._idle: threading.Timer | None = None
        self._looked_at = 0.0
        #: The last lease: its GPUs are asked for first, since CUDA may know them already.
        self._last: HeldLease | None = None
        #: The lease whose GPUs CUDA has seen in this process. It can see no others any more.
        self._fixed: HeldLease | None = None
        self._were_others_waiting = False
        #: The variables that were changed, as they were.
        self._before: dict[str, str | None] = {}

    # --- for the plugin ---

    def during(self, item: pytest.Item) -> Iterator[GPUAssignment]:
        options = options_of(item)
        begun_at = time.monotonic()
        lease, problem, is_missing = None, "", False
        try:
            lease = self._take(options)
        except _NoGPUError as missing:
            problem, is_missing = str(missing), True
        except (GPUWorkerPoolError, ValueError) as error:
            problem = str(error)
        item.user_properties.append((WAIT_PROPERTY, round(time.monotonic() - begun_at, 3)))
        if lease is None:
            self._ended()
            if is_missing and self._is_skipping:
                pytest.skip(f"no GPU for this test: {problem}")
            fail(f"no GPU for this test: {problem}")
        item.user_properties.append((GPUS_PROPERTY, ",".join(str(gpu.index) for gpu in lease.gpus)))
        assert self._leases is not None
        try:
            yield self._leases.assignment_of(lease)
        finally:
            is_lost, reason = lease.is_lost, lease.reason
            self._ended()
        if is_lost:
            fail(f"the GPU of this test was lost while it ran, and another test may have used it: {reason}")

    def before_collection(self) -> None:
        """Without a GPU the tests say why; those that need none must not fail."""
        with suppress(_NoGPUError, GPUWorkerPoolError, ValueError):
            self._take({"count": 1})

    def after_collection(self) -> None:
        self._ended(is_collection=True)

    def stop(self) -> None:
        with self._lock:
            self._cancel_idle()
            if self._leases is not None and self._leases.is_here:
                self._give_back()
                self._leases.stop()
        self._restore_variables()

    # --- taking ---

    def _take(self, options: dict[str, Any]) -> HeldLease:
        with self._lock:
            self._cancel_idle()
            held = self._held
            if held is not None and not held.has_ended and not held.is_lost and options == self._held_options:
                return held
            self._give_back()
            self._fixed = self._fixed or self._seen_by_cuda()
            lease = self._acquire(options)
            self._held, self._held_options, self._last = lease, options, lease
            self._show(lease)
            return lease

    def _acquire(self, options: dict[str, Any]) -> HeldLease:
        if self._leases is None or not self._leases.is_here:
            self._leases = OwnLeases("pytest", f"pytest in {self._config.rootpath.name}"[:200])
        if self._fixed is not None:
            return self._request(_narrowed(options, self._fixed), self._timeout_seconds, self._fixed.endpoint_id)
        last = self._last
        if last is not None and not self._were_others_waiting and options.get("count", 1) == len(last.gpus):
            with suppress(_NoGPUError, GPUWorkerPoolError):
                return self._request(_narrowed(options, last), 0.0, last.endpoint_id)
        return self._request(options, self._timeout_seconds, None)

    def _request(self, options: dict[str, Any], timeout_seconds: float, endpoint_id: str | None) -> HeldLease:
        assert self._leases is not None
        said: list[str] = []

        def say(waited_seconds: float, why: str) -> None:
            if waited_seconds >= SAID_AFTER_SECONDS and not said:
                said.append(why)
                self._say(f"waiting for a GPU: {why or 'no answer yet'}")

        try:
            return self._leases.acquire(options, timeout_seconds, endpoint_id=endpoint_id, on_waiting=say)
        except ServiceUnavailableTimeoutError:
            raise
        except (WorkerTimeoutError, ImpossibleRequestError, DriverError) as error:
            raise _NoGPUError(str(error)) from None
        except ServiceRefusedError as error:
            if error.status is not None or isinstance(error, LedgerUnusableError):
                raise
            raise _NoGPUError(str(error)) from None  # this host has none

    def _show(self, lease: HeldLease) -> None:
        assert self._leases is not None
        self._restore_variables()  # those of a share must not limit the next test
        variables = self._leases.variables_of(lease)
        variables |= {name: value for name, value in _MODEST.items() if name not in os.environ}
        for name, value in variables.items():
            self._before[name] = os.environ.get(name)
            os.environ[name] = value

    def _restore_variables(self) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._before.clear()

    def _say(self, text: str) -> None:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "")
        capture = self._config.pluginmanager.getplugin("capturemanager")
        line = f"\ngpu-pool: {f'{worker} is ' if worker else ''}{text}\n"
        if capture is None:
            sys.stderr.write(line)
        else:
            with capture.global_and_fixture_disabled():
                sys.stderr.write(line)
                sys.stderr.flush()

    # --- giving back ---

    def _ended(self, *, is_collection: bool = False) -> None:
        """A test has ended, or the collection."""
        with self._lock:
            held = self._held
            if held is not None:
                is_over = held.has_ended or held.is_lost or (self._is_per_test and not is_collection)
                if is_over or self._has_others_waiting(held):
                    self._give_back()
            self._cancel_idle()
            self._idle = threading.Timer(IDLE_SECONDS, self._idle_for_a_while)
            self._idle.daemon = True
            self._idle.start()

    def _has_others_waiting(self, held: HeldLease) -> bool:
        now = time.monotonic()
        if now - self._looked_at < QUEUE_LOOK_SECONDS:
            return False
        self._looked_at = now
        assert self._leases is not None
        self._were_others_waiting = self._leases.has_others_waiting(held)
        return self._were_others_waiting

    def _idle_for_a_while(self) -> None:
        with self._lock:
            if self._idle is threading.current_thread():
                self._idle = None
                self._give_back()
                if self._leases is not None:
                    self._leases.rest()

    def _cancel_idle(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _give_back(self) -> None:
        held, self._held = self._held, None
        if held is None or self._leases is None:
            return
        self._fixed = self._fixed or self._seen_by_cuda()
        if self._fixed is not None:
            free_cached_memory()
        self._leases.release(held)

    # --- what CUDA knows ---

    def _seen_by_cuda(self) -> HeldLease | None:
        """The lease whose GPUs were visible when this process loaded CUDA, which looks once and for all."""
        if not is_cuda_loaded():
            return None
        if self._last is None:
            warnings.warn(
                "CUDA was loaded before this process had a GPU of gpu-pool, so it may see others: do not use CUDA "
                "in conftest.py or while tests are collected",
                stacklevel=2,
            )
        return self._last


def _narrowed(options: dict[str, Any], lease: HeldLease) -> dict[str, Any]:
    """The same request for GPUs of that lease, which CUDA knows in this process."""
    if options.get("count", 1) > len(lease.gpus):
        seen = ", ".join(str(gpu.index) for gpu in lease.gpus)
        raise _NoGPUError(
            f"it asks for {options['count']} GPUs, and CUDA was loaded in this process when only GPU {seen} was "
            "visible: run such tests in a process of their own, such as by pytest -m or -k"
        )
    return options | {"only": [gpu.uuid or gpu.index for gpu in lease.gpus]}
