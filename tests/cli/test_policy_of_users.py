"""The host's policy with two real users who use the ledger without a server: each limit, and whose usage it was."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.fakes.nvml import FakeNVML, fake_gpus
from tests.people import Lab, lab, needs_root
from tests.waiting import eventually

pytestmark = needs_root

POLICY = """
["*"]
most_gpus = 1
highest_priority = 0
[account.{bob}]
highest_priority = 5
[group.{group}]
longest_time = "1h"
"""
TWO = {"GPU_BACKEND": "simulated:3"}
ONE = {"GPU_BACKEND": "simulated:1"}
#: What a holder runs: it says when it has the GPU.
HOLD = ("--", "sh", "-c", "echo has it; exec sleep 60")


@pytest.fixture(scope="module")
def people() -> Iterator[Lab]:
    with lab(2) as made:
        subprocess.run(["/usr/sbin/groupadd", made.group], check=True)
        for user in made.users:
            subprocess.run(["/usr/sbin/usermod", "-aG", made.group, user], check=True)
        made.shared.mkdir()
        shutil.chown(made.shared, group=made.group)
        made.shared.chmod(0o2770)
        policy = made.top / "policy.toml"
        policy.write_text(POLICY.format(bob=made.users[1], group=made.group))
        policy.chmod(0o644)
        yield made


@pytest.fixture(autouse=True)
def nobody_holds(people: Lab) -> Iterator[None]:
    yield
    people.end()


def test_each_user_has_limits_and_nobody_waits_for_who_is_kept_back(people: Lab) -> None:
    alice, bob = people.users
    holder = people.start(alice, "run", "--", "sh", "-c", "echo has it; sleep 60", **TWO)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "has it\n"
    late = people.gpu_pool(alice, "run", "--timeout", "3s", "--", "true", **TWO)
    assert (late.status, f"account {alice} holds one GPU, its limit" in late.err) == (124, True), late
    many = people.gpu_pool(alice, "run", "-n", "2", "--", "true", **TWO)
    assert (many.status, f"account {alice} may hold one GPU at most, not 2" in many.err) == (65, True), many
    urgent = people.gpu_pool(alice, "run", "--priority", "3", "--", "true", **TWO)
    assert (urgent.status, "may ask for priority 0 at most, not 3" in urgent.err) == (65, True), urgent
    long = people.gpu_pool(bob, "run", "--max-time", "2h", "--", "true", **TWO)
    assert (long.status, f"account {bob} may hold GPUs for 1 h, not 2 h" in long.err) == (65, True), long
    done = people.gpu_pool(bob, "run", "--priority", "5", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES", **TWO)
    assert (done.status, done.out) == (0, "1\n"), done


def test_a_user_cannot_choose_a_policy_and_a_bad_file_keeps_the_old_one(people: Lab) -> None:
    alice = people.users[0]
    own = people.top / f"home-{alice}" / "own.toml"
    own.write_text("")
    own.chmod(0o644)
    refused = people.gpu_pool(alice, "run", "-n", "2", "--", "true", GPU_POOL_POLICY=str(own), **TWO)
    assert refused.status == 65
    policy = people.top / "policy.toml"
    before = policy.read_text()
    policy.write_text('["*"]\nmost_gpus = "all of them"\n')
    try:
        still = people.gpu_pool(alice, "run", "-n", "2", "--", "true", **TWO)
        assert (still.status, "may hold one GPU at most, not 2" in still.err) == (65, True), still
        doctor = people.gpu_pool(alice, "doctor", **TWO)
        said = next(line for line in doctor.out.splitlines() if " policy " in line)
        assert said.startswith("wrong")
        assert f"{policy}, line 2: most_gpus must be a whole number of at least 0, not 'all of them'" in said
    finally:
        policy.write_text(before)


@contextmanager
def policy_of(people: Lab, text: str) -> Iterator[None]:
    policy = people.top / "policy.toml"
    before = policy.read_text()
    policy.write_text(text)
    try:
        yield
    finally:
        policy.write_text(before)


def holding(people: Lab, user: str, *options: str, **variables: str) -> subprocess.Popen[str]:
    process = people.start(user, "run", *options, *HOLD, **variables)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "has it\n", process.stderr.read()
    return process


def test_the_longest_time_of_an_account_ends_its_command_and_no_other(people: Lab) -> None:
    alice, bob = people.users
    with policy_of(people, f'[account.{alice}]\nlongest_time = "2s"\n'):
        other = holding(people, bob, **TWO)
        ended = people.gpu_pool(alice, "run", "--grace", "1s", *HOLD, **TWO)
        assert (ended.status, "the time limit is reached in" in ended.err) == (128 + 15, True), ended
        assert other.poll() is None


def test_anybody_may_ask_a_holder_to_yield_and_who_terminates_makes_room(people: Lab) -> None:
    alice, bob = people.users
    with policy_of(people, ""):
        holder = holding(people, alice, "--ttl", "2s", "--on-yield", "terminate", **ONE)
        done = people.gpu_pool(bob, "run", "--ask", "--timeout", "40s", "--", "true", **ONE)
        assert done.status == 0, done
        assert holder.wait(30) == 128 + 15
        assert holder.stderr is not None
        assert f"you are asked to give it back: {bob}" in holder.stderr.read()
        stays = holding(people, alice, "--ttl", "2s", **ONE)
        (lease,) = json.loads(people.gpu_pool(bob, "leases", "--json", **ONE).out)["leases"]
        asked = people.gpu_pool(bob, "yield", lease["lease_id"], "--reason", "a demo", **ONE)
        assert (asked.status, asked.out) == (0, f"the holder of {lease['lease_id']} is asked to give it back\n"), asked
        assert stays.stderr is not None
        assert "you are asked to give it back" in stays.stderr.readline()
        assert stays.poll() is None, "nobody is forced"


def test_an_idle_holder_makes_room_for_another_user_and_is_told_before(people: Lab) -> None:
    """Without a server: the program that waits looks at the readings."""
    alice, bob = people.users
    fake = FakeNVML(people.top, gpus=fake_gpus(1))
    for path in (fake.library.parent, *fake.library.parent.iterdir(), *people.top.glob("nvml-*")):
        path.chmod(0o755)
    idle = {"GPU_BACKEND": "nvml", "GPU_POOL_REFRESH_INTERVAL": "0.2", **fake.env}
    with policy_of(people, '["*"]\nidle_may_be_asked = true\n[idle]\nafter = "1s"\ngrace = "1s"\n'):
        holder = holding(people, alice, "--ttl", "2s", "--on-lost", "terminate", **idle)
        done = people.gpu_pool(bob, "run", "--timeout", "40s", "--", "true", **idle)
        assert done.status == 0, done
        assert holder.wait(30) != 0
        assert holder.stderr is not None
        told = holder.stderr.read()
    assert f", and {bob}" in told[told.index("it has been idle for") :]
    assert told.index("the lease ends in") < told.index("the lease is lost")


def test_the_usage_of_both_is_in_one_file_that_both_may_write(people: Lab) -> None:
    alice, bob = people.users
    for user in (alice, bob, alice):
        assert people.gpu_pool(user, "run", "--", "true", **TWO).status == 0

    def counted() -> bool:
        found = json.loads(people.gpu_pool(bob, "report", "--json", **TWO).out)
        leases = {row["name"]: row["leases"] for row in found["rows"]}
        return leases.get(alice, 0) >= 2 and leases.get(bob, 0) >= 1

    eventually(counted)
    (usage,) = people.shared.glob("usage-simulated-3-*.jsonl")
    assert stat.S_IMODE(usage.stat().st_mode) == 0o660
    assert usage.stat().st_gid == people.shared.stat().st_gid
