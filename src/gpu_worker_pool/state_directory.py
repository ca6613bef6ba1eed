"""Finds the state directory: the folder for the files that processes of one host share."""

from __future__ import annotations

import errno
import logging
import os
import shlex
import site
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from gpu_worker_pool.errors import LedgerPermissionError, LedgerUnusableError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

logger: logging.Logger = logging.getLogger(__name__)

VARIABLE: Final = "GPU_POOL_STATE_DIR"
#: Locks and shared memory are unreliable there, and several hosts would share one folder.
NETWORK_FILE_SYSTEMS = frozenset(
    ["9p", "afs", "beegfs", "ceph", "cifs", "fuse.sshfs", "glusterfs", "lustre", "nfs", "nfs4", "smb3", "smbfs"]
)
#: Made by `gpu-pool setup`, for the users that share the GPUs.
SHARED_DIRECTORY = Path("/var/lib/gpu-pool")
#: Where root finds commands with the usual `secure_path` of sudo.
_PATH_OF_ROOT: Final = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
#: Errors of the system that another try does not change.
LASTING_ERRORS: Final = frozenset(
    [errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT, errno.ELOOP, errno.ENAMETOOLONG]
)
#: How long a file of another user may be closed to us: it gets its mode a moment after it was made.
_SETTLE_SECONDS: Final = 0.05
_announced: list[bool] = []


class Location(NamedTuple):
    path: Path
    #: Only this user's programs use it, and the user did not choose that.
    is_private: bool


def state_directory(chosen: str | None = None, environ: Mapping[str, str] | None = None) -> Path:
    """`chosen`, else `GPU_POOL_STATE_DIR`, else the shared directory if there is one, else the user's own.

    Raises `LedgerUnusableError` where it cannot be used, and an `OSError` where that may pass.
    """
    directory = locate(chosen, environ).path
    try:
        make_private(directory)
    except OSError as error:
        if error.errno in LASTING_ERRORS or isinstance(error, FileExistsError):
            text = f"cannot make the state directory {directory}: {error.strerror}; set {VARIABLE} to a folder of yours"
            raise LedgerUnusableError(text) from None
        raise
    if (kind := file_system_of(directory.resolve())) in NETWORK_FILE_SYSTEMS:
        raise LedgerUnusableError(
            f"{directory} is on a network file system ({kind}), where locks are not reliable; set {VARIABLE} to a "
            "folder on a local disk"
        )
    if not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
        raise LedgerPermissionError(_why_not_writable(directory))
    return directory


def locate(chosen: str | None = None, environ: Mapping[str, str] | None = None) -> Location:
    """Where it is or would be; makes nothing. Raises `LedgerUnusableError` for a path that cannot be meant."""
    env = os.environ if environ is None else environ
    text = (chosen or env.get(VARIABLE, "")).strip()
    try:
        if text:
            return Location(_absolute(text), is_private=False)
        if os.path.lexists(SHARED_DIRECTORY):
            if not SHARED_DIRECTORY.is_dir():
                raise LedgerUnusableError(f"{SHARED_DIRECTORY} is not a folder: remove it; {remedy()}")
            return Location(SHARED_DIRECTORY, is_private=False)
        return Location(own_directory(env), is_private=True)
    except RuntimeError as error:  # a home directory is unknown
        raise LedgerUnusableError(f"{error}; set {VARIABLE}") from error


def own_directory(environ: Mapping[str, str] | None = None) -> Path:
    """The directory of this user alone. Raises a `RuntimeError` where the home directory is unknown."""
    base = (os.environ if environ is None else environ).get("XDG_STATE_HOME", "").strip()
    # As its specification says, a relative path is ignored.
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "state") / "gpu-pool"


