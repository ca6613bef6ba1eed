"""Opens or makes the file of a ledger, never replaces it, and says in words what is wrong with it."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import apsw

from gpu_worker_pool.errors import LedgerPermissionError, LedgerUnavailableError, LedgerUnusableError
from gpu_worker_pool.ledger.forking import OPENING, check_not_inherited, watch
from gpu_worker_pool.ledger.locks import lock_holder, user_of_deleted
from gpu_worker_pool.state_directory import LASTING_ERRORS, repair_command, share_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: How long to wait for another process that writes: it may be stopped in the middle of a transaction.
BUSY_SECONDS: Final = 5.0
#: How long files of other users may be closed to us before that counts.
SETTLE_SECONDS: Final = 0.3
#: "gpuP", to recognise the file.
APPLICATION_ID: Final = 0x67707550
#: What SQLite adds to the name for the files that it keeps beside it while it is in use.
BESIDE: Final = ("-wal", "-shm")


class LedgerFile:
    """An open ledger file. Used by one thread."""

    def __init__(self, path: Path, schema: str, version: int) -> None:
        """Raises `LedgerUnavailableError` where the file cannot be used."""
        self.path = path
        self._beside = [f"{path}{suffix}" for suffix in BESIDE]
        self._waiting_since = 0.0
        #: Held while the connection is used, so that the process does not fork meanwhile.
        self.in_use = threading.Lock()
        #: Opened by the process that this one was forked from, and closed here.
        self.is_inherited = False
        with self.errors(), OPENING:
            if not os.path.lexists(path):
                if who := user_of_deleted(path):
                    raise LedgerUnavailableError(
                        f"the ledger {path} was deleted while {who} uses it, which may hold GPUs: end that first"
                    )
                _make(path, schema, version)
            self._look(path)
            check_not_inherited(path)
            self._open(version)
            watch(self)

    def _open(self, version: int) -> None:
        """Another user's file beside it is closed to us for a moment while SQLite makes it: so try more than once."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            self.connection = apsw.Connection(
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
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=OFF", "trusted_schema=OFF"):
            connection.execute(f"PRAGMA {pragma}")
        connection.pragma("data_version")  # now all its files are there
        self._identity = self._look_at_all()
        if any(os.lstat(file).st_uid != os.geteuid() for file in self._beside) or why_not_open(path) is not None:
            self._try_to_write()

    def _try_to_write(self) -> None:
        """SQLite opens files read-only where it must, and fails only when it writes: find out now."""
        self.connection.set_busy_handler(None)
        with suppress(apsw.BusyError):  # another process writes; a file that is read-only is said first
            self.connection.execute("BEGIN IMMEDIATE")
            self.connection.execute("ROLLBACK")
        self.connection.set_busy_handler(self._wait)

    def check(self) -> None:
        """Raises if the open files were deleted or replaced: no other process would see what is written."""
        try:
            is_same = self._look_at_all() == self._identity
        except OSError:
            is_same = False
        if not is_same:
            raise LedgerUnavailableError(f"the ledger {self.path} was deleted or replaced; restart what uses it")

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

    def _wait(self, attempts: int) -> bool:
        """Whether SQLite should try again. Its own waiting is slower: its pauses double, up to 100 ms."""
        now = time.monotonic()
        if attempts == 0:
            self._waiting_since = now
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
            return f"{file.name} is another user's, and not for the group of its folder; {repair}"
        # With `fs.protected_regular`, the kernel refuses what SQLite does to open them.
        if folder.st_mode & stat.S_ISVTX and file.stat().st_uid not in (os.geteuid(), folder.st_uid):
            return f"{file.name} is another user's, and its folder is sticky; {repair}"
    return None


def _make(path: Path, schema: str, version: int) -> None:
    """Atomic: the file gets its name when it is complete, unless another process was faster."""
    draft = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.new")
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
