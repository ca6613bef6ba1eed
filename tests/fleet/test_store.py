"""The store of a fleet with a real PostgreSQL: elections, fenced writes, and what is said where it cannot be used."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import psycopg
import pytest

from gpu_worker_pool.fleet.database_care import examine, make_tables
from gpu_worker_pool.fleet.postgres import PostgresStore
from gpu_worker_pool.fleet.schema import STEPS, VERSION
from gpu_worker_pool.fleet.store import CommitsLost, Delete, Deposed, Office, Put, StoreMismatch, StoreUnavailable
from tests.fakes.tcp_proxy import TCPProxy
from tests.fleet.conftest import started
from tests.postgres_server import PostgresServer, bin_folders
from tests.waiting import eventually

Stores = Callable[..., PostgresStore]


def put(key: str, **document: object) -> Put:
    return Put("requests", key, document)


def elected(store: PostgresStore, name: str = "gpu-1", lowest_epoch: int = 0, office_seconds: float = 30) -> Office:
    office = store.stand(name, f"http://{name}:8000", lowest_epoch, office_seconds)
    assert office is not None
    return office


@pytest.mark.parametrize("version", list(bin_folders()))
def test_what_was_written_is_loaded_with_every_version_that_is_installed(version: str, stores: Stores) -> None:
    server = started(version)
    try:
        store = stores(server.create_database("fleet"))
        office = elected(store)
        assert store.write(office, []).revision == office.revision + 1
        office = Office(office.epoch, office.revision + 1)
        text = "quotes \" and ' and \\ and % and ü and \ud800 and \x00"
        office = store.write(office, [put("a", text=text), put("b"), put("a", text="first"), put("a", text=text)])
        office = store.write(office, [Delete("requests", "b"), Put("hosts", "gpu-1", {"gpus": [1, None, 0.5]})])
        rows = store.load(office)
        assert rows == {
            "requests": {"a": {"text": text}},
            "outcomes": {},
            "hosts": {"gpu-1": {"gpus": [1, None, 0.5]}},
            "accounts": {},
        }
        assert store.look().revision == office.revision
    finally:
        server.remove()


# --- elections ---


def test_one_candidate_is_elected_until_its_term_ends_or_it_concedes(database: str, stores: Stores) -> None:
    one, other = stores(database), stores(database)
    office = elected(one, office_seconds=30)
    assert office == Office(1, 1)
    assert other.stand("gpu-2", "http://gpu-2:8000", 0, 30) is None
    assert other.look().dispatcher == ("gpu-1", "http://gpu-1:8000")
    one.concede(office)
    assert other.look().dispatcher is None
    assert elected(other, "gpu-2", lowest_epoch=7) == Office(8, 2)
    with pytest.raises(Deposed, match="another dispatcher") as refused:
        one.renew(office, "gpu-1", 30)
    assert refused.value.epoch == 8


def test_a_term_that_is_not_renewed_ends(database: str, stores: Stores) -> None:
    one, other = stores(database), stores(database)
    office = elected(one, office_seconds=0.2)
    one.renew(office, "gpu-1", 0.2)
    eventually(lambda: other.stand("gpu-2", "http://gpu-2:8000", 0, 30))
    assert other.look().dispatcher == ("gpu-2", "http://gpu-2:8000")


def test_of_many_that_stand_at_once_one_is_elected(database: str, stores: Stores) -> None:
    stores(database)
    candidates = [stores(database, is_new=False) for _ in range(8)]
    found: list[Office | None] = []
    start = threading.Barrier(len(candidates))

    def stand(number: int) -> None:
        start.wait()
        found.append(candidates[number].stand(f"gpu-{number}", "http://gpu", 0, 30))

    threads = [threading.Thread(target=stand, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(each is None for each in found) == [False] + [True] * 7


@pytest.mark.fault(50)
def test_the_clock_of_the_database_set_back_an_hour_keeps_nobody_in_office(
    database: str, stores: Stores, shared_postgres: PostgresServer
) -> None:
    """Then the end of the term is an hour ahead."""
    store = stores(database)
    elected(store, office_seconds=2)
    name = database.rpartition("/")[2]
    shared_postgres.execute("UPDATE gpu_pool.fleet SET until = until + interval '1 hour'", database=name)
    assert store.look().dispatcher is None
    assert elected(store, "gpu-2", office_seconds=2).epoch == 2


# --- fences ---


@pytest.mark.fault(43)
def test_a_dispatcher_of_an_earlier_epoch_can_write_nothing(database: str, stores: Stores) -> None:
    frozen, other = stores(database), stores(database)
    office = elected(frozen, office_seconds=0.01)
    later = eventually(lambda: other.stand("gpu-2", "http://gpu-2:8000", 0, 30))
    for action in (
        lambda: frozen.write(office, [put("a")]),
        lambda: frozen.rewrite(office, {"requests": {"a": {}}}),
        lambda: frozen.renew(office, "gpu-1", 30),
        lambda: frozen.load(office),
    ):
        with pytest.raises(Deposed):
            action()
    frozen.concede(office)
    assert other.load(later)["requests"] == {}
    other.renew(later, "gpu-2", 30)


@pytest.mark.fault(44)
def test_two_dispatchers_of_one_epoch_are_told_apart_by_name(database: str, stores: Stores) -> None:
    """A replica that lagged behind elected a second one with the same number."""
    one, other = stores(database), stores(database)
    office = elected(one, "gpu-1")
    one.concede(office)
    elected(other, "gpu-2")
    assert other.look().epoch == 2
    forged = Office(2, other.look().revision)
    with pytest.raises(Deposed):
        one.write(forged, [put("a")])
    with pytest.raises(Deposed):
        one.rewrite(forged, {})


@pytest.mark.fault(43)
def test_a_transaction_that_its_dispatcher_froze_in_delays_nobody_for_long(database: str, stores: Stores) -> None:
    one = PostgresStore(database, operation_seconds=0.3)
    other = stores(database)
    try:
        elected(one, office_seconds=0.01)
        one._cutter.close()  # it is frozen with its process
        transaction = one.transaction()
        cursor = transaction.__enter__()
        cursor.execute("UPDATE gpu_pool.fleet SET revision = revision")
        assert eventually(lambda: other.stand("gpu-2", "http://gpu-2:8000", 0, 30))
        with pytest.raises(StoreUnavailable):
            transaction.__exit__(None, None, None)
    finally:
        one.close()


# --- the database is away, or commits are ---


@pytest.mark.fault(38)
def test_killed_in_a_commit_the_revision_settles_what_became_of_it(own_postgres: PostgresServer) -> None:
    url = own_postgres.create_database("fleet")
    with TCPProxy(own_postgres.port) as proxy:
        store = PostgresStore(url.replace(f":{own_postgres.port}", f":{proxy.port}"), operation_seconds=0.5)
        make_tables(store)
        office = elected(store)
        office = store.write(office, [put("a")])
        # What `psycopg` sends as a COMMIT.
        proxy.only = b"Q\x00\x00\x00\x0bCOMMIT"
        for mode, is_committed in (("lose replies", True), ("refuse", False)):
            proxy.mode = mode
            with pytest.raises(StoreUnavailable) as refused:
                store.write(office, [put(mode)])
            assert refused.value.is_unknown
            proxy.mode = "forward"
            expected = office.revision + is_committed
            eventually(lambda expected=expected: store.look().revision == expected)
            office = Office(office.epoch, expected)
            assert (mode in store.load(office)["requests"]) is is_committed
        store.close()
    own_postgres.kill()
    own_postgres.start()
    after = PostgresStore(url)
    assert after.look().revision == office.revision
    after.close()


@pytest.mark.fault(38)
def test_a_write_that_arrives_late_is_the_dispatchers_own(database: str, stores: Stores) -> None:
    store = stores(database)
    office = elected(store)
    store.write(office, [put("a")])
    with pytest.raises(StoreUnavailable, match="committed only now") as refused:
        store.write(office, [put("a")])
    assert refused.value.is_unknown


@pytest.mark.fault(39)
def test_after_a_failover_that_lost_commits_everything_is_written_again(own_postgres: PostgresServer) -> None:
    """With a real replica that is cut off before the last commits."""
    url = own_postgres.create_database("fleet")
    first = PostgresStore(url)
    make_tables(first)
    office = elected(first)
    office = first.write(office, [put("seen by the replica")])
    with own_postgres.replica() as replica:
        replica.wait_until_caught_up(own_postgres)
        replica.cut_off()
        office = first.write(office, [put("lost"), Delete("requests", "seen by the replica")])
        own_postgres.kill()
        replica.promote()
        # As where a name, or Patroni, leads to the new primary.
        moved = url.replace(f":{own_postgres.port}", f":{own_postgres.port},127.0.0.1:{replica.port}")
        after = PostgresStore(moved)
        after._name, after._fleet_id = first._name, first._fleet_id
        with pytest.raises(CommitsLost) as lost:
            after.write(office, [put("next")])
        assert lost.value.revision == office.revision - 1
        office = after.rewrite(office, {"requests": {"lost": {"n": 1}, "next": {}}})
        assert after.load(office)["requests"] == {"lost": {"n": 1}, "next": {}}
        after.write(office, [Delete("requests", "lost")])
        after.close()
    first.close()


@pytest.mark.fault(44)
def test_a_failover_that_lost_the_election_is_mended_by_the_one_who_was_elected(database: str, stores: Stores) -> None:
    store = stores(database)
    office = elected(store, lowest_epoch=6)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("UPDATE gpu_pool.fleet SET epoch = 5, revision = 0, dispatcher_name = 'gpu-9'")
    with pytest.raises(CommitsLost):
        store.renew(office, "gpu-1", 30)
    after = store.rewrite(office, {"requests": {"a": {}}})
    assert (after.epoch, store.look().dispatcher) == (7, ("gpu-1", "http://gpu-1:8000"))


@pytest.mark.fault(42)
def test_a_database_that_hangs_is_given_up_within_three_seconds(own_postgres: PostgresServer) -> None:
    """The kernel goes on answering for a process that stands still."""
    store = PostgresStore(own_postgres.create_database("fleet"), operation_seconds=0.4)
    make_tables(store)
    office = elected(store)
    own_postgres.freeze()
    with pytest.raises(StoreUnavailable, match="does not answer") as refused:
        store.write(office, [put("a")])
    assert not refused.value.is_unknown, "no COMMIT was sent"
    with pytest.raises(StoreUnavailable, match="no connection yet"):
        store.look()
    own_postgres.thaw()
    eventually(lambda: store.look().revision == office.revision)
    store.close()


@pytest.mark.fault(38)
def test_a_commit_that_waits_for_a_replica_is_never_cancelled(own_postgres: PostgresServer) -> None:
    """Else PostgreSQL reports success for what no replica has. Until there is one nobody is told anything."""
    url = own_postgres.create_database("fleet")
    store = PostgresStore(url, operation_seconds=0.4)
    make_tables(store)
    office = elected(store)
    own_postgres.configure("synchronous_standby_names = 'none_of_this_name'")
    own_postgres.reload()

    # PostgreSQL hears of it somewhat later.
    refused = None
    while refused is None:
        try:
            office = store.write(office, [put(f"a-{office.revision}")])
        except StoreUnavailable as error:
            refused = error
    assert refused.is_unknown
    assert store.look().revision == office.revision, "not yet: it waits for the replica"
    with pytest.raises(StoreUnavailable):
        store.write(office, [put("b")])
    own_postgres.configure("synchronous_standby_names = ''")
    own_postgres.reload()
    eventually(lambda: store.look().revision == office.revision + 1)
    assert "canceling wait" not in own_postgres.log
    rows = store.load(Office(office.epoch, office.revision + 1))["requests"]
    assert f"a-{office.revision}" in rows
    assert "b" not in rows
    store.close()


@pytest.mark.fault(41)
def test_restarted_the_next_look_finds_it_again(own_postgres: PostgresServer) -> None:
    store = PostgresStore(own_postgres.create_database("fleet"))
    make_tables(store)
    own_postgres.stop()
    with pytest.raises(StoreUnavailable, match=r"terminating connection|closed the connection|refused"):
        store.look()
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        store.look()
    own_postgres.start()
    assert store.look().epoch == 0
    store.close()


@pytest.mark.fault(41)
def test_a_database_that_is_read_only_is_unavailable_for_writes_and_can_be_looked_at(
    database: str, stores: Stores
) -> None:
    store = stores(database)
    office = elected(store)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("ALTER ROLE CURRENT_USER SET default_transaction_read_only = on")
        try:
            other = stores(database, is_new=False)
            assert other.look().epoch == 1
        finally:
            connection.execute("ALTER ROLE CURRENT_USER RESET default_transaction_read_only")
    assert store.write(office, [put("a")])


@pytest.mark.fault(41)
def test_a_replica_refuses_writes_and_can_be_looked_at(own_postgres: PostgresServer) -> None:
    store = PostgresStore(own_postgres.create_database("fleet"))
    make_tables(store)
    office = elected(store)
    with own_postgres.replica() as replica:
        replica.wait_until_caught_up(own_postgres)
        there = PostgresStore(replica.url("fleet"))
        assert there.look().epoch == office.epoch
        assert examine(there).is_read_only
        with pytest.raises(StoreUnavailable, match=r"recovery|read-only") as refused:
            there.stand("gpu-2", "http://gpu-2:8000", 0, 30)
        assert not refused.value.is_unknown
        there.close()
        # Of several servers, the one that can be written to is used.
        both = PostgresStore(f"postgresql://postgres@127.0.0.1:{replica.port},127.0.0.1:{own_postgres.port}/fleet")
        assert both.stand("gpu-2", "http://gpu-2:8000", 0, 30) is None
        both.close()
    store.close()


@pytest.mark.fault(41)
def test_a_full_disk_is_said_and_nothing_is_written(database: str, stores: Stores) -> None:
    """A trigger that fails takes the place of the disk."""
    store = stores(database)
    office = elected(store)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(
            "CREATE FUNCTION gpu_pool.full() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = 'disk_full'; END $$"
        )
        connection.execute(
            "CREATE TRIGGER full_disk BEFORE INSERT ON gpu_pool.requests EXECUTE FUNCTION gpu_pool.full()"
        )
        with pytest.raises(StoreUnavailable, match="No space left") as refused:
            store.write(office, [put("a")])
        assert not refused.value.is_unknown
        connection.execute("DROP TRIGGER full_disk ON gpu_pool.requests")
    assert store.write(office, [put("a")]).revision == office.revision + 1


# --- the tables, and what is wrong with a database ---


def test_making_the_tables_twice_and_at_once_changes_nothing(database: str, stores: Stores) -> None:
    made = []
    threads = [
        threading.Thread(target=lambda: made.append(make_tables(stores(database, is_new=False)))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({each.fleet_id for each in made}) == 1
    assert sorted(each.version_before is None for each in made) == [False, False, False, True]
    again = make_tables(stores(database, is_new=False))
    assert (again.version_before, again.version) == (VERSION, VERSION)


@pytest.mark.fault(52)
def test_a_later_version_of_the_tables_is_made_while_an_earlier_program_uses_them(
    database: str, stores: Stores
) -> None:
    earlier, later = stores(database), stores(database)
    office = elected(earlier)
    steps = {**STEPS, VERSION + 1: ("ALTER TABLE gpu_pool.fleet ADD COLUMN next text",)}
    with pytest.raises(Deposed):
        make_tables(later, Office(office.epoch + 1, 0), steps)
    assert earlier.look().schema_version == VERSION
    assert make_tables(earlier, office, steps).version == VERSION + 1
    office = earlier.write(office, [put("a")])
    assert earlier.look().schema_version == VERSION + 1
    assert make_tables(later).version == VERSION + 1


@pytest.mark.fault(52)
def test_tables_that_need_a_newer_program_are_refused_with_a_sentence(database: str, stores: Stores) -> None:
    store = stores(database)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("UPDATE gpu_pool.fleet SET schema_version = 99, oldest_schema_user = 98")
    for action in (store.look, lambda: make_tables(store)):
        with pytest.raises(StoreMismatch, match="upgrade"):
            action()


def test_another_fleet_in_its_place_is_not_overwritten(database: str, stores: Stores) -> None:
    store = stores(database)
    office = elected(store)
    office = store.write(office, [put("a")])
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("UPDATE gpu_pool.fleet SET fleet_id = 'another', epoch = 0, revision = 0")
    for action in (store.look, lambda: store.write(office, [put("b")])):
        with pytest.raises(StoreMismatch, match="another fleet"):
            action()
    with pytest.raises((StoreMismatch, Deposed)):
        store.rewrite(office, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("/fleet_", "/nothing_"), "does not exist.*create it"),
        (("postgres@", "nobody@"), "does not exist"),
        (("/fleet_", "/template1?user=postgres&application_name="), "gpu-pool fleet init"),
        (("/fleet_", "/fleet?nonsense="), "parameters after"),
    ],
)
def test_a_wrong_database_is_said_with_what_to_do(
    database: str, stores: Stores, change: tuple[str, str], message: str
) -> None:
    with pytest.raises(StoreMismatch, match=message):
        stores(database.replace(*change), is_new=False).look()


def test_what_a_user_may_not_do_is_listed(database: str, stores: Stores, shared_postgres: PostgresServer) -> None:
    name = database.rpartition("/")[2]
    user = f"user_{name}"
    shared_postgres.execute(f"CREATE ROLE {user} LOGIN")
    url = shared_postgres.url(name, user=user)
    limited = stores(url, is_new=False)
    assert examine(limited).missing_privileges == (f"CREATE on the database {name}",)
    with pytest.raises(StoreMismatch, match=r"permission denied.*doctor"):
        make_tables(limited)
    stores(database)
    assert examine(limited).missing_privileges == ("USAGE on the schema gpu_pool",)
    shared_postgres.execute(
        f"GRANT USAGE ON SCHEMA gpu_pool TO {user}",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA gpu_pool TO {user}",
        f"REVOKE DELETE ON gpu_pool.hosts FROM {user}",
        database=name,
    )
    assert examine(limited).missing_privileges == ("DELETE on gpu_pool.hosts",)
    shared_postgres.execute(f"GRANT DELETE ON gpu_pool.hosts TO {user}", database=name)
    assert examine(limited).missing_privileges == ()
    office = elected(limited)
    assert limited.load(limited.write(office, [put("a")]))["requests"] == {"a": {}}


def test_no_message_and_no_repr_shows_a_password(own_postgres: PostgresServer) -> None:
    own_postgres.execute("CREATE ROLE pool LOGIN PASSWORD 'right'")
    hba = own_postgres.data / "pg_hba.conf"
    hba.write_text("host all postgres 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256\n")
    own_postgres.reload()
    for address in (
        f"postgresql://pool:hunter%322@127.0.0.1:{own_postgres.port}/postgres",
        f"postgresql://pool@127.0.0.1:{own_postgres.port}/postgres?password=hunter2",
        "postgresql://pool:hunter2@127.0.0.1:1/postgres",
    ):
        store = PostgresStore(address)
        with pytest.raises((StoreMismatch, StoreUnavailable)) as refused:
            store.look()
        assert "hunter" not in f"{refused.value} {refused.value!r} {store!r} {store.shown_url.partition('@')[0]}"
        assert refused.value.__cause__ is None
        store.close()


def test_a_program_without_psycopg_is_told_which_extra_brings_it() -> None:
    program = (
        "import sys; sys.modules['psycopg'] = None\n"
        "try:\n    import gpu_worker_pool.fleet.postgres\n"
        "except Exception as error:\n    print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "StoreMismatch" in done.stdout
    assert "pip install 'gpu-worker-pool[fleet]'" in done.stdout
