"""Opens or makes the file of a ledger, never replaces it, and says in words what is wrong with it."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import apsw

from gpu_worker_pool.errors import LedgerPermissionError, LedgerUnavailableError, LedgerUnusableError
from gpu_worker_pool.hardware.proc import user_name
from gpu_worker_pool.ledger.forking import OPENING, check_not_inherited, watch
from gpu_worker_pool.ledger.locks import lock_holder, readers, user_of_deleted
from gpu_worker_pool.state_directory import LASTING_ERRORS, open_shared, repair_command, share_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: How long to wait for another process that writes: it may be stopped in the middle of a transaction.
BUSY_SECONDS: Final = 5.0
#: The limit also includes an event's wait behind another one: most locks last only a moment.
LEAST_WAIT_SECONDS: Final = 0.2
#: How long another user's file may be inaccessible before that is an error.
SETTLE_SECONDS: Final = 0.3
_MAGIC: Final = b"SQLite format 3\0"
_HEADER_BYTES: Final = 100
#: "gpuP", to recognise the file.
APPLICATION_ID: Final = 0x67707550
#: What is written first goes into the file `-wal`. It grows while a program reads an older state, and is cut to this
#: size again afterwards.
MOST_WAL_BYTES: Final = 4 * 1024 * 1024
#: A longer one is reported, with the program that reads.
LONG_WAL_BYTES: Final = 64 * 1024 * 1024
#: What SQLite adds to the name for the files that it keeps beside it while it is in use.
BESIDE: Final = ("-wal", "-shm")


class LedgerFile:
    """An open ledger file. Used by one thread."""

    def __init__(self, path: Path, schema: str, version: int) -> None:
        """Raises `LedgerUnavailableError` where the file cannot be used."""
        self.path = path
        self._beside = [f"{path}{suffix}" for suffix in BESIDE]
        self._waiting_since = 0.0
        #: Since when the oldest event waits that is to be written, by the monotonic clock: it counts towards the limit.
        self.asked_at: float | None = None
        #: Held while the connection is used, so that the process does not fork meanwhile.
        self.in_use: threading.Lock = threading.Lock()
        #: Opened by the process that this one was forked from, and closed here.
        self.is_inherited = False
        #: Where the identity of the files is written that were used last.
        self._identity_file = path.with_suffix(".identity")
        with self.errors(), OPENING:
            known = self._known_identity()
            if known is None or known != self._shown_identity():
                _check_not_replaced(path)
            if not os.path.lexists(path):
                _make(path, schema, version)
            self._look(path)
            if not os.access(path, os.R_OK | os.W_OK, effective_ids=True):
                # SQLite would open it read-only, and give the files beside it the same mode.
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            self._check_beside()
            self._give_mode()
            check_not_inherited(path)
            self._open(version)
            if known != self._shown_identity():
                self._remember_identity()
            watch(self)

    def _open(self, version: int) -> None:
        """Another user's file beside it is closed to us for a moment while SQLite makes it: so try more than once."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            self.connection: apsw.Connection = apsw.Connection(
                str(self.path), flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_NOFOLLOW
            )
            try:
                self._begin(version)
            except (apsw.CantOpenError, apsw.ReadOnlyError):
                self.connection.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            except BaseException:
                self.connection.close()
                raise
            else:
                return

    def _begin(self, version: int) -> None:
        connection, path = self.connection, self.path
        connection.set_busy_handler(self._wait)
        # First of all: another program's file must not be changed.
        if connection.pragma("application_id") != APPLICATION_ID:
            raise LedgerUnusableError(f"{path} is not a ledger of this program; name another GPU_POOL_STATE_DIR")
        if (found := connection.pragma("user_version")) != version:
            raise LedgerUnusableError(f"{path} was made by another version: format {found}, not {version}")
        limit = f"journal_size_limit={MOST_WAL_BYTES}"
        for pragma in ("journal_mode=WAL", limit, "synchronous=FULL", "foreign_keys=OFF", "trusted_schema=OFF"):
            connection.execute(f"PRAGMA {pragma}")
        connection.pragma("data_version")  # now all its files are there
        self._identity = self._look_at_all()
        if any(os.lstat(file).st_uid != os.geteuid() for file in self._beside) or why_not_open(path) is not None:
            self._try_to_write()

    def _check_beside(self) -> None:
        """SQLite would write to whatever has their names, such as a second name of a file that is not ours."""
        for file in self._beside:
            with suppress(FileNotFoundError):
                found = os.lstat(file)
                if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
                    raise LedgerUnusableError(f"{file} is a link, or not a regular file: remove it")

    def _give_mode(self) -> None:
        """The files beside it get its mode where they are ours: they may be from a time when it was read-only."""
        mode = stat.S_IMODE(self.path.stat().st_mode)
        for file in self._beside:
            with suppress(OSError):
                # Not by its name, which another user of the folder could give to a link; and not opened to be read,
                # as closing it again would drop this process's locks on it.
                descriptor = os.open(file, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    found = os.fstat(descriptor)
                    is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
                    if is_ours and stat.S_IMODE(found.st_mode) != mode:
                        os.chmod(f"/proc/self/fd/{descriptor}", mode)  # noqa: PTH101  # a name, not a path
                finally:
                    os.close(descriptor)

    def _try_to_write(self) -> None:
        """SQLite opens files read-only where it must, and fails only when it writes: find out now."""
        self.connection.set_busy_handler(None)
        with suppress(apsw.BusyError):  # another process writes; a file that is read-only is said first
            self.connection.execute("BEGIN IMMEDIATE")
            self.connection.execute("ROLLBACK")
        self.connection.set_busy_handler(self._wait)

    def check(self) -> None:
        """Raises if the open files were deleted, replaced or overwritten: what is written would be lost."""
        try:
            is_same = self._look_at_all() == self._identity
        except OSError:
            is_same = False
        if not is_same:
            raise LedgerUnavailableError(f"the ledger {self.path} was deleted or replaced; restart what uses it")
        # SQLite would not notice: it has these pages in memory.
        _, header = self.connection.read("main", 0, 0, _HEADER_BYTES)
        if header[:16] != _MAGIC or header[68:72] != APPLICATION_ID.to_bytes(4, "big"):
            self.connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)  # leave it as it is
            raise LedgerUnusableError(
                f"the ledger {self.path} is damaged (it was overwritten); it is left as it is: move it away to start "
                "again, and restart what uses it"
            )

    def check_size(self) -> str | None:
        """Whether the file `-wal` is very long, and why."""
        size = os.lstat(self._beside[0]).st_size
        if size <= LONG_WAL_BYTES:
            return None
        who = ", ".join(readers(self.path)) or "another program"
        return f"{self._beside[0]} has grown to {size / 1e6:.0f} MB: {who} keeps reading an older state; end that"

    def _look_at_all(self) -> list[tuple[int, int]]:
        """The ledger, and the two files that SQLite keeps beside it while it is in use."""
        return [self._look(self.path), *((found.st_dev, found.st_ino) for found in map(os.lstat, self._beside))]

    @staticmethod
    def _look(path: Path) -> tuple[int, int]:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            raise LedgerUnusableError(f"{path} is not a regular file")
        if found.st_size == 0:
            # This package never leaves an empty file: something has emptied it, and its leases are lost.
            raise LedgerUnusableError(f"the ledger {path} is empty: if that is intended, remove it to start again")
        return found.st_dev, found.st_ino

    # --- the same files as before ---
    # Finding who uses deleted files takes long where many processes run. The same files as at the last check
    # are not replaced.

    def _known_identity(self) -> bytes | None:
        with suppress(OSError):
            descriptor = os.open(self._identity_file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                return os.read(descriptor, 1000)
            finally:
                os.close(descriptor)
        return None

    def _shown_identity(self) -> bytes | None:
        """None where one of the files is missing."""
        try:
            return "".join(f"{device} {inode}\n" for device, inode in self._look_at_all()).encode()
        except (OSError, LedgerUnusableError):
            return None

    def _remember_identity(self) -> None:
        with suppress(OSError):  # such as a full disk: then the next program looks again
            descriptor = open_shared(self._identity_file)
            try:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, self._shown_identity() or b"", 0)
            finally:
                os.close(descriptor)

    def _wait(self, attempts: int) -> bool:
        """Whether SQLite should try again. Its own waiting is slower: its pauses double, up to 100 ms."""
        now = time.monotonic()
        if attempts == 0:
            waited = 0.0 if self.asked_at is None else now - self.asked_at
            self._waiting_since = now - min(waited, max(BUSY_SECONDS - LEAST_WAIT_SECONDS, 0.0))
        elif now - self._waiting_since > BUSY_SECONDS:
            return False
        apsw.sleep(1 if attempts < 20 else 5)
        return True

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Errors of SQLite and the system, with words for the person who has to fix it."""
        try:
            yield
        except (apsw.Error, OSError) as error:
            raise self._in_words(error) from error

    def _in_words(self, error: apsw.Error | OSError) -> LedgerUnavailableError:
        """Of a kind that says whether trying again can help."""
        about = f"the ledger {self.path}"
        match error:
            case apsw.BusyError():
                who = lock_holder(self.path)
                return LedgerUnavailableError(
                    f"{about} has been locked{f' by {who}' if who else ''} for more than {BUSY_SECONDS:g} s"
                )
            case apsw.FullError() | apsw.IOError():
                return LedgerUnavailableError(f"{about} cannot be written ({error}): is the disk full?")
            case apsw.CorruptError() | apsw.NotADBError():
                return LedgerUnusableError(
                    f"{about} is damaged ({error}); it is left as it is: move it away to start again"
                )
            case apsw.ReadOnlyError() | apsw.CantOpenError() | apsw.PermissionsError() | apsw.AuthError():
                if (why := why_not_open(self.path)) is not None:
                    return LedgerPermissionError(f"{about} cannot be opened for writing: {why}")
                return LedgerUnavailableError(f"{about} cannot be opened for writing ({error})")
            case OSError() if error.errno in (errno.EACCES, errno.EPERM):
                why = why_not_open(self.path) or error.strerror
                return LedgerPermissionError(f"{about} cannot be opened for writing: {why}")
            case OSError():
                kind = LedgerUnusableError if error.errno in LASTING_ERRORS else LedgerUnavailableError
                return kind(f"{about} cannot be used: {error.strerror}")
        return LedgerUnavailableError(f"{about} failed: {type(error).__name__}: {error}")


def _check_not_replaced(path: Path) -> None:
    """A process that still uses deleted or replaced files would not see our leases, and may hold GPUs."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while (who := user_of_deleted(path)) is not None:
        # SQLite itself deletes the files beside the ledger, and closes them a moment later.
        if time.monotonic() > deadline:
            raise LedgerUnavailableError(
                f"the ledger {path} was deleted or replaced while {who} uses it, which may hold GPUs: end that first"
            )
        time.sleep(0.02)


