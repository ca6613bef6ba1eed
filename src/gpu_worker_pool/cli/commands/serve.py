"""`gpu-pool serve` starts the server."""

from __future__ import annotations

import click


@click.command(
    short_help="Serve this host's GPUs over HTTP.",
    epilog="""\
\b
Examples:
  gpu-pool serve
  gpu-pool serve --simulate 4 --port 8080      without a GPU
  gpu-pool serve --host 127.0.0.1              for programs on this host only
  GPU_POOL_API_KEYS=… gpu-pool serve           also leases for other hosts

\b
Environment variables, or a file .env, set everything else; gpu-pool config lists them. Ctrl-C
ends the server.
""",
)
@click.option("--host", metavar="ADDRESS", help="Address to listen on.  [default: HOST, else 0.0.0.0]")
@click.option("--port", type=click.IntRange(0, 65535), metavar="N", help="Port to use.  [default: PORT, else 8000]")
@click.option("--simulate", type=click.IntRange(0, 10_000), metavar="N", help="Serve N simulated GPUs.")
@click.option("--backend", help="How to read the GPUs: auto, nvml, nvidia-smi, simulated:N.  [default: GPU_BACKEND]")
@click.option("--workers", type=click.IntRange(1, 1024), metavar="N", help="Number of server processes.")
@click.option("--state-dir", metavar="FOLDER", help="Folder of the ledger.  [default: GPU_POOL_STATE_DIR]")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error", "critical"]), help="How much to log."
)
@click.option("--access-log/--no-access-log", default=None, help="Log every request, or do not.")
def serve(**given: str | int | bool | None) -> None:
    """Serve statistics of this host's GPUs, and leases on them, over HTTP.

    Run one server per host. It shares its leases with programs on this host that use local://.
    """
    from gpu_worker_pool.cli.serving import serve_with

    serve_with(given)
