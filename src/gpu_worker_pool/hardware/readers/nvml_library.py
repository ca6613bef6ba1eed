"""Loads NVML through pynvml, and really unloads it, so that a replaced driver is found."""

from __future__ import annotations

import _ctypes
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from gpu_worker_pool.errors import DriverError

if TYPE_CHECKING:
    from collections.abc import Callable

# pynvml has names for these, but importing it takes longer than the rest of this package.
UNINITIALIZED: Final = 1
NOT_SUPPORTED: Final = 3
NO_PERMISSION: Final = 4
DRIVER_NOT_LOADED: Final = 9
LIBRARY_NOT_FOUND: Final = 12
FUNCTION_NOT_FOUND: Final = 13
GPU_IS_LOST: Final = 15
RESET_REQUIRED: Final = 16
VERSION_MISMATCH: Final = 18
GPU_NOT_FOUND: Final = 28

#: After these no GPU can be read until the library is reloaded.
LIBRARY_FAILED: Final = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED, VERSION_MISMATCH})
#: After these, and after those of one unusable GPU, its other values cannot be read either.
_MORE_THAN_ONE_VALUE: Final = LIBRARY_FAILED | frozenset({GPU_IS_LOST, RESET_REQUIRED, GPU_NOT_FOUND})
#: After these a healthy GPU cannot, or may not, report one value.
_UNAVAILABLE: Final = frozenset({NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND})

#: The error code if the library is missing, so that another reader can be tried.
NVML_NOT_FOUND: Final = "nvml_not_found"

_CAUSES: Final = {
    LIBRARY_NOT_FOUND: (
        NVML_NOT_FOUND,
        "libnvidia-ml.so.1 cannot be loaded: install the NVIDIA driver, or start the container with its GPUs.",
    ),
    DRIVER_NOT_LOADED: (
        "driver_not_loaded",
        "The NVIDIA driver is not loaded: run `modprobe nvidia`, and see `dmesg` if that fails.",
    ),
    VERSION_MISMATCH: (
        "driver_version_mismatch",
        "The NVIDIA kernel module and libnvidia-ml.so.1 differ in version, as after an upgrade: reboot the host.",
    ),
    NO_PERMISSION: (
        "permission_denied",
        "This user may not talk to the NVIDIA driver: allow it to read and write /dev/nvidia*.",
    ),
}


def driver_error(error: Any) -> DriverError:
    """Translates a `pynvml.NVMLError` that affects all GPUs."""
    code, message = _CAUSES.get(
        error.value, ("driver_error", f"The NVIDIA driver failed ({error}): see `nvidia-smi` and `dmesg`.")
    )
    return DriverError(message, code=code)


class DecisiveAnswer(NamedTuple):
    """A value that decides about a GPU, or why there is none."""

    value: Any = None
    #: Why the GPU must not be used: the value should be known and is not.
    fault: str | None = None
    #: The driver says that this GPU has no such value.
    is_unsupported: bool = False
    #: The same, or that this user or driver version cannot have it.
    is_unavailable: bool = False


