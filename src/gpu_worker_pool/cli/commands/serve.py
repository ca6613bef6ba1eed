"""`gpu-pool serve`: the server, for people."""

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
  GPU_POOL_API_KEYS=… gpu-pool serve           leases for other hosts, too

\b
Everything else is set by variables, in the environment or a file .env; gpu-pool config lists
them. Ctrl-C ends it.
""",
)
@click.option("--host", metavar="ADDRESS", help="Where to listen.  [default: HOST, else 0.0.0.0]")
@click.option("--port", type=click.IntRange(0, 65535), metavar="N", help="On which port.  [default: PORT, else 8000]")
@click.option("--simulate", type=click.IntRange(0, 10_000), metavar="N", help="Pretend to have so many GPUs.")
@click.option("--backend", help="How GPUs are read: auto, nvml, nvidia-smi, simulated:N.  [default: GPU_BACKEND]")
@click.option("--workers", type=click.IntRange(1, 1024), metavar="N", help="How many processes serve.")
@click.option("--state-dir", metavar="FOLDER", help="Where programs of this host meet.  [default: GPU_POOL_STATE_DIR]")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error", "critical"]), help="How much is logged."
)
@click.option("--access-log/--no-access-log", default=None, help="Whether every request is logged.")
def serve(**given: str | int | bool | None) -> None:
    """Serve what this host's GPUs do, and leases on them, over HTTP.

    One server a host. Programs that use local:// on the same host share its leases.
    """
    from gpu_worker_pool.cli.serving import serve_with

    serve_with(given)
