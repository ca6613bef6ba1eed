"""The blocking client and `with_gpu`: real threads, a real server process, and programs of their own for signals,
forks and exits."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import inspect
import random
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tests.server_process import ServerProcess, free_port
from tests.waiting import eventually

from gpu_worker_pool import client as asynchronous
from gpu_worker_pool import sync
from gpu_worker_pool.client import loop_thread
from gpu_worker_pool.decorators import with_gpu
from gpu_worker_pool.errors import (
    AlreadyStartedError,
    ImpossibleRequestError,
    InvalidAssignmentError,
    NotStartedError,
    PoolStoppedError,
    ServiceUnavailableError,
    WorkerTimeoutError,
)
from gpu_worker_pool.models import GPUAssignment, GPUStats, MultiEndpointPoolStatus

GPUS = 8


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), GPU_BACKEND=f"simulated:{GPUS}") as started:
        yield started


@pytest.fixture(autouse=True)
def _nothing_is_left(server: ServerProcess) -> Iterator[None]:
    def sockets() -> set[str]:
        links = set()
        for entry in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                links.add(str(entry.readlink()))
        return {link for link in links if link.startswith(("socket:", "anon_inode:"))}

    gc.collect()
    threads, open_sockets = set(threading.enumerate()), sockets()
    yield
    gc.collect()
    assert set(threading.enumerate()) <= threads
    assert sockets() <= open_sockets


@pytest.fixture
def client(server: ServerProcess) -> Iterator[sync.GPUWorkerPoolClient]:
    with sync.GPUWorkerPoolClient(server.url) as started:
        yield started


class Workers:
    """Threads whose errors are not lost, and that are waited for."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []

    def add(self, work: Callable[..., object], *args: object) -> threading.Thread:
        def run() -> None:
            try:
                work(*args)
            except BaseException as error:
                self.errors.append(error)

        thread = threading.Thread(target=run)
        self.threads.append(thread)
        thread.start()
        return thread

    def join(self, within_seconds: float = 30.0) -> None:
        deadline = time.monotonic() + within_seconds
        for thread in self.threads:
            thread.join(max(deadline - time.monotonic(), 0))
        assert not [thread for thread in self.threads if thread.is_alive()], "they hang"


@pytest.fixture
def workers() -> Workers:
    return Workers()


def waiting(client: sync.GPUWorkerPoolClient) -> int:
    return client.get_pool_status().blocked_workers


def is_empty(client: sync.GPUWorkerPoolClient) -> bool:
    status = client.get_pool_status()
    return (status.active_workers, status.blocked_workers, status.available_gpus) == (0, 0, GPUS)


def run_program(program: str, *args: str, within_seconds: float = 40.0) -> subprocess.CompletedProcess[str]:
    """In development mode, where asyncio watches too, and with every warning an error."""
    head = """if True:
    import atexit, logging, os, signal, sys, threading, time
    last = []
    atexit.register(lambda: [call() for call in last])  # which comes after what is registered later
    from gpu_worker_pool import sync
    # That this machine is busy is told by asyncio too.
    logging.getLogger("asyncio").addFilter(lambda record: not str(record.msg).startswith("Executing"))
    url = sys.argv[1]
"""
    return subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", head + textwrap.dedent(program), *args],
        capture_output=True,
        text=True,
        timeout=within_seconds,
        check=False,
    )


def check_program(program: str, *args: str) -> None:
    done = run_program(program, *args)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


# --- the same names ---


def public(kind: type) -> dict[str, Any]:
    named = {name: value for name, value in vars(kind).items() if not name.startswith("_")}
    return named | {"__init__": vars(kind)["__init__"]}


@pytest.mark.parametrize("name", ["GPUWorkerPoolClient", "GPUContextManager"])
def test_everything_has_the_name_and_the_arguments_of_the_async_client(name: str) -> None:
    theirs, ours = public(getattr(asynchronous, name)), public(getattr(sync, name))
    # A blocking program uses the executor itself, which blocks already.
    assert ours.keys() == theirs.keys() - {"run_in_gpu_process"}
    for method, function in ours.items():
        if not callable(function):
            continue
        expected = inspect.signature(theirs[method]).parameters
        found = inspect.signature(function).parameters
        plain = [(one.name, one.kind, one.default) for one in found.values()]
        assert plain == [(one.name, one.kind, one.default) for one in expected.values()], method
    assert sync.__all__ == asynchronous.__all__


# --- life ---


def test_nothing_starts_before_start_and_nothing_is_left_after_stop(server: ServerProcess) -> None:
    before = threading.enumerate()
    client = sync.GPUWorkerPoolClient(server.url)
    assert threading.enumerate() == before
    assert not client.is_running
    for _ in range(3):  # a stopped client can be started again
        client.start()
        assert client.is_running
        names = {thread.name for thread in threading.enumerate() if thread not in before}
        assert names == {"gpu-worker-pool", "gpu-pool leases"}
        client.release_gpu(client.request_gpu())
        client.stop()
        assert threading.enumerate() == before
        assert not client.is_running
    client.stop()


