"""What importing a part of the package drags in, looked at in a fresh interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SERVER_ONLY = {"fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client"}


def loaded_by(statement: str, **environment: str) -> set[str]:
    program = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    variables = os.environ | environment
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, env=variables)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import gpu_worker_pool",
        "import gpu_worker_pool.worker_pool_manager, gpu_worker_pool.testing",
        "import gpu_worker_pool.hardware.sampler, gpu_worker_pool.hardware.visibility",
        "from gpu_worker_pool.gpu_server import ServerSettings, get_bool_env",
    ],
)
def test_only_a_server_imports_a_server(statement: str) -> None:
    assert not loaded_by(statement) & SERVER_ONLY


def test_a_program_without_a_server_loads_no_http_library(tmp_path: Path) -> None:
    grant = (
        "from gpu_worker_pool import sync\n"
        "with sync.GPUWorkerPoolClient('local://') as client:\n"
        "    client.release_gpu(client.request_gpu())"
    )
    loaded = loaded_by(grant, GPU_BACKEND="simulated:1", GPU_POOL_STATE_DIR=str(tmp_path))
    assert not loaded & (SERVER_ONLY | {"aiohttp", "yarl", "multidict", "email"})


@pytest.mark.parametrize(
    "statement",
    [
        "from gpu_worker_pool.gpu_server import create_app\ncreate_app()\nfrom gpu_worker_pool.gpu_server import app",
        "from gpu_worker_pool.gpu_server import app",
        "import gpu_worker_pool.gpu_server.application\nfrom gpu_worker_pool.gpu_server import app",
    ],
)
def test_the_documented_app_is_one_application_however_it_is_reached(statement: str) -> None:
    again = "import gpu_worker_pool.gpu_server as server\nassert server.app is app\nassert callable(app.openapi)"
    assert "fastapi" in loaded_by(f"{statement}\n{again}")
