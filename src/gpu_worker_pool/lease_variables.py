"""The environment variables that show a program its GPUs and no others."""

from __future__ import annotations


def lease_variables(devices: str, lease_id: str | None) -> dict[str, str]:
    """Without a lease only CUDA is told."""
    # Otherwise CUDA numbers the fastest GPU first, unlike nvidia-smi.
    cuda = {"CUDA_VISIBLE_DEVICES": devices, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return cuda if lease_id is None else cuda | {"NVIDIA_VISIBLE_DEVICES": devices, "GPU_POOL_LEASE_ID": lease_id}
