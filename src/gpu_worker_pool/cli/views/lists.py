"""Lists of what endpoints have, as a table or as the body that the HTTP API has for it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.cli.output import print_json
from gpu_worker_pool.cli.printable import printable
from gpu_worker_pool.cli.tables import print_table
from gpu_worker_pool.cli.views.queries import look, merged

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from gpu_worker_pool.cli.views.queries import Body, Host, Seen


def print_list(
    endpoints: Sequence[str],
    ask: Callable[[Host], Awaitable[Body]],
    name: str,
    columns: Sequence[str],
    cells: Callable[[dict[str, Any]], list[str]],
    *,
    as_json: bool,
    nothing: str,
) -> None:
    """`nothing`: what is said of an empty list."""
    seen = look(endpoints, ask)
    body = merged(seen, name)
    if as_json:
        print_json(body)
        return
    is_many = len(seen) > 1
    rows = [([row["endpoint"]] if is_many else []) + cells(row) for row in body[name]]
    print_table([*(["endpoint"] if is_many else []), *columns], rows, nothing=nothing)
    tell_failures(seen)


def tell_failures(seen: Sequence[Seen]) -> None:
    for each in seen:
        if each.error is not None:
            sys.stderr.write(f"gpu-pool: {printable(f'{each.endpoint.endpoint_id}: {each.error}')}\n")
