"""`gpu-pool fleet` sets up a fleet of several hosts with one queue, shows it, and administers its hosts."""

from __future__ import annotations

from pathlib import Path

import click

from gpu_worker_pool.cli.options import endpoint_option, json_option


@click.group(
    epilog="""\
\b
Examples:
  gpu-pool fleet init postgresql://pool@db.lab/gpupool
  gpu-pool fleet key rotate /etc/gpu-pool/fleet.key       makes the first one, too
  gpu-pool fleet status
  gpu-pool fleet drain gpu-7

\b
docs/FLEET.md leads from nothing to three hosts in ten minutes.
"""
)
def fleet() -> None:
    """Share the GPUs of several hosts with one queue, in one order."""


@fleet.command(
    epilog="""\
\b
Examples:
  gpu-pool fleet init postgresql://pool@db.lab/gpupool
  GPU_POOL_FLEET_DATABASE=postgresql://pool:…@db.lab/gpupool gpu-pool fleet init
"""
)
@click.argument("url", required=False)
def init(url: str | None) -> None:
    """Make the tables of a fleet in a PostgreSQL database, or upgrade them to this version.

    Changes nothing that exists, and can be run again at any time. Other users of this host can see the command
    line: put a password into GPU_POOL_FLEET_DATABASE, or into the file that PGPASSFILE names.
    """
    from gpu_worker_pool.cli.views.fleet import init_database

    init_database(url)


@fleet.command(
    epilog="""\
\b
Examples:
  gpu-pool fleet status
  gpu-pool fleet status --json | jq '.hosts[] | select(.state != "up")'
"""
)
@json_option
@endpoint_option
def status(*, as_json: bool, endpoints: tuple[str, ...]) -> None:
    """Show the hosts of the fleet, which of them is the dispatcher, and whether the database answers."""
    from gpu_worker_pool.cli.views.fleet import show_fleet

    show_fleet(endpoints, as_json=as_json)


@fleet.command(
    epilog="""\
\b
Examples:
  gpu-pool fleet drain gpu-7             before it is switched off
  gpu-pool fleet drain gpu-7 --undo
"""
)
@click.argument("host")
@click.option("--undo", is_flag=True, help="The host gets leases again.")
@endpoint_option
def drain(*, host: str, undo: bool, endpoints: tuple[str, ...]) -> None:
    """Give a host no new leases. It keeps those that it has until they end."""
    from gpu_worker_pool.cli.views.fleet import administer

    administer(endpoints, host, "undrain" if undo else "drain")


@fleet.command(
    epilog="""\
\b
Example:
  gpu-pool fleet remove gpu-7            it is gone, or comes back with a new ledger
"""
)
@click.argument("host")
@endpoint_option
def remove(*, host: str, endpoints: tuple[str, ...]) -> None:
    """Forget a host: it leaves the fleet until it joins again, even with a new ledger."""
    from gpu_worker_pool.cli.views.fleet import administer

    administer(endpoints, host, "remove")


@fleet.group()
def key() -> None:
    """The key by which the servers of a fleet know each other."""


@key.command(
    epilog="""\
\b
Examples:
  gpu-pool fleet key rotate /etc/gpu-pool/fleet.key             a new key; the old one stays valid
  (copy the file to all hosts of the fleet: their servers notice the change)
  gpu-pool fleet key rotate --finish /etc/gpu-pool/fleet.key    the old key is no longer valid
  (copy it again)
"""
)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), envvar="GPU_POOL_FLEET_KEY_FILE")
@click.option("--finish", is_flag=True, help="Make no new key, and remove all but the newest.")
def rotate(*, file: Path, finish: bool) -> None:
    """Put a new key into FILE, above the old one, which is still accepted; make FILE if there is none.

    FILE is that of `gpu-pool serve --fleet-key-file`, by default GPU_POOL_FLEET_KEY_FILE.
    """
    from gpu_worker_pool.cli.views.fleet import rotate_key

    rotate_key(file, is_finish=finish)
