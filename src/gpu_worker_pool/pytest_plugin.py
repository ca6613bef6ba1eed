"""The pytest plugin: the fixture `gpu`, which gives a test a GPU that no other test, worker, run or user has.

Loaded by every pytest of an environment that has this package: it does nothing, and imports nothing, until a test asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpu_worker_pool.for_pytest.gpus import GPUsOfTests
    from gpu_worker_pool.models import GPUAssignment

_MARKER = "gpu_pool(count=1, memory=None, share=False, ...): what the `gpu` fixture of the test asks for"
_TIMEOUT = "10m"
_gpus_key = pytest.StashKey["GPUsOfTests"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu-pool", "GPUs of gpu-worker-pool, for tests that use the fixture `gpu`")
    group.addoption(
        "--gpu-pool-scope",
        choices=("worker", "test"),
        default="worker",
        help="Who gets a GPU: each worker, for as long as it has tests for it and no other client waits (default); or "
        "each test separately.",
    )
    group.addoption(
        "--gpu-pool-timeout",
        metavar="TIME",
        default=_TIMEOUT,
        help=f"The longest wait for a GPU: 90s, 5m (default: {_TIMEOUT}).",
    )
    group.addoption(
        "--gpu-pool-missing",
        choices=("skip", "fail"),
        default="skip",
        help="What happens to a test if there is no GPU for it, or none in time (default: skip).",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)
    if config.option.gpu_pool_timeout != _TIMEOUT:
        # Here, where xdist has started no worker yet: each would end with this error, and none would be left.
        from gpu_worker_pool.for_pytest.options import seconds_of

        seconds_of(config.option.gpu_pool_timeout)


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[GPUAssignment]:
    """A GPU that no one else has; CUDA_VISIBLE_DEVICES shows it and no other. See @pytest.mark.gpu_pool."""
    yield from _gpus(request.config).during(request.node)


def _gpus(config: pytest.Config) -> GPUsOfTests:
    if _gpus_key not in config.stash:
        from gpu_worker_pool.for_pytest.gpus import GPUsOfTests

        config.stash[_gpus_key] = GPUsOfTests(config)
    return config.stash[_gpus_key]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Modules that import a CUDA library find CUDA_VISIBLE_DEVICES set."""
    config = session.config
    if _runs_tests(config):
        from gpu_worker_pool.for_pytest.files import use_the_fixture

        if use_the_fixture(config.args, config.rootpath, config.getini("python_files")):
            _gpus(config).before_collection()
    try:
        return (yield)
    finally:
        if _gpus_key in config.stash:
            config.stash[_gpus_key].after_collection()


def _runs_tests(config: pytest.Config) -> bool:
    """Not the controller of xdist, whose workers run them; nor one that only lists them."""
    is_controller = getattr(config.option, "dist", "no") != "no" and not hasattr(config, "workerinput")
    return not (is_controller or config.option.collectonly)


def pytest_unconfigure(config: pytest.Config) -> None:
    if _gpus_key in config.stash:
        config.stash[_gpus_key].stop()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [
        report for kind in ("passed", "failed", "error", "skipped") for report in terminalreporter.getreports(kind)
    ]
    if any(name == "gpu_pool_wait_seconds" for report in reports for name, _ in getattr(report, "user_properties", ())):
        from gpu_worker_pool.for_pytest.waits import write_waits

        write_waits(terminalreporter, reports)
