"""Prints, as requirements, the oldest version that pyproject.toml allows of each package that gpu-worker-pool needs.

The lower bounds are promises that nobody's pip tries: it installs the newest versions.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def main() -> None:
    for text in tomllib.loads(PROJECT.read_text())["project"]["dependencies"]:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate():
            print(f"{requirement.name}=={lowest(requirement)}")  # noqa: T201  # what it is for


def lowest(requirement: Requirement) -> Version:
    command = [sys.executable, "-m", "pip", "index", "versions", requirement.name, "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603  # names of our own
    listed = re.search(r"Available versions: (.*)", done.stdout)
    assert listed is not None, done.stdout + done.stderr
    return min(requirement.specifier.filter(map(Version, listed[1].split(", "))))


if __name__ == "__main__":
    main()
