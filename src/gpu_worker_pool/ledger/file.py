"""Opens or makes the file of a ledger, never replaces it, and says in words what is wrong with it."""

from __future__ import annotations

import os
import secrets
import stat
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import apsw

from gpu_worker_pool.errors import LedgerUnavailableError
from gpu_worker_pool.ledger.forking import OPENING, check_not_inherited, watch
from gpu_worker_pool.ledger.locks import lock_holder, user_of_deleted
from gpu_worker_pool.state_directory import shared_mode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: How long to wait for another process that writes: it may be stopped in the middle of a transaction.
BUSY_SECONDS: Final = 5.0
#: "gpuP", to recognise the file.
APPLICATION_ID: Final = 0x67707550


class LedgerFile:
    """An open ledger file. Used by one thread."""

    def __init__(self, path: Path, schema: str, version: int) -> None:
        """Raises `LedgerUnavailableError` where the file cannot be used."""
        self.path = path
        self._beside = [f"{path}-wal", f"{path}-shm"]
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
            self.connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_NOFOLLOW)
            try:
                self._begin(version)
            except BaseException:
                self.connection.close()
                raise
            watch(self)

    def _begin(self, version: int) -> None:
        connection, path = self.connection, self.path
        connection.set_busy_handler(self._wait)
        # First of all: another program's file must not be changed.
        if connection.pragma("application_id") != APPLICATION_ID:
            raise LedgerUnavailableError(f"{path} is not a ledger of this program; name another GPU_POOL_STATE_DIR")
        if (found := connection.pragma("user_version")) != version:
            raise LedgerUnavailableError(f"{path} was made by another version: format {found}, not {version}")
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=OFF", "trusted_schema=OFF"):
            connection.execute(f"PRAGMA {pragma}")
        connection.pragma("data_version")  # now all its files are there
        self._identity = self._look_at_all()

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
            raise LedgerUnavailableError(f"{path} is not a regular file")
        if found.st_size == 0:
            # This package never leaves an empty file: something has emptied it, and its leases are lost.
            raise LedgerUnavailableError(f"the ledger {path} is empty: if that is intended, remove it to start again")
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
            raise LedgerUnavailableError(f"the ledger {self.path} {self._in_words(error)}") from error

    def _in_words(self, error: apsw.Error | OSError) -> str:
        match error:
            case apsw.BusyError():
                who = lock_holder(self.path)
                return f"has been locked{f' by {who}' if who else ''} for more than {BUSY_SECONDS:g} s"
            case apsw.FullError() | apsw.IOError():
                return f"cannot be written ({error}): is the disk full?"
            case apsw.CorruptError() | apsw.NotADBError():
                return f"is damaged ({error}); it is left as it is: move it away to start again"
            case apsw.ReadOnlyError() | apsw.CantOpenError() | apsw.PermissionsError() | apsw.AuthError():
                is_sticky = _is_sticky(self.path.parent)
                why = "its folder is sticky (chmod -t)" if is_sticky else "who may write to its folder?"
                return f"cannot be opened for writing ({error}): {why}"
            case apsw.Error():
                return f"failed: {type(error).__name__}: {error}"
            case OSError():
                return f"cannot be used: {error.strerror}"


def _is_sticky(folder: Path) -> bool:
    """Many kernels do not let a user open another user's file in such a folder the way SQLite does."""
    try:
        return bool(folder.stat().st_mode & stat.S_ISVTX)
    except OSError:
        return False


def _make(path: Path, schema: str, version: int) -> None:
    """Atomic: the file gets its name when it is complete, unless another process was faster."""
    draft = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.new")
    try:
        connection = apsw.Connection(str(draft))
        connection.execute("PRAGMA journal_mode=DELETE")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version={version}")
        with connection:
            connection.execute(schema)
        connection.close()
        # The folder decides who may use it, not the umask of the first process.
        draft.chmod(shared_mode(path.parent))
        with suppress(FileExistsError):
            path.hardlink_to(draft)
    finally:
        draft.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
