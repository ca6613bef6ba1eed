"""The rooms of the package: imports point one way, and documented import paths stay where they were."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

import gpu_worker_pool

ROOT = Path(gpu_worker_pool.__file__).parent
#: What each room may import, itself included; nothing imports upwards.
MAY_IMPORT = {
    "core": {"core"},
    "simulation": {"simulation", "ledger", "core"},
    "hardware": {"hardware", "core"},
    "ledger": {"ledger", "core", "hardware"},
    "broker": {"broker", "ledger", "hardware", "core"},
    "api": {"api", "broker", "hardware", "core"},
    "fleet": {"fleet", "leases", "api", "broker", "ledger", "hardware", "core"},
    "leases": {"leases", "api", "broker", "ledger", "hardware", "core"},
    "workers": {"workers", "leases", "hardware", "core"},
    "client": {"client", "workers", "leases", "api", "hardware", "core"},
    "gpu_server": {"gpu_server", "fleet", "api", "broker", "ledger", "hardware", "core"},
    "for_pytest": {"for_pytest", "cli", "client", "leases", "hardware", "core"},
    "cli": {"cli", "simulation", "client", "leases", "api", "broker", "ledger", "hardware", "core"}
    | {"gpu_server", "fleet"},
}
#: Modules at the root that belong to no room, and what they may import: each other, and the core.
FOUNDATION = {
    "_version",
    "checks",
    "clocks",
    "config",
    "config_file",
    "durations",
    "environment",
    "lease_variables",
    "errors",
    "forks",
    "host_socket",
    "models",
    "state_directory",
    "wording",
}
#: Documented import paths, thin modules that re-export what is in a room; and what puts rooms together.
ENTRANCES = {
    "__init__",
    "__main__",
    "decorators",
    "endpoints",
    "gpu_monitor",
    "http_client",
    "joblib",
    "pytest_plugin",
    "sync",
    "testing",
    "torch",
    "worker_pool_manager",
}


def imported(path: Path) -> set[str]:
    """The modules of this package that a file imports, at run time or for types, without the package's own name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            module = node.module or ""
            found |= {f"{module}.{alias.name}" for alias in node.names} if module == "gpu_worker_pool" else {module}
    return {name.removeprefix("gpu_worker_pool.") for name in found if name.startswith("gpu_worker_pool.")}


def upward_imports(room: str, path: Path) -> list[str]:
    wrong = []
    for name in imported(path):
        target = name.partition(".")[0]
        if target in FOUNDATION or target in MAY_IMPORT.get(room, {"core"}):
            continue
        if target == "__version__" or (room == "cli" and target in gpu_worker_pool.__all__):
            continue
        wrong.append(name)
    return sorted(wrong)


FILES = [
    pytest.param(room, path, id=str(path.relative_to(ROOT)))
    for room in MAY_IMPORT
    for path in sorted((ROOT / room).rglob("*.py"))
]


@pytest.mark.parametrize(("room", "path"), FILES)
def test_nothing_imports_upwards(room: str, path: Path) -> None:
    assert upward_imports(room, path) == []


@pytest.mark.parametrize("name", sorted(FOUNDATION))
def test_the_foundation_imports_no_room_but_the_core(name: str) -> None:
    assert upward_imports("foundation", ROOT / f"{name}.py") == []


def test_every_module_has_its_room() -> None:
    assert {path.stem for path in ROOT.glob("*.py")} == FOUNDATION | ENTRANCES
    assert {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()} == set(MAY_IMPORT)


def test_an_upward_import_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("from gpu_worker_pool.client import sync\nimport gpu_worker_pool.broker.local\n")
    assert upward_imports("core", tmp_path / "wrong.py") == ["broker.local", "client"]
    assert upward_imports("cli", tmp_path / "wrong.py") == []


#: The blocking client's twins of the async ones, documented under these names.
TWINS = {"GPUContextManager", "GPUWorkerPoolClient"}


def test_no_class_name_stands_for_two_things() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in found.items() if len(files) > 1 and name not in TWINS} == {}


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("client", ["GPUWorkerPoolClient", "GPUContextManager", "gpu_worker_pool_client"]),
        ("sync", ["GPUWorkerPoolClient", "GPUContextManager", "gpu_worker_pool_client"]),
        ("decorators", ["with_gpu"]),
        ("worker_pool_manager", ["WorkerPoolManager", "WorkerTimeoutError", "StaleAssignmentError"]),
        ("gpu_monitor", ["GPUMonitor", "MultiEndpointGPUMonitor"]),
        ("endpoints", ["EndpointManager"]),
        ("http_client", ["AsyncGPUStatsHTTPClient", "MultiEndpointHTTPClientPool", "ServiceUnavailableError"]),
        ("core", ["GPUAllocator", "WorkerQueue", "WorkerAssignmentTracker", "Requirements"]),
        ("config", ["EnvironmentConfigurationManager", "MultiEndpointConfigurationManager"]),
        ("models", ["GPUAssignment", "GPUStats", "PoolStatus", "WorkerInfo"]),
    ],
)
def test_documented_import_paths_stay(module: str, names: list[str]) -> None:
    found = import_module(f"gpu_worker_pool.{module}")
    assert [name for name in names if not hasattr(found, name)] == []
