"""What frameworks are told of a share, and how PyTorch is limited to it."""

from __future__ import annotations

import os
import sys
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_worker_pool import GPUAssignment
from gpu_worker_pool import torch as our_torch
from gpu_worker_pool.lease_variables import memory_caps


def test_a_share_is_a_fraction_for_jax_and_growth_for_tensorflow() -> None:
    assert memory_caps(8192.0, [24576.0], {}) == {
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3333",
        "GPU_POOL_MEMORY_MB": "8192",
        "GPU_POOL_MEMORY_CAPS": "TF_FORCE_GPU_ALLOW_GROWTH,XLA_PYTHON_CLIENT_MEM_FRACTION",
    }


@pytest.mark.parametrize(
    ("memory_mb", "totals", "fraction"),
    [
        (24576.0, [24576.0], "1"),
        (30000.0, [24576.0], "1"),  # never more than all
        (1000.0, [24576.0], "0.0406"),  # rounded down: more would be others' memory
        (1.0, [1e6], "0.0001"),
        (8192.0, [24576.0, 81920.0], "0.1"),  # one number for all of them
        (8192.0, [24576.0, None], None),  # unknown is not 0
        (8192.0, [None], None),
        (8192.0, [0.0], None),
    ],
)
def test_the_fraction(memory_mb: float, totals: list[float | None], fraction: str | None) -> None:
    assert memory_caps(memory_mb, totals, {}).get("XLA_PYTHON_CLIENT_MEM_FRACTION") == fraction


def test_what_is_set_already_stays() -> None:
    environ = {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5", "TF_FORCE_GPU_ALLOW_GROWTH": ""}
    caps = memory_caps(8192.0, [16384.0], environ)
    assert not caps.keys() & environ.keys()


def test_jax_is_told_by_one_name_because_it_refuses_two() -> None:
    """It then falls back to the CPU."""
    old, new = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"
    for environ in ({}, {old: ".5"}, {new: ".5"}):
        found = {**memory_caps(8192.0, [16384.0], environ), **environ}
        assert len({old, new} & found.keys()) == 1, environ


def test_what_a_lease_around_has_set_does_not_count_as_set() -> None:
    outer = memory_caps(16000.0, [32000.0], {})
    assert memory_caps(8000.0, [32000.0], outer)["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.25"


def test_the_multi_process_service_is_told_where_its_daemon_runs(tmp_path: Path) -> None:
    name = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
    environ = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    assert name not in memory_caps(8192.5, [24576.0], environ)
    pid_file = tmp_path / "nvidia-cuda-mps-control.pid"
    pid_file.write_text("garbage")
    assert name not in memory_caps(8192.5, [24576.0], environ)
    pid_file.write_text(str(2**22 + 1))  # of no process
    assert name not in memory_caps(8192.5, [24576.0], environ)
    pid_file.write_text(str(os.getpid()))
    assert memory_caps(8192.5, [24576.0, 24576.0], environ)[name] == "0=8192M,1=8192M"


# --- PyTorch ---


class FakeCuda:
    def __init__(self, *totals_mb: int) -> None:
        self.totals = totals_mb
        self.fractions: dict[int, float] = {}

    def is_available(self) -> bool:
        return bool(self.totals)

    def device_count(self) -> int:
        return len(self.totals)

    def get_device_properties(self, place: int) -> Any:
        return SimpleNamespace(total_memory=self.totals[place] * 2**20)

    def set_per_process_memory_fraction(self, fraction: float, place: int) -> None:
        self.fractions[place] = fraction


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Of a host with two GPUs."""
    fake = FakeCuda(16384, 32768)
    torch = SimpleNamespace(cuda=fake, device=lambda kind, place=None: kind if place is None else f"{kind}:{place}")
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("GPU_POOL_MEMORY_MB", raising=False)
    return fake


def share(*gpus: int, memory_mb: float | None = 8192.0) -> GPUAssignment:
    uuids = tuple(f"GPU-{gpu}" for gpu in gpus)
    return GPUAssignment(gpus[0], "worker", datetime.now(), gpu_ids=gpus, gpu_uuids=uuids, memory_mb=memory_mb)


def test_a_process_that_sees_all_gpus_uses_its_own(cuda: FakeCuda) -> None:
    assert our_torch.device(share(1)) == "cuda:1"
    our_torch.limit_memory(share(1))
    assert cuda.fractions == {1: 0.25}


@pytest.mark.parametrize("visible", ["1", "GPU-1", "7,1", "7 GPU-1"])
def test_a_process_that_sees_some_numbers_them_anew(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    place = len(visible.replace(",", " ").split()) - 1
    assert our_torch.device(share(1)) == f"cuda:{place}"
    our_torch.limit_memory(share(1))
    assert cuda.fractions == {place: 0.5 if place == 0 else 0.25}


def test_inside_a_lease_no_assignment_is_needed(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    monkeypatch.setenv("GPU_POOL_MEMORY_MB", "8192")
    assert our_torch.device() == "cuda:0"
    our_torch.limit_memory()
    assert cuda.fractions == {0: 0.5, 1: 0.25}


def test_a_gpu_that_the_process_does_not_see_is_explained(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ValueError, match=r"does not see GPU 1: .*; set what assignment\.env says"):
        our_torch.device(share(1))


@pytest.mark.parametrize("text", [None, "much"])
def test_without_a_share_there_is_no_limit(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    if text is not None:
        monkeypatch.setenv("GPU_POOL_MEMORY_MB", text)
    for assignment in (None, share(0, memory_mb=None)):
        with pytest.raises(ValueError, match="request one with memory_mb= and share=True"):
            our_torch.limit_memory(assignment)


def test_without_cuda_it_is_the_cpu(cuda: FakeCuda) -> None:
    cuda.totals = ()
    assert our_torch.device(share(1)) == "cpu"
    our_torch.limit_memory(share(1))
    assert cuda.fractions == {}


def test_torch_is_imported_only_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ModuleNotFoundError, match="PyTorch is not installed: pip install torch"):
        our_torch.device()
