"""Collects why a request waits, from every endpoint, and prints it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpu_worker_pool.cli.exits import CommandError, Status
from gpu_worker_pool.cli.output import print_line
from gpu_worker_pool.cli.tables import print_table
from gpu_worker_pool.cli.views.lists import print_failures
from gpu_worker_pool.cli.views.queries import query
from gpu_worker_pool.config import MultiEndpointConfigurationManager
from gpu_worker_pool.leases.lease import requirements_at
from gpu_worker_pool.leases.places import complete_requirements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_worker_pool.cli.views.queries import Body, Host, HostAnswer


def explanations(
    endpoints: Sequence[str], requirement_options: dict[str, Any], request_id: str | None
) -> list[HostAnswer]:
    """One per endpoint that has an explanation."""
    try:
        requirements = complete_requirements(requirement_options, MultiEndpointConfigurationManager())
    except ValueError as error:
        raise CommandError(str(error), Status.USAGE) from None

    async def explain(host: Host) -> Body | None:
        if request_id is not None:
            return await host.explain_request(request_id)
        here = requirements_at(host.endpoint.endpoint_id, requirements)
        if here is None:
            return None
        return await host.explain_requirements(here)

    answers = query(endpoints, explain)
    print_failures(answers)
    found = [each for each in answers if each.body is not None]
    if not found:
        what = f"no waiting request has the id {request_id!r}; gpu-pool queue lists them"
        raise CommandError(what if request_id is not None else "no endpoint has such a GPU", Status.FAILED)
    return found


def print_explanations(found: Sequence[HostAnswer]) -> None:
    for each in found:
        body = each.body
        where = f"{each.endpoint.endpoint_id}: " if len(found) > 1 else ""
        print_line(f"{where}{body['summary']}")
        free = "free" if body.get("impossible") else "free: it could be granted now"
        hosts: dict[str, int] = {}
        rows = []
        for gpu in body["gpus"]:
            why = "; ".join(obstacle["text"] for obstacle in gpu["obstacles"]) or free
            host = gpu.get("host")
            if host is not None:
                hosts[host] = hosts.get(host, 0) + (not gpu["obstacles"])
            name = "?" if gpu["gpu_id"] is None else str(gpu["gpu_id"])
            rows.append([name if host is None else f"{host}:{name}", gpu["name"] or "?", why])
        for host, number in hosts.items():
            count = sum(gpu.get("host") == host for gpu in body["gpus"])
            print_line(f"{host}: {number} of {count} GPUs could serve it")
        print_table(("gpu", "name", "why not"), rows)
