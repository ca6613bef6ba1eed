"""The store of a fleet through a real PgBouncer in transaction mode (fault 51); skipped where it is not installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from gpu_worker_pool.fleet.database_care import examine, make_tables
from gpu_worker_pool.fleet.postgres import PostgresStore
from gpu_worker_pool.fleet.store import Office, Put, StoreUnavailable
from tests.postgres_server import UNPRIVILEGED, PostgresServer
from tests.server_process import free_port
from tests.waiting import eventually

PGBOUNCER = shutil.which("pgbouncer") or shutil.which("/usr/sbin/pgbouncer")
pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(PGBOUNCER is None, reason="pgbouncer is not installed: apt-get install pgbouncer"),
]


@pytest.fixture
def pooled(own_postgres: PostgresServer) -> Iterator[str]:
    """The URL of a database through PgBouncer, which shares two connections among all."""
    own_postgres.create_database("fleet")
    port = free_port()
    folder = Path(tempfile.mkdtemp(prefix="gpu-pool-pgbouncer-"))
    (folder / "pgbouncer.ini").write_text(
        f"[databases]\nfleet = host=127.0.0.1 port={own_postgres.port} dbname=fleet user=postgres\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
        "pool_mode = transaction\ndefault_pool_size = 2\nserver_login_retry = 1\n"
    )
    as_user = ["-u", UNPRIVILEGED] if os.geteuid() == 0 else []
    if os.geteuid() == 0:
        for path in (folder, *folder.iterdir()):
            shutil.chown(path, UNPRIVILEGED)
    assert PGBOUNCER is not None
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([PGBOUNCER, *as_user, folder / "pgbouncer.ini"], stdout=log, stderr=log)
    try:
        url = f"postgresql://postgres@127.0.0.1:{port}/fleet"
        eventually(lambda: is_answering(process, url))
        yield url
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder)


def is_answering(process: subprocess.Popen[bytes], url: str) -> bool:
    assert process.poll() is None
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True


@pytest.mark.fault(51)
def test_six_stores_share_two_connections(pooled: str) -> None:
    stores = [PostgresStore(pooled, f"gpu-{number}") for number in range(6)]
    make_tables(stores[0])
    assert examine(stores[0]).missing_privileges == ()
    elected = [store.stand(f"gpu-{number}", "http://gpu", 0, 30) for number, store in enumerate(stores)]
    offices = [office for office in elected if office is not None]
    assert offices == [Office(1, 1)]
    dispatcher, office = stores[elected.index(offices[0])], offices[0]
    for number in range(20):
        office = dispatcher.write(office, [Put("requests", f"r-{number}", {"n": number})])
        dispatcher.renew(office, f"gpu-{elected.index(offices[0])}", 30)
        assert {store.look().revision for store in stores} == {office.revision}
    assert len(dispatcher.load(office)["requests"]) == 20
    for store in stores:
        store.close()


@pytest.mark.fault(51)
def test_postgresql_restarted_behind_it_is_found_again(pooled: str, own_postgres: PostgresServer) -> None:
    store = PostgresStore(pooled)
    make_tables(store)
    own_postgres.kill()
    with pytest.raises(StoreUnavailable):
        store.look()
    own_postgres.start()

    def is_found() -> bool:
        try:
            return store.look().epoch == 0
        except StoreUnavailable:
            return False

    eventually(is_found)
    store.close()
