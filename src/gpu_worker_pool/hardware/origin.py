"""Where the requests of a process come from: its user, host, pid and program. Loads fast: the command line needs it.

A program is known by its script's or its own name. Arguments are never shown: they may be secret.
"""

from __future__ import annotations

import os
import re
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpu_worker_pool.hardware.proc import process_stat, user_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpu_worker_pool.core.events import Origin

#: Longer names are cut.
LONGEST_NAME: Final = 64
#: Where no script has a name: `python -c`, or an interactive session.
PYTHON: Final = "python"
#: Loaded in the process of every notebook.
_KERNEL: Final = "ipykernel.kernelapp"
#: Of a command line: enough for the name of a script.
_MOST_BYTES: Final = 64 * 1024

_PYTHON_NAME: Final = re.compile(r"(?:python|pypy)[0-9.]*[dtw]?")


class _Interpreter(NamedTuple):
    """Which options may stand before its script; after any other one, only the interpreter itself is named."""

    flags: str = ""
    #: Their value follows, in the same word or as the next one.
    with_value: str = ""
    #: Their value is the name of a module.
    with_module: str = ""


_PYTHON: Final = _Interpreter("bBdEiIOPqRsSuvx", "WX", "m")
_SHELL: Final = _Interpreter("aefhilmnpruvxBCEHPT", "oO")
_OTHERS: Final = dict.fromkeys(("sh", "bash", "dash", "ash", "ksh", "zsh"), _SHELL) | dict.fromkeys(
    ("busybox", "fish", "julia", "lua", "node", "perl", "php", "Rscript", "ruby"), _Interpreter()
)


def origin_of_this_process() -> Origin:
    """Made once: a request must not take time for it."""
    return _origin_of(os.getpid())


@lru_cache(maxsize=1)
def _origin_of(pid: int) -> Origin:
    """By pid: a forked child is another process."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return origin(program_of_python(getattr(sys, "argv", ()), main, sys.modules, os.environ), pid)


def origin(program: str | None, pid: int) -> Origin:
    """Of a process of this user on this host."""
    from gpu_worker_pool.core.events import Origin

    return Origin(bounded(user_name(os.getuid())), host_name(), pid, program)


def worker_name(what: str, pid: int | None = None) -> str:
    """The holder as others see it: user, program and pid."""
    name = f"{user_name(os.getuid())}:{os.path.basename(what)}"  # noqa: PTH119
    return f"{re.sub(r'[^A-Za-z0-9._:-]+', '_', name)[:50]}:{pid or os.getpid()}"


def is_interactive() -> bool:
    """Whether a person runs this process line by line or cell by cell."""
    return _KERNEL in sys.modules or hasattr(sys, "ps1")


@lru_cache(maxsize=1)
def host_name() -> str:
    return bounded(os.uname().nodename) or "localhost"


def bounded(name: str) -> str | None:
    """Printable and not too long; None if nothing is left of it."""
    return "".join(letter for letter in name if letter.isprintable())[:LONGEST_NAME].strip() or None


def program_of_python(
    argv: Sequence[str], main_spec: Any, modules: Mapping[str, Any], environ: Mapping[str, str]
) -> str:
    """The program of a Python process: its notebook, its module (`python -m`) or its script."""
    if _KERNEL in modules:
        return _base_name(environ.get("JPY_SESSION_NAME", "")) or "notebook"
    module: str | None = getattr(main_spec, "name", None)
    if module is not None and module != "__main__":  # which a directory or an archive has
        return bounded(module.removesuffix(".__main__")) or PYTHON
    script = argv[0] if argv else ""
    return PYTHON if script in ("", "-", "-c", "-m") else _base_name(script) or PYTHON


def program_of_command(command: Sequence[str]) -> str | None:
    """The program that a command runs: `train.py` for `python -u train.py --lr 3`, never an argument of it."""
    name = _base_name(command[0]) if command else None
    if name is None:
        return None
    interpreter = _PYTHON if _PYTHON_NAME.fullmatch(name) else _OTHERS.get(name)
    return name if interpreter is None else _script_of(interpreter, command[1:]) or name


def program_of_process(pid: int) -> str | None:
    """The same for a process that runs; None if it is gone or hidden."""
    stat = process_stat(pid)
    if stat is None:
        return None
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123  # loads faster
            first, *words = [os.fsdecode(word) for word in file.read(_MOST_BYTES).split(b"\0")]
    except OSError:
        return bounded(stat.command)
    if not first or (" " in first and not any(words)):
        return bounded(stat.command)  # it has no command line, or has replaced it by a text
    # A login shell begins its name with a dash.
    return program_of_command([first.removeprefix("-"), *words[:-1]])


def _script_of(interpreter: _Interpreter, words: Sequence[str]) -> str | None:
    """The script or module among its words; None where it runs something else, such as code in an argument."""
    rest = iter(words)
    for word in rest:
        if word == "--":
            return _script_name(next(rest, ""))
        if word in ("", "-") or word.startswith("+"):
            return None
        if not word.startswith("-"):
            return _script_name(word)
        for at, option in enumerate(word[1:], start=2):
            if option in interpreter.with_module:
                return bounded(word[at:] or next(rest, ""))
            if option in interpreter.with_value:
                if not word[at:]:
                    next(rest, None)
                break
            if option not in interpreter.flags:
                return None
    return None


def _script_name(path: str) -> str | None:
    """None for `/dev/fd/63`, which a shell makes of `<(…)`."""
    return None if path.startswith(("/dev/", "/proc/")) else _base_name(path)


def _base_name(path: str) -> str | None:
    return bounded(os.path.basename(path.rstrip("/")))  # noqa: PTH119
