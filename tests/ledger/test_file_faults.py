"""Ledger files that are full, locked, damaged, foreign, gone or forked: an error in words, and nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import apsw
import pytest

from gpu_worker_pool.core import Cancelled, Granted, Pool, PoolSettings, Released, Renewed, Requested, Ticked
from gpu_worker_pool.errors import LedgerUnavailableError, LedgerUnusableError
from gpu_worker_pool.ledger import file as ledger_file
from gpu_worker_pool.ledger import sqlite
from gpu_worker_pool.ledger.sqlite import SQLiteLedger
from gpu_worker_pool.ledger.tables import FORMAT
from tests.ledger.disks import Fails, WatchedDisk, fill, mounted
from tests.ledger.places import TTL, InSQLite, Told, read, request
from tests.ledger.test_any_ledger import check, granted
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]


@pytest.fixture
def place(tmp_path: Path) -> InSQLite:
    folder = tmp_path / "state"
    folder.mkdir()
    return InSQLite(folder)


@contextlib.asynccontextmanager
async def opened(place: InSQLite, told: Told | None = None) -> AsyncIterator[SQLiteLedger]:
    ledger = place.open(told or Told())
    try:
        yield ledger
    finally:
        await ledger.close()


@contextlib.contextmanager
def watched(watch: Fails) -> Iterator[None]:
    disk = WatchedDisk(watch)
    try:
        yield
    finally:
        disk.unregister()


async def made(place: InSQLite) -> str:
    """A ledger with one lease in it, closed."""
    async with opened(place) as ledger:
        await ledger.submit(read(place, 2))
        return (await granted(ledger, "one")).lease_id


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---- fault 26: what is there is no ledger


def may_pass(error: LedgerUnavailableError) -> bool:
    """A program that waits goes on waiting."""
    return error.retryable


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\0" * 4096, "damaged|not a ledger"),
        (b"this was a shopping list " * 400, "damaged"),
        (b"SQLite format 3\0" + b"\xff" * 8176, "damaged|not a ledger"),
    ],
    ids=["empty", "zeros", "a text", "a header and noise"],
)
async def test_what_is_no_ledger_is_refused_and_left_alone(place: InSQLite, content: bytes, words: str) -> None:
    place.path.write_bytes(content)
    with pytest.raises(LedgerUnusableError, match=words):
        place.open(Told())
    assert place.path.read_bytes() == content
    assert [entry.name for entry in place.folder.iterdir()] == [place.path.name]


async def test_somebody_elses_database_is_left_as_it_is(place: InSQLite) -> None:
    theirs = sqlite3.connect(place.path)
    theirs.execute("CREATE TABLE recipes (name TEXT)")
    theirs.commit()
    theirs.close()
    before = digest(place.path)
    with pytest.raises(LedgerUnusableError, match=r"not a ledger of this program.*GPU_POOL_STATE_DIR"):
        place.open(Told())
    assert digest(place.path) == before
    assert [entry.name for entry in place.folder.iterdir()] == [place.path.name]


async def test_a_ledger_of_a_later_version_is_left_as_it_is(place: InSQLite) -> None:
    await made(place)
    connection = apsw.Connection(str(place.path))
    connection.execute(f"PRAGMA user_version={FORMAT + 1}")
    connection.close()
    before = digest(place.path)
    with pytest.raises(LedgerUnusableError, match=f"format {FORMAT + 1}, not {FORMAT}"):
        place.open(Told())
    assert digest(place.path) == before


@pytest.mark.parametrize("kind", ["folder", "link", "link to nowhere", "fifo"])
async def test_what_is_no_file_is_refused(place: InSQLite, kind: str, tmp_path: Path) -> None:
    if kind == "folder":
        place.path.mkdir()
    elif kind == "fifo":
        os.mkfifo(place.path)
    else:
        target = tmp_path / "elsewhere.db"
        if kind == "link":
            other = InSQLite(tmp_path)
            await made(other)
            target = other.path
        place.path.symlink_to(target)
    before = place.path.lstat()
    with pytest.raises(LedgerUnusableError, match="not a regular file"):
        place.open(Told())
    assert place.path.lstat().st_ino == before.st_ino


async def test_a_folder_that_is_not_there_or_not_writable(tmp_path: Path) -> None:
    missing = InSQLite(tmp_path / "missing")
    with pytest.raises(LedgerUnavailableError, match="cannot be"):
        missing.open(Told())
    not_a_folder = tmp_path / "file"
    not_a_folder.write_text("")
    with pytest.raises(LedgerUnusableError, match=os.strerror(errno.ENOTDIR)):
        InSQLite(not_a_folder).open(Told())


@pytest.mark.fault(26)
async def test_a_ledger_that_is_damaged_in_the_middle(place: InSQLite) -> None:
    """Its first page tells that it is one; what is in it cannot be read. It is not begun anew."""
    await made(place)
    content = bytearray(place.path.read_bytes())
    content[4096:] = os.urandom(len(content) - 4096)
    place.path.write_bytes(content)
    told = Told()

    async def use() -> None:
        async with opened(place, told) as ledger:
            await ledger.submit(Requested(request("two")))

    with pytest.raises(LedgerUnavailableError, match="damaged"):
        await use()
    assert told.all == []
    assert place.path.read_bytes() == content


async def test_rows_that_make_no_sense(place: InSQLite) -> None:
    await made(place)
    connection = apsw.Connection(str(place.path))
    connection.execute("UPDATE requests SET data = '{\"what\": 1}'")
    connection.close()
    async with opened(place) as ledger:
        with pytest.raises(LedgerUnavailableError):
            await ledger.submit(Requested(request("two")))
        with pytest.raises(LedgerUnavailableError):
            await ledger.submit(Ticked())
    assert place.read("SELECT request_id, data FROM requests") == [("one", '{"what": 1}')]


async def test_a_ledger_that_lost_its_first_row(place: InSQLite) -> None:
    await made(place)
    connection = apsw.Connection(str(place.path))
    connection.execute("DELETE FROM meta")
    connection.close()
    with pytest.raises(LedgerUnavailableError, match="damaged"):
        place.open(Told())


# ---- files that vanish under a running process


@pytest.mark.parametrize("ending", ["", "-wal", "-shm"])
@pytest.mark.parametrize("is_replaced", [False, True], ids=["deleted", "replaced"])
async def test_a_file_that_was_deleted_or_replaced_is_noticed(
    place: InSQLite, tmp_path: Path, ending: str, is_replaced: bool
) -> None:
    told = Told()
    async with opened(place, told) as ledger:
        await ledger.submit(read(place, 2))
        lease = await granted(ledger, "one")
        gone = place.path.with_name(place.path.name + ending)
        copy = tmp_path / "copy"
        shutil.copy(gone, copy)
        gone.unlink()
        if is_replaced:
            copy.rename(gone)
        seen = len(told.all)
        for event in (Requested(request("two")), Renewed(lease.lease_id), Released(lease.lease_id)):
            with pytest.raises(LedgerUnavailableError, match="deleted or replaced; restart"):
                await ledger.submit(event)
        with pytest.raises(LedgerUnavailableError, match="deleted or replaced"):
            await ledger.look(lambda pool, now: pool.fence)
        assert len(told.all) == seen
        assert gone.exists() == is_replaced, "it must not be made anew"


# ---- fault 25: disk full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk") as disk:
        yield disk


@pytest.mark.fault(25)
async def test_a_full_disk(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "PAUSE_SECONDS", 0.0)
    place = InSQLite(small_disk)
    told = Told()
    async with opened(place, told) as ledger:
        await ledger.submit(read(place, 4))
        lease = await granted(ledger, "one")
        filler = fill(small_disk)
        with pytest.raises(LedgerUnavailableError, match="is the disk full", check=may_pass):
            await fill_up(ledger)
        fence = max(committed.grants for committed in told.all)
        told.all.clear()
        # Reading goes on, and nothing was granted that is not in the file.
        for _ in range(3):
            with pytest.raises(LedgerUnavailableError, match="is the disk full", check=may_pass):
                await ledger.submit(Requested(request("never")))
        assert await ledger.look(lambda pool, now: (pool.fence, "never" in pool.requests)) == (fence, False)
        assert not any(committed.effects for committed in told.all)
        place.clock.advance(40.0)
        filler.unlink()
        # Nobody could renew for so long: that time does not count.
        assert await ledger.submit(Renewed(lease.lease_id)) == (Granted(lease.extended(place.clock.now() + TTL)),)
        assert "never" not in await ledger.look(lambda pool, now: pool.requests)
        await check(ledger)
    assert place.read("PRAGMA integrity_check") == ["ok"]


async def fill_up(ledger: SQLiteLedger) -> None:
    """Some room may be left in what SQLite has."""
    for number in range(100):
        await ledger.submit(Requested(request(f"more-{number}")))


async def test_a_limit_on_the_size_of_files(place: InSQLite) -> None:
    """The same where no disk can be filled: a process that may not write so much."""
    await made(place)
    script = """
        import asyncio, resource, sys
        from pathlib import Path
        from gpu_worker_pool.core import Requested
        from gpu_worker_pool.errors import LedgerUnavailableError
        from tests.ledger.places import InSQLite, Told, read, request

        async def main():
            place = InSQLite(Path(sys.argv[1]))
            ledger = place.open(Told())
            await ledger.submit(read(place, 3))
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
            for attempt in range(2):
                try:
                    await ledger.submit(Requested(request("two")))
                except LedgerUnavailableError as error:
                    print("refused:", error)
            print(await ledger.look(lambda pool, now: pool.fence))
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            (granted,) = await ledger.submit(Requested(request("two")))
            print(granted.lease.fence)
            await ledger.close()

        asyncio.run(main())
    """
    done = await asyncio.to_thread(run_script, script, str(place.folder))
    first, second, *rest = done.splitlines()
    assert first == second
    assert "is the disk full" in first
    assert rest == ["1", "2"]
    assert place.read("SELECT count(*) FROM promised") == [2]


def run_script(script: str, *arguments: str, timeout: float = 60.0) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- fault 36: COMMIT fails after the decision


@pytest.mark.fault(36)
@pytest.mark.parametrize("call", ["write", "sync"])
@pytest.mark.parametrize("error", [apsw.FullError, apsw.IOError])
async def test_when_the_commit_fails_nobody_was_told_and_nothing_is_remembered(
    place: InSQLite, call: str, error: type[apsw.Error], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "PAUSE_SECONDS", 0.0)
    disk = Fails(call)
    with watched(disk):
        told = Told()
        async with opened(place, told) as ledger:
            await ledger.submit(read(place, 2))
            lease = await granted(ledger, "one")
            # All but the revision: what is due by the clock may be written in between.
            stored = [f"SELECT {what}" for what in ("fence, ticket FROM meta", "* FROM promised", "* FROM requests")]
            before = list(map(place.read, stored))
            told.all.clear()
            disk.with_error = error
            events = [Requested(request("two")), Requested(request("three")), Released(lease.lease_id)]
            answers = await asyncio.gather(*map(ledger.submit, events), return_exceptions=True)
            assert [type(answer) for answer in answers] == [LedgerUnavailableError] * 3
            assert "is the disk full" in str(answers[0])
            assert disk.failed > 0
            await asyncio.sleep(0.2)
            assert told.effects == []
            assert set(told.changes) <= {"one"}  # read anew, it is as it was
            assert await ledger.look(lambda pool, now: (pool.fence, list(pool.requests))) == (1, ["one"])
            disk.with_error = None
            assert list(map(place.read, stored)) == before
            assert (await granted(ledger, "two")).gpu_ids == ("1",)
            await ledger.submit(Released(lease.lease_id))
            await check(ledger)
    assert place.read("SELECT gpu_id FROM promised") == ["1"]


async def test_a_ledger_that_recovers_has_its_readings_still(place: InSQLite, monkeypatch: pytest.MonkeyPatch) -> None:
    """And decides by them: what was read anew and granted at once is in the file before anybody is told."""
    monkeypatch.setattr(sqlite, "PAUSE_SECONDS", 0.0)
    disk = Fails("sync")
    with watched(disk):
        told = Told()
        async with opened(place, told) as ledger, opened(place) as other:
            await other.submit(Requested(request("waits", ttl=30.0)))
            disk.with_error = apsw.IOError
            with pytest.raises(LedgerUnavailableError):
                await ledger.submit(read(place, 1))  # it grants, and that cannot be written
            disk.with_error = None
            await ledger.submit(read(place, 1))
            assert place.read("SELECT lease_id FROM promised") == ["lease-1"]
            disk.with_error = apsw.IOError
            with pytest.raises(LedgerUnavailableError):
                await ledger.submit(Requested(request("next")))
            disk.with_error = None
            place.clock.advance(1.0)
            await other.submit(Released("lease-1"))
            await other.submit(Requested(request("after")))
            place.clock.advance(0.1)
            told.all.clear()
            await ledger.submit(read(place, 1))
            grants = [effect.lease for effect in told.effects if isinstance(effect, Granted)]
            assert [lease.request.request_id for lease in grants] == ["after"]
            assert place.read("SELECT lease_id FROM promised") == [lease.lease_id for lease in grants]
            await check(ledger)
            await check(other)


# ---- the database itself refuses a double booking


@pytest.mark.parametrize(("first", "second", "is_allowed"), [(0, 0, False), (0, 1, False), (1, 0, False), (1, 1, True)])
async def test_a_gpu_promised_twice_is_an_error_of_the_database(
    place: InSQLite, first: int, second: int, is_allowed: bool
) -> None:
    async with opened(place):
        pass
    connection = apsw.Connection(str(place.path))
    connection.execute("INSERT INTO promised VALUES ('a GPU', 'lease-1', ?)", (first,))
    try:
        if is_allowed:
            connection.execute("INSERT INTO promised VALUES ('a GPU', 'lease-2', ?)", (second,))
        else:
            with pytest.raises(apsw.ConstraintError, match="promised already"):
                connection.execute("INSERT INTO promised VALUES ('a GPU', 'lease-2', ?)", (second,))
            connection.execute("DROP TRIGGER promised_twice")
            if (first, second) == (0, 0):
                with pytest.raises(apsw.ConstraintError):  # the index alone is enough for these
                    connection.execute("INSERT INTO promised VALUES ('a GPU', 'lease-2', ?)", (second,))
        connection.execute("INSERT INTO promised VALUES ('another GPU', 'lease-2', ?)", (second,))
    finally:
        connection.close()


async def test_a_program_that_believes_a_promised_gpu_is_free_is_stopped(place: InSQLite) -> None:
    told = Told()
    async with opened(place, told) as ledger:
        await ledger.submit(read(place, 1))
        connection = apsw.Connection(str(place.path))
        connection.execute("INSERT INTO promised VALUES ('0', 'lease-77', 0)")
        connection.close()
        told.all.clear()
        with pytest.raises(LedgerUnavailableError, match="promised already"):
            await ledger.submit(Requested(request("one")))
        assert told.all == []
    assert place.read("SELECT lease_id FROM promised") == ["lease-77"]


# ---- fault 26 and 33: locked


def writer(place: InSQLite) -> subprocess.Popen[str]:
    """A process in the middle of a transaction, until it reads a line."""
    script = """
        import sys, apsw
        connection = apsw.Connection(sys.argv[1])
        connection.set_busy_timeout(5000)
        connection.execute("BEGIN IMMEDIATE")
        print("locked", flush=True)
        sys.stdin.readline()
        connection.execute("COMMIT")
        print("done", flush=True)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(place.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    return process


@pytest.mark.fault(26)
async def test_a_locked_ledger_is_waited_for_and_then_an_error_that_says_by_whom(
    place: InSQLite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_file, "BUSY_SECONDS", 0.3)
    async with opened(place) as ledger:
        await ledger.submit(read(place, 2))
        with writer(place) as locked:
            begun = time.monotonic()
            with pytest.raises(
                LedgerUnavailableError, match=rf"locked by .*\(pid {locked.pid}\) for more than 0\.3 s", check=may_pass
            ):
                await ledger.submit(Requested(request("one")))
            assert 0.3 <= time.monotonic() - begun < 3.0
            # Whoever comes while it is locked, and stays, is served when it is not any more.
            monkeypatch.setattr(ledger_file, "BUSY_SECONDS", 5.0)
            asked = asyncio.ensure_future(ledger.submit(Requested(request("one"))))
            await asyncio.sleep(0.2)
            assert not asked.done()
            locked.communicate("go on\n")
            (grant,) = await asked
            assert isinstance(grant, Granted)
        await check(ledger)


async def test_a_locked_ledger_can_be_looked_at_and_opened(place: InSQLite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_file, "BUSY_SECONDS", 0.2)
    await made(place)
    with writer(place) as locked:
        async with opened(place) as ledger:
            with pytest.raises(LedgerUnavailableError, match="locked"):
                await ledger.submit(read(place, 2))
            assert await ledger.look(lambda pool, now: pool.fence) == 1
        locked.communicate("go on\n")


async def test_readings_do_not_hold_up_those_who_look_at_a_locked_ledger(
    place: InSQLite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program gets a reading every second, and each of them used to wait for the lock as long as a request may."""
    monkeypatch.setattr(ledger_file, "BUSY_SECONDS", 0.2)
    await made(place)
    with writer(place) as locked:
        async with opened(place) as ledger:
            with pytest.raises(LedgerUnavailableError, match="locked"):
                await ledger.submit(read(place, 2))
            monkeypatch.setattr(ledger_file, "BUSY_SECONDS", 3600.0)
            async with asyncio.timeout(30):
                for _ in range(3):
                    with pytest.raises(LedgerUnavailableError, match="locked"):
                        await ledger.submit(read(place, 2))
                    assert await ledger.look(lambda pool, _: len(pool.leases)) == 1
            locked.communicate("go on\n")


async def test_once_it_can_be_written_again_others_are_followed_at_once(
    place: InSQLite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause after a failure is over with a success: on this clock, which stands still, it would be never."""
    monkeypatch.setattr(ledger_file, "BUSY_SECONDS", 0.1)
    async with opened(place) as ledger, opened(place) as other:
        with writer(place) as locked:
            with pytest.raises(LedgerUnavailableError, match="locked"):
                await ledger.submit(read(place, 2))
            locked.communicate("go on\n")
        await ledger.submit(read(place, 2))
        await other.submit(read(place, 2))
        lease = await granted(other, "theirs")
        async with asyncio.timeout(15):
            while await ledger.look(lambda pool, _: pool.leases.lookup(lease.lease_id)) is None:
                await asyncio.sleep(0.01)


@pytest.mark.fault(33)
async def test_a_process_that_is_stopped_inside_a_transaction_holds_the_others_up_for_a_bounded_time(
    place: InSQLite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 33, with one of ours: stopped (Ctrl-Z) between its decision and its commit."""
    monkeypatch.setattr(ledger_file, "BUSY_SECONDS", 0.5)
    script = """
        import asyncio, os, signal, sys
        from pathlib import Path
        from gpu_worker_pool.core import Requested
        from tests.ledger.disks import WatchedDisk
        from tests.ledger.places import InSQLite, Told, read, request

        is_to_stop = False

        def stop(what, name, is_done):
            global is_to_stop
            if is_to_stop and what == "write":
                is_to_stop = False
                os.kill(os.getpid(), signal.SIGSTOP)

        async def main():
            global is_to_stop
            disk = WatchedDisk(stop)
            place = InSQLite(Path(sys.argv[1]))
            ledger = place.open(Told())
            await ledger.submit(read(place, 1))
            is_to_stop = True
            (granted,) = await ledger.submit(Requested(request("stopped")))
            print(granted.lease.lease_id, flush=True)
            await ledger.close()

        asyncio.run(main())
    """
    await made_without_leases(place)
    process = started(script, str(place.folder))
    try:
        await asyncio.to_thread(eventually, lambda: state_of(process.pid) == "T")
        async with opened(place) as ledger:
            begun = time.monotonic()
            with pytest.raises(LedgerUnavailableError, match=rf"pid {process.pid}\), which is stopped: continue it"):
                await ledger.submit(read(place, 1))
            assert time.monotonic() - begun < 3.0
            with pytest.raises(LedgerUnavailableError, match="which is stopped"):
                await ledger.submit(Requested(request("other")))
            process.send_signal(signal.SIGCONT)
            out, _ = await asyncio.to_thread(process.communicate)
            assert out == "lease-1\n"
            await ledger.submit(read(place, 1))
            assert await ledger.submit(Requested(request("other"))) == ()
            assert await ledger.look(lambda pool, now: [lease.worker for lease in pool.leases]) == ["stopped"]
            await check(ledger)
    finally:
        process.kill()
        process.wait()


def started(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


async def made_without_leases(place: InSQLite) -> None:
    async with opened(place) as ledger:
        await ledger.submit(Ticked())


def state_of(pid: int) -> str:
    return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]


# ---- fault 27: the wall clock


@pytest.mark.fault(27)
async def test_no_wall_time_is_used(place: InSQLite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the wall clock does, no rule asks it: only records of what has ended, for people, are in its time."""

    def asked(*_: object) -> float:
        raise AssertionError("the wall clock was asked")

    for name in ("time", "time_ns", "localtime", "gmtime", "ctime"):
        monkeypatch.setattr(time, name, asked)
    ledger = SQLiteLedger(place.path, PoolSettings(), Told(), first_fence=0)
    await ledger.submit(read(place, 1))
    now = await ledger.look(lambda pool, now: now)
    assert abs(now - time.clock_gettime(time.CLOCK_BOOTTIME)) < 5.0
    await ledger.close()
    for path in (ROOT / "src" / "gpu_worker_pool" / "ledger").glob("*.py"):
        assert "datetime" not in path.read_text() or path.name in ("records.py", "report.py", "report_svg.py")


# ---- several users


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize(
    "mode", [0o777, 0o2775, 0o1777], ids=["for all", "for a group", "for all, each deletes its own"]
)
def test_users_who_share_a_folder_share_the_ledger(tmp_path_factory: pytest.TempPathFactory, mode: int) -> None:
    """The first one's umask must not keep the others out."""
    if mode & stat.S_ISVTX and Path("/proc/sys/fs/protected_regular").read_text().strip() != "0":
        pytest.skip("this kernel lets nobody open another's files in a sticky folder as SQLite does")
    top = Path(f"/tmp/gpu-pool-test-{os.getpid()}-{mode:o}")  # noqa: S108  # others must be able to come in
    top.mkdir()
    try:
        os.chown(top, 0, 12345)
        top.chmod(mode)
        outputs = [as_user(uid, top, ASK) for uid in (54321, 54322)]
        assert outputs == ["lease-1 ('0',)\n", "lease-2 ('1',)\n"]
        assert stat.S_IMODE((top / "ledger.db").stat().st_mode) == (0o666 if mode & 0o002 else 0o660)
    finally:
        shutil.rmtree(top)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_folder_of_ones_own_is_ones_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    top = Path(f"/tmp/gpu-pool-test-{os.getpid()}-own")  # noqa: S108
    top.mkdir()
    try:
        os.chown(top, 54321, 12345)
        top.chmod(0o755)
        assert as_user(54321, top, ASK) == "lease-1 ('0',)\n"
        assert stat.S_IMODE((top / "ledger.db").stat().st_mode) & 0o077 == 0
        out = as_user(54322, top, ASK)
        assert "cannot be opened" in out
        assert "you may not write to its folder; an administrator repairs it: sudo " in out
    finally:
        shutil.rmtree(top)


ASK = """
import asyncio, os, sys
from pathlib import Path
os.umask(0o077)
from gpu_worker_pool.core import Requested
from gpu_worker_pool.errors import LedgerUnavailableError
from tests.ledger.places import InSQLite, Told, read, request

async def main():
    place = InSQLite(Path(sys.argv[1]))
    ledger = place.open(Told())
    await ledger.submit(read(place, 4))
    (granted,) = await ledger.submit(Requested(request(f"of-{os.getuid()}")))
    print(granted.lease.lease_id, granted.lease.gpu_ids)
    await ledger.close()

try:
    asyncio.run(main())
except LedgerUnavailableError as error:
    print(error)
"""


def as_user(uid: int, folder: Path, script: str) -> str:
    """Imported as root, since this checkout need not be readable for others; then really somebody else."""
    become = f"""
import os, sys, asyncio, apsw, concurrent.futures.thread
import tests.ledger.places, gpu_worker_pool.ledger.sqlite
os.setgroups([12345]); os.setgid(12345); os.setuid({uid})
"""
    return run_script(become + script, str(folder))


# ---- forks


FORK = """
    import asyncio, gc, os, selectors, sys
    from pathlib import Path
    from gpu_worker_pool.core import Requested, Renewed, Ticked
    from gpu_worker_pool.errors import LedgerUnavailableError
    from tests.ledger.places import InSQLite, Told, read, request

    async def in_child(place, ledger):
        for attempt in (lambda: ledger.submit(Ticked()), lambda: ledger.look(lambda pool, now: pool)):
            try:
                await attempt()
            except LedgerUnavailableError as error:
                assert "forked" in str(error), error
            else:
                raise AssertionError("the child used its parent's ledger")
        await ledger.close()

    async def own(place, name):
        ledger = place.open(Told())
        await ledger.submit(read(place, 64))
        (granted,) = await ledger.submit(Requested(request(name)))
        await ledger.close()

    async def parent(place, what):
        ledger = place.open(Told())
        ledgers.append(ledger)
        await ledger.submit(read(place, 64))
        children = []
        asking = [asyncio.ensure_future(ledger.submit(Requested(request(f"before-{n}")))) for n in range(3)]
        for number in range(8):
            await asyncio.sleep(0.003 * number)
            pid = os.fork()
            if pid == 0:
                raise SystemExit(number)  # out of the parent's event loop, without another turn of it
            children.append(pid)
            await ledger.submit(Requested(request(f"parent-{number}")))
        await asyncio.gather(*asking)
        for pid in children:
            _, status = await asyncio.to_thread(os.waitpid, pid, 0)
            assert status == 0, status
        (granted,) = await ledger.submit(Requested(request("last")))
        print(granted.lease.fence)
        await ledger.close()

    ledgers = []
    place, what = InSQLite(Path(sys.argv[1])), sys.argv[2]
    # Not epoll: what a child does with that happens to its parent as well.
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    try:
        loop.run_until_complete(parent(place, what))
    except SystemExit as forked:
        number = forked.code
        if what == "use":
            asyncio.run(in_child(place, ledgers[0]))
        elif what == "collect":
            ledgers.clear()
            gc.collect()
        elif what == "open":
            asyncio.run(own(place, f"child-{number}"))
        sys.exit(0)  # with everything that an interpreter does at its end
"""


@pytest.mark.fault(9)
@pytest.mark.parametrize("what", ["use", "collect", "open", "nothing"])
def test_a_child_cannot_harm_its_parents_ledger(place: InSQLite, what: str) -> None:
    """Fault 9; and a child that opens a ledger of its own has one as good as anybody's."""
    out = run_script(FORK, str(place.folder), what)
    grants = 3 + 8 + 1 + (8 if what == "open" else 0)
    assert out == f"{grants}\n" or what == "open"
    assert place.read("SELECT fence FROM meta") == [grants]
    assert place.read("PRAGMA integrity_check") == ["ok"]
    assert place.read("SELECT count(*), count(DISTINCT gpu_id) FROM promised") == [(grants, grants)]


def test_a_child_that_opened_a_ledger_of_its_own_does_not_need_its_parents(place: InSQLite) -> None:
    """The parent's is closed, and was not the last: what the child is told of afterwards must be there."""
    script = """
        import asyncio, os, selectors, sys
        from pathlib import Path
        from gpu_worker_pool.core import Requested
        from tests.ledger.places import InSQLite, Told, read, request

        place = InSQLite(Path(sys.argv[1]))
        opened_r, opened_w = os.pipe()
        closed_r, closed_w = os.pipe()

        async def in_child():
            ledger = place.open(Told())
            await ledger.submit(read(place, 4))
            await ledger.submit(Requested(request("child-1")))
            os.write(opened_w, b"x")
            os.read(closed_r, 1)
            (granted,) = await ledger.submit(Requested(request("child-2")))
            print(granted.lease.lease_id, flush=True)
            os._exit(0)  # it ends as a process does that is killed

        async def in_parent():
            ledger = place.open(Told())
            await ledger.submit(read(place, 4))
            await ledger.submit(Requested(request("parent")))
            pid = os.fork()
            if pid == 0:
                raise SystemExit
            await asyncio.to_thread(os.read, opened_r, 1)
            await ledger.close()
            os.write(closed_w, b"x")
            os.waitpid(pid, 0)

        loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
        try:
            loop.run_until_complete(in_parent())
        except SystemExit:
            asyncio.run(in_child())
    """
    assert run_script(script, str(place.folder)) == "lease-3\n"
    assert place.read("SELECT request_id FROM requests ORDER BY rowid") == ["parent", "child-1", "child-2"]
    assert place.read("PRAGMA integrity_check") == ["ok"]


async def test_a_child_forked_in_the_middle_of_a_transaction_is_kept_away(place: InSQLite) -> None:
    script = """
        import asyncio, os, sys, threading
        from pathlib import Path
        from gpu_worker_pool.core import Requested
        from gpu_worker_pool.errors import LedgerUnavailableError
        from gpu_worker_pool.ledger import forking
        from gpu_worker_pool.ledger.file import LedgerFile
        from gpu_worker_pool.ledger.tables import FORMAT, schema_from
        from tests.ledger.disks import WatchedDisk
        from tests.ledger.places import InSQLite, Told, read, request

        forking.PATIENCE_SECONDS = 0.1
        writing, may_go_on = threading.Event(), threading.Event()

        def slowly(what, name, is_done):
            if what == "write" and name.endswith("-wal") and slow:
                writing.set()
                may_go_on.wait(10)

        slow = False
        disk = WatchedDisk(slowly)

        async def main():
            global slow
            place = InSQLite(Path(sys.argv[1]))
            ledger = place.open(Told())
            await ledger.submit(read(place, 2))
            slow = True
            asked = asyncio.ensure_future(ledger.submit(Requested(request("one"))))
            await asyncio.to_thread(writing.wait)
            pid = os.fork()
            if pid == 0:
                try:
                    LedgerFile(place.path, schema_from(), FORMAT)
                except LedgerUnavailableError as error:
                    os._exit("was forked while its parent wrote" not in str(error))
                os._exit(2)
            slow = False
            may_go_on.set()
            _, status = os.waitpid(pid, 0)
            print(status, len(await asked))
            await ledger.close()

        asyncio.run(main())
    """
    assert await asyncio.to_thread(run_script, script, str(place.folder)) == "0 1\n"
    assert place.read("PRAGMA integrity_check") == ["ok"]


async def test_a_holder_whose_asker_has_left_is_not_asked_after_a_restart(place: InSQLite) -> None:
    def asked(pool: Pool, _: float) -> object:
        (lease,) = pool.leases
        return lease.asked

    async with opened(place) as ledger:
        await ledger.submit(read(place, 1))
        await granted(ledger, "one")
        await ledger.submit(Requested(replace(request("two"), asks=True), deadline=1e9))
        place.clock.advance(1.0)
        await ledger.submit(read(place, 1))
        assert await ledger.look(asked) is not None
        await ledger.submit(Cancelled("two"))
        assert await ledger.look(asked) is None
    async with opened(place) as again:
        await again.submit(read(place, 1))
        assert await again.look(asked) is None
