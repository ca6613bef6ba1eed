"""What is sent to the host of a remote command: a shell script that watches the command, and one that starts it.

Words and values go through the standard input of the watching session, never through an argument, which everyone on
either host could read. What is an argument is the same every time, so that any login shell understands it.
"""

from __future__ import annotations

import os
import shlex
from importlib.resources import files
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: Stores both scripts in a folder that only this user can read, and continues as the first. A shell's `read` takes one
#: byte at a time, so what follows the scripts is left for it.
BOOTSTRAP: Final = (
    "exec sh -c '"
    'take() { while [ "$1" -gt 0 ] && IFS= read -r line; do printf "%s\\n" "$line"; set -- $(($1 - 1)); done; }; '
    "umask 077; read -r folder watch run silence && "
    'mkdir "$folder" && take "$watch" > "$folder/watch" && take "$run" > "$folder/run" && '
    'exec sh "$folder/watch" "$folder" "$silence"'
    "'"
)

SHORTEST_SILENCE_SECONDS: Final = 5.0

#: Ends with the command's own status, also if a signal ended the command: ssh alone would say 255. Signals are caught
#: (the command gets them with their default action) so that this shell outlives the command.
_RUN: Final = """\
rm -f "$0"
trap : HUP INT QUIT TERM USR1 USR2
echo $$ > {folder}/leader
cd -- {directory} 2> /dev/null || {{ cd || cd /; printf '%s\\n' {moved} >&2; }}
{exports}
export GPU_POOL_RUN_MARK={nonce}
set -- {words}
command -v -- "$1" > /dev/null || {{ printf '%s\\n' {not_found} >&2; echo 127 > {folder}/status; exit 127; }}
exec 3>&2 2> /dev/null # a shell says "Terminated", the command does not
(exec 2>&3 3>&- && exec sh -c 'echo $$ > "$0/pid" && exec "$@"' {folder} "$@")
status=$?
echo "$status" > {folder}/status
echo "$status" > {folder}/done < /dev/null &
exit "$status"
"""


def remote_folder(nonce: str) -> str:
    # Made by `mkdir`, which fails if another user was first.
    return f"/tmp/gpu-pool-{nonce}"  # noqa: S108


def command_line(nonce: str) -> str:
    """What the session of the command runs, once the scripts are there."""
    return f"exec sh {remote_folder(nonce)}/run"


def scripts(
    nonce: str,
    words: Sequence[str],
    variables: Mapping[str, str],
    *,
    directory: str,
    host: str,
    silence: float,
) -> bytes:
    """What the watching session reads first."""
    folder = remote_folder(nonce)
    moved = f"gpu-pool: {directory!r} cannot be entered on {host}: the command runs in the home directory"
    run = _RUN.format(
        folder=folder,
        directory=shlex.quote(directory),
        moved=shlex.quote(moved),
        exports="\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
        nonce=nonce,
        words=shlex.join(words),
        not_found=shlex.quote(f"gpu-pool: program {words[0]!r} not found on {host}"),
    )
    # Names and words are bytes to the system: what is not UTF-8 arrives as surrogates.
    watch_text, run_text = files(__package__).joinpath("watch.sh").read_bytes(), os.fsencode(run)
    counts = [text.count(b"\n") for text in (watch_text, run_text)]
    return f"{folder} {counts[0]} {counts[1]} {round(silence)}\n".encode() + watch_text + run_text


def silence_seconds(ttl_seconds: float) -> float:
    """Without a sign of life for one TTL, the other side counts the connection as gone, and ends the command."""
    return max(ttl_seconds, SHORTEST_SILENCE_SECONDS)


def working_directory() -> str:
    """As the shell calls it, which is more likely to exist elsewhere than where its links lead."""
    try:
        here = os.getcwd()  # noqa: PTH109
    except OSError:  # it was deleted
        return "."
    called = os.environ.get("PWD", "")
    try:
        return called if called.startswith("/") and os.path.samefile(called, here) else here  # noqa: PTH121
    except OSError:
        return here
