"""What importing a part of the package drags in, looked at in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

SERVER_ONLY = {"fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client"}


def loaded_by(statement: str) -> set[str]:
    program = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
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
