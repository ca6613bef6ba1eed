"""Builds the wheel and the sdist, checks both, and tries the wheel in an empty environment.

`make release-check`. The checking tools are installed into a temporary environment, not into the one of the tests.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = ["build", "twine", "check-wheel-contents"]


def run(*words: str | Path, cwd: Path = ROOT) -> str:
    print("$", *words, flush=True)  # noqa: T201
    done = subprocess.run([str(word) for word in words], cwd=cwd, text=True, stdout=subprocess.PIPE, check=False)  # noqa: S603
    if done.returncode:
        sys.exit(f"{done.stdout}\nfailed with status {done.returncode}")
    return done.stdout.strip()


def environment(folder: Path, *packages: str | Path) -> Path:
    run(sys.executable, "-m", "venv", folder)
    run(folder / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages)
    return folder / "bin"


def main() -> None:
    found = re.search(r'= "(.+)"', (ROOT / "src/gpu_worker_pool/_version.py").read_text())
    assert found is not None
    version = found[1]
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if headings[0] != "Unreleased" and not headings[0].startswith(version):
        sys.exit(f"the changelog begins with {headings[0]!r}, but the version is {version}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tools = environment(folder / "tools", *TOOLS)
        run(tools / "python", "-m", "build", "--outdir", folder / "dist", ROOT)
        (wheel,), (sdist,) = folder.glob("dist/*.whl"), folder.glob("dist/*.tar.gz")
        run(tools / "twine", "check", "--strict", wheel, sdist)
        run(tools / "check-wheel-contents", wheel)
        for each in (wheel, sdist):
            programs = environment(folder / f"from-{each.suffix[1:]}", each)
            said = run(programs / "gpu-pool", "--version", cwd=folder)
            if version not in said:
                sys.exit(f"gpu-pool --version says {said!r}, but the version is {version}")
            if not (programs.parent / "share/man/man1/gpu-pool.1").exists():
                sys.exit(f"{each.name} brings no man page")
            settings = ["env", "GPU_BACKEND=simulated:2", f"GPU_POOL_STATE_DIR={folder / 'state'}"]
            run(*settings, programs / "gpu-pool", "run", "--", "true", cwd=folder)
    print(f"version {version}: wheel and sdist are in order")  # noqa: T201


if __name__ == "__main__":
    main()
