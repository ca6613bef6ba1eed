"""`gpu-pool setup` prepares this host, as root, so that its users share one ledger."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from gpu_worker_pool.cli.exits import CommandError, Status
from gpu_worker_pool.state_directory import SHARED_DIRECTORY, setup_command


@click.command(
    epilog="""\
\b
Examples:
  sudo gpu-pool setup --add alice --add bob
  sudo gpu-pool setup --dry-run              only say what would be done
  sudo gpu-pool setup --service              also start a server, as a systemd service
  sudo gpu-pool setup --service --server-only
                                             users who do not trust each other: only the
                                             service can write the ledger
  sudo gpu-pool setup --undo                 take back what setup made, and nothing else

\b
It may be repeated: it repairs what is wrong, and leaves the rest. Added users must log in again.
"""
)
@click.option("--group", metavar="NAME", help="The group that shares the GPUs.  [default: gpu-pool]")
@click.option(
    "--add", multiple=True, metavar="USER", help="Add this user to the group; may be repeated.  [default: you]"
)
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    default=SHARED_DIRECTORY,
    show_default=True,
    help="The shared folder. For another one, users must set GPU_POOL_STATE_DIR.",
)
@click.option("--service", is_flag=True, help="Install and start the server as a systemd service.")
@click.option(
    "--server-only", is_flag=True, help="With --service: only the service can write; users come through its socket."
)
@click.option("--dry-run", is_flag=True, help="Change nothing; say what would be done.")
@click.option("--undo", "is_undo", is_flag=True, help="Take back what setup made; refused while GPUs are in use.")
def setup(
    *,
    group: str | None,
    add: tuple[str, ...],
    directory: Path,
    service: bool,
    server_only: bool,
    dry_run: bool,
    is_undo: bool,
) -> None:
    """Let all users of this host share its GPUs: make a group and a folder for one ledger, and add users.

    It then opens the ledger as each of these users, and says what is wrong. Needs root.
    """
    if os.geteuid() != 0:
        words = sys.argv[sys.argv.index("setup") + 1 :] if "setup" in sys.argv else []
        raise CommandError(f"setup changes this host, so it needs root: {setup_command(*words)}", Status.NO_PERMISSION)
    if server_only and add:
        raise click.UsageError(
            "--add is not needed with --server-only: all users of this host come through the socket."
        )
    if is_undo and (add or group or service or server_only):
        raise click.UsageError("--undo takes back all that setup made: give it only --directory and --dry-run.")
    if directory == Path("/"):
        raise click.UsageError("--directory must be a folder for gpu-pool alone, such as /var/lib/gpu-pool.")
    if not directory.is_absolute():
        raise click.UsageError(f"--directory must be an absolute path, such as {Path.cwd() / directory}.")
    from gpu_worker_pool.cli.output import print_line
    from gpu_worker_pool.cli.setup import Options, Places, Steps
    from gpu_worker_pool.cli.setup.install import install
    from gpu_worker_pool.cli.setup.undo import undo

    caller = os.environ.get("SUDO_USER", "")
    if not add and not server_only and caller not in ("", "root"):
        add = (caller,)
    options = Options(directory, group, add, service or server_only, server_only)
    steps = Steps(print_line, is_dry=dry_run)
    (undo if is_undo else install)(options, Places(), steps)
