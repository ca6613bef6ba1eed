"""Prints one JSON document."""

from __future__ import annotations

import json
import sys
from typing import Any


def print_json(body: Any) -> None:
    json.dump(body, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")
