"""The hosts on which executors and runs are tried."""

from tests.cli.conftest import programs  # noqa: F401
from tests.workers.conftest import host  # noqa: F401
