"""Ledger files that are replaced, overwritten, closed to us or held open by strangers while a server runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpu_worker_pool.core import Granted, PoolSettings, Renewed, Requested, Ticked
from gpu_worker_pool.errors import LedgerUnavailableError, LedgerUnusableError
from gpu_worker_pool.ledger import file as ledger_file
from gpu_worker_pool.ledger import locks
from gpu_worker_pool.ledger.sqlite import SQLiteLedger
from tests.ledger.places import InSQLite, Told, read, request
from tests.ledger.test_any_ledger import granted
from tests.ledger.test_file_faults import ROOT, may_pass, opened, run_script, writer
from tests.people import Lab, lab, needs_root

SERVER = """
    import asyncio, sys
    from pathlib import Path
    from gpu_worker_pool.core import Requested
    from tests.ledger.places import InSQLite, Told, read, request

    async def main():
        place = InSQLite(Path(sys.argv[1]))
        ledger = place.open(Told())
        await ledger.submit(read(place, 1))
        (granted,) = await ledger.submit(Requested(request("served")))
        print(granted.lease.lease_id, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await ledger.close()

    asyncio.run(main())
"""


@contextlib.contextmanager
def server_on(place: InSQLite) -> Iterator[subprocess.Popen[str]]:
    """Another process that serves the ledger and holds a lease, until the end of the test."""
    command = [sys.executable, "-c", textwrap.dedent(SERVER), str(place.folder)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "lease-1\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def place(tmp_path: Path) -> InSQLite:
    folder = tmp_path / "state"
    folder.mkdir()
    return InSQLite(folder)


@pytest.mark.parametrize("attack", ["deleted", "replaced", "-wal", "-shm", "both", "all"])
async def test_a_newcomer_is_refused_while_a_server_uses_files_that_are_gone(place: InSQLite, attack: str) -> None:
    with server_on(place) as server:
        beside = [place.path.with_name(place.path.name + ending) for ending in ("-wal", "-shm")]
        match attack:
            case "deleted":
                place.path.unlink()
            case "replaced":
                copy = place.folder / "copy"
                shutil.copy(place.path, copy)
                copy.rename(place.path)
            case "both" | "all":
                for file in (*beside, place.path)[: 2 if attack == "both" else 3]:
                    file.unlink()
            case ending:
                place.path.with_name(place.path.name + ending).unlink()
        before = {entry: entry.stat().st_ino for entry in place.folder.iterdir()}
        with pytest.raises(
            LedgerUnavailableError,
            match=rf"deleted or replaced while python.* \(pid {server.pid}\) uses it.*: end that first",
            check=may_pass,
        ):
            place.open(Told())
        assert {entry: entry.stat().st_ino for entry in place.folder.iterdir()} == before, "it must not be made anew"
    if attack != "replaced":  # a copy without what was not yet in it is an older ledger
        async with opened(place) as ledger:
            await ledger.submit(Ticked())


async def test_ledgers_that_come_and_go_are_not_taken_for_replaced_ones(place: InSQLite) -> None:
    """SQLite itself deletes the files beside the ledger with the last process that closes it."""
    script = """
        import asyncio, sys
        from pathlib import Path
        from gpu_worker_pool.core import Requested
        from tests.ledger.places import InSQLite, Told, read, request

        async def main():
            place = InSQLite(Path(sys.argv[1]))
            for number in range(25):
                ledger = place.open(Told())
                await ledger.submit(Requested(request(f"{sys.argv[2]}-{number}", count=99)))
                await ledger.close()

        asyncio.run(main())
    """
    both = [asyncio.to_thread(run_script, script, str(place.folder), name) for name in ("a", "b")]
    assert await asyncio.gather(*both) == ["", ""]


async def test_fences_and_ids_of_a_new_ledger_are_never_those_of_an_older_one(place: InSQLite) -> None:
    fences = []
    for _ in range(3):
        ledger = SQLiteLedger(place.path, PoolSettings(), told := Told(), clock=place.clock.now)
        await ledger.submit(read(place, 4))
        for name in "abc":
            (grant,) = await ledger.submit(Requested(request(name)))
            assert isinstance(grant, Granted)
            fences.append(grant.lease.fence)
            assert grant.lease.lease_id == f"lease-{grant.lease.fence}"
        assert told.all[-1].grants == 3, "what is counted begins at 0"
        await ledger.close()
        for file in place.folder.iterdir():
            file.unlink()
        await asyncio.sleep(0.005)
    assert fences == sorted(set(fences))


# ---- overwritten under a running server


@pytest.mark.parametrize("garbage", [b"x" * 100, b"\0" * 8192])
async def test_a_ledger_that_is_overwritten_is_noticed_at_once_and_left_as_it_is(
    place: InSQLite, garbage: bytes
) -> None:
    told = Told()
    async with opened(place, told) as ledger:
        await ledger.submit(read(place, 2))
        lease = await granted(ledger, "one")
        with place.path.open("r+b") as file:
            file.write(garbage)
        found = place.path.read_bytes()
        seen = len(told.all)
        for event in (Requested(request("two")), Renewed(lease.lease_id)):
            with pytest.raises(LedgerUnusableError, match=r"is damaged \(it was overwritten\)"):
                await ledger.submit(event)
        assert len(told.all) == seen
    assert place.path.read_bytes() == found, "what is in it may be all that is left"


# ---- locked by another process


async def test_what_waited_behind_a_locked_attempt_does_not_wait_again(
    place: InSQLite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_file, "BUSY_SECONDS", 1.5)
    async with opened(place) as ledger:
        await ledger.submit(read(place, 2))
        lease = await granted(ledger, "one")
        with writer(place) as locked:
            first = asyncio.ensure_future(ledger.submit(Requested(request("two"))))
            await asyncio.sleep(0.3)
            begun = time.monotonic()
            with pytest.raises(LedgerUnavailableError, match="locked"):
                await ledger.submit(Renewed(lease.lease_id))
            took = time.monotonic() - begun
            with pytest.raises(LedgerUnavailableError, match="locked"):
                await first
            locked.communicate("go on\n")
        assert took < 2.4, f"a renewal waited {took:.1f} s behind an attempt that took 1.5 s"


async def test_who_only_looks_does_not_delay_who_renews(place: InSQLite) -> None:
    answered = 0

    def look(_pool: object, _now: float) -> None:
        nonlocal answered
        time.sleep(0.005)
        answered += 1

    async with opened(place) as ledger:
        await ledger.submit(read(place, 2))
        lease = await granted(ledger, "one")
        looking = [asyncio.ensure_future(ledger.look(look)) for _ in range(200)]
        await asyncio.sleep(0)
        await ledger.submit(Renewed(lease.lease_id))
        assert answered < 20
        await asyncio.gather(*looking)
        assert answered == 200


def reader_of(place: InSQLite) -> subprocess.Popen[str]:
    """A process that reads a state of the ledger, and keeps it until it reads a line."""
    script = (
        "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None); c.execute('BEGIN');"
        "c.execute('SELECT * FROM meta').fetchall(); print('reads', flush=True); sys.stdin.readline()"
    )
    command = [sys.executable, "-c", script, str(place.path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "reads\n"
    return process


async def test_the_file_in_front_is_cut_when_a_reader_has_gone(
    place: InSQLite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_file, "LONG_WAL_BYTES", 1_000_000)
    monkeypatch.setattr(ledger_file, "MOST_WAL_BYTES", 200_000)
    wal = place.path.with_name(place.path.name + "-wal")
    async with opened(place) as ledger:
        await ledger.submit(read(place, 2))
        with reader_of(place) as reader:
            number = 0
            while wal.stat().st_size < 5_000_000:  # SQLite clears it from 4 MB on
                number += 1
                await asyncio.gather(
                    *(ledger.submit(Requested(request(f"{number}-{each}", count=99))) for each in range(200))
                )
            problem = ledger._file.check_size()
            assert problem is not None
            assert f"(pid {reader.pid}) keeps reading an older state" in problem
            reader.communicate("\n")
        for each in range(100):
            await ledger.submit(Requested(request(f"after-{each}", count=99)))
            if wal.stat().st_size <= 200_000:
                break
        assert wal.stat().st_size <= 200_000


# ---- read-only at start, and modes


@pytest.fixture(scope="module")
def people() -> Iterator[Lab]:
    with lab(1) as made_lab:
        yield made_lab


def ledger_of(people: Lab) -> Path:
    return people.top / f"home-{people.users[0]}" / ".local/state/gpu-pool/ledger-simulated-1-v1.db"


Link = Callable[[Path, Path], None]

_HEALS = """
import asyncio
from gpu_worker_pool.broker.local import LocalBroker

async def heals():
    broker = LocalBroker("simulated:1").broker
    await broker.start()
    print(broker.problem, flush=True)
    async with asyncio.timeout(20):
        while broker.problem is not None:
            await asyncio.sleep(0.1)
    await broker.stop()

asyncio.run(heals())
"""


@needs_root
def test_a_ledger_that_was_read_only_at_start_heals_and_the_message_names_its_mode(people: Lab) -> None:
    user = people.users[0]
    assert people.gpu_pool(user, "run", "--no-wait", "--", "true").status == 0
    ledger = ledger_of(people)
    ledger.chmod(0o444)
    refused = people.gpu_pool(user, "run", "--no-wait", "--", "true")
    assert refused.status != 0
    remedy = f"{ledger.name} has the mode -r--r--r--: chmod u+rw {ledger}"
    assert remedy in refused.err
    assert "sticky" not in refused.err
    beside = ledger.parent.glob(f"{ledger.name}-*")
    assert all(file.stat().st_mode & 0o200 for file in beside), "SQLite would make them read-only too"

    serving = people.run_script(user, _HEALS)
    assert serving.stdout is not None
    assert remedy in serving.stdout.readline()
    ledger.chmod(0o644)  # as the message says
    begun = time.monotonic()
    assert serving.wait(20) == 0
    assert time.monotonic() - begun < 10
    assert people.gpu_pool(user, "run", "--no-wait", "--", "true").status == 0


@needs_root
def test_files_beside_a_ledger_that_are_still_read_only_are_given_its_mode(people: Lab) -> None:
    user, ledger = people.users[0], ledger_of(people)
    assert people.gpu_pool(user, "run", "--no-wait", "--", "true").status == 0
    for ending in ("-wal", "-shm"):
        file = ledger.with_name(ledger.name + ending)
        file.touch()
        file.chmod(0o444)
        shutil.chown(file, user, user)
    done = people.gpu_pool(user, "run", "--no-wait", "--", "true")
    assert done.status == 0, done


@needs_root
@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_a_link_beside_a_ledger_is_refused_and_what_it_leads_to_not_changed(people: Lab, link: Link) -> None:
    user, ledger = people.users[0], ledger_of(people)
    assert people.gpu_pool(user, "run", "--no-wait", "--", "true").status == 0
    wal = ledger.with_name(f"{ledger.name}-wal")
    wal.unlink(missing_ok=True)
    notes = wal.parent.parent / "notes"
    notes.touch(0o640)
    notes.chmod(0o640)
    shutil.chown(notes, user, user)
    link(notes, wal)
    done = people.gpu_pool(user, "run", "--no-wait", "--", "true")
    assert f"{wal} is a link" in done.err
    assert (notes.stat().st_mode & 0o777, notes.read_bytes()) == (0o640, b"")
    wal.unlink()
    notes.unlink()


_MODES = """
import asyncio, stat
from gpu_worker_pool.broker.local import LocalBroker
from gpu_worker_pool.leases.tokens import Tokens
from gpu_worker_pool.core import Request

seen = []

def watch(event, arguments):
    # At every call that opens or changes something: nothing was made open to others, not even for a moment.
    if event in ("open", "os.mkdir", "os.chmod", "os.link"):
        home = Path(os.environ["HOME"])
        for path in (home, *home.rglob("*")):
            with contextlib.suppress(FileNotFoundError):
                mode = stat.S_IMODE(path.stat().st_mode)
                seen.append(path.name)
                if mode & 0o077:
                    print(event, arguments, path, oct(mode), flush=True)
                    os._exit(1)

import contextlib
sys.addaudithook(watch)
Tokens().remember(Request("r1", owner="secret"))

async def opens():
    broker = LocalBroker("simulated:1")
    await broker.start()
    await broker.sample()
    await broker.broker.held()
    await broker.stop()

asyncio.run(opens())
watch("open", ())
assert any(name.endswith(".new") for name in seen)
assert {"gpu-pool", "requests", "request-r1", "ledger-simulated-1-v1.db"} <= set(seen)
"""


@needs_root
def test_everything_is_made_with_the_right_mode_from_the_first_moment() -> None:
    with lab(1) as fresh:
        script = f"os.umask(0)\n{_MODES}"
        done = fresh.python(fresh.users[0], script)
    assert done.status == 0, done


async def test_who_uses_deleted_files_is_looked_for_only_where_the_files_are_new(
    place: InSQLite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It means looking at every open file of every process, which takes long on a busy host."""
    looks: list[Path] = []
    monkeypatch.setattr("gpu_worker_pool.ledger.file.user_of_deleted", looks.append)
    with server_on(place):  # so that the files stay
        looks.clear()
        async with opened(place):
            pass
        assert looks == []
    (place.path.with_suffix(".identity")).write_text("of a larger text\n" * 3)
    async with opened(place):
        assert looks == [place.path]
        async with opened(place):
            assert looks == [place.path]
        place.path.with_name(place.path.name + "-shm").unlink()
        with contextlib.suppress(LedgerUnavailableError):
            place.open(Told())
        assert looks == [place.path, place.path]


def test_only_those_who_have_a_database_open_are_looked_at(place: InSQLite) -> None:
    """A new ledger is made often, and a busy host has thousands of open files."""
    command = [sys.executable, "-c", "input()"]
    with server_on(place) as server, subprocess.Popen(command, stdin=subprocess.PIPE) as other:
        try:
            assert server.pid in locks.users_of_databases()
            assert other.pid not in locks.users_of_databases()
        finally:
            other.kill()
