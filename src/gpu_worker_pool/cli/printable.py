"""Text that others have chosen, such as names and labels: whoever shows it on a terminal must not be driven by it."""

from __future__ import annotations


def printable(text: str) -> str:
    """In one line, with as many characters: no escape sequence, nor what turns the direction of reading."""
    return "".join(char if char.isprintable() else "?" for char in text)
