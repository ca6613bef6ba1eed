"""The host's memory, from files that /proc/meminfo might be."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_worker_pool.hardware.host_memory import HostMemory, read_host_memory


def test_this_host_has_memory() -> None:
    memory = read_host_memory()
    assert memory.total_mb is not None
    assert memory.used_mb is not None
    assert 0 < memory.used_mb < memory.total_mb


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "MemTotal:       125000000 kB\nMemFree:  1 kB\nMemAvailable:   25000000 kB\n",
            HostMemory(122_070, 97_656, 24_414),
        ),
        ("MemTotal:       125000000 kB\n", HostMemory(122_070)),
        ("MemTotal: 10240 kB\nMemAvailable: 20480 kB\n", HostMemory(10)),
        ("MemTotal: lots kB\nMemAvailable: 20480 kB\n", HostMemory()),
        ("", HostMemory()),
    ],
)
def test_what_is_not_there_is_unknown(tmp_path: Path, text: str, expected: HostMemory) -> None:
    (tmp_path / "meminfo").write_text(text)
    assert read_host_memory(tmp_path / "meminfo") == expected


def test_a_host_without_the_file(tmp_path: Path) -> None:
    assert read_host_memory(tmp_path / "none") == HostMemory()
