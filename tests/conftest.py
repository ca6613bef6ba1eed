"""For all tests: how long something takes is measured in `bench/`, and never makes a test fail on a busy machine."""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def _logging_is_left_as_it_was() -> Iterator[None]:
    """Else a later test of the same process would look in vain for what is logged."""
    yield
    assert logging.getLogger("gpu_worker_pool").propagate
    assert logging.root.manager.disable == logging.NOTSET
