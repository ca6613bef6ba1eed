"""The shared folder as root changes it: no link is followed, and only files of this program are touched."""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.cli.exits import CommandError
from gpu_worker_pool.cli.setup.accounts import group_name
from gpu_worker_pool.hardware.proc import user_name
from gpu_worker_pool.state_directory import NETWORK_FILE_SYSTEMS, file_system_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gpu_worker_pool.cli.setup import Steps

#: The names of this program's files, and how each begins, so that no other file is taken for one of them.
_DATABASE: Final = rb"SQLite format 3\x00.{52}gpuP"
_OWN_FILES: Final = (
    (re.compile(r"ledger-[A-Za-z0-9._-]+-v\d+\.db(\.\d+-[0-9a-f]+\.new)?"), re.compile(_DATABASE, re.DOTALL)),
    (re.compile(r"ledger-[A-Za-z0-9._-]+-v\d+\.db-wal"), re.compile(rb"\x37\x7f\x06[\x82\x83]")),
    (re.compile(r"ledger-[A-Za-z0-9._-]+-v\d+\.db-shm"), re.compile(rb"\x18\xe2\x2d\x00|\x00\x2d\xe2\x18|\x00{4}")),
    (re.compile(r"readings-[A-Za-z0-9._-]+-v\d+\.jsonl"), re.compile(rb'\{"boot"')),
    (re.compile(r"readings-[A-Za-z0-9._-]+-v\d+\.(lock|relief)"), re.compile(rb'\{"pid"')),
    (re.compile(r"ledger-[A-Za-z0-9._-]+-v\d+\.identity"), re.compile(rb"\d+ \d+\n")),
    (re.compile(r"usage-[A-Za-z0-9._-]+-v\d+\.jsonl(\.\d+)?"), re.compile(rb"\{")),
    (re.compile(r"webhooks\.lock"), re.compile(rb"$")),
    (re.compile(r"warned-not-shared"), re.compile(rb"$")),
)
LEDGER: Final = re.compile(r"ledger-[A-Za-z0-9._-]+-v\d+\.db")
#: A ledger has a second name for a moment while it is made.
_SECOND_NAME_SECONDS: Final = 1.0


