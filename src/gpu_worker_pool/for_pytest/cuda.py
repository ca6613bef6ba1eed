"""Tells whether this process has loaded CUDA, and frees the GPU memory that its frameworks cache."""

from __future__ import annotations

import gc
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

_LIBRARIES: Final = ("/libcuda.so", "/libamdhip64")


def is_cuda_loaded() -> bool:
    """CUDA's driver library reads CUDA_VISIBLE_DEVICES when it is initialized; NVML is another library."""
    try:
        mapped = Path("/proc/self/maps").read_text(errors="replace")
        return any(name in mapped for name in _LIBRARIES)
    except OSError:
        return False


def free_cached_memory() -> None:
    """Other processes cannot use memory that a framework caches."""
    gc.collect()
    with suppress(Exception):
        if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    with suppress(Exception):
        if (cupy := sys.modules.get("cupy")) is not None:
            cupy.get_default_memory_pool().free_all_blocks()
