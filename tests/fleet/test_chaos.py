"""The fleet keeps its promises while everything is killed, frozen and cut off, which `chaos.py` does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.network import Network, UnavailableNetworkError

ROOT = Path(__file__).parents[2]


def wreak_havoc(seconds: float, requests: int, *options: str, within_seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.fleet.chaos", str(seconds), str(requests), "a seed", *options]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=within_seconds)
    except BaseException:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        raise
    assert process.returncode == 0, f"{out}\n{err[-6000:]}"
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert found["problems"] == [], f"{out}\n{err[-6000:]}"
    assert found["granted"] >= requests
    return found


def namespaces() -> list[str]:
    """Where the test can make them; else all hosts are on loopback, and are not cut off from each other."""
    if os.geteuid() != 0:
        return []
    try:
        with Network(["one"]):
            return ["--namespaces"]
    except UnavailableNetworkError:
        return []


@pytest.mark.fault(39)
@pytest.mark.timeout(240)
def test_after_a_failover_that_lost_commits_no_gpu_is_promised_twice() -> None:
    found = wreak_havoc(8, 40, "--only", "fail_over", within_seconds=220)
    assert found["done"]["fail_over"] >= 1


@pytest.mark.fault(40, 43, 46)
@pytest.mark.timeout(500)
def test_for_a_minute_everything_is_killed_frozen_or_cut_off_and_every_promise_is_kept() -> None:
    found = wreak_havoc(60, 300, *namespaces(), within_seconds=480)
    assert sum(found["done"].values()) >= 3


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_for_ten_minutes_every_promise_is_kept() -> None:
    """Three servers with addresses of their own: skipped by name where there can be no network namespaces."""
    if not namespaces():
        pytest.skip("no network namespaces can be made here")
    found = wreak_havoc(600, 1000, "--namespaces", within_seconds=1400)
    assert {"kill_client", "kill_server", "freeze_server", "cut_server_off", "fail_over"} <= found["done"].keys()
