"""What `status` and `top` show: the GPUs of all endpoints, their holders and the waiting requests."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

from gpu_worker_pool.cli.output import print_line
from gpu_worker_pool.cli.tables import print_table
from gpu_worker_pool.cli.views.cells import GPU_COLUMNS, WAITING_COLUMNS, gpu_rows, waiting_cells
from gpu_worker_pool.errors import ServiceRefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_worker_pool.cli.views.queries import Host, HostAnswer


class Part(NamedTuple):
    """A heading with a table, or with a sentence instead of one."""

    title: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    nothing: str = ""


async def everything_of(host: Host) -> dict[str, Any]:
    """One endpoint's part of `gpu-pool status --json`."""
    stats = await host.stats()
    try:
        leases, queue = await asyncio.gather(host.leases(), host.queue())
    except ServiceRefusedError:
        # A server that gives no leases still has GPUs.
        return {**stats, "leases": None, "queue": None}
    return {**stats, "leases": leases["leases"], "queue": queue["queue"]}


def as_json(answers: Sequence[HostAnswer]) -> dict[str, Any]:
    return {
        "endpoints": [
            {"endpoint": each.endpoint.endpoint_id, "url": each.endpoint.url, "error": each.error, **(each.body or {})}
            for each in answers
        ]
    }


def parts(answers: Sequence[HostAnswer]) -> list[Part]:
    found: list[Part] = []
    for each in answers:
        name = each.endpoint.endpoint_id if each.endpoint.endpoint_id == "local" else each.endpoint.url
        if each.error is not None:
            found.append(Part(name, nothing=f"failed: {each.error}"))
            continue
        body = each.body
        leases, queue = body["leases"], body["queue"]
        columns, rows = _gpu_table(body["gpus"], leases or ())
        free = sum(1 for row in rows if row[columns.index("state")] == "free")
        waiting = "" if queue is None else f", {len(queue)} waiting"
        found.append(Part(f"{name}: {_counted(body['gpus'])}, {free} free{waiting}", columns, rows, "no GPU"))
        if leases is None:
            found.append(Part("", nothing="this server gives no leases"))
        if queue:
            found.append(Part("waiting", WAITING_COLUMNS, [waiting_cells(row) for row in queue[:MOST_WAITING]]))
            if len(queue) > MOST_WAITING:
                found.append(Part("", nothing=f"and {len(queue) - MOST_WAITING} more; gpu-pool queue lists them all"))
    return found


def print_parts(answers: Sequence[HostAnswer]) -> None:
    for number, part in enumerate(parts(answers)):
        if number and part.title:
            print_line()
        if part.title and not part.rows:
            print_line(part.title)
        print_table(part.columns, part.rows, title=part.title, nothing=part.nothing)


def _counted(gpus: Sequence[dict[str, Any]]) -> str:
    names = {row["name"] for row in gpus}
    what = names.pop() if len(names) == 1 else "GPUs"
    return f"{len(gpus)} x {what}" if what != "GPUs" else f"{len(gpus)} GPUs"


def _gpu_table(gpus: Sequence[dict[str, Any]], leases: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """GPUs that all have the same name need no column for it."""
    columns, rows = list(GPU_COLUMNS), []
    is_mixed = len({row["name"] for row in gpus}) > 1
    if is_mixed:
        columns.insert(1, "name")
    for gpu in gpus:
        for number, cells in enumerate(gpu_rows(gpu, leases)):
            if is_mixed:
                cells.insert(1, "" if number else gpu["name"])
            rows.append(cells)
    return columns, rows


#: `gpu-pool queue` lists all of them.
MOST_WAITING = 20
