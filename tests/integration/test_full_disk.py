"""Fault 25, as holders see it: a full disk costs nobody a lease, whatever its TTL."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.ledger.disks import fill, mounted
from tests.server_process import ServerProcess

from gpu_worker_pool import GPUWorkerPoolClient

#: The shortest there is, and the disk is full for several of them.
TTL_SECONDS = 2.0


@pytest.mark.fault(25)
async def test_a_full_disk_costs_nobody_a_lease(tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "disk", "1m") as disk,
        ServerProcess(tmp_path, GPU_BACKEND="simulated:2", GPU_POOL_STATE_DIR=str(disk / "state")) as server,
    ):
        lost: list[object] = []
        async with GPUWorkerPoolClient(server.url, lease_ttl=TTL_SECONDS, on_lease_lost=lost.append) as client:
            assignment = await client.request_gpu(timeout=20)
            filler = fill(disk)
            await asyncio.sleep(4 * TTL_SECONDS)
            assert not assignment.lost, assignment
            listed = await asyncio.to_thread(server.get, "/readyz")
            assert listed.status == 503, "the disk was not full: this has shown nothing"
            filler.unlink()
            await asyncio.sleep(1.5 * TTL_SECONDS)
            assert not assignment.lost
            rows = (await asyncio.to_thread(server.get, "/leases")).json["leases"]
            assert [(row["lease_id"], row["state"]) for row in rows] == [(assignment.lease_id, "held")]
            await client.release_gpu(assignment)
        assert lost == []


def test_the_answer_says_that_the_lease_is_held_and_when_to_try_again(tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "disk", "1m") as disk,
        ServerProcess(tmp_path, GPU_BACKEND="simulated:2", GPU_POOL_STATE_DIR=str(disk / "state")) as server,
    ):
        granted = server.ask("POST", "/leases", {"ttl_seconds": 4.0, "wait_seconds": 10.0}).json
        path, token = f"/leases/{granted['lease_id']}/renew", {"X-Lease-Token": granted["token"]}
        fill(disk)
        answers = []
        while not answers or (answers[-1].status, answers[-1].json.get("lease")) != (503, "held"):
            answers.append(server.ask("POST", path, headers=token))
            assert len(answers) < 2_000, answers[-1]
        assert {answer.json.get("lease") for answer in answers if answer.status == 503} <= {"unknown", "held"}
        assert answers[-1].headers["Retry-After"] == "1"
        stranger = server.ask("POST", path, headers={"X-Lease-Token": "not-the-token-of-this-lease"})
        assert (stranger.status, stranger.json["lease"]) == (503, "unknown")
