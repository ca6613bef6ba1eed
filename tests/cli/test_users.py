"""Several real users on one host: strangers at first, then one queue, and one who is not in the group."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator

import pytest

from tests.people import Lab, lab, needs_root
from tests.waiting import eventually

pytestmark = needs_root

ALONE = "only your own jobs are coordinated; to share this host's GPUs with other users: sudo "


@pytest.fixture(scope="module")
def three() -> Iterator[Lab]:
    with lab(3) as made:
        yield made


@pytest.fixture
def people(three: Lab) -> Iterator[Lab]:
    """The same users for all tests, each with a folder of its own."""
    yield three
    three.end()
    for user in three.users:
        shutil.rmtree(three.top / f"home-{user}" / ".local", ignore_errors=True)
    shutil.rmtree(three.shared, ignore_errors=True)
    three.shared.with_name("shared.setup.json").unlink(missing_ok=True)
    subprocess.run(["/usr/sbin/groupdel", three.group], check=False, capture_output=True)


def set_up(people: Lab, *users: str) -> str:
    added = [word for user in users for word in ("--add", user)]
    done = people.gpu_pool("root", "setup", "--directory", str(people.shared), "--group", people.group, *added)
    assert done.status == 0, done
    return done.out


def holding(people: Lab, user: str, **variables: str) -> None:
    """A program of this user that has the GPU."""
    started = people.start(user, "run", "--", "sh", "-c", "echo has it; sleep 60", **variables)
    assert started.stdout is not None
    assert started.stdout.readline() == "has it\n"


def open_ledger(people: Lab, user: str, **variables: str) -> None:
    """A program of this user that has the ledger open; a holder closes it from time to time."""
    script = """
