"""The checks of `gpu-pool doctor`. They change nothing, except that they may create the state directory."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Literal

import apsw

from gpu_worker_pool._version import __version__
from gpu_worker_pool.cli.checking import Finding
from gpu_worker_pool.cli.checking.fleet_checks import check_fleet
from gpu_worker_pool.cli.checking.server_checks import check_servers
from gpu_worker_pool.cli.checking.settings_list import all_settings
from gpu_worker_pool.cli.checking.sharing import check_sharing
from gpu_worker_pool.clocks import boot_time
from gpu_worker_pool.config import MultiEndpointConfigurationManager, is_loopback_url, is_private_url
from gpu_worker_pool.errors import DriverError
from gpu_worker_pool.hardware.readers.choose import make_reader
from gpu_worker_pool.hardware.readers.nvml_library import NVMLLibrary
from gpu_worker_pool.hardware.visibility import VisibilityFilter
from gpu_worker_pool.host_socket import socket_path
from gpu_worker_pool.leases.endpoint_choice import chosen_endpoints, is_local, local_backend
from gpu_worker_pool.leases.tokens import allows_insecure_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gpu_worker_pool.config import EndpointConfig
    from gpu_worker_pool.hardware.readers import Reader
    from gpu_worker_pool.hardware.samples import DriverAnswer

#: A driver that takes longer is reported as hanging.
DRIVER_SECONDS: Final = 10.0


def diagnose(given: Sequence[str]) -> list[Finding]:
    findings = [*_versions()]
    try:
        endpoints = chosen_endpoints(given)
    except ValueError as error:
        findings.append(Finding("wrong", "endpoints", str(error), "use a URL such as http://gpu-1:8000, or local://"))
        endpoints = ()
    # With remote servers only, this host needs no driver.
    is_local_needed = any(is_local(endpoint) or is_loopback_url(endpoint.url) for endpoint in endpoints)
    findings += _hardware(is_needed=is_local_needed)
    # Programs that use the server's socket have no ledger of their own.
    if socket_path() is None:
        findings += check_sharing()
    findings += asyncio.run(check_servers(endpoints))
    findings += check_fleet(endpoints)
    findings += _keys(endpoints)
    findings += _settings()
    return findings


# --- this installation ---


def _versions() -> Iterator[Finding]:
    yield Finding("ok", "gpu-pool", f"{__version__}, Python {platform.python_version()}, {sys.executable}")
    sqlite = tuple(map(int, apsw.sqlite_lib_version().split(".")))
    if sqlite < (3, 51, 3):
        yield Finding(
            "wrong",
            "SQLite",
            f"{apsw.sqlite_lib_version()} may damage a ledger that several processes share",
            "pip install --upgrade apsw",
        )
    else:
        yield Finding("ok", "SQLite", apsw.sqlite_lib_version())


# --- the driver, and what it shows ---


def _hardware(*, is_needed: bool) -> Iterator[Finding]:
    bad: Literal["warning", "wrong"] = "wrong" if is_needed else "warning"
    try:
        backend = local_backend()
    except ValueError as error:
        yield Finding("wrong", "driver", str(error), "unset GPU_BACKEND")
        return
    if backend.startswith("simulated"):
        yield Finding(
            "warning", "driver", f"GPU_BACKEND={backend}: the GPUs are simulated", "unset GPU_BACKEND for real ones"
        )
    else:
        yield from _ways_to_read(bad)
    answer = read_gpus(backend)
    if isinstance(answer, DriverError):
        yield Finding(bad, "GPUs", str(answer), _driver_advice(answer))
        return
    if not answer.gpus:
        yield Finding(bad, "GPUs", "the driver shows none", "nvidia-smi -L lists them; in a container: --gpus all")
        return
    driver = f", driver {answer.driver_version}" if answer.driver_version else ""
    yield Finding("ok", "GPUs", f"{len(answer.gpus)} seen by {answer.backend}{driver}")
    for gpu in answer.gpus:
        if gpu.fault:
            yield Finding("wrong", f"GPU {gpu.index}", gpu.fault, gpu.recovery_action or "nvidia-smi -q says more")
        if gpu.processes is None:
            yield Finding("warning", f"GPU {gpu.index}", "its processes cannot be seen", "in a container: --pid=host")
    yield from _visible(answer)


def _ways_to_read(bad: Literal["warning", "wrong"]) -> Iterator[Finding]:
    """One of the two is enough."""
    found = shutil.which("nvidia-smi")
    answer = read_gpus("nvml")
    nvml = str(answer) if isinstance(answer, DriverError) else None
    if nvml is None:
        yield Finding("ok", "NVML", "can be used")
        yield from _memory_limits()
    else:
        yield Finding("warning" if found else bad, "NVML", nvml, "" if found else "install the NVIDIA driver")
    if found:
        yield Finding("ok", "nvidia-smi", found)
    elif nvml is None:
        yield Finding("ok", "nvidia-smi", "not found, but not needed")


def _memory_limits() -> Iterator[Finding]:
    """Only where the driver has them: elsewhere nothing is wrong, and nothing can be done."""
    with suppress(DriverError), NVMLLibrary() as nvml:
        if nvml.limits_memory:
            yield Finding(
                "ok",
                "memory limits",
                "an administrator can limit the GPU memory of a cgroup with this driver (nvmlDeviceSetMemoryLimits); "
                "gpu-pool does not: a share with --memory is what programs obey, not a wall",
            )


def read_gpus(
    backend: str, make: Callable[[str, Callable[[], float]], Reader] = make_reader
) -> DriverAnswer | DriverError:
    """In a thread, which is abandoned if the driver hangs."""
    answers: list[DriverAnswer | DriverError] = []

    def read() -> None:
        try:
            answers.append(make(backend, boot_time).read())
        except DriverError as error:
            answers.append(error)
        except Exception as error:
            answers.append(DriverError(f"reading failed: {type(error).__name__}: {error}", code="reader_failed"))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(DRIVER_SECONDS)
    hangs = DriverError(f"the driver has not answered for {DRIVER_SECONDS:g} s", code="driver_hangs")
    return answers[0] if answers else hangs


def _driver_advice(error: DriverError) -> str:
    match error.code:
        case "nvidia_smi_not_found" | "nvml_not_found":
            return "install the NVIDIA driver, or use a server elsewhere: --endpoint http://…"
        case "amd_smi_not_found" | "reader_not_found":
            return "install what is missing, or set GPU_BACKEND to another reader"
        case "driver_hangs":
            return "dmesg may say why; a hanging driver needs a reboot"
    if "amd" in str(error):
        return "`amd-smi static` shows the same; its user must be in the groups render and video"
    return "nvidia-smi shows the same; after an update of the driver, reboot"


def _visible(answer: DriverAnswer) -> Iterator[Finding]:
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        yield Finding("ok", "visible devices", "all: CUDA_VISIBLE_DEVICES is not set")
    else:
        visibility = VisibilityFilter(value).apply(answer.gpus)
        shown = ", ".join(str(gpu.index) for gpu in visibility.gpus) or "none"
        if not visibility.is_filtering and visibility.gpus:
            yield Finding("wrong", "visible devices", f"CUDA_VISIBLE_DEVICES={value!r} matches no GPU", "unset it")
        elif not visibility.gpus:
            yield Finding("wrong", "visible devices", f"CUDA_VISIBLE_DEVICES={value!r} hides every GPU", "unset it")
        else:
            yield Finding("ok", "visible devices", f"CUDA_VISIBLE_DEVICES={value!r}: {shown}")
    order = os.environ.get("CUDA_DEVICE_ORDER", "")
    if value is not None and order != "PCI_BUS_ID" and len(answer.gpus) > 1 and not value.startswith(("GPU-", "MIG-")):
        yield Finding(
            "warning",
            "visible devices",
            "CUDA may number the GPUs in a different order than the driver",
            "export CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )


# --- keys and settings ---


def _keys(endpoints: Sequence[EndpointConfig]) -> Iterator[Finding]:
    key = MultiEndpointConfigurationManager().get_api_key()
    elsewhere = [endpoint for endpoint in endpoints if not is_loopback_url(endpoint.url)]
    if key is None and not elsewhere:
        yield Finding("ok", "keys", "not needed on this host")
    elif key is None:
        yield Finding("warning", "keys", "servers on other hosts need GPU_POOL_API_KEY", "export GPU_POOL_API_KEY=…")
    else:
        yield Finding("ok", "keys", "GPU_POOL_API_KEY is set")
    for endpoint in elsewhere:
        if key is not None and not is_private_url(endpoint.url) and not allows_insecure_key():
            yield Finding(
                "wrong",
                endpoint.endpoint_id,
                "keys are not sent over plain http, where others can read them",
                "use https://, or export GPU_POOL_ALLOW_INSECURE_KEY=1 in a network you trust",
            )


def _settings() -> Iterator[Finding]:
    bad = [setting for setting in all_settings() if setting.problem]
    for setting in bad:
        yield Finding("wrong", setting.name, setting.problem or "", "gpu-pool config lists all settings")
    if not bad:
        yield Finding("ok", "settings", "all are valid")