def test_use_before_start_and_after_stop(server: ServerProcess) -> None:
    client = sync.GPUWorkerPoolClient(server.url)
    client.stop()
    assignment = GPUAssignment(0, "worker-1", datetime.now())
    calls: list[Callable[[], object]] = [
        client.request_gpu,
        lambda: client.release_gpu(assignment),
        client.get_pool_status,
        client.get_detailed_metrics,
        client.get_health,
        client.get_error_recovery_status,
        client.print_error_recovery_summary,
        client.explain,
        lambda: client.trigger_endpoint_recovery("a"),
        lambda: client.queue_request_for_retry(client.request_gpu),
        lambda: client.add_endpoint("http://127.0.0.1:1"),
        lambda: client.remove_endpoint("a"),
        sync.GPUContextManager(client).__enter__,
    ]
    for _ in range(2):
        for call in calls:
            with pytest.raises(NotStartedError):
                call()
        assert client.get_endpoints_info() is None
        client.start()
        client.stop()


def test_started_twice(client: sync.GPUWorkerPoolClient) -> None:
    with pytest.raises(AlreadyStartedError):
        client.start()
    client.release_gpu(client.request_gpu())


def test_many_start_and_stop_at_once(server: ServerProcess, workers: Workers) -> None:
    client = sync.GPUWorkerPoolClient(server.url)
    outcomes: Counter[str] = Counter()

    def start_and_stop(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(25):
            try:
                if draw.random() < 0.5:
                    client.start()
                else:
                    client.stop()
                outcomes["done"] += 1
            except (AlreadyStartedError, NotStartedError, PoolStoppedError) as error:
                outcomes[type(error).__name__] += 1

    for seed in range(6):
        workers.add(start_and_stop, seed)
    workers.join()
    client.stop()
    assert workers.errors == []
    assert outcomes["done"] > 20
    with client:
        client.release_gpu(client.request_gpu())


def test_a_start_succeeds_without_a_server_and_the_requests_say_so() -> None:
    with sync.GPUWorkerPoolClient(f"http://127.0.0.1:{free_port()}") as client:
        with pytest.raises(WorkerTimeoutError) as caught:
            client.request_gpu(timeout=0.2)
        assert isinstance(caught.value, ServiceUnavailableError)
        assert client.get_health()["status"] == "unhealthy"


def test_arguments_are_checked_where_they_are_given() -> None:
    with pytest.raises(ValueError, match="memory_threshold"):
        sync.GPUWorkerPoolClient(memory_threshold=500.0)


# --- GPUs ---


def test_errors_come_to_the_thread_that_asked(client: sync.GPUWorkerPoolClient) -> None:
    with pytest.raises(ImpossibleRequestError):
        client.request_gpu(count=GPUS + 1)
    with pytest.raises(ValueError, match="timeout"):
        client.request_gpu(timeout=-1)
    with pytest.raises(InvalidAssignmentError):
        client.release_gpu("GPU 0")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cuont"), sync.GPUContextManager(client, cuont=2):
        pass
    everything = client.request_gpu(count=GPUS)
    with pytest.raises(WorkerTimeoutError) as caught:
        client.request_gpu(timeout=0.05)
    assert not isinstance(caught.value, ServiceUnavailableError)
    client.release_gpu(everything)
    client.release_gpu(everything)
    eventually(lambda: is_empty(client))


def test_an_error_keeps_nothing_alive(client: sync.GPUWorkerPoolClient) -> None:
    gc.collect()
    gc.disable()
    try:
        with suppress(ImpossibleRequestError):
            client.request_gpu(count=GPUS + 1)
        # The thread that heard of it may still be in the middle of saying so.
        eventually(lambda: not [one for one in gc.get_objects() if type(one) is loop_thread.LoopCall])
    finally:
        gc.enable()


def test_blocks(client: sync.GPUWorkerPoolClient) -> None:
    block = sync.GPUContextManager(client, timeout=45)
    for _ in range(2):  # one after the other
        with block as gpu_id:
            assert isinstance(gpu_id, int)
            assert block.assignment is not None
            assert block.assignment.env["CUDA_VISIBLE_DEVICES"]
            with pytest.raises(RuntimeError, match="in use"):
                block.__enter__()
        eventually(lambda: is_empty(client))
    with sync.GPUContextManager(client, count=3) as gpu_ids:
        assert len(set(gpu_ids)) == 3
    with pytest.raises(ZeroDivisionError), sync.GPUContextManager(client):
        raise ZeroDivisionError
    eventually(lambda: is_empty(client))


def test_32_threads_never_hold_the_same_gpu(client: sync.GPUWorkerPoolClient, workers: Workers) -> None:
    holders: dict[object, list[int]] = {}
    double: list[object] = []
    cycles: Counter[int] = Counter()

    def work(number: int) -> None:
        draw = random.Random(number)
        for _ in range(30):
            count = draw.choice([1, 1, 1, 2])
            assignment = client.request_gpu(count=count)
            for gpu_id in assignment.gpu_ids:
                # Lists: `append` happens as a whole, and whoever finds somebody else in it has found a double booking.
                held = holders.setdefault(gpu_id, [])
                held.append(number)
                if held != [number]:
                    double.append((gpu_id, list(held)))
            if draw.random() < 0.05:
                time.sleep(0.001)
            for gpu_id in assignment.gpu_ids:
                holders[gpu_id].remove(number)
            client.release_gpu(assignment)
            cycles[number] += 1

    for number in range(32):
        workers.add(work, number)
    workers.join(50)
    assert not workers.errors
    assert not double
    assert cycles == dict.fromkeys(range(32), 30)
    assert len(holders) == GPUS
    eventually(lambda: is_empty(client))


def test_threads_are_served_in_the_order_in_which_they_asked(
    client: sync.GPUWorkerPoolClient, workers: Workers
) -> None:
    served: list[int] = []

    def work(number: int) -> None:
        with sync.GPUContextManager(client, only=[0]):
            served.append(number)

    first = client.request_gpu(only=[0])
    for number in range(24):
        workers.add(work, number)
        eventually(lambda expected=number + 1: waiting(client) == expected)  # type: ignore[misc]
    client.release_gpu(first)
    workers.join()
    assert not workers.errors
    assert served == list(range(24))


def test_an_assignment_that_nobody_has_any_more_is_told(
    client: sync.GPUWorkerPoolClient, caplog: pytest.LogCaptureFixture
) -> None:
    client.request_gpu()

    def is_told() -> bool:
        gc.collect()  # each time: the thread of the client may have had the assignment a little longer
        return "without release_gpu()" in caplog.text

    eventually(is_told)
    # Its thread may still use the GPU, so it stays assigned.
    assert "when the pool stops" in caplog.text
    assert client.get_pool_status().active_workers == 1


# --- a stop while others are at it ---


def test_a_stop_ends_every_thread_that_waits(server: ServerProcess, workers: Workers) -> None:
    client = sync.GPUWorkerPoolClient(server.url)
    client.start()
    everything = client.request_gpu(count=GPUS)
    for _ in range(10):
        workers.add(client.request_gpu)
        workers.add(sync.GPUContextManager(client).__enter__)
    eventually(lambda: waiting(client) == 20)
    begun = time.monotonic()
    client.stop()
    workers.join(5)
    assert time.monotonic() - begun < 5
    assert [type(error) for error in workers.errors] == [PoolStoppedError] * 20
    assert "stopped while" in str(workers.errors[0])
    with pytest.raises(NotStartedError):
        client.release_gpu(everything)


def test_a_call_that_comes_too_late_is_not_begun(server: ServerProcess) -> None:
    """Its thread looked before the client was closed, and came to the loop when the client had stopped."""
    client = sync.GPUWorkerPoolClient(server.url)
    client.start()
    running = client._running
    assert running is not None
    begun: list[int] = []

    async def work() -> None:
        begun.append(1)

    call = loop_thread.LoopCall(work)

    def late() -> None:
        eventually(lambda: not running._begins_calls)
        running._calls.add(call)
        running._loop.call_soon_threadsafe(running._begin, call)

    running._loop.call_soon_threadsafe(running._loop.run_in_executor, None, late)  # which the end of the loop waits for
    client.stop()
    assert call.news.get_nowait() is None
    assert isinstance(call.error, PoolStoppedError)
    assert not begun


@pytest.mark.parametrize("seed", range(15))
def test_requests_that_arrive_while_it_stops(server: ServerProcess, workers: Workers, seed: int) -> None:
    client = sync.GPUWorkerPoolClient(server.url)
    client.start()
    served: list[int] = []

    def work() -> None:
        while True:
            with sync.GPUContextManager(client):
                served.append(1)
            client.get_pool_status()

    for _ in range(12):
        workers.add(work)
    eventually(lambda: len(served) > 20)
    time.sleep(random.Random(seed).random() * 0.02)
    client.stop()
    workers.join(10)
    assert len(workers.errors) == 12
    assert {type(error) for error in workers.errors} <= {NotStartedError, PoolStoppedError}


def test_a_stop_while_it_starts(workers: Workers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:  # so that the start waits for an answer
        client = sync.GPUWorkerPoolClient(f"http://127.0.0.1:{mute.getsockname()[1]}")
        workers.add(client.start)
        eventually(lambda: client.is_running)
        begun = time.monotonic()
        client.stop()
        workers.join(5)
        assert time.monotonic() - begun < 1.5
        assert [type(error) for error in workers.errors] == [PoolStoppedError]


def test_a_client_that_is_dropped_ends(server: ServerProcess) -> None:
    before = set(threading.enumerate())
    client = sync.GPUWorkerPoolClient(server.url)
    client.start()
    client.release_gpu(client.request_gpu())
    del client
    eventually(lambda: set(threading.enumerate()) <= before)


# --- interrupts ---


def throw_into(thread: threading.Thread, kind: type[BaseException]) -> None:
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(kind)) == 1


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("how", ["request", "block"])
def test_a_thread_that_is_interrupted_as_it_is_granted_gives_the_gpu_back(
    client: sync.GPUWorkerPoolClient, workers: Workers, how: str
) -> None:
    for _ in range(20):
        everything = client.request_gpu(count=GPUS)
        thread = workers.add(client.request_gpu if how == "request" else sync.GPUContextManager(client).__enter__)
        eventually(lambda: waiting(client) == 1)
        # A thread that waits notices only when it wakes, and here it is the grant that wakes it.
        throw_into(thread, Interrupted)
        client.release_gpu(everything)
        thread.join(5)
        eventually(lambda: is_empty(client))
    assert [type(error) for error in workers.errors] == [Interrupted] * 20


def is_interrupted(call: Callable[[], object], moment: int) -> bool:
    """Call it, and interrupt it in one of the moments in which Python looks for signals, if it has so many.

    That is where a function begins and where one that is written in C has returned, of which a profiler is told.
    """
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_return")
        if count == moment:
            raise Interrupted

    result = None
    sys.setprofile(profile)
    try:
        result = call()
    except Interrupted:
        return True
    finally:
        sys.setprofile(None)
        del result  # not while it can be interrupted
    return False


@pytest.mark.parametrize("how", ["request", "block"])
def test_an_interrupt_at_every_moment_of_a_request(client: sync.GPUWorkerPoolClient, how: str) -> None:
    block = sync.GPUContextManager(client)
    ask = client.request_gpu if how == "request" else block.__enter__
    moments = 0
    while is_interrupted(ask, moments + 1):
        moments += 1
        eventually(lambda: is_empty(client))
    assert moments > 10


def test_an_interrupt_at_every_moment_of_the_end_of_a_block(client: sync.GPUWorkerPoolClient) -> None:
    moments = 1  # in the first one it has not begun
    while True:
        block = sync.GPUContextManager(client)
        block.__enter__()
        if not is_interrupted(functools.partial(block.__exit__, None, None, None), moments + 1):
            break
        moments += 1
        eventually(lambda: is_empty(client))
    assert moments > 10


INTERRUPT = """
    class Interrupted(BaseException):
        pass

    def interrupt(*_):
        raise Interrupted

    def tell_unless_interrupted(unraisable):
        if unraisable.exc_type is not Interrupted:
            sys.__unraisablehook__(unraisable)

    # What is raised while Python forgets a weak reference is told, and then goes no further: as if nothing had come.
    sys.unraisablehook = tell_unless_interrupted
    signal.signal(signal.SIGALRM, interrupt)
    client = sync.GPUWorkerPoolClient(url)
"""


@pytest.mark.parametrize("how", ["request", "block"])
def test_a_signal_withdraws_the_request_of_the_main_thread(server: ServerProcess, how: str) -> None:
    program = f"""
    {INTERRUPT}
    with client:
        everything = client.request_gpu(count={GPUS})
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            if {how!r} == "request":
                client.request_gpu(timeout=3600)
            else:
                sync.GPUContextManager(client, 3600).__enter__()
        except Interrupted:
            pass
        else:
            sys.exit("it was not interrupted")
        while client.get_pool_status().blocked_workers:
            time.sleep(0.01)
        client.release_gpu(everything)
        assert client.get_pool_status().available_gpus == {GPUS}
    assert len(threading.enumerate()) == 1
    print("done")
    """
    check_program(program, server.url)


@pytest.mark.parametrize(("coordination", "rounds", "turns"), [("local", 20, 50), ("leases", 5, 20)])
def test_a_signal_handler_may_call_the_client(
    server: ServerProcess, coordination: str, rounds: int, turns: int
) -> None:
    """At whatever moment: the thread that it interrupts may be in the middle of a call."""
    program = f"""
    from gpu_worker_pool.errors import NotStartedError, PoolStoppedError
    logging.disable(logging.WARNING)  # a GPU that is held when the handler stops the client is told
    looked = 0

    def look(*_):
        global looked
        client.get_pool_status()
        looked += 1

    signal.signal(signal.SIGALRM, look)
    for _ in range({rounds}):
        client = sync.GPUWorkerPoolClient(url, coordination="{coordination}")
        client.start()
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.003)
        for _ in range({turns}):
            client.release_gpu(client.request_gpu())
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGUSR1, lambda *_: client.stop())
        threading.Timer(0.01, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
        try:
            while True:
                client.release_gpu(client.request_gpu())
        except (NotStartedError, PoolStoppedError):
            pass
    assert looked > 20, looked
    print("done")
    """
    check_program(program, server.url)


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), signal.SIGINT)", "_thread.interrupt_main()"])
def test_control_c_ends_a_program_that_waits(server: ServerProcess, how: str) -> None:
    program = f"""
    import _thread
    signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs tests in the background ignores it
    with sync.GPUWorkerPoolClient(url) as client:
        with sync.GPUContextManager(client, count={GPUS}):
            threading.Timer(0.2, lambda: {how}).start()
            client.request_gpu()
    """
    done = run_program(program, server.url)
    assert done.returncode == -2  # as every program that Ctrl-C ends
    assert done.stderr.strip().endswith("KeyboardInterrupt")
    assert "Error" not in done.stderr
    assert "during handling" not in done.stderr.lower()


