"""`gpu-pool setup` as root, with real users and groups: what it makes, repairs, refuses, and takes back."""

from __future__ import annotations

import grp
import json
import os
import pwd
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.people import Ended, Lab, lab, needs_root

pytestmark = needs_root


@pytest.fixture(scope="module")
def two() -> Iterator[Lab]:
    with lab(2) as made:
        yield made


@pytest.fixture
def people(two: Lab) -> Iterator[Lab]:
    yield two
    two.end()
    shutil.rmtree(two.shared, ignore_errors=True)
    two.shared.unlink(missing_ok=True)
    record_of(two).unlink(missing_ok=True)
    for left in two.top.glob("outside*"):
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()
    subprocess.run(["/usr/sbin/userdel", f"{two.group}s"], check=False, capture_output=True)
    subprocess.run(["/usr/sbin/groupdel", two.group], check=False, capture_output=True)


def record_of(people: Lab) -> Path:
    return people.shared.with_name("shared.setup.json")


def setup(people: Lab, *words: str, group: bool = True) -> Ended:
    named = ("--group", people.group) if group else ()
    return people.gpu_pool("root", "setup", "--directory", str(people.shared), *named, *words)


def undo(people: Lab, *words: str) -> Ended:
    return setup(people, "--undo", *words, group=False)


def members(group: str) -> list[str]:
    return sorted(grp.getgrnam(group).gr_mem)


def has_group(group: str) -> bool:
    try:
        grp.getgrnam(group)
    except KeyError:
        return False
    return True


def everything_in(folder: Path) -> dict[str, tuple[int, int, int, int]]:
    """Owner, group, mode and size by name."""
    found = {}
    for path in (folder, *folder.rglob("*")):
        each = path.lstat()
        found[str(path)] = (each.st_uid, each.st_gid, each.st_mode, each.st_size)
    return found


def test_a_dry_run_says_all_and_changes_nothing(people: Lab) -> None:
    alice, _ = people.users
    before = everything_in(people.top)
    done = setup(people, "--add", alice, "--dry-run")
    assert done.out.splitlines() == [
        f"would make group {people.group}",
        f"would make folder {people.shared} (2770 root:{people.group})",
        f"would add {alice} to group {people.group}",
        "would make ledger ledger-real-v1.db",
        "this was a dry run: nothing was changed",
    ]
    assert everything_in(people.top) == before
    assert not has_group(people.group)
    assert setup(people, "--add", alice).status == 0
    before = everything_in(people.top)
    assert "would remove" in undo(people, "--dry-run").out
    assert everything_in(people.top) == before


def test_again_does_nothing_and_undo_leaves_nothing(people: Lab) -> None:
    alice, bob = people.users
    before = everything_in(people.top)
    assert setup(people, "--add", alice).status == 0
    assert stat.S_IMODE(people.shared.stat().st_mode) == 0o2770
    assert not list(people.shared.glob("ledger-trial-*")), "what the trial made is gone"
    again = setup(people, "--add", alice)
    assert f"nothing to do: {people.shared} is set up already" in again.out
    assert "must log in again" not in again.out
    later = setup(people, "--add", bob, group=False)  # the group is remembered
    assert f"{bob} must log in again" in later.out
    assert members(people.group) == [alice, bob]
    done = undo(people)
    assert done.status == 0, done
    assert everything_in(people.top) == before
    assert not has_group(people.group)
    assert "nothing to take back" in undo(people).out


def test_undo_leaves_what_was_there_before(people: Lab) -> None:
    """A folder with a ledger, a group with a member: none of them is setup's."""
    alice, bob = people.users
    subprocess.run(["/usr/sbin/groupadd", people.group], check=True)
    subprocess.run(["/usr/bin/gpasswd", "-a", alice, people.group], check=True, capture_output=True)
    people.shared.mkdir()
    people.shared.chmod(0o1777)
    assert people.gpu_pool(alice, "run", "--", "true").status == 0
    before = everything_in(people.shared)
    done = setup(people, "--add", alice, "--add", bob)
    assert done.status == 0, done
    assert f"changed {people.shared} from 1777 root:root to 2770 root:{people.group}" in done.out
    assert members(people.group) == [alice, bob]
    done = undo(people)
    assert done.status == 0, done
    after = everything_in(people.shared)
    ledger = str(people.shared / "ledger-simulated-1-v1.db")
    assert after[str(people.shared)][:3] == before[str(people.shared)][:3]
    uid, _, mode, _ = after[ledger]
    assert (uid, mode) == (before[ledger][0], before[ledger][2])
    assert members(people.group) == [alice]


