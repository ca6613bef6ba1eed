"""`gpu-pool fleet`, and what `gpu-pool doctor` says of a fleet's database and key."""

from __future__ import annotations

import json
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_worker_pool.fleet.keys import read_keys
from tests.cli.programs import Programs
from tests.postgres_server import PostgresServer

#: Several servers or programs are started, one after the other.
pytestmark = pytest.mark.timeout(180)

DATABASE, KEY_FILE = "GPU_POOL_FLEET_DATABASE", "GPU_POOL_FLEET_KEY_FILE"


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with Programs(tmp_path) as started:
        yield started


def test_the_tables_are_made_once(programs: Programs, database: str) -> None:
    made = programs.call("fleet", "init", database)
    assert (made.returncode, made.stderr) == (0, "")
    fleet_id = made.stdout.split()[1]
    assert made.stdout.startswith(f"made {fleet_id} in {database}")
    programs.environment[DATABASE] = database.replace("postgres@", "postgres:hunter2@")
    again = programs.call("fleet", "init")
    assert again.stdout.startswith(f"{fleet_id} is in {database} already")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name the database: gpu-pool fleet init postgresql://"),
        (("postgresql://pool:hunter2@db/gpupool",), "other users of this host can see"),
        (("postgresql://pool@db",), "names no database"),
        (("postgresql://pool@127.0.0.1:1/gpupool",), "cannot be reached"),
    ],
)
def test_a_database_that_cannot_be_used_is_said_in_a_sentence(
    programs: Programs, arguments: tuple[str, ...], message: str
) -> None:
    done = programs.call("fleet", "init", *arguments)
    assert done.returncode != 0
    assert message in done.stderr
    assert "hunter2" not in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_key_is_changed_in_two_steps(programs: Programs, tmp_path: Path) -> None:
    file = tmp_path / "fleet.key"
    assert programs.call("fleet", "key", "rotate", str(file)).returncode == 0
    (first,) = read_keys(str(file))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o640)
    assert "still the one before" in programs.call("fleet", "key", "rotate", str(file)).stdout
    second, kept = read_keys(str(file))
    assert kept == first != second
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    programs.environment[KEY_FILE] = str(file)
    assert programs.call("fleet", "key", "rotate", "--finish").returncode == 0
    assert read_keys(str(file)) == (second,)
    assert [each.name for each in tmp_path.glob("*fleet*")] == ["fleet.key"]
    file.write_text("short\n")
    done = programs.call("fleet", "key", "rotate")
    assert done.returncode == 2
    assert "shorter than 16" in done.stderr
    assert file.read_text() == "short\n"


def test_the_password_of_the_database_is_shown_nowhere(programs: Programs, database: str) -> None:
    """Nor do commands that hold a GPU get it."""
    programs.call("fleet", "init", database)
    programs.environment[DATABASE] = database.replace("postgres@", "postgres:hunter2@")
    for arguments in (["config"], ["doctor"], ["doctor", "--json"], ["fleet", "init"], ["run", "--", "env"]):
        done = programs.call(*arguments)
        assert "hunter2" not in done.stdout + done.stderr, arguments


def findings(programs: Programs) -> dict[str, tuple[str, str]]:
    """Of the fleet."""
    done = programs.call("doctor", "--json")
    rows = json.loads(done.stdout)["checks"]
    return {
        row["check"]: (row["status"], f"{row['what']} -> {row['advice']}") for row in rows if "fleet" in row["check"]
    }


def test_without_a_fleet_doctor_says_nothing_of_one(programs: Programs) -> None:
    assert findings(programs) == {}


def test_doctor_checks_database_user_and_key(
    programs: Programs, database: str, shared_postgres: PostgresServer, tmp_path: Path
) -> None:
    programs.environment[DATABASE] = database
    found = findings(programs)
    assert found["fleet database"][0] == "wrong"
    assert "gpu-pool fleet init" in found["fleet database"][1]
    assert found["fleet key"] == ("wrong", f"no file is named -> set {KEY_FILE}; gpu-pool fleet key rotate FILE")
    programs.call("fleet", "init")
    file = tmp_path / "fleet.key"
    programs.environment[KEY_FILE] = str(file)
    programs.call("fleet", "key", "rotate")
    found = findings(programs)
    assert {status for status, _ in found.values()} == {"ok"}
    assert found.keys() == {"fleet database", "fleet", "fleet database, clock", "fleet key"}
    file.chmod(0o644)
    assert "chmod o-rwx" in findings(programs)["fleet key"][1]
    name = database.rpartition("/")[2]
    shared_postgres.execute(f"CREATE ROLE only_{name} LOGIN")
    programs.environment[DATABASE] = shared_postgres.url(name, user=f"only_{name}")
    assert findings(programs)["fleet database, user"][0] == "wrong"
    assert "USAGE on the schema gpu_pool" in findings(programs)["fleet database, user"][1]


def test_a_server_without_a_fleet_says_how_to_make_one(programs: Programs) -> None:
    done: subprocess.CompletedProcess[str] = programs.call("fleet", "status")
    assert done.returncode == 2
    assert "name a server of the fleet" in done.stderr