@pytest.mark.parametrize("how", ["request", "block"])
def test_signals_at_any_moment_of_a_request_leave_nothing_assigned(server: ServerProcess, how: str) -> None:
    """One GPU goes to and fro between the main thread, which is interrupted, and another one."""
    program = f"""
    import random
    {INTERRUPT}
    draw = random.Random(7)
    interrupted = granted = 0
    longest = 2e-3

    def other():
        while not over:
            with sync.GPUContextManager(client, only=[0]):
                time.sleep(0.0003)

    with client:
        over = False
        thread = threading.Thread(target=other)
        thread.start()
        for _ in range(300):
            assignment = None
            block = sync.GPUContextManager(client, 30, only=[0])
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, longest))
                if {how!r} == "request":
                    assignment = client.request_gpu(30, only=[0])
                else:
                    block.__enter__()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupted:
                interrupted += 1
                longest *= 1.05  # so that about every second one is interrupted, however busy the machine is
            else:
                granted += 1
                longest /= 1.05
            if assignment is None:
                assignment = block.assignment
            if assignment is not None:
                client.release_gpu(assignment)
        over = True
        thread.join()
        begun = time.monotonic()
        while (status := client.get_pool_status()).active_workers or status.blocked_workers:
            assert time.monotonic() - begun < 5, status
    assert interrupted > 50 and granted > 50, (interrupted, granted)
    print("done")
    """
    check_program(program, server.url)


