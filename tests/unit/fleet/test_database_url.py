"""The URL of a fleet's database: what is refused, and that nothing secret of it is shown."""

from __future__ import annotations

import pytest

from gpu_worker_pool.fleet.database_url import check_argument, check_url, shown_url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://pool@db.lab/gpupool", "postgresql://pool@db.lab/gpupool"),
        ("postgres://db.lab:6432/gpupool?sslmode=verify-full", "postgresql://db.lab:6432/gpupool"),
        ("postgresql://pool:hunter%402@a:5432,b,[fd00::1]:5432/gpupool", "postgresql://pool@a:5432,b,[fd00::1]:5432/gpupool"),
        ("postgresql:///gpupool?host=/run/postgresql", "postgresql:///gpupool"),
        ("postgresql://pool@db?dbname=gpupool&password=hunter2", "postgresql://pool@db"),
    ],
)  # fmt: skip
def test_what_is_usable_is_taken_and_shown_without_its_secrets(url: str, shown: str) -> None:
    assert check_url(f" {url}\n", "GPU_POOL_FLEET_DATABASE") == url
    assert shown_url(url) == shown


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("", "must be a URL such as postgresql://pool@db.lab/gpupool"),
        ("host=db password=hunter2", "must be a URL"),
        ("mysql://pool:hunter2@db/x", "must be a URL"),
        ("postgresql://pool:hunter2@db", "names no database"),
        ("postgresql://pool:hunt@er2@db/gpupool", "write %40 for @"),
        ("postgresql://pool:hunt/er2@db/gpupool", "%2F for /"),
        ("postgresql://pool:hunt#er2@db/gpupool", "%23 for #"),
        ("postgresql://pool:hunt?er2@db/gpupool", "%3F for ?"),
        ("postgresql://pool:hunt er2@db/gpupool", "%20 for a space"),
        ("postgresql://pool:hunter2@db\x00/gpupool", "control characters"),
        ("postgresql://pool:hunter2@db:port/gpupool", "must name the host"),
        ("postgresql://pool:hunter2@[::1/gpupool", "not a valid URL"),
        ("postgresql://pool:hunter2@db/" + "x" * 3000, "too long"),
    ],
)
def test_what_is_not_is_refused_with_advice_and_without_any_part_of_it(url: str, advice: str) -> None:
    with pytest.raises(ValueError, match="GPU_POOL_FLEET_DATABASE") as refused:
        check_url(url, "GPU_POOL_FLEET_DATABASE")
    assert advice in str(refused.value)
    assert "hunt" not in str(refused.value)
    assert "er2" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://pool:hunter2@db/gpupool",
        "postgresql://:hunter2@db/gpupool",
        "postgresql://pool@db/gpupool?password=hunter2",
        "postgresql://pool@db/gpupool?sslmode=require&sslpassword=hunter2",
    ],
)
def test_a_password_on_the_command_line_is_refused(url: str) -> None:
    """Every user of the host could see it there."""
    with pytest.raises(ValueError, match="PGPASSFILE") as refused:
        check_argument(url, "--fleet")
    assert "hunter2" not in str(refused.value)
    assert check_argument("postgresql://pool@db/gpupool", "--fleet")
