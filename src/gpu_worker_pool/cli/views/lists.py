"""Prints lists of leases and of waiting requests, as a table or as the JSON of the HTTP API."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Literal

from gpu_worker_pool.cli.output import print_json, printable
from gpu_worker_pool.cli.tables import print_table
from gpu_worker_pool.cli.views.cells import LEASE_COLUMNS, QUEUE_COLUMNS, lease_cells, queue_cells
from gpu_worker_pool.cli.views.queries import query

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_worker_pool.cli.views.queries import Body, HostAnswer


def print_list(name: Literal["leases", "queue"], endpoints: Sequence[str], *, as_json: bool) -> None:
    is_leases = name == "leases"
    answers = query(endpoints, lambda host: host.leases() if is_leases else host.queue())
    body = _merged(answers, name)
    if as_json:
        print_json(body)
        return
    columns, cells = (LEASE_COLUMNS, lease_cells) if is_leases else (QUEUE_COLUMNS, queue_cells)
    nothing = "no leases" if is_leases else "no waiting requests"
    is_many = len(answers) > 1
    rows = [([row["endpoint"]] if is_many else []) + cells(row) for row in body[name]]
    print_table([*(["endpoint"] if is_many else []), *columns], rows, nothing=nothing)
    print_failures(answers)


def _merged(answers: Sequence[HostAnswer], name: str) -> Body:
    """One body of the same shape; with several endpoints, each row names its endpoint."""
    if len(answers) == 1:
        body: Body = answers[0].body
        return body
    rows = [
        {**row, "endpoint": each.endpoint.endpoint_id}
        for each in answers
        if each.error is None
        for row in each.body[name]
    ]
    failed = {each.endpoint.endpoint_id: each.error for each in answers if each.error is not None}
    return {name: rows, **({"errors": failed} if failed else {})}


def print_failures(answers: Sequence[HostAnswer]) -> None:
    for each in answers:
        if each.error is not None:
            sys.stderr.write(f"gpu-pool: {printable(f'{each.endpoint.endpoint_id}: {each.error}')}\n")