def test_a_release_that_is_interrupted_is_done_all_the_same(server: ServerProcess) -> None:
    program = f"""
    {INTERRUPT}
    interrupted = 0
    with client:
        loop = client._running._loop
        for _ in range(3):
            assignment = client.request_gpu()
            held = threading.Event()
            loop.call_soon_threadsafe(lambda: (held.set(), time.sleep(0.3)))
            held.wait()
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            try:
                client.release_gpu(assignment)
            except Interrupted:
                interrupted += 1
        assert client.get_pool_status().available_gpus == {GPUS}
    assert interrupted == 3
    print("done")
    """
    check_program(program, server.url)


def test_a_start_that_is_interrupted_leaves_nothing() -> None:
    program = f"""
    import socket
    {INTERRUPT}
    mute = socket.create_server(("127.0.0.1", 0))
    client = sync.GPUWorkerPoolClient(f"http://127.0.0.1:{{mute.getsockname()[1]}}")
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        client.start()
    except Interrupted:
        assert len(threading.enumerate()) == 1
        assert not client.is_running
    else:
        sys.exit("it was not interrupted")
    mute.close()
    print("done")
    """
    check_program(program, "http://127.0.0.1:1")


# --- forks and exits ---


def test_a_forked_process_is_told_at_once(server: ServerProcess) -> None:
    program = """
    import warnings
    from gpu_worker_pool.errors import NotStartedError

    client = sync.GPUWorkerPoolClient(url)
    unstarted = sync.GPUWorkerPoolClient(url)
    client.start()
    assignment = client.request_gpu()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: there are threads
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        for call in [
            client.start, client.request_gpu, lambda: client.release_gpu(assignment), client.get_pool_status,
            client.get_endpoints_info, client.get_health, client.explain, sync.GPUContextManager(client).__enter__,
            lambda: client.queue_request_for_retry(client.request_gpu),
        ]:
            try:
                call()
            except NotStartedError as error:
                assert "fork" in str(error) and "new client" in str(error), error
            else:
                sys.exit(f"{call} did something")
        assert not client.is_running
        client.stop()
        for own in (unstarted, sync.GPUWorkerPoolClient(url)):
            with own:
                own.release_gpu(own.request_gpu())
        sys.exit()  # through everything that happens at exit
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    assert client.get_pool_status().active_workers == 1
    client.release_gpu(assignment)
    client.release_gpu(client.request_gpu())
    client.stop()
    print("done")
    """
    check_program(program, server.url)


