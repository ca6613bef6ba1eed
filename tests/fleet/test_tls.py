"""Links of a fleet over https, and plain ones that others on the network could read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fleet.hosts import FleetServers, make_fleet_tables, release, wait_for_lease
from tests.integration.test_tls import OTHER, make_certificate
from tests.server_process import ServerProcess
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(180)


def test_hosts_link_over_https_to_a_candidate_whose_certificate_they_know(database: str, tmp_path: Path) -> None:
    certificate, key, fingerprint = make_certificate(tmp_path / "tls")
    make_fleet_tables(database)
    tls = {"GPU_POOL_TLS_CERT": str(certificate), "GPU_POOL_TLS_KEY": str(key)}
    with FleetServers(
        tmp_path / "fleet",
        database,
        gpus=1,
        names=["gpu-1", "gpu-2"],
        candidates=1,
        GPU_POOL_TLS_FINGERPRINT=fingerprint,
        **tls,
    ) as fleet:
        assert all(server.url.startswith("https://") for server in fleet.servers)
        candidate, host = fleet.servers
        _, lease = wait_for_lease([candidate], "secure", only=["gpu-2"])
        assert lease["endpoint_url"] == host.url
        assert release(candidate, lease, "secure").status == 200
        # One that expects another certificate does not even say who it is.
        host.kill()
        host.environment["GPU_POOL_TLS_FINGERPRINT"] = OTHER
        host.start()
        assert eventually(lambda: "its certificate is not the one that GPU_POOL_TLS_FINGERPRINT names" in host.log)
        assert candidate.fleet()["hosts"][1]["state"] == "unreachable"


def test_a_plain_link_to_another_host_must_be_allowed(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a key of this fleet alone")
    with ServerProcess(
        tmp_path / "host",
        GPU_BACKEND="simulated:1",
        GPU_POOL_FLEET_KEY_FILE=str(tmp_path / "key"),
        GPU_POOL_FLEET_JOIN="http://203.0.113.1:8000",
    ) as server:
        refused = server.ask("POST", "/leases", {}, timeout=30)
        assert refused.status == 503
        assert "others on the network can read: use https, or --fleet-insecure" in refused.json["detail"]
