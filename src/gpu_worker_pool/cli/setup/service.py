"""The server as a systemd service: its unit, its file of keys, and how it is started and stopped."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.cli.exits import CommandError
from gpu_worker_pool.cli.setup.accounts import run_tool

if TYPE_CHECKING:
    from gpu_worker_pool.cli.setup import Options, Places

UNIT: Final = "gpu-pool.service"
SOCKET_NAME: Final = "gpu-pool.sock"
MADE_BY: Final = "# Made by gpu-pool setup."
ENVIRONMENT: Final = """\
# Settings of the gpu-pool service, one NAME=value per line; then: systemctl restart gpu-pool
# `gpu-pool config` lists all. Only root can read this file, since keys belong here.
# For other hosts:
# HOST=0.0.0.0
# GPU_POOL_API_KEYS=name:key
# GPU_POOL_ADMIN_KEYS=
"""
#: ProtectHome hides these.
_HOMES: Final = ("/home", "/root", "/run/user")


def unit_text(options: Options, places: Places, group: str) -> str:
    """Hardened, except that the driver's devices and other users' processes stay visible to it."""
    runtime = ""
    if options.is_server_only:
        # Only the service may write there, so that no other program can offer its socket.
        runtime = f"RuntimeDirectory={places.runtime.name}\nRuntimeDirectoryMode=0755\n"
    return f"""\
{MADE_BY}
[Unit]
Description=GPU server
After=network.target nvidia-persistenced.service

[Service]
Type=notify
NotifyAccess=all
WatchdogSec=60
User={places.service_user}
Group={group}
UMask=0007
ExecStart={" ".join(map(_quoted, command_line(options, places)))}
Environment=ACCESS_LOG=false {" ".join(map(_quoted, _variables(options)))}
EnvironmentFile=-{_escaped(str(places.environment))}
ReadWritePaths={_quoted(str(options.directory))}
{runtime}Restart=on-failure
RestartSec=2
KillMode=mixed
TimeoutStopSec=10

NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectSystem=strict
ProtectHome={"read-only" if _is_in_a_home() else "yes"}
PrivateTmp=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native

[Install]
WantedBy=multi-user.target
"""


def _variables(options: Options) -> list[str]:
    variables = ["HOST=127.0.0.1", f"GPU_POOL_STATE_DIR={options.directory}"]
    # Over TCP the kernel does not say who calls: without this, any user could take a lease anonymously.
    return [*variables, "GPU_POOL_OPEN_ON_LOOPBACK=false"] if options.is_server_only else variables


def command_line(options: Options, places: Places) -> list[str]:
    # -P: not what another user has put into the folder in which root types it.
    words = [sys.executable, "-P", "-m", "gpu_worker_pool", "serve"]
    return [*words, "--socket", str(places.runtime / SOCKET_NAME)] if options.is_server_only else words


def command_by_hand(options: Options, places: Places) -> str:
    """What root types where no systemd runs the service."""
    import shlex

    words = [*_variables(options), *command_line(options, places)]
    return shlex.join(["runuser", "-u", places.service_user, "--", "env", *words])


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("%", "%%").replace('"', '\\"')


def _quoted(text: str) -> str:
    escaped = _escaped(text).replace("$", "$$")
    return f'"{escaped}"' if any(sign in text for sign in " \t'\"\\;") else escaped


def _is_in_a_home() -> bool:
    return any(
        Path(prefix).resolve().is_relative_to(home) for prefix in (sys.prefix, sys.base_prefix) for home in _HOMES
    )


def unreadable_code() -> str | None:
    """The first folder or file of this program that others may not read; None where the service's user can run it."""
    for path in (Path(sys.executable), Path(os.__file__), Path(__file__)):
        for each in (*reversed(path.resolve().parents), path.resolve()):
            mode = each.stat().st_mode
            if not mode & (0o001 if each.is_dir() else 0o004):
                return str(each)
    return None


def hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write_root_file(path: Path, text: str, mode: int) -> None:
    """Atomic; in a folder that only root can change."""
    draft = path.with_name(f".{path.name}.new")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, mode)
        file.write(text)
    draft.replace(path)


def start_service(unit: str = UNIT) -> None:
    run_tool("systemctl", "daemon-reload")
    try:
        run_tool("systemctl", "enable", unit)
        run_tool("systemctl", "restart", unit)
    except CommandError as error:
        raise CommandError(f"{error}; journalctl -u {unit} says more") from None


def stop_service(unit: str = UNIT) -> None:
    run_tool("systemctl", "disable", "--now", unit)