def test_a_folder_that_has_another_use_is_not_taken(people: Lab) -> None:
    other = people.top / "outside-use"
    other.mkdir()
    (other / "notes").write_text("not ours")
    done = people.gpu_pool("root", "setup", "--directory", str(other), "--group", people.group)
    assert (done.status, "has other files (notes): choose a folder for gpu-pool alone" in done.err) == (1, True)
    assert not has_group(people.group)


def test_undo_refuses_while_leases_live_and_never_deletes_a_ledger_of_others(people: Lab) -> None:
    alice, _ = people.users
    assert setup(people, "--add", alice).status == 0
    # Of the real GPUs' ledger, which setup made: a lease that a simulated GPU stands in for.
    holder = people.run_script(alice, HOLD_REAL)
    assert holder.stdout is not None
    assert (held := holder.stdout.readline().split()[0]).startswith("lease-")
    before = everything_in(people.top)
    done = undo(people)
    assert (done.status, f"GPUs are in use: {held}" in done.err) == (1, True)
    assert everything_in(people.top).keys() == before.keys()
    assert stat.S_IMODE(people.shared.stat().st_mode) == 0o2770
    holder.kill()
    holder.wait()
    assert people.gpu_pool(alice, "run", "--", "true").status == 0  # simulated: a ledger that setup did not make
    done = undo(people)
    assert (done.status, "did not make: ledger-simulated-1-v1.db" in done.err) == (1, True)
    assert has_group(people.group)
    (people.shared / "ledger-simulated-1-v1.db").unlink()
    done = undo(people)
    assert done.status == 0, done  # its holder was killed, so nothing is in use
    assert not people.shared.exists()


