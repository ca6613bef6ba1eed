"""What the package imports, it declares; and what it declares, it uses."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import gpu_worker_pool

PACKAGE = Path(gpu_worker_pool.__file__).parent
ROOT = PACKAGE.parents[1]
HYDRA = ROOT / "integrations" / "hydra"
#: Imported only by who has them: what they extend, or what a program brings itself.
BROUGHT_BY_OTHERS = {"amdsmi", "cloudpickle", "cupy", "joblib", "pytest", "torch"}
#: uvicorn loads these for us: the loop and the HTTP parser that the server is measured with.
LOADED_BY_NAME = {"httptools", "uvloop"}


def imported(package: Path = PACKAGE) -> dict[str, str]:
    """Each package that is not Python's or ours, and a file that imports it."""
    found: dict[str, str] = {}
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                found.setdefault(name.partition(".")[0], str(path.relative_to(package)))
    ours = sys.stdlib_module_names | {package.name, "__future__"}
    return {name: where for name, where in found.items() if name not in ours}


def declared(folder: Path = ROOT) -> set[str]:
    return names(project(folder)["dependencies"])


def optional() -> set[str]:
    """What an extra brings, and no other does."""
    found = {name for each in project()["optional-dependencies"].values() for name in names(each)}
    return found - {"gpu-worker-pool"}


def project(folder: Path = ROOT) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def names(requirements: list[str]) -> set[str]:
    return {normalized(re.split(r"[<>=!~; \[]", each)[0]) for each in requirements}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def distribution_of(module: str) -> str:
    return normalized(packages_distributions().get(module, [module])[0])


def test_every_imported_package_is_declared() -> None:
    missing = {
        module: where
        for module, where in imported().items()
        if module not in BROUGHT_BY_OTHERS and distribution_of(module) not in declared() | optional()
    }
    assert missing == {}


def test_every_declared_package_is_used() -> None:
    used = {distribution_of(module) for module in imported()} | LOADED_BY_NAME
    assert (declared() | optional()) - used == set()


def test_all_brings_every_extra() -> None:
    extras = project()["optional-dependencies"]
    assert extras.pop("all") == [f"gpu-worker-pool[{','.join(extras)}]"]
    assert set(extras) == {"fleet", "plots"}


def test_what_others_bring_is_not_needed() -> None:
    """Nothing of it is imported by the modules that everybody loads."""
    assert not BROUGHT_BY_OTHERS & {distribution_of(module) for module in declared()}


def test_only_the_store_of_a_fleet_imports_what_an_extra_brings() -> None:
    importing = re.compile(r"^\s*(import|from) psycopg", re.MULTILINE)
    files = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if importing.search(path.read_text())}
    assert files == {"fleet/postgres.py"}


def test_the_hydra_launcher_declares_what_it_imports_and_nothing_else() -> None:
    distributions = {"hydra": "hydra-core", "gpu_worker_pool": "gpu-worker-pool"}
    used = {distributions.get(module, module) for module in imported(HYDRA / "hydra_plugins")}
    assert declared(HYDRA) == used