EXITS = {
    "idle": "client.release_gpu(client.request_gpu())",
    "with a GPU": "assignment = client.request_gpu()",
    "with threads that wait": f"""
everything = client.request_gpu(count={GPUS})
for _ in range(4):
    threading.Thread(target=client.request_gpu, daemon=True).start()
while client.get_pool_status().blocked_workers < 4:
    pass
""",
    "with threads that go on": """
def work():
    threading.main_thread().join()
    with sync.GPUWorkerPoolClient(url) as other:  # which has a name to look up
        for one in (client, other):
            with sync.GPUContextManager(one, 5):
                pass
threading.Thread(target=work).start()
""",
    "dropped": "del client",
    "with a server that does not answer": f"""
other = sync.GPUWorkerPoolClient("http://localhost:{free_port()}")
logging.disable(logging.WARNING)  # that it is down is told, and is not what this is about
other.start()
""",
    "stopped at exit": """
def look():
    if len(threading.enumerate()) > 1:
        print("it was not stopped")
last.append(look)
""",
    "in a function of its own at exit": """
atexit.register(lambda: client.release_gpu(client.request_gpu()))
""",
}


@pytest.mark.parametrize("how", EXITS)
def test_a_program_that_never_stops_its_client_ends_by_itself(server: ServerProcess, how: str) -> None:
    program = f"client = sync.GPUWorkerPoolClient(url)\nclient.start()\n{EXITS[how]}\nprint('done')\n"
    begun = time.monotonic()
    check_program(program, server.url.replace("127.0.0.1", "localhost"))
    assert time.monotonic() - begun < 15