class LoadedNVML:
    """The initialized library, with the best version of each call it has."""

    __slots__ = ("driver_version", "error", "graphics", "limits_memory", "memory", "module", "processes")

    def __init__(self, module: Any) -> None:
        #: pynvml has no types, so results get theirs where they are read.
        self.module: Any = module
        #: Its `value` is one of the numbers above.
        self.error: Any = module.NVMLError
        has = partial(hasattr, module.nvmlLib)
        self.memory: Callable[[Any], Any] = module.nvmlDeviceGetMemoryInfo
        if has("nvmlDeviceGetMemoryInfo_v2"):  # excludes memory that the driver reserves, as nvidia-smi does
            self.memory = partial(module.nvmlDeviceGetMemoryInfo, version=module.nvmlMemory_v2)
        self.processes: Callable[[Any], Any] = module.nvmlDeviceGetComputeRunningProcesses_v2
        if has("nvmlDeviceGetComputeRunningProcesses_v3"):
            self.processes = module.nvmlDeviceGetComputeRunningProcesses_v3
        self.graphics: Callable[[Any], Any] = module.nvmlDeviceGetGraphicsRunningProcesses_v2
        if has("nvmlDeviceGetGraphicsRunningProcesses_v3"):
            self.graphics = module.nvmlDeviceGetGraphicsRunningProcesses_v3
        #: The driver can limit the GPU memory of a cgroup, for an administrator.
        self.limits_memory: bool = has("nvmlDeviceSetMemoryLimits_v1")
        self.driver_version: str | None = self.ask(module.nvmlSystemGetDriverVersion)

    def ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """The answer, or None if this one value is unknown; raises if the GPU or the library failed."""
        try:
            return call(*arguments)
        except self.error as error:
            if error.value in _MORE_THAN_ONE_VALUE:
                raise
        except UnicodeDecodeError:
            pass
        return None

    def ask_decisive(self, name: str, call: Callable[..., Any], handle: Any) -> DecisiveAnswer:
        try:
            return DecisiveAnswer(call(handle))
        except self.error as error:
            if error.value in _MORE_THAN_ONE_VALUE:
                raise
            is_fault = error.value not in _UNAVAILABLE
            return DecisiveAnswer(
                fault=f"its {name} cannot be read ({error}): see `dmesg`" if is_fault else None,
                is_unsupported=error.value == NOT_SUPPORTED,
                is_unavailable=not is_fault,
            )
        except UnicodeDecodeError:
            return DecisiveAnswer()


class NVMLLibrary:
    """A context manager: enter it while calling the library.

    Unloading it during a call, which may hang forever, would crash the process. So it is unloaded only when no other
    reader is inside, and no other user of pynvml has it initialized.
    """

    _inside: ClassVar[set[NVMLLibrary]] = set()
    #: Guards `_inside`; never held while the driver is called.
    _lock: ClassVar = threading.Lock()

    def __init__(self) -> None:
        self._loaded: LoadedNVML | None = None
        self._is_stale = False
        self._is_closing = False

    def __enter__(self) -> LoadedNVML:
        with self._lock:
            self._inside.add(self)
        try:
            self._is_closing = False
            if self._is_stale:
                self._release()
            if self._loaded is None:
                self._loaded = self._load()
        except BaseException:
            self._leave()
            raise
        return self._loaded

    def __exit__(self, *_: object) -> None:
        if self._is_closing:
            self._release()
        self._leave()

    def reload_next_time(self) -> None:
        self._is_stale = True

    def close(self) -> None:
        """Unload the library, or let the thread that is inside do so when it leaves."""
        self._is_closing = True
        if self not in self._inside:
            self._release()

    def _leave(self) -> None:
        with self._lock:
            self._inside.discard(self)

    def _load(self) -> LoadedNVML:
        try:
            import pynvml  # type: ignore[import-untyped]  # it has no types
        except ImportError as error:
            raise DriverError("pynvml cannot be imported: install nvidia-ml-py.", code=NVML_NOT_FOUND) from error
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            failure = driver_error(error)
            self._unload(pynvml)
            raise failure from error
        try:
            return LoadedNVML(pynvml)
        except pynvml.NVMLError as error:
            failure = driver_error(error)
            self._shut_down(pynvml)
            raise failure from error

    def _release(self) -> None:
        loaded, self._loaded = self._loaded, None
        self._is_stale = False
        if loaded is not None:
            self._shut_down(loaded.module)

    def _shut_down(self, pynvml: Any) -> None:
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            # pynvml still counts us as a user of the library.
            with pynvml.libLoadLock:
                count = vars(pynvml).get("_nvmlLib_refcount")
                if count:
                    vars(pynvml)["_nvmlLib_refcount"] = count - 1
        self._unload(pynvml)

    def _unload(self, pynvml: Any) -> None:
        with self._lock, pynvml.libLoadLock:
            others_are_inside = bool(self._inside - {self})
            library = pynvml.nvmlLib
            # If another version of pynvml lacks these names, leave the library loaded.
            count, cache = (vars(pynvml).get(name) for name in ("_nvmlLib_refcount", "_nvmlGetFunctionPointer_cache"))
            if library is None or others_are_inside or count != 0 or cache is None:
                return
            pynvml.nvmlLib = None
            cache.clear()
            # ctypes never closes a library, and an open library is not looked up on disk again.
            _ctypes.dlclose(vars(library)["_handle"])