class Folder:
    """An open folder. Its files are opened within it, so that a renamed or replaced folder does not matter."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor

    @property
    def found(self) -> os.stat_result:
        return os.fstat(self.descriptor)

    def names(self) -> list[str]:
        return sorted(os.listdir(self.descriptor))  # noqa: PTH208  # by descriptor

    def own_names(self) -> list[str]:
        """Files of this program, by their names."""
        return [name for name in self.names() if any(known.fullmatch(name) for known, _ in _OWN_FILES)]

    def others(self) -> list[str]:
        own = self.own_names()
        return [name for name in self.names() if name not in own]

    def users(self) -> list[str]:
        """Users who made files in it."""
        found = {os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_uid for name in self.own_names()}
        return sorted(user_name(uid) for uid in found if uid != 0)

    def check(self) -> None:
        """Raises a `CommandError` for a trap among our files: a link, or something else under their names."""
        for name in self.own_names():
            with self._own_file(name):
                pass

    def ledgers(self) -> list[str]:
        return [name for name in self.names() if LEDGER.fullmatch(name)]

    def shown(self) -> str:
        return f"{self.path} ({shown_mode(self.found.st_mode, self.found.st_uid, self.found.st_gid)})"

    # --- changing it ---

    def fit(self, steps: Steps, *, uid: int, gid: int, mode: int) -> None:
        """Owner, group and mode of the folder and of our files in it."""
        found = self.found
        if (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) != (uid, gid, mode):
            before = shown_mode(found.st_mode, found.st_uid, found.st_gid)
            what = f"{self.path} from {before} to {shown_mode(mode, uid, gid)}"
            steps.do("change", what, lambda: self._change(self.descriptor, uid, gid, mode))
        for name in self.own_names():
            with self._own_file(name) as descriptor:
                if descriptor is not None:
                    # In a folder of one user, the files are that user's; else they stay those of their makers.
                    owner = os.fstat(descriptor).st_uid if mode & 0o020 else uid
                    self._fit_file(steps, name, descriptor, owner, gid, file_mode(mode))

    def _fit_file(self, steps: Steps, name: str, descriptor: int, uid: int, gid: int, mode: int) -> None:
        found = os.fstat(descriptor)
        if (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) != (uid, gid, mode):
            before = shown_mode(found.st_mode, found.st_uid, found.st_gid)
            what = f"{name}: was {before}, is {shown_mode(mode, uid, gid)}"
            steps.do("repair", what, lambda: self._change(descriptor, uid, gid, mode))

    @staticmethod
    def _change(descriptor: int, uid: int, gid: int, mode: int) -> None:
        os.fchown(descriptor, uid, gid)
        os.fchmod(descriptor, mode)  # last: a new owner clears some bits

    def identity(self, name: str) -> list[int]:
        found = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        return [found.st_dev, found.st_ino]

    def remove(self, name: str) -> None:
        for each in (name, f"{name}-wal", f"{name}-shm") if LEDGER.fullmatch(name) else (name,):
            with suppress(FileNotFoundError):
                os.unlink(each, dir_fd=self.descriptor)

    @contextmanager
    def _own_file(self, name: str) -> Iterator[int | None]:
        """Its descriptor; None if it is gone. Raises a `CommandError` for a trap."""
        begins = next(begins for known, begins in _OWN_FILES if known.fullmatch(name))
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags, dir_fd=self.descriptor)
        except FileNotFoundError:
            yield None
            return
        except OSError as error:
            why = "a symbolic link" if error.errno == errno.ELOOP else f"not a regular file ({error.strerror})"
            raise CommandError(f"{self.path / name} is {why}; nothing of it was changed: remove it") from None
        try:
            self._check_file(name, descriptor, begins)
            yield descriptor
        finally:
            os.close(descriptor)

    def _check_file(self, name: str, descriptor: int, begins: re.Pattern[bytes]) -> None:
        path = self.path / name
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CommandError(f"{path} is not a regular file; nothing of it was changed: remove it")
        deadline = time.monotonic() + _SECOND_NAME_SECONDS
        while os.fstat(descriptor).st_nlink > 1:
            if time.monotonic() > deadline:
                raise CommandError(f"{path} has a second name (a hard link); nothing of it was changed: remove it")
            time.sleep(0.02)
        start = os.pread(descriptor, 128, 0)
        if start and not begins.match(start):
            raise CommandError(f"{path} is not a file of gpu-pool; nothing of it was changed: remove it")


def shown_mode(mode: int, uid: int, gid: int) -> str:
    return f"{stat.S_IMODE(mode):04o} {user_name(uid)}:{group_name(gid)}"


def file_mode(folder_mode: int) -> int:
    """As `state_directory.shared_mode`."""
    return 0o600 | (0o060 if folder_mode & 0o020 else 0) | (0o006 if folder_mode & 0o002 else 0)


@contextmanager
def open_folder(path: Path) -> Iterator[Folder | None]:
    """None where there is none. Raises a `CommandError` where root must not work."""
    check_place(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    except OSError as error:
        is_link = path.is_symlink()
        why = "is a symbolic link" if is_link else f"is not a folder ({error.strerror})"
        raise CommandError(f"{path} {why}: remove it, or choose another with --directory") from None
    try:
        yield Folder(path, descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """For root alone at first."""
    path.mkdir(mode=0o700)


def check_place(path: Path) -> None:
    """Root changes it by its name, so no other user may be able to replace a folder above it."""
    parent = path.parent
    try:
        resolved = parent.resolve(strict=True)
    except OSError as error:
        raise CommandError(f"{parent} cannot be used: {error.strerror}; --directory names a folder in it") from None
    for folder in (resolved, *resolved.parents):
        found = folder.stat()
        is_sticky = bool(found.st_mode & stat.S_ISVTX)
        if found.st_uid != 0 or (found.st_mode & 0o022 and not is_sticky):
            raise CommandError(f"{folder} can be changed by other users than root: choose another --directory")
    kind = file_system_of(path.resolve() if path.is_dir() else resolved)
    if kind in NETWORK_FILE_SYSTEMS:
        raise CommandError(
            f"{path} is on a network file system ({kind}), where locks are not reliable: choose a local disk"
        )
