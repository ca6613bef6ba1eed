"""The policy file: which one counts, when it is read again, and what a mistake in it changes: nothing."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from gpu_worker_pool.core.policy import NO_POLICY, Policy
from gpu_worker_pool.errors import PolicyError
from gpu_worker_pool.ledger.policy_file import (
    MOST_BYTES,
    PolicyFile,
    StoredPolicy,
    accounts_named,
    groups_of,
    policy_path,
    read_text,
)
from gpu_worker_pool.ledger.policy_text import parse_policy
from gpu_worker_pool.testing import FakeClock


class Place:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "state"
        self.folder.mkdir()
        self.host_file = folder / "etc" / "policy.toml"
        self.host_file.parent.mkdir()
        self.own = folder / "own.toml"
        self.clock = FakeClock()

    def file(self, *, is_server: bool = False) -> PolicyFile:
        return PolicyFile(
            self.folder,
            is_server=is_server,
            variable=str(self.own),
            host_file=self.host_file,
            clock=self.clock.now,
        )


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def most(number: int) -> str:
    return f'["*"]\nmost_gpus = {number}\n'


def gpus_allowed(file: PolicyFile) -> int | None:
    return file.in_force.policy.everyone.most_gpus


def test_without_a_file_there_is_no_policy(place: Place) -> None:
    file = place.file()
    assert file.update(None) is None
    assert file.in_force == (NO_POLICY, None, None)


def test_the_hosts_file_wins_over_the_variable_which_counts_for_a_server_only(place: Place) -> None:
    place.own.write_text(most(2))
    user, server = place.file(), place.file(is_server=True)
    user.update(None)
    server.update(None)
    assert (gpus_allowed(user), gpus_allowed(server)) == (None, 2)
    place.host_file.write_text(most(3))
    assert user.update(None) == server.update(None) == StoredPolicy(str(place.host_file), most(3))
    assert (gpus_allowed(user), gpus_allowed(server)) == (3, 3)
    assert policy_path(str(place.own), place.host_file) == place.host_file


def test_a_program_that_sees_no_file_goes_by_what_the_ledger_remembers(place: Place) -> None:
    place.own.write_text(most(2))
    stored = place.file(is_server=True).update(None)
    user = place.file()
    assert user.update(stored) == stored
    assert gpus_allowed(user) == 2
    # The file in /etc was removed by the administrator: for the owner of the folder that ends the policy.
    user.update(StoredPolicy(str(place.host_file), most(1)))
    assert gpus_allowed(user) is None


def test_a_change_is_seen_within_a_second_and_looked_for_no_more_often(place: Place) -> None:
    place.host_file.write_text(most(1))
    file = place.file()
    file.update(None)
    place.host_file.write_text(most(12))
    assert not file.has_changed()
    place.clock.advance(1.1)
    assert file.has_changed()
    assert file.has_changed(), "until it is read"
    file.update(None)
    assert gpus_allowed(file) == 12
    place.clock.advance(1.1)
    assert not file.has_changed()


def test_webhooks_count_only_from_a_file_that_was_read(place: Place) -> None:
    """In a shared folder, users can write to the ledger, and could let a server send messages, and sign them."""
    text = f'{most(1)}[[webhook]]\nurl = "https://chat.example.org/hook"\nevents = ["granted"]\n'
    place.host_file.write_text(text)
    file = place.file()
    stored = file.update(None)
    assert len(file.in_force.policy.webhooks) == 1
    place.host_file.write_text("mistake")
    file.update(stored)
    assert len(file.in_force.policy.webhooks) == 1, "a mistake leaves what was read before"
    later = place.file()
    later.update(stored)
    assert (gpus_allowed(later), later.in_force.policy.webhooks) == (1, ())
    place.host_file.write_text(text)
    later.update(stored)
    assert len(later.in_force.policy.webhooks) == 1


def test_a_bad_file_keeps_the_old_policy_and_says_so_once(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.host_file.write_text(most(1))
    file = place.file()
    stored = file.update(None)
    place.host_file.write_text('["*"]\nmost_gpu = 12\n')
    with caplog.at_level(logging.ERROR):
        assert file.update(stored) == stored
        assert file.update(stored) == stored
    sentence = (
        f"{place.host_file}, line 2: 'most_gpu' is not a limit; did you mean most_gpus?; "
        "the previous policy is in force"
    )
    assert file.in_force == (Policy(everyone=file.in_force.policy.everyone), str(place.host_file), sentence)
    assert gpus_allowed(file) == 1
    assert [record.message for record in caplog.records] == [f"policy: {sentence}"]
    # A program that starts now goes by the old one, too.
    later = place.file()
    later.update(stored)
    assert (gpus_allowed(later), later.in_force.problem) == (1, sentence)
    place.host_file.write_text(most(5))
    file.update(stored)
    assert (gpus_allowed(file), file.in_force.problem) == (5, None)


def test_a_file_that_was_bad_from_the_beginning_limits_nobody_and_says_so(place: Place) -> None:
    place.host_file.write_text("most_gpus = 1")
    file = place.file()
    assert file.update(None) is None
    assert file.in_force.policy == NO_POLICY
    assert file.in_force.problem is not None
    assert file.in_force.problem.endswith("no policy is in force")


def test_a_server_whose_file_is_missing_says_so(place: Place) -> None:
    file = place.file(is_server=True)
    file.update(None)
    assert file.in_force.problem == f"{place.own} cannot be read: No such file or directory; no policy is in force"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a folder of another user")
def test_only_root_or_the_owner_of_the_folder_may_choose_the_policy_of_a_ledger(place: Place) -> None:
    place.own.write_text(most(2))
    place.own.chmod(0o644)
    for folder in (place.folder.parent, *place.folder.parent.parents):
        if folder.stat().st_uid == 0 and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setuid(65_534)
            file = place.file(is_server=True)
            file.update(None)
            os.write(write_end, (file.in_force.problem or "none").encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write_end)
    with os.fdopen(read_end) as said:
        assert said.read() == (
            f"GPU_POOL_POLICY is ignored: only root or the owner of {place.folder} may choose the policy of this ledger"
        )


def test_what_is_no_text_is_refused_in_words(place: Place) -> None:
    place.own.write_bytes(b"# \xff\n")
    with pytest.raises(PolicyError, match="line 1: this is not UTF-8"):
        read_text(place.own)
    place.own.write_bytes(b"#" * (MOST_BYTES + 1))
    with pytest.raises(PolicyError, match="is larger than 256 KiB, too large for a policy"):
        read_text(place.own)


def test_names_mean_users_and_keys() -> None:
    assert accounts_named("root") == ("key:root", "user:0")
    assert accounts_named("physics-of-nobody") == ("key:physics-of-nobody",)
    assert accounts_named("user:77") == ("user:77",)
    assert accounts_named("loopback") == ("loopback",)


def test_groups_are_those_of_the_system_and_of_the_policy() -> None:
    policy = parse_policy("[group.root]\nmost_gpus = 1\n[group.other]\nmost_gpus = 2").policy(accounts_named)
    assert groups_of("user:0", policy) == ("root",)
    assert groups_of("user:0", NO_POLICY) is None
    assert groups_of("key:root", policy) is None
