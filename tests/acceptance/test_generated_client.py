"""A client that openapi-python-client generates from our OpenAPI document takes, renews and releases a lease."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.server_process import ServerProcess

#: A program of somebody who has only the generated client. Its warnings are not ours.
PROGRAM = """
import importlib, json, pkgutil, sys
import generated
for module in pkgutil.walk_packages(generated.__path__, "generated."):
    importlib.import_module(module.name)

from generated import Client
from generated.api.gpus import get_gpu_summary
from generated.api.leases import acquire_lease, explain_requirements, list_leases, list_queue, renew_lease
from generated.api.leases import release_lease
from generated.api.server import get_health, get_readiness
from generated.models import GrantedLease, HolderBody, LeaseRequest, Refused, RequirementsBody, StillWaiting

client = Client(base_url=sys.argv[1])
assert get_health.sync(client=client).status == "healthy"
assert get_readiness.sync(client=client).status == "ready"
assert get_gpu_summary.sync(client=client).gpu_count == 1
body = LeaseRequest(request_id="generated", label="from a generated client", holder=HolderBody(user="ada"))
lease = acquire_lease.sync(client=client, body=body)
assert isinstance(lease, GrantedLease), lease
(row,) = list_leases.sync(client=client).leases
assert (row.lease_id, row.label, row.holder.user) == (lease.lease_id, "from a generated client", "ada")
waiting = acquire_lease.sync(client=client, body=LeaseRequest(request_id="second"))
assert isinstance(waiting, StillWaiting) and waiting.position == 1, waiting
assert [each.request_id for each in list_queue.sync(client=client).queue] == ["second"]
impossible = explain_requirements.sync(client=client, body=RequirementsBody(count=7))
assert impossible.impossible, impossible
renewed = renew_lease.sync(lease.lease_id, client=client, x_lease_token=lease.token)
assert renewed.expires_in_seconds > 59, renewed
refused = renew_lease.sync(lease.lease_id, client=client, x_lease_token="not-the-token-of-it")
assert isinstance(refused, Refused) and refused.error == "not_yours" and refused.status == 403, refused
assert release_lease.sync(lease.lease_id, client=client, x_lease_token=lease.token).released is True
print("done")
"""


def test_it_takes_renews_and_releases_a_lease(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "server", GPU_BACKEND="simulated:1", REFRESH_INTERVAL="0.2") as server:
        document = tmp_path / "openapi.json"
        document.write_bytes(server.get("/openapi.json").body)
        generator = str(Path(sys.executable).with_name("openapi-python-client"))
        command = [
            generator,
            "generate",
            f"--path={document}",
            "--meta=none",
            f"--output-path={tmp_path / 'generated'}",
        ]
        (tmp_path / "config.json").write_text(json.dumps({"post_hooks": []}))
        made = subprocess.run(
            [*command, "--config=config.json", "--fail-on-warning"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert made.returncode == 0, made.stdout + made.stderr
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, server.url], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
        assert "Traceback" not in server.log
