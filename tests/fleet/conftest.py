"""A real PostgreSQL for the tests of the fleet: one for each worker of the tests, with a new database for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import pytest

from gpu_worker_pool.fleet.database_care import make_tables
from gpu_worker_pool.fleet.postgres import PostgresStore
from tests.postgres_server import PostgresServer, UnavailableError, bin_folders, remove_copies

_numbers = count(1)


def started(version: str = "18") -> PostgresServer:
    """Started, and its own: for tests that kill it. Skips where there is none."""
    try:
        server = PostgresServer(version)
    except UnavailableError as error:
        pytest.skip(str(error))
    server.start()
    return server


@pytest.fixture(scope="session")
def shared_postgres() -> Iterator[PostgresServer]:
    server = started(next(iter(bin_folders()), "18"))
    try:
        yield server
    finally:
        server.remove()
        remove_copies()


@pytest.fixture
def database(shared_postgres: PostgresServer) -> str:
    """The URL of an empty one."""
    return shared_postgres.create_database(f"fleet_{next(_numbers)}")


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    server = started(next(iter(bin_folders()), "18"))
    try:
        yield server
    finally:
        server.remove()


@pytest.fixture
def stores() -> Iterator[Callable[[str], PostgresStore]]:
    """Makes stores, whose tables are there, and closes them."""
    made: list[PostgresStore] = []

    def make(url: str, *, is_new: bool = True) -> PostgresStore:
        store = PostgresStore(url)
        made.append(store)
        if is_new:
            make_tables(store)
        return store

    yield make
    for store in made:
        store.close()