HOLD_REAL = """
from gpu_worker_pool.core import Requested, Request, Requirements, Observed
from gpu_worker_pool.core.settings import PoolSettings
from gpu_worker_pool.hardware.leasable import readings_of
from gpu_worker_pool.hardware.processes import name_of_this_process
from gpu_worker_pool.hardware.readers.choose import make_reader
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.ledger.host import open_host_ledger
async def main():
    ledger = open_host_ledger("auto", PoolSettings(), lambda _: None)
    gpus = make_reader("simulated:1", boot_time).read().gpus
    await ledger.submit(Observed("", readings_of(gpus), boot_time()))
    request = Request("a", Requirements(), owner="x", account="x", process=name_of_this_process(), ttl_seconds=600.0)
    (granted,) = await ledger.submit(Requested(request))
    print(granted.lease.lease_id, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def test_files_of_another_umask_and_group_are_repaired_and_others_left(people: Lab) -> None:
    alice, bob = people.users
    assert setup(people, "--add", alice, "--add", bob).status == 0
    assert people.gpu_pool(alice, "run", "--", "true").status == 0
    ledger, foreign = people.shared / "ledger-simulated-1-v1.db", people.shared / "notes"
    ledger.chmod(0o600)
    os.chown(ledger, -1, 0)
    foreign.write_text("mine")
    foreign.chmod(0o600)
    assert people.gpu_pool(bob, "run", "--", "true").status == 77
    doctor = people.gpu_pool(alice, "doctor")
    assert (doctor.status, f"{ledger.name} is not open to the other users" in doctor.out) == (1, True)
    done = setup(people)
    assert f"repaired {ledger.name}: was 0600 {alice}:root, is 0660 {alice}:{people.group}" in done.out
    assert people.gpu_pool(bob, "run", "--", "true").status == 0
    assert stat.S_IMODE(foreign.stat().st_mode) == 0o600


def test_links_and_what_is_not_ours_are_refused_and_not_changed(people: Lab) -> None:
    """A member of the group could point a name of ours at a file of root."""
    alice, _ = people.users
    assert setup(people, "--add", alice).status == 0
    outside = people.top / "outside"
    outside.write_text("root:secret")
    outside.chmod(0o600)
    before = outside.lstat()
    trap = people.shared / "readings-simulated-1-v1.jsonl"
    traps = {
        "is a symbolic link": lambda: trap.symlink_to(outside),
        "has a second name": lambda: trap.hardlink_to(outside),
        "is not a regular file": lambda: os.mkfifo(trap),
        "is not a file of gpu-pool": lambda: shutil.move(outside, trap),
    }
    for words, set_trap in traps.items():
        set_trap()
        done = setup(people)
        assert (done.status, words in done.err) == (1, True), done
        after = (trap if words == "is not a file of gpu-pool" else outside).lstat()
        assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
        assert undo(people).status == 1
        trap.unlink()


def test_a_folder_that_others_can_replace_is_refused(people: Lab) -> None:
    alice, _ = people.users
    target = people.top / f"home-{alice}" / "pool"
    done = people.gpu_pool("root", "setup", "--directory", str(target), "--group", people.group)
    assert (done.status, "can be changed by other users than root" in done.err) == (1, True)
    people.shared.symlink_to(people.top / f"home-{alice}")
    done = setup(people)
    assert (done.status, "is a symbolic link" in done.err) == (1, True)
    assert not has_group(people.group)
    done = people.gpu_pool("root", "setup", "--directory", "pool", "--group", people.group)
    assert (done.status, "--directory must be an absolute path, such as /pool" in done.err) == (2, True)


def test_it_is_tried_with_the_rights_of_each_user(people: Lab) -> None:
    """Root could open the ledger; a user does not get through the folder above it."""
    alice, _ = people.users
    closed = people.top / "outside-closed"
    closed.mkdir(mode=0o700)
    words = ["--directory", str(closed / "pool"), "--group", people.group, "--add", alice]
    done = people.gpu_pool("root", "setup", *words)
    assert done.status == 1
    assert f"the ledger cannot be used: as {alice}: the ledger {closed}/pool/ledger-trial-" in done.err
    assert "as root" not in done.err
    assert people.gpu_pool("root", "setup", "--directory", str(closed / "pool"), "--undo").status == 0
    assert list(closed.iterdir()) == []


def test_a_network_file_system_is_refused(people: Lab) -> None:
    script = """
from gpu_worker_pool.cli.setup import folder
folder.file_system_of = lambda path: "nfs4"
sys.argv = ["gpu-pool", "setup", "--group", "not-made", "--directory", sys.argv[1]]
gpu_worker_pool.cli.main()
"""
    done = people.python("root", script)
    assert (done.status, "on a network file system (nfs4)" in done.err) == (1, True)
    assert not people.shared.exists()


def test_the_one_who_typed_sudo_is_added(people: Lab) -> None:
    alice, _ = people.users
    done = people.gpu_pool("root", "setup", "--directory", str(people.shared), "--group", people.group, SUDO_USER=alice)
    assert f"{alice} must log in again" in done.out
    assert members(people.group) == [alice]


def test_a_record_that_others_could_have_written_is_not_believed(people: Lab) -> None:
    alice, _ = people.users
    assert setup(people, "--add", alice).status == 0
    record = record_of(people)
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    record.chmod(0o620)
    done = undo(people)
    assert (done.status, "others can change it" in done.err) == (1, True)
    record.chmod(0o600)
    assert undo(people).status == 0


def test_a_user_or_group_that_cannot_be_is_a_usage_error(people: Lab) -> None:
    for words in (
        ["--add", "no-such-user-here", "--group", people.group],
        ["--group", "-x"],
        ["--undo", "--service"],
        ["--server-only", "--add", "x"],
    ):
        assert people.gpu_pool("root", "setup", "--directory", str(people.shared), *words).status == 2, words
    assert not people.shared.exists()


# --- the service


SERVICE = """
import json
from gpu_worker_pool.cli.setup import Options, Places, Steps, install, service, undo
service.unreadable_code = lambda: None  # whether others may read this checkout is not the question here
words = json.loads(os.environ["WORDS"])
folder = Path(sys.argv[1]).parent
(folder / "outside-units").mkdir(exist_ok=True)
outside = [folder / name for name in ("outside-units", "outside.env", "outside-run", "no-systemd")]
places = Places(words["user"], *outside)
options = Options(Path(sys.argv[1]), words["group"], (), True, words["server_only"])
try:
    (undo.undo if words["undo"] else install.install)(options, places, Steps(print))
