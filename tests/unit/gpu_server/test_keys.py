"""Keys of the lease API: their names, and the file of keys, which is read again when it changes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
from tests.unit.gpu_server.test_security import ELSEWHERE, ask, bearer, refusal, scope_of

from gpu_worker_pool.core.accounts import LOOPBACK, account_name, uid_of
from gpu_worker_pool.core.events import Origin
from gpu_worker_pool.gpu_server import ServerSettings
from gpu_worker_pool.gpu_server.keys import LOOK_SECONDS, KeyRing, parse_keys
from gpu_worker_pool.gpu_server.security import Authenticator, read_headers
from gpu_worker_pool.testing import FakeClock

if TYPE_CHECKING:
    from pathlib import Path

PHYSICS, CI, UNNAMED = "key-of-physics-01234", "key-of-ci-0123456789", "key-without-a-name-0123"


def test_a_named_key_is_an_account_and_one_without_a_name_is_its_own() -> None:
    settings = ServerSettings(
        gpu_pool_api_keys=(f"physics:{PHYSICS}", f"ci:{CI}", UNNAMED), gpu_pool_admin_keys=("ops:an-admins-key-0123",)
    )

    def account(key: str) -> str:
        return ask(settings, client=ELSEWHERE, authorization=bearer(key)).account

    assert [account(PHYSICS), account(CI)] == ["key:physics", "key:ci"]
    assert account(UNNAMED).startswith("key-")
    assert UNNAMED not in account(UNNAMED)
    admin = ask(settings, client=ELSEWHERE, authorization=bearer("an-admins-key-0123"))
    assert (admin.account, admin.is_admin) == ("key:ops", True)
    assert ask(settings).account == LOOPBACK


def test_two_keys_of_one_name_are_one_account() -> None:
    settings = ServerSettings(gpu_pool_api_keys=(f"physics:{PHYSICS}", f"physics:{CI}"))
    accounts = {ask(settings, client=ELSEWHERE, authorization=bearer(key)).account for key in (PHYSICS, CI)}
    assert accounts == {"key:physics"}


def test_a_key_with_a_colon_works_as_it_did_before_keys_had_names() -> None:
    settings = ServerSettings(gpu_pool_api_keys=(f"ab:{PHYSICS}",))
    assert ask(settings, client=ELSEWHERE, authorization=bearer(f"ab:{PHYSICS}")).account == "key:ab"


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ("", (), 0),
        (f"physics:{PHYSICS}, {UNNAMED}", (f"physics:{PHYSICS}", UNNAMED), 0),
        (f"physics:short,{CI}", (CI,), 1),
        ("a-name-that-is-not-short:0123456789", (), 1),
        (f"{CI}\n{CI}\tschlüssel-0123456789", (CI,), 1),
    ],
)
def test_how_keys_are_written(text: str, good: tuple[str, ...], bad: int) -> None:
    complaints: list[str] = []
    assert parse_keys("GPU_POOL_API_KEYS", text, complaints.append) == good
    assert len(complaints) == min(bad, 1)
    assert all(f"{bad} of" in complaint and "short" not in complaint for complaint in complaints)


def test_a_file_of_keys_is_read_again_when_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock, file = FakeClock(), tmp_path / "keys"
    file.write_text(f"# who may\nphysics:{PHYSICS}  # the group\n")
    ring = KeyRing(ServerSettings(gpu_pool_api_keys_file=str(file), gpu_pool_api_keys=(UNNAMED,)), clock.now)

    def names() -> set[str]:
        return {key.account for key in ring.current() if key.account.startswith("key:")}

    assert names() == {"key:physics"}
    assert any(key.account.startswith("key-") for key in ring.current())
    replacement = tmp_path / "new"
    replacement.write_text(f"physics:{PHYSICS}\nci:{CI}\n")
    replacement.replace(file)
    assert names() == {"key:physics"}  # not looked at yet
    clock.advance(LOOK_SECONDS)
    assert names() == {"key:physics", "key:ci"}
    file.unlink()
    for _ in range(3):
        clock.advance(LOOK_SECONDS)
        assert names() == {"key:physics", "key:ci"}
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert errors == [
        f"GPU_POOL_API_KEYS_FILE: {file} cannot be read (No such file or directory): its keys stay as they were"
    ]
    file.write_text("")
    clock.advance(LOOK_SECONDS)
    assert names() == set()


def test_a_file_of_keys_that_all_users_can_read_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text(f"physics:{PHYSICS}")
    file.chmod(0o640)
    KeyRing(ServerSettings(gpu_pool_api_keys_file=str(file)))
    assert caplog.records == []
    file.chmod(0o644)
    KeyRing(ServerSettings(gpu_pool_api_keys_file=str(file)))
    assert [record.getMessage() for record in caplog.records] == [
        f"GPU_POOL_API_KEYS_FILE: all users can read {file}: chmod o-rwx {file}"
    ]


def test_a_server_with_a_file_of_keys_takes_them(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"physics:{PHYSICS}")
    settings = ServerSettings.from_environment({"GPU_POOL_API_KEYS_FILE": str(file)})
    authenticator = Authenticator(settings, hostnames=["gpu1"])
    assert authenticator.open_to == ["loopback", "keys"]
    scope = scope_of(client=ELSEWHERE, authorization=bearer(PHYSICS))
    assert authenticator.identify(scope, read_headers(scope)).account == "key:physics"
    assert refusal(settings, client=ELSEWHERE, authorization=bearer(CI)) == (401, "key_wrong")


def test_how_others_see_accounts() -> None:
    ada = Origin("ada", "gpu1", 7, "train.py", is_verified=True)
    assert account_name("user:1000", ada) == "ada"
    assert account_name("user:1000", Origin("mallory")) == "user 1000"  # which only the client says
    assert account_name("user:1000", user="eve") == "eve"
    assert account_name("key:physics", ada) == "physics"
    assert account_name("key-0123456789ab") == "a key without a name"
    assert [uid_of(account) for account in ("user:1000", "key:7", "user:x", LOOPBACK, "")] == [
        1000,
        None,
        None,
        None,
        None,
    ]
