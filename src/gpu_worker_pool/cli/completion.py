"""Offers ids of leases and waiting requests when a shell completes a word; silent and quick if nothing answers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, Literal

from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import click

    from gpu_worker_pool.cli.views.queries import Host, HostAnswer

#: A shell waits for this, and shows nothing meanwhile.
_ANSWER_SECONDS: Final = 1.0
#: Even if the driver hangs, or a file system.
_LONGEST_SECONDS: Final = 3.0
_MOST: Final = 100

_Row = dict[str, Any]


def complete_ids(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """What `gpu-pool release` can end, this user's own first."""
    return _matching(context, incomplete, ("lease", "request"))


def complete_request_ids(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _matching(context, incomplete, ("request",))


def _matching(
    context: click.Context, incomplete: str, kinds: Sequence[Literal["lease", "request"]]
) -> list[CompletionItem]:
    given = context.params.get("identifiers") or ()
    found = _found(context.params.get("endpoints") or ())
    offered = [
        item
        for kind, item in sorted(found, key=lambda each: not each[1].is_mine)
        if kind in kinds and item.value.startswith(incomplete) and item.value not in given
    ]
    return offered[:_MOST]


def _found(endpoints: Sequence[str]) -> list[tuple[str, CompletionItem]]:
    import logging
    from threading import Timer

    logging.disable(logging.CRITICAL)
    watchdog = Timer(_LONGEST_SECONDS, os._exit, (0,))
    watchdog.daemon = True
    watchdog.start()
    try:
        return [item for answer in _answers(endpoints) if answer.error is None for item in _items(answer.body)]
    except Exception:  # a shell that completes a word has no place for a message
        return []
    finally:
        watchdog.cancel()


def _answers(endpoints: Sequence[str]) -> list[HostAnswer]:
    import asyncio

    from gpu_worker_pool.cli.views.queries import query_any
    from gpu_worker_pool.errors import ServiceRetryableError

    async def both(host: Host) -> _Row:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                leases, queue = await asyncio.gather(host.leases(), host.queue())
        except TimeoutError:
            raise ServiceRetryableError from None
        return {**leases, **queue}

    return query_any(endpoints, both)


def _items(body: _Row) -> Iterable[tuple[str, CompletionItem]]:
    from gpu_worker_pool.cli.views.cells import LEASE_COLUMNS, QUEUE_COLUMNS, lease_cells, queue_cells

    for row in body["leases"]:
        cells = dict(zip(LEASE_COLUMNS, lease_cells(row), strict=True))
        words = [f"GPU {cells['gpu']}", f"held by {cells['holder']}", f"for {cells['since']}", cells["label"]]
        yield "lease", _item(row["lease_id"], words, row)
    for row in body["queue"]:
        cells = dict(zip(QUEUE_COLUMNS, queue_cells(row), strict=True))
        words = [f"waits for {cells['wants']}", cells["who"], f"for {cells['waiting']}", cells["label"]]
        yield "request", _item(row["request_id"], words, row)


def _item(identifier: str, words: Iterable[str], row: _Row) -> CompletionItem:
    from gpu_worker_pool.cli.output import printable

    return CompletionItem(identifier, help=printable(", ".join(filter(None, words))), is_mine=_is_mine(row))


def _is_mine(row: _Row) -> bool:
    from gpu_worker_pool.hardware.proc import user_name
    from gpu_worker_pool.leases.tokens import Tokens

    me = user_name(os.getuid())
    holder = row.get("holder") or {}
    return (
        me in (row.get("user"), holder.get("user"))
        or (row["worker_id"] or "").startswith(f"{me}:")
        or Tokens().of(row["request_id"] or "") is not None
    )