except gpu_worker_pool.cli.exits.CommandError as error:
    print("refused:", error)
"""


def service(people: Lab, *, server_only: bool = False, undo: bool = False) -> str:
    words = {"user": f"{people.group}s", "group": people.group, "server_only": server_only, "undo": undo}
    done = people.python("root", SERVICE, WORDS=json.dumps(words))
    assert done.status == 0, done
    return done.out


@pytest.mark.parametrize("server_only", [False, True], ids=["for a group", "for the server alone"])
def test_a_service_has_its_own_user_a_hardened_unit_and_a_file_for_keys(people: Lab, *, server_only: bool) -> None:
    said = service(people, server_only=server_only)
    user, folder = f"{people.group}s", people.shared.stat()
    assert pwd.getpwnam(user).pw_gid == grp.getgrnam(people.group).gr_gid
    unit = (people.top / "outside-units" / "gpu-pool.service").read_text()
    keys = people.top / "outside.env"
    assert stat.S_IMODE(keys.stat().st_mode) == 0o600
    assert f"EnvironmentFile=-{keys}" in unit
    for line in ("Type=notify", f"User={user}", "ProtectSystem=strict", "NoNewPrivileges=yes", "PrivateTmp=yes"):
        assert line in unit.splitlines()
    assert "PrivateDevices" not in unit  # the driver's devices
    assert "ProtectProc" not in unit  # whose processes are on a GPU
    assert "no systemd runs this host, so nothing was started; as root, run: runuser -u" in said
    is_closed = "GPU_POOL_OPEN_ON_LOOPBACK=false" in unit
    assert is_closed == server_only, "over TCP anybody could take a lease"
    if server_only:
        assert (stat.S_IMODE(folder.st_mode), folder.st_uid) == (0o700, pwd.getpwnam(user).pw_uid)
        assert f"serve --socket {people.top}/outside-run/gpu-pool.sock" in unit
        assert "RuntimeDirectoryMode=0755" in unit
        run = (people.top / "outside-run").stat()
        assert (stat.S_IMODE(run.st_mode), run.st_uid) == (0o755, pwd.getpwnam(user).pw_uid)
        assert {file.owner() for file in people.shared.iterdir()} == {user}
        opened = setup(people, "--add", people.users[0])
        assert (opened.status, "was set up with --server-only" in opened.err) == (2, True)
    else:
        assert (stat.S_IMODE(folder.st_mode), folder.st_uid) == (0o2770, 0)
        assert "--socket" not in unit
    assert "nothing to do" in service(people, server_only=server_only)
    keys.write_text("GPU_POOL_API_KEYS=mine\n")
    said = service(people, server_only=server_only, undo=True)
    assert f"kept {keys}: it was changed after setup wrote it" in said
    assert not people.shared.exists()
    assert not list((people.top / "outside-units").iterdir())
    assert not (people.top / "outside-run").exists()
    with pytest.raises(KeyError):
        pwd.getpwnam(user)


def test_a_unit_of_somebody_else_is_not_replaced(people: Lab) -> None:
    units = people.top / "outside-units"
    units.mkdir()
    (units / "gpu-pool.service").write_text("[Service]\n")
    assert "was not made by gpu-pool setup" in service(people)
    assert (units / "gpu-pool.service").read_text() == "[Service]\n"
    assert not people.shared.exists()


def test_systemd_accepts_the_unit(people: Lab) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    service(people, server_only=True)
    unit = people.top / "outside-units" / "gpu-pool.service"
    checked = subprocess.run(["/usr/bin/systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert [line for line in checked.stderr.splitlines() if "gpu-pool.service" in line] == []