def test_a_program_that_fails_shows_its_own_error_only(server: ServerProcess) -> None:
    program = "client = sync.GPUWorkerPoolClient(url)\nclient.start()\ngpu = client.request_gpu()\n1 / 0\n"
    done = run_program(program, server.url)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


# --- where it is called ---


async def test_a_thread_that_runs_an_event_loop_is_refused(server: ServerProcess) -> None:
    client = sync.GPUWorkerPoolClient(server.url)
    with pytest.raises(RuntimeError, match="async client"):
        client.start()
    client.stop()
    await asyncio.to_thread(client.start)
    assignment = await asyncio.to_thread(client.request_gpu)
    for call in (
        client.request_gpu,
        lambda: client.release_gpu(assignment),
        client.get_pool_status,
        client.get_endpoints_info,
        sync.GPUContextManager(client).__enter__,
        client.stop,
    ):
        with pytest.raises(RuntimeError, match="async client"):
            call()
    await asyncio.to_thread(client.release_gpu, assignment)
    await asyncio.to_thread(client.stop)
    await asyncio.get_running_loop().shutdown_default_executor()


def test_callbacks_may_look_but_not_wait(server: ServerProcess) -> None:
    seen: list[object] = []
    client = sync.GPUWorkerPoolClient(server.url, polling_interval=1)

    def arrived(stats: GPUStats) -> None:
        seen.append(stats.gpu_count)
        seen.append(client.get_pool_status().total_gpus)
        for call in (client.request_gpu, client.stop):
            try:
                call()
            except RuntimeError as error:
                seen.append(str(error))

    end = client.on_stats_update(arrived)
    with client:
        eventually(lambda: len(seen) >= 4)
        end()
        assert seen[:2] == [GPUS, GPUS]
        assert all("own thread" in str(told) for told in seen[2:4])


# --- many endpoints ---


