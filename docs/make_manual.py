"""Writes the man page `gpu-pool.1` from the help texts of the commands: `make docs`.

Another path than that of the page may be given; `--check` only compares.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from gpu_worker_pool._version import __version__
from gpu_worker_pool.cli.program import COMMANDS, gpu_pool

PAGE = Path(__file__).parent / "gpu-pool.1"

FILES = """\
.TP
.I ~/.config/gpu-pool/config.toml\\fR, \\fI/etc/gpu-pool/config.toml
Defaults of clients: the endpoint, a file with the key.
.TP
.I /etc/gpu-pool/policy.toml
Limits for users and groups.
.TP
.I /var/lib/gpu-pool
The ledger that the users of this host share, where
.B gpu-pool setup
made it; else
.I ~/.local/state/gpu-pool\\fR.
.TP
.I /run/gpu-pool/gpu-pool.sock
The server's Unix socket, which
.B local://
uses where it exists."""


def roff(text: str) -> str:
    """As text: no sign in it is a command."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("`", "\\(ga").replace("'", "\\(aq")
    return re.sub(r"[^\x00-\x7f]", lambda match: f"\\[u{ord(match[0]):04X}]", text)


def paragraphs(text: str | None) -> list[str]:
    """Of click's texts, in which `\\b` begins a paragraph whose lines stay as they are."""
    found = []
    for paragraph in (text or "").strip().split("\n\n"):
        lines = paragraph.strip("\n").split("\n")
        if lines[0].strip() == "\b":
            found += [".PP", ".nf", *(f"\\&{roff(line)}" for line in lines[1:]), ".fi"]
        elif paragraph.strip():
            found += [".PP", f"\\&{roff(' '.join(line.strip() for line in lines))}"]
    return found


def options(command: click.Command, context: click.Context) -> list[str]:
    found = []
    for option in command.get_params(context):
        if (record := option.get_help_record(context)) is not None:
            found += [".TP", f"\\fB{roff(record[0])}\\fR", f"\\&{roff(record[1])}"]
    return found


def manual() -> str:
    top = click.Context(gpu_pool, info_name="gpu-pool", **gpu_pool.context_settings)
    lines = [
        '.\\" Made by docs/make_manual.py.',
        f'.TH GPU\\-POOL 1 "" "gpu\\-worker\\-pool {roff(__version__)}" "User Commands"',
        ".SH NAME",
        "gpu\\-pool \\- get a GPU that is really free, and keep it until you are done",
        ".SH SYNOPSIS",
        ".B gpu\\-pool",
        ".I COMMAND",
        "[OPTIONS] [ARGUMENTS]",
        ".SH OPTIONS",
        *options(gpu_pool, top),
        ".SH COMMANDS",
    ]
    for name in COMMANDS:
        command = gpu_pool.get_command(top, name)
        assert command is not None
        context = click.Context(command, info_name=f"gpu-pool {name}", parent=top, **command.context_settings)
        usage = " ".join(command.collect_usage_pieces(context))
        lines += [f'.SS "gpu\\-pool {roff(name)} {roff(usage)}"', *paragraphs(command.help)]
        lines += [*options(command, context), *paragraphs(command.epilog)]
    lines += [".SH FILES", FILES, ".SH EXAMPLES", *paragraphs(gpu_pool.epilog)]
    return "\n".join(lines) + "\n"


def main() -> None:
    if sys.argv[1:] == ["--check"]:
        is_same = PAGE.read_text(encoding="ascii") == manual()
        sys.exit(0 if is_same else f"{PAGE} is out of date: run make docs")
    page = Path(sys.argv[1]) if sys.argv[1:] else PAGE
    page.write_text(manual(), encoding="ascii")


if __name__ == "__main__":
    main()
