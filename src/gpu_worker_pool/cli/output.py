"""Prints lines and JSON; text from other users, such as labels, is made safe for a terminal."""

from __future__ import annotations

import sys
from typing import Any


def printable(text: str) -> str:
    """One line of the same length, without escape sequences or marks that change the reading direction."""
    return "".join(char if char.isprintable() else "?" for char in text)


def print_line(text: str = "") -> None:
    sys.stdout.write(f"{printable(text)}\n")


def print_json(body: Any) -> None:
    import json  # `gpu-pool --help` does without

    json.dump(body, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")