def test_many_endpoints(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    twice = f"here={server.url},again={server.url.replace('127.0.0.1', 'localhost')}"
    with sync.gpu_worker_pool_client(service_endpoints=twice) as client:
        assert client.is_multi_endpoint_mode()
        status = client.get_pool_status()
        assert isinstance(status, MultiEndpointPoolStatus)
        assert status.total_gpus == 2 * GPUS
        with sync.GPUContextManager(client) as gpu_id:
            assert gpu_id.split(":")[0] in ("here", "again")
        infos = client.get_endpoints_info()
        assert infos is not None
        assert [info["endpoint_id"] for info in infos] == ["here", "again"]
        assert client.get_detailed_metrics()["load_balancer"]["total_grants"] == 1
        assert client.get_health()["status"] == "healthy"
        assert client.get_error_recovery_status()["degradation_manager"]["total_endpoints"] == 2
        assert len(client.explain(count=2).gpus) == 2 * GPUS
        client.print_error_recovery_summary()
        assert "2/2 endpoints healthy" in capsys.readouterr().out
        assert client.trigger_endpoint_recovery("here") is True
        assert client.trigger_endpoint_recovery("nowhere") is False
        client.remove_endpoint("again")
        with pytest.raises(ValueError, match="again"):
            client.remove_endpoint("again")
        assert client.add_endpoint(f"back={server.url.replace('127.0.0.1', 'localhost')}") == "back"
        eventually(lambda: client.get_pool_status().total_gpus == 2 * GPUS)


def test_a_queued_request_is_called_in_its_own_thread_once_an_endpoint_answers(
    tmp_path: Path, workers: Workers
) -> None:
    late = ServerProcess(tmp_path, GPU_BACKEND="simulated:2")
    endpoints = [f"late={late.url}", f"never=http://127.0.0.1:{free_port()}"]
    with sync.GPUWorkerPoolClient(service_endpoints=endpoints, endpoint_health_check_interval=0.3) as client:
        called_in: list[threading.Thread] = []
        results: list[GPUAssignment] = []

        def request() -> GPUAssignment:
            called_in.append(threading.current_thread())
            return client.request_gpu(timeout=45)

        thread = workers.add(lambda: results.append(client.queue_request_for_retry(request)))
        queued = "recovery_orchestrator", "queued_requests"
        eventually(lambda: client.get_error_recovery_status()[queued[0]][queued[1]] == 1)
        assert not called_in
        with late:
            workers.join()
            assert not workers.errors
            assert called_in == [thread]
            assert client.get_error_recovery_status()[queued[0]][queued[1]] == 0
            client.release_gpu(results[0])

            def fail() -> None:
                raise ZeroDivisionError

            def find_nobody() -> None:
                raise ServiceUnavailableError("somebody else's")

            with pytest.raises(ZeroDivisionError):
                client.queue_request_for_retry(fail)
            with pytest.raises(ServiceUnavailableError, match="somebody else's"):
                client.queue_request_for_retry(find_nobody)
            assert client.get_error_recovery_status()[queued[0]][queued[1]] == 0


async def _nothing() -> None: ...


def test_a_stop_ends_queued_requests_also_those_that_are_being_called(server: ServerProcess, workers: Workers) -> None:
    with pytest.raises(TypeError, match="plain function"):
        sync.GPUWorkerPoolClient().queue_request_for_retry(_nothing)
    nobody = [f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"]
    client = sync.GPUWorkerPoolClient(service_endpoints=nobody)
    client.start()
    workers.add(client.queue_request_for_retry, client.request_gpu)
    eventually(lambda: client.get_error_recovery_status()["recovery_orchestrator"]["queued_requests"] == 1)
    client.stop()
    workers.join(5)
    assert [type(error) for error in workers.errors] == [PoolStoppedError]

    client = sync.GPUWorkerPoolClient(service_endpoints=[server.url, nobody[0]])
    client.start()
    is_called, may_end = threading.Event(), threading.Event()
    results: list[str] = []

    def work() -> str:
        is_called.set()
        may_end.wait()
        return "it did end"

    workers.add(lambda: results.append(client.queue_request_for_retry(work)))
    is_called.wait()
    client.stop()
    may_end.set()
    workers.join(5)
    assert results == ["it did end"]


def test_a_restarted_client_queues_requests_again(workers: Workers) -> None:
    nobody = [f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"]
    client = sync.GPUWorkerPoolClient(service_endpoints=nobody, endpoint_max_retries=0)
    for _ in range(2):
        client.start()
        thread = workers.add(client.queue_request_for_retry, client.request_gpu)
        thread.join(0.3)
        client.stop()
    workers.join(5)
    assert [type(error) for error in workers.errors] == [PoolStoppedError] * 2


# --- with_gpu ---


def test_a_function_with_a_gpu(client: sync.GPUWorkerPoolClient) -> None:
    @with_gpu(client, timeout=5, count=2)
    def train(gpu: GPUAssignment, epochs: int, *, rate: float = 0.5) -> tuple[object, ...]:
        """Learns."""
        assert client.get_pool_status().active_workers == 1
        return len(gpu.gpu_ids), epochs, rate

    @with_gpu(client)
    def later(epochs: int, gpu: GPUAssignment, rate: float = 0.5) -> tuple[object, ...]:
        return epochs, type(gpu), rate

    @with_gpu(client)
    def by_keyword(epochs: int, *, gpu: GPUAssignment) -> tuple[object, ...]:
        return epochs, type(gpu)

    @with_gpu(client)
    def anything(*args: object, **kwargs: object) -> tuple[object, ...]:
        return args, sorted(kwargs)

    class Model:
        @with_gpu(client)
        def train(self, gpu: GPUAssignment, epochs: int) -> tuple[object, ...]:
            return type(self), type(gpu), epochs

        @staticmethod
        @with_gpu(client)
        def static(gpu: GPUAssignment) -> type:
            return type(gpu)

    assert train(3) == train(epochs=3) == (2, 3, 0.5)
    assert train(3, rate=1.0) == (2, 3, 1.0)
    assert later(3, 1.0) == later(3, rate=1.0) == later(epochs=3, rate=1.0) == (3, GPUAssignment, 1.0)
    assert by_keyword(3) == (3, GPUAssignment)
    assert anything(1, a=2) == ((1,), ["a", "gpu"])
    assert Model().train(3) == Model().train(epochs=3) == (Model, GPUAssignment, 3)
    assert Model.static() is GPUAssignment
    assert (train.__name__, train.__doc__) == ("train", "Learns.")
    assert list(inspect.signature(train).parameters) == ["epochs", "rate"]
    eventually(lambda: is_empty(client))


def test_a_function_with_a_gpu_gives_it_back_however_it_ends(client: sync.GPUWorkerPoolClient) -> None:
    @with_gpu(client)
    def fail(gpu: GPUAssignment, how: type[BaseException]) -> None:
        raise how

    for how in (ZeroDivisionError, KeyboardInterrupt, SystemExit):
        with pytest.raises(how):
            fail(how)
        eventually(lambda: is_empty(client))

    @with_gpu(client, timeout=0.05)
    def never(gpu: GPUAssignment) -> None: ...

    with sync.GPUContextManager(client, count=GPUS):
        with pytest.raises(WorkerTimeoutError):
            never()
        # Wrong arguments are told at once, though there is no GPU.
        with pytest.raises(TypeError, match="never"):
            never(1)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="leave it out"):
            never(gpu=None)  # type: ignore[call-arg]


def test_threads_share_a_function_with_a_gpu(client: sync.GPUWorkerPoolClient, workers: Workers) -> None:
    held: Counter[object] = Counter()
    most: list[int] = []

    @with_gpu(client)
    def work(gpu: GPUAssignment) -> None:
        held[gpu.gpu_id] += 1
        most.append(held[gpu.gpu_id])
        time.sleep(0.002)
        held[gpu.gpu_id] -= 1

    for _ in range(32):
        workers.add(lambda: [work() for _ in range(5)])
    workers.join()
    assert not workers.errors
    assert most == [1] * 160


async def test_an_async_function_with_a_gpu(server: ServerProcess) -> None:
    async with asynchronous.GPUWorkerPoolClient(server.url) as client:

        @with_gpu(client, count=2)
        async def train(gpu: GPUAssignment, epochs: int) -> tuple[int, int]:
            assert client.get_pool_status().active_workers >= 1
            await asyncio.sleep(0.01)
            return len(gpu.gpu_ids), epochs

        assert inspect.iscoroutinefunction(train)
        assert await asyncio.gather(*(train(number) for number in range(20))) == [(2, number) for number in range(20)]

        @with_gpu(client)
        async def wait(*, gpu: GPUAssignment) -> None:
            await asyncio.sleep(60)

        task = asyncio.create_task(wait())
        await asyncio.sleep(0.05)
        assert client.get_pool_status().active_workers == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert client.get_pool_status().active_workers == 0
        with pytest.raises(TypeError, match="leave it out"):
            await wait(gpu=None)


def test_what_cannot_have_a_gpu_is_told_where_it_is_written() -> None:
    plain = sync.GPUWorkerPoolClient("http://127.0.0.1:1")
    waited = asynchronous.GPUWorkerPoolClient("http://127.0.0.1:1")

    def function(gpu: GPUAssignment) -> None: ...

    async def async_function(gpu: GPUAssignment) -> None: ...

    def generator(gpu: GPUAssignment) -> Iterator[int]:
        yield 1

    async def async_generator(gpu: GPUAssignment) -> AsyncIterator[int]:
        yield 1

    class AsyncObject:
        async def __call__(self, gpu: GPUAssignment) -> None: ...

    refused: list[tuple[Any, Any, str]] = [
        (plain, async_function, "async function"),
        (plain, AsyncObject(), "async function"),
        (plain, functools.partial(async_function), "async function"),
        (waited, function, "plain function"),
        (plain, generator, "generator"),
        (waited, async_generator, "generator"),
        (plain, lambda: None, "argument gpu"),
        (plain, lambda *gpu: None, "argument gpu"),
        (plain, AsyncObject, "for functions"),
        (plain, classmethod(function), "for functions"),
    ]
    for client, what, told in refused:
        with pytest.raises(TypeError, match=told):
            with_gpu(client)(what)
    with pytest.raises(TypeError, match=r"@with_gpu\(client\)"):
        with_gpu(function)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="cuont"):
        with_gpu(plain, cuont=2)
    assert with_gpu(waited)(AsyncObject()) is not None
