"""Prints lists of leases and of waiting requests, as a table or as the JSON of the HTTP API."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.cli.output import print_json, printable
from gpu_worker_pool.cli.tables import print_table
from gpu_worker_pool.cli.views.queries import merged, query

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from gpu_worker_pool.cli.views.queries import Body, Host, HostAnswer


def print_list(
    endpoints: Sequence[str],
    get_list: Callable[[Host], Awaitable[Body]],
    name: str,
    columns: Sequence[str],
    cells: Callable[[dict[str, Any]], list[str]],
    *,
    as_json: bool,
    nothing: str,
) -> None:
    """`nothing`: what is printed instead of an empty table."""
    answers = query(endpoints, get_list)
    body = merged(answers, name)
    if as_json:
        print_json(body)
        return
    is_many = len(answers) > 1
    rows = [([row["endpoint"]] if is_many else []) + cells(row) for row in body[name]]
    print_table([*(["endpoint"] if is_many else []), *columns], rows, nothing=nothing)
    print_failures(answers)


def print_failures(answers: Sequence[HostAnswer]) -> None:
    for each in answers:
        if each.error is not None:
            sys.stderr.write(f"gpu-pool: {printable(f'{each.endpoint.endpoint_id}: {each.error}')}\n")