from gpu_worker_pool.ledger.file import LedgerFile
from gpu_worker_pool.ledger.tables import FORMAT, SCHEMA
file = LedgerFile(gpu_worker_pool.ledger.host.ledger_path(Path(sys.argv[1]), "simulated:1"), SCHEMA, FORMAT)
print("open", flush=True)
__import__("time").sleep(60)
"""
    started = people.run_script(user, script, **variables)
    assert started.stdout is not None
    assert started.stdout.readline() == "open\n"


def test_until_it_is_set_up_every_grant_says_in_one_line_that_others_are_not_seen(people: Lab) -> None:
    alice, bob, _ = people.users
    for _ in range(2):
        done = people.gpu_pool(alice, "run", "--", "true")
        assert (done.status, done.err.count("\n")) == (0, 1)
        assert done.err.startswith(f"gpu-pool: {ALONE}")
    waited = people.gpu_pool(alice, "wait", "--pid", str(os.getpid()))
    assert waited.err.startswith(f"gpu-pool: {ALONE}")
    holding(people, bob)  # nothing of the other's is in their way, and that is what was said
    doctor = people.gpu_pool(alice, "doctor")
    assert ALONE in doctor.out


def test_the_printed_remedy_works_when_typed(people: Lab) -> None:
    """Root does not find a virtual environment's programs by name."""
    line = people.gpu_pool(people.users[0], "run", "--", "true").err
    command = line.strip().partition("sudo ")[2]
    done = subprocess.run(
        ["/usr/bin/env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "sh", "-c", f"{command} --help"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert "--add USER" in done.stdout


def test_python_says_it_once_in_a_process(people: Lab) -> None:
    script = """
import logging
logging.basicConfig(level=logging.WARNING, format="%(message)s")
async def main():
    for _ in range(2):
        async with gpu_worker_pool.GPUWorkerPoolClient(service_endpoint="local://") as client:
            await client.release_gpu(await client.request_gpu())
asyncio.run(main())
"""
    done = people.python(people.users[0], script)
    assert (done.status, done.err.count(ALONE), done.err.count("\n")) == (0, 1, 1)


def test_after_setup_two_users_are_in_one_queue_whoever_was_first(people: Lab) -> None:
    alice, bob, _ = people.users
    said = set_up(people, alice, bob)
    assert f"{alice} must log in again" in said
    assert f"tried as {alice}, {bob}, and as root" in said
    assert people.gpu_pool("root", "run", "--", "true").status == 0  # root first, with umask 077
    holding(people, alice)
    refused = people.gpu_pool(bob, "run", "--no-wait", "--", "true")
    assert refused.status == 75
    assert ALONE not in refused.err
    assert "1 leases" in people.gpu_pool(bob, "doctor").out
    shared = next(line for line in people.gpu_pool(bob, "doctor").out.splitlines() if "shared with others" in line)
    assert f"users seen beside you: {alice}, root; group {people.group}: {alice}, {bob}" in shared
    for file in people.shared.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o660, file
        assert file.stat().st_gid == people.shared.stat().st_gid, file


def test_who_is_not_in_the_group_is_refused_and_can_be_private(people: Lab) -> None:
    alice, _, carol = people.users
    set_up(people, alice)
    sentence = f"{people.shared} exists, but you may not write to it: join group {people.group} and log in again (sudo "
    for words in (
        ["run", "--", "true"],
        ["wait"],
        ["status"],
        ["queue"],
        ["leases"],
        ["explain"],
        ["release", "lease-1"],
    ):
        done = people.gpu_pool(carol, *words)
        assert sentence in done.err, done
        assert f"setup --add {carol}" in done.err
        assert done.status == 77, done
    doctor = people.gpu_pool(carol, "doctor")
    assert doctor.status == 1
    assert sentence in doctor.out
    assert not (people.top / f"home-{carol}" / ".local").exists()  # no private ledger behind their back
    private = people.gpu_pool(carol, "run", "--private", "--", "sh", "-c", "echo $GPU_POOL_STATE_DIR")
    assert (private.status, private.err) == (0, "")
    assert private.out == f"{people.top}/home-{carol}/.local/state/gpu-pool\n"
    exported = people.gpu_pool(carol, "wait", "--private", "--pid", str(os.getpid()), "--export").out
    assert f"export GPU_POOL_STATE_DIR={people.top}/home-{carol}/.local/state/gpu-pool\n" in exported
    elsewhere = people.gpu_pool(carol, "run", "--private", "-e", "http://127.0.0.1:9", "--", "true")
    assert (elsewhere.status, "--private is for" in elsewhere.err) == (2, True)


def test_who_is_in_the_group_but_has_not_logged_in_again_is_told_so(people: Lab) -> None:
    alice, bob, _ = people.users
    set_up(people, alice)
    # A process that began before: the group is in the database, but not among its own.
    script = f"""
import subprocess
from gpu_worker_pool.state_directory import state_directory
open({str(people.top / f"home-{bob}" / "ready")!r}, "w").close()
while {bob!r} not in grp.getgrnam({people.group!r}).gr_mem:
    import time; time.sleep(0.02)
try:
    state_directory()
except gpu_worker_pool.errors.LedgerPermissionError as error:
    print(error)
"""
    process = people.run_script(bob, script)
    eventually((people.top / f"home-{bob}" / "ready").exists)
    set_up(people, bob)
    out, _ = process.communicate(timeout=30)
    assert f"you may not write to it yet: you are in group {people.group}; log in again, or type: newgrp" in out


def test_python_refuses_at_once_with_the_same_sentence(people: Lab) -> None:
    alice, _, carol = people.users
    set_up(people, alice)
    script = """
async def main():
    async with gpu_worker_pool.GPUWorkerPoolClient(service_endpoint="local://") as client:
        try:
            await client.request_gpu()  # without a timeout: it would wait for ever
        except gpu_worker_pool.errors.LedgerPermissionError as error:
            print(error.retryable, error)
asyncio.run(main())
"""
    done = people.python(carol, script)
    assert done.out.startswith(f"False {people.shared} exists, but you may not write to it: join group {people.group}")
    assert "GPU_POOL_STATE_DIR=~/.local/state/gpu-pool" in done.out


def test_setup_needs_root_and_says_how(people: Lab) -> None:
    done = people.gpu_pool(people.users[0], "setup", "--add", "x y", "--service")
    assert done.status == 77
    assert done.err.startswith("gpu-pool: setup changes this host, so it needs root: sudo ")
    assert done.err.endswith(" setup --add 'x y' --service\n")


# --- fs.protected_regular: a setting of the whole machine, so a library stands in for the kernel

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
/* As the kernel's may_create_in_sticky() with fs.protected_regular = 2. */
static int refuses(const char *path, int flags) {
    struct stat file, folder;
    char copy[4096];
    if (!(flags & O_CREAT) || strlen(path) >= sizeof copy || lstat(path, &file) || !S_ISREG(file.st_mode)) return 0;
    strcpy(copy, path);
    if (stat(dirname(copy), &folder) || !(folder.st_mode & S_ISVTX)) return 0;
    if (file.st_uid == folder.st_uid || file.st_uid == geteuid()) return 0;
    return (folder.st_mode & (S_IWOTH | S_IWGRP)) != 0;
}
#define SHADOW(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \
        if (refuses(path, flags)) { errno = EACCES; return -1; } \
        return ((int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name))(path, flags, mode); \
    }
SHADOW(open)
SHADOW(open64)
"""


@pytest.fixture(scope="module")
def protected_regular(three: Lab) -> str:
    if (gcc := shutil.which("gcc")) is None:
        pytest.skip("gcc is needed to build what stands in for the kernel")
    source, library = three.top / "shim.c", three.top / "shim.so"
    source.write_text(SHIM)
    subprocess.run([gcc, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    library.chmod(0o755)
    ctypes.CDLL(str(library))
    return str(library)


def test_where_the_kernel_protects_files_in_sticky_folders_nobody_waits_for_ever(
    people: Lab, protected_regular: str
) -> None:
    alice, bob, _ = people.users
    people.shared.mkdir()
    people.shared.chmod(0o1777)  # as an older version advised
    open_ledger(people, alice, LD_PRELOAD=protected_regular)
    holding(people, alice, LD_PRELOAD=protected_regular)
    refused = people.gpu_pool(bob, "run", "--", "true", LD_PRELOAD=protected_regular)
    assert refused.status == 77
    assert "is another user's, and its folder is sticky; an administrator repairs it: sudo " in refused.err
    assert refused.err.count("\n") == 1
    doctor = people.gpu_pool(bob, "doctor", LD_PRELOAD=protected_regular)
    assert doctor.status == 1
    assert any(line.startswith("wrong") and "sticky" in line for line in doctor.out.splitlines())
    assert people.gpu_pool(bob, "status", LD_PRELOAD=protected_regular).status == 77
    # The repair, while the first one still has its GPU.
    said = set_up(people, alice, bob)
    assert f"changed {people.shared} from 1777 root:root to 2770 root:{people.group}" in said
    assert people.gpu_pool(bob, "run", "--no-wait", "--", "true", LD_PRELOAD=protected_regular).status == 75


def test_a_folder_of_root_alone_and_one_of_a_server_are_told_apart(people: Lab) -> None:
    alice, bob, _ = people.users
    people.shared.mkdir(mode=0o755)
    done = people.gpu_pool(alice, "run", "--", "true")
    assert (done.status, "you may not write to it: only root may; to share this host's GPUs" in done.err) == (77, True)
    shutil.chown(people.shared, bob)
    people.shared.chmod(0o700)
    done = people.gpu_pool(alice, "run", "--", "true")
    assert (done.status, f"only user {bob} may, whose server gives the leases; is it running?" in done.err) == (
        77,
        True,
    )


def test_root_does_not_lock_out_the_owner_of_a_folder(people: Lab) -> None:
    alice = people.users[0]
    people.shared.mkdir(mode=0o700)
    shutil.chown(people.shared, alice)
    assert people.gpu_pool("root", "run", "--", "true").status == 0
    assert {file.owner() for file in people.shared.iterdir()} == {alice}
    assert people.gpu_pool(alice, "run", "--", "true").status == 0


def test_users_who_open_and_close_it_at_the_same_time_do_not_see_half_made_files(people: Lab) -> None:
    """Each time the last one closes it, SQLite removes the files beside it, and the next one makes them again."""
    set_up(people, *people.users)
    script = """
from gpu_worker_pool.ledger.trial import try_ledger
path = gpu_worker_pool.ledger.host.ledger_path(Path(sys.argv[1]), "auto")
for _ in range(400):
    try_ledger(path)
print("done")
"""
    started = [people.run_script(user, script) for user in people.users]
    ended = [process.communicate(timeout=50) for process in started]
    assert ended == [("done\n", "")] * 3
