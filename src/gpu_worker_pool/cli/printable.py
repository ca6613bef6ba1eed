"""Makes text from other users, such as labels, safe to print on a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """One line of the same length, without escape sequences or marks that change the reading direction."""
    return "".join(char if char.isprintable() else "?" for char in text)
