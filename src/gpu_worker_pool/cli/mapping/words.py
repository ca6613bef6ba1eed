"""The arguments of `map`, in GNU parallel's syntax: a command with placeholders, and after `:::` what replaces them."""

from __future__ import annotations

import re
from itertools import product
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

#: Begins the arguments; given again, each combination is a job.
SEPARATOR: Final = ":::"
#: More jobs, or longer arguments, are a mistake.
MOST_JOBS: Final = 1_000_000
MOST_BYTES: Final = 64 * 1024 * 1024
#: All arguments, one of them by its number, or the number of the job.
_PLACEHOLDER: Final = re.compile(r"\{(|#|[1-9][0-9]?)\}")


class JobWords(NamedTuple):
    #: From 1.
    number: int
    #: The arguments as people read them.
    shown: str
    command: list[str]


def split_words(words: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """The command, and the arguments behind each `:::`."""
    groups: list[list[str]] = [[]]
    for word in words:
        if word == SEPARATOR:
            groups.append([])
        else:
            groups[-1].append(word)
    return groups[0], groups[1:]


def arguments_of_lines(lines: Iterable[bytes]) -> list[str]:
    """One argument per line; empty lines are skipped. Raises a `ValueError`."""
    found: list[str] = []
    size = 0
    for line in lines:
        size += len(line)
        if size > MOST_BYTES:
            raise ValueError(f"stdin has more than {MOST_BYTES // 1024**2} MiB")
        text = line.rstrip(b"\r\n").decode(errors="surrogateescape")
        if "\0" in text:
            raise ValueError("a line of stdin has a null byte: it must be text, one argument per line")
        if text:
            found.append(text)
    return found


def jobs_of(command: Sequence[str], sources: Sequence[Sequence[str]]) -> Iterator[JobWords]:
    """One job for each combination of one argument from each source. Raises a `ValueError`."""
    number_of_jobs = 1
    for source in sources:
        number_of_jobs *= len(source)
    if number_of_jobs > MOST_JOBS:
        raise ValueError(f"these are {number_of_jobs} jobs, and at most {MOST_JOBS} are possible")
    has_placeholder = any(_placeholders(word, len(sources)) for word in command)
    for number, arguments in enumerate(product(*sources), 1):
        words = [_filled(word, arguments, number) for word in command]
        yield JobWords(number, " ".join(arguments), words if has_placeholder else [*words, *arguments])


def has_placeholder(word: str) -> bool:
    return _PLACEHOLDER.search(word) is not None


def _placeholders(word: str, number_of_sources: int) -> list[str]:
    return [name for name in _PLACEHOLDER.findall(word) if not name.isdecimal() or int(name) <= number_of_sources]


def _filled(word: str, arguments: Sequence[str], number: int) -> str:
    def value(found: re.Match[str]) -> str:
        name = found[1]
        if not name:
            return " ".join(arguments)
        if name == "#":
            return str(number)
        return arguments[int(name) - 1] if int(name) <= len(arguments) else found[0]

    return _PLACEHOLDER.sub(value, word)
