"""For programs with PyTorch: the device of an assignment, and its share of the memory. Imports torch when called."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.lease_variables import MEMORY_VARIABLE

if TYPE_CHECKING:
    from gpu_worker_pool.models import GPUAssignment

__all__ = ["device", "limit_memory"]


def device(assignment: GPUAssignment | None = None) -> Any:
    """The `torch.device` of the first GPU of an assignment, or the CPU's where CUDA is not available.

    Without an assignment: of the lease inside which this process runs, as a worker of `GPUProcessPoolExecutor` or a
    command of `gpu-pool run` does.
    """
    torch = _torch()
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", _places(assignment, torch)[0])


def limit_memory(assignment: GPUAssignment | None = None) -> None:
    """Have PyTorch raise an out-of-memory error when this process uses more than its share of a GPU.

    Only its own allocator obeys: not CUDA's contexts, nor other libraries. Raises a `ValueError` if the assignment is
    no share; does nothing where CUDA is not available.
    """
    torch = _torch()
    memory_mb = assignment.memory_mb if assignment is not None else _share_of_this_process()
    if memory_mb is None:
        raise ValueError("there is no share to keep to: request one with memory_mb= and share=True")
    if not torch.cuda.is_available():
        return
    for place in _places(assignment, torch):
        total_mb = torch.cuda.get_device_properties(place).total_memory / 2**20
        torch.cuda.set_per_process_memory_fraction(min(memory_mb / total_mb, 1.0), place)


def _torch() -> Any:
    try:
        return import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError("PyTorch is not installed: pip install torch", name="torch") from None


def _share_of_this_process() -> float | None:
    text = os.environ.get(MEMORY_VARIABLE, "")
    try:
        return float(text) if text else None
    except ValueError:
        return None


def _places(assignment: GPUAssignment | None, torch: Any) -> list[int]:
    """The numbers of its GPUs among those that this process sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = None if visible is None else [name for name in visible.replace(",", " ").split() if name]
    if assignment is None:
        return list(range(torch.cuda.device_count() if names is None else len(names))) or [0]
    indices: list[int] = list(assignment.local_gpu_ids)
    if names is None:
        return indices
    uuids = assignment.gpu_uuids or (None,) * len(indices)
    found = [
        next((place for place, name in enumerate(names) if name in (str(index), uuid)), None)
        for index, uuid in zip(indices, uuids, strict=True)
    ]
    if None in found:
        raise ValueError(
            f"this process does not see GPU {assignment.gpu_id}: CUDA_VISIBLE_DEVICES is {visible!r}; set what "
            "assignment.env says before torch is imported"
        )
    return [place for place in found if place is not None]