def why_not_open(path: Path) -> str | None:
    """Why this user may not open the ledger for writing, and what to do; None where nothing forbids it.

    Never by opening a file: closing it again would drop this process's locks on it.
    """
    repair = f"an administrator repairs it: {repair_command(path.parent)}"
    try:
        folder = path.parent.stat()
    except OSError:
        return None
    if os.statvfs(path.parent).f_flag & os.ST_RDONLY:
        return "its file system is read-only"
    if not os.access(path.parent, os.W_OK | os.X_OK, effective_ids=True):
        return f"you may not write to its folder; {repair}"
    for file in (path, *(path.with_name(path.name + suffix) for suffix in BESIDE)):
        if not os.path.lexists(file):
            continue
        if not os.access(file, os.R_OK | os.W_OK, effective_ids=True):
            return _why_not_accessible(file, repair)
        # With `fs.protected_regular`, the kernel refuses what SQLite does to open them.
        if folder.st_mode & stat.S_ISVTX and file.stat().st_uid not in (os.geteuid(), folder.st_uid):
            return f"{file.name} is another user's, and its folder is sticky; {repair}"
    return None


def _why_not_accessible(file: Path, repair: str) -> str:
    found = file.stat()
    shown = f"{file.name} has the mode {stat.filemode(found.st_mode)}"
    if found.st_uid != os.geteuid():
        return f"{shown}, and is {user_name(found.st_uid)}'s; {repair}"
    if found.st_mode & 0o600 == 0o600:
        return f"{shown} and is yours, but the system forbids it: is it immutable (lsattr {file})?"
    return f"{shown}: chmod u+rw {file}"


def _make(path: Path, schema: str, version: int) -> None:
    """Atomic: the file gets its name when it is complete, unless another process was faster."""
    draft = path.with_name(f"{path.name}.{os.getpid()}-{os.urandom(4).hex()}.new")
    try:
        # With its final mode from the first moment: the folder decides who may use it, not the umask of its maker.
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            share_file(descriptor, path.parent)
        finally:
            os.close(descriptor)
        connection = apsw.Connection(str(draft), flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_NOFOLLOW)
        connection.execute("PRAGMA journal_mode=DELETE")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version={version}")
        with connection:
            connection.execute(schema)
        connection.close()
        with suppress(FileExistsError):
            path.hardlink_to(draft)
    finally:
        draft.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
