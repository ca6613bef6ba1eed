"""The host on which other libraries are tried."""

from tests.workers.conftest import host  # noqa: F401
