"""Quantities as people type them."""

from __future__ import annotations

import click
import pytest

from gpu_worker_pool.cli.quantities import Duration, GPUNames, MemorySize, Percent, spoken_mb, spoken_seconds


@pytest.mark.parametrize(
    ("text", "megabytes"),
    [
        ("8GiB", 8192.0),
        ("24GB", 24_000.0),
        ("8000MB", 8000.0),
        ("8000mb", 8000.0),
        (" 512 MiB ", 512.0),
        ("1.5GiB", 1536.0),
        ("1TiB", 1024.0**2),
    ],
)
def test_sizes(text: str, megabytes: float) -> None:
    assert MemorySize().convert(text, None, None) == megabytes


@pytest.mark.parametrize("text", ["", "8", "8G B", "-1GB", "0GB", "8e3MB", "GiB", "8KB", "9999999TiB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"8GiB|unit|amount"):
        MemorySize().convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0),
        ("90s", 90.0),
        ("5m", 300.0),
        ("0.5h", 1800.0),
        ("1d", 86400.0),
        ("1m30s", 90.0),
        ("1h 5 min", 3900.0),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert Duration().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1", "1y", "nan", "inf", "1e3", "1m30", "1m2y"])
def test_durations_that_are_none(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Duration().convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "percent"), [("50", 50.0), ("50%", 50.0), ("12.5 %", 12.5), ("0", 0.0), ("100%", 100.0)]
)
def test_percentages(text: str, percent: float) -> None:
    assert Percent().convert(text, None, None) == percent


@pytest.mark.parametrize("text", ["", "nan", "inf", "101", "-1", "half", "%"])
def test_percentages_that_are_none(text: str) -> None:
    with pytest.raises(click.BadParameter, match="not a percentage; write 50 or 50%"):
        Percent().convert(text, None, None)


def test_durations_have_limits() -> None:
    with pytest.raises(click.BadParameter, match="from 2 to 3600 seconds"):
        Duration(2, 3600).convert("1s", None, None)


def test_names_of_gpus() -> None:
    assert GPUNames().convert("0, 2 GPU-6ec5", None, None) == ("0", "2", "GPU-6ec5")
    with pytest.raises(click.BadParameter):
        GPUNames().convert(" , ", None, None)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.9, "0 s"),
        (59, "59 s"),
        (60, "1 min"),
        (125, "2 min 5 s"),
        (3600, "1 h"),
        (12_000, "3 h 20 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_times_as_people_read_them(seconds: float, said: str) -> None:
    assert spoken_seconds(seconds) == said


def test_sizes_as_people_read_them() -> None:
    assert [spoken_mb(None), spoken_mb(12), spoken_mb(18_000)] == ["?", "12 MB", "17.6 GiB"]
