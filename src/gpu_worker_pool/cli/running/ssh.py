"""How the system's `ssh` is called: the program, its options, what it may connect to, and what it must not be given."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.cli.exits import CommandError, Status
from gpu_worker_pool.cli.keys import SECRETS

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The program and options for it, such as `ssh -F config`.
SSH_VARIABLE: Final = "GPU_POOL_SSH"
#: How long a connection may take to be made.
_CONNECT_SECONDS: Final = 30
#: ssh itself asks for a sign of life this many times before the other side gives up.
_SIGNS_OF_LIFE: Final = 4

#: `host` or `user@host`; neither may look like an option, or mean anything to a shell or to ssh's own settings.
_TARGET: Final = re.compile(
    r"(?:[A-Za-z0-9_][A-Za-z0-9._+-]{0,63}@)?(?:[A-Za-z0-9_][A-Za-z0-9._-]{0,252}|[0-9A-Fa-f:.]{2,45})", re.ASCII
)


def check_target(text: str, name: str = "--ssh") -> str:
    """Raises a `ValueError` that says what was expected."""
    if not _TARGET.fullmatch(text):
        raise ValueError(f"{name} must be a host, or user@host, such as ana@gpu-server, not {text!r}")
    return text


def ssh_program(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Raises a `CommandError` if there is none."""
    try:
        words = shlex.split(environment.get(SSH_VARIABLE, "")) or ["ssh"]
    except ValueError as error:
        raise CommandError(f"{SSH_VARIABLE} cannot be read: {str(error).lower()}", Status.USAGE) from None
    if shutil.which(words[0]) is None:
        hint = f"install an OpenSSH client, or name another program in {SSH_VARIABLE}"
        raise CommandError(f"program {words[0]!r} not found: {hint}", Status.NOT_FOUND)
    return words


def watch_words(socket_path: str, silence_seconds: float) -> list[str]:
    """The connection over which the command is watched; the command's own session uses it too, so that a password is
    asked for once."""
    interval = max(1, round(silence_seconds / _SIGNS_OF_LIFE))
    return [
        *ssh_program(),
        *_options(socket_path, ControlMaster="yes", ControlPersist="no", ServerAliveInterval=interval),
        "-T",
    ]


def command_words(socket_path: str, *, has_terminal: bool) -> list[str]:
    # Errors of the connection are those of the other one; and no "Shared connection closed" after each command.
    return [
        *ssh_program(),
        *_options(socket_path, ControlMaster="no", LogLevel="ERROR"),
        "-tt" if has_terminal else "-T",
    ]


def _options(socket_path: str, **more: object) -> list[str]:
    options = {
        "ControlPath": socket_path,
        "ConnectTimeout": _CONNECT_SECONDS,
        "ServerAliveCountMax": _SIGNS_OF_LIFE,
        "ClearAllForwardings": "yes",
        "PermitLocalCommand": "no",
        "RemoteCommand": "none",
        "EscapeChar": "none",
        **more,
    }
    return [word for name, value in options.items() for word in ("-o", f"{name}={value}")]


def ssh_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Without keys: its settings may say that variables are sent on."""
    return {name: value for name, value in environment.items() if name not in SECRETS}