def make_private(folder: Path) -> None:
    """Make it, and what is missing above it, for this user alone. What exists stays as it is."""
    if not folder.exists():
        make_private(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def _absolute(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_absolute():
        raise LedgerUnusableError(
            f"{VARIABLE}={text!r} is relative, so every folder would get a separate ledger; write an absolute path, "
            f"such as {Path.cwd() / path}"
        )
    return path


# --- files in it ---


def shared_mode(directory: Path) -> int:
    """The mode of a file in it: open to exactly those who may write to the folder."""
    mode = directory.stat().st_mode
    return 0o600 | (0o060 if mode & 0o020 else 0) | (0o006 if mode & 0o002 else 0)


def share_file(descriptor: int, directory: Path) -> None:
    """Give a new file to all who may write to its folder, whatever the umask and group of its maker are.

    Raises an `OSError` for anything else under its name: another user may have put a link to a file of ours there.
    """
    check_ordinary(descriptor, directory)
    folder, file = directory.stat(), os.fstat(descriptor)
    owner = folder.st_uid if os.geteuid() == 0 else -1  # root must not lock out the owner of the folder
    if file.st_gid != folder.st_gid or owner not in (-1, file.st_uid):
        with suppress(PermissionError):  # not in that group: then the folder is open to all
            os.fchown(descriptor, owner, folder.st_gid)
    os.fchmod(descriptor, shared_mode(directory))


def open_shared(path: Path) -> int:
    """For reading and writing; made if it is not there, for all who may write to its folder."""
    # No symbolic links: in a shared folder another user could point one at any file.
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        # Without O_CREAT: in a world-writable folder the kernel refuses it for files of other users.
        descriptor = _open_settled(path, flags)
    except FileNotFoundError:
        descriptor = os.open(path, flags | os.O_CREAT, 0o600)
        with suppress(OSError):  # another process was faster, and does the same
            share_file(descriptor, path.parent)
    try:
        check_ordinary(descriptor, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def check_ordinary(descriptor: int, path: Path) -> None:
    """Raises an `OSError` for what another user of the folder may have put there: a pipe, or a file from elsewhere.

    A second name is as good as a link: where the kernel does not forbid it, anybody can give one to a file of root.
    """
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        raise OSError(errno.EINVAL, "not a regular file, or one with a second name", str(path))


def _open_settled(path: Path, flags: int) -> int:
    """A file that another user just makes is closed to us for a moment: so try more than once."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while True:
        try:
            return os.open(path, flags)
        except PermissionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)


# --- sharing it with other users ---


def setup_command(*words: str) -> str:
    """The command that an administrator types, as it works on this host."""
    return " ".join(["sudo", *map(shlex.quote, [*_own_command(), "setup", *words])])


def repair_command(directory: Path) -> str:
    """The same for a folder that is shared already."""
    return setup_command(*(() if directory == SHARED_DIRECTORY else ("--directory", str(directory))))


def remedy() -> str:
    """What to do so that all users of this host share its GPUs."""
    return f"to share this host's GPUs with other users: {setup_command()}"


def privacy_notice() -> str:
    return f"only your own jobs are coordinated; {remedy()}"


def announce_privacy(chosen: str | None = None, say: Callable[[str], object] = logger.warning) -> None:
    """Say once in a process, before it grants, that other users' jobs are not seen."""
    if not _announced and locate(chosen).is_private:
        _announced.append(True)
        say(privacy_notice())


def _own_command() -> list[str]:
    """`gpu-pool` where root finds this installation under that name; else by a path that works for root too.

    -P: root must not run what another user has put into the folder in which it is typed.
    """
    user_site = site.getusersitepackages() if site.ENABLE_USER_SITE else ""
    if user_site and Path(__file__).is_relative_to(user_site):  # root does not look there
        return ["env", f"PYTHONPATH={user_site}", sys.executable, "-P", "-m", "gpu_worker_pool"]
    script = Path(sys.executable).with_name("gpu-pool")
    if not script.exists():
        return [sys.executable, "-P", "-m", "gpu_worker_pool"]
    found = next((path for folder in _PATH_OF_ROOT if (path := Path(folder, "gpu-pool")).exists()), None)
    return ["gpu-pool"] if found is not None and found.samefile(script) else [str(script)]


def _why_not_writable(directory: Path) -> str:
    import grp  # not before they are needed: `gpu-pool run` should start fast
    import pwd

    folder = directory.stat()
    uid = os.geteuid()
    private = f"to coordinate only your own jobs: gpu-pool run --private, or {VARIABLE}={_shown_home(own_directory())}"
    refused = f"{directory} exists, but you may not write to it"
    if os.statvfs(directory).f_flag & os.ST_RDONLY:
        return f"{refused}: its file system is read-only; {private}"
    user = _name_of(lambda: pwd.getpwuid(uid).pw_name, uid)
    if directory == own_directory():
        return f"{refused}: sudo chown -R {user} {directory} gives it back to you"
    if not folder.st_mode & stat.S_IWGRP:
        owner = _name_of(lambda: pwd.getpwuid(folder.st_uid).pw_name, folder.st_uid)
        if folder.st_uid == 0:
            return f"{refused}: only root may; {remedy()}; {private}"
        return (
            f"{refused}: only user {owner} may, whose server gives the leases; is it running? "
            f"(systemctl status gpu-pool); {private}"
        )
    group = _name_of(lambda: grp.getgrgid(folder.st_gid).gr_name, folder.st_gid)
    if user in _members(folder.st_gid):
        return f"{refused} yet: you are in group {group}; log in again, or type: newgrp {group}; {private}"
    return f"{refused}: join group {group} and log in again ({_joining(directory, user)}); {private}"


def _joining(directory: Path, user: str) -> str:
    return f"{repair_command(directory)} --add {shlex.quote(user)}"


def _members(gid: int) -> list[str]:
    import grp

    try:
        return grp.getgrgid(gid).gr_mem
    except KeyError:
        return []


def _name_of(look_up: Callable[[], str], number: int) -> str:
    try:
        return look_up()
    except KeyError:
        return str(number)


def _shown_home(path: Path) -> str:
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return shlex.quote(str(path))


def file_system_of(path: Path) -> str:
    """The type of the file system, such as `ext4`."""
    kind, longest = "", -1
    inside = f"{path}/"
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        # Blanks in it are written as \\040; for such a mount point its parent's type is returned.
        mount = before.split()[4].rstrip("/") + "/"
        if inside.startswith(mount) and len(mount) >= longest:
            kind, longest = after.split()[0], len(mount)
    return kind
