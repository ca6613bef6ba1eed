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
        ("8G", 8192.0),
        ("8g", 8192.0),
        ("512M", 512.0),
        ("0.5t", 1024.0**2 / 2),
        ("8gb", 8000.0),
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


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (Duration(1.0), "0s", "'0s' is too short; write at least 1 second."),
        (Duration(5.0), "4s", "'4s' is too short; write at least 5 seconds."),
        (Duration(2.0, 3600.0), "2h", "'2h' is not from 2 to 3600 seconds."),
    ],
)
def test_durations_out_of_range(kind: Duration, text: str, said: str) -> None:
    with pytest.raises(click.BadParameter) as raised:
        kind.convert(text, None, None)
    assert raised.value.message == said


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
    ("text", "remedy"),
    [
        ("1-3", "write 1,2,3"),
        ("0,2-4", "write 0,2,3,4"),
        ("3-1", "write 1,2,3"),
        ("lab:0-1", "write lab:0,lab:1"),
        ("0-1,GPU-6ec5-1", "write 0,1,GPU-6ec5-1"),
        ("0-999999999", "write indices or UUIDs such as 0,2"),
        ("1 - 3", "write indices or UUIDs such as 0,2"),
        ("1-", "write indices or UUIDs such as 0,2"),
    ],
)
def test_a_range_is_a_usage_error_that_says_what_to_write(text: str, remedy: str) -> None:
    with pytest.raises(click.BadParameter) as caught:
        GPUNames().convert(text, None, None)
    assert remedy in caught.value.message
    if remedy.startswith("write indices"):
        return
    GPUNames().convert(remedy.removeprefix("write "), None, None)


def test_the_beginning_of_a_uuid_is_not_a_range() -> None:
    names = ("GPU-6ec5c1a2-4a1f", "MIG-1-3", "GPU-1-3")
    assert GPUNames().convert(",".join(names), None, None) == names


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
