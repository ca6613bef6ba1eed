"""Readers that other packages bring, for hardware that this one does not know.

A package declares an entry point in the group `gpu_worker_pool.readers`. Its name is the backend, as `GPU_BACKEND` and
`--backend` give it; its value is called without arguments, and returns a `Reader`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.errors import DriverError
from gpu_worker_pool.hardware.samples import DriverAnswer, GPUReading

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from gpu_worker_pool.hardware.readers import Reader

GROUP: Final = "gpu_worker_pool.readers"


def readers_of_packages() -> dict[str, EntryPoint]:
    """By the name of the backend."""
    from importlib.metadata import entry_points  # only where a name is not one of ours

    return {found.name.lower(): found for found in sorted(entry_points(group=GROUP), key=lambda each: each.name)}


class PackageReader:
    """Loads the reader with the first read, which says what is wrong with it."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._reader: Reader | None = None

    def read(self) -> DriverAnswer:
        if self._reader is None:
            self._reader = self._loaded()
        answer: object = self._reader.read()
        problem = _problem_of(answer)
        if problem:
            raise DriverError(f"the reader {self._backend!r} {problem}")
        assert isinstance(answer, DriverAnswer)
        return answer

    def interrupt(self) -> None:
        if self._reader is not None:
            self._reader.interrupt()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def _loaded(self) -> Reader:
        found = readers_of_packages().get(self._backend)
        if found is None:
            raise DriverError(f"no installed package brings the reader {self._backend!r}", code="reader_not_found")
        try:
            reader: Reader = found.load()()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise DriverError(f"the reader {self._backend!r} of {found.value} cannot be loaded ({why})") from error
        return reader


def _problem_of(answer: object) -> str:
    """Two GPUs of one name would be one that is granted twice."""
    if not isinstance(answer, DriverAnswer):
        return f"returned {answer!r:.80} instead of a DriverAnswer"
    gpus: tuple[object, ...] = tuple(answer.gpus)
    readings = [gpu for gpu in gpus if isinstance(gpu, GPUReading)]
    if len(readings) < len(gpus):
        wrong = next(gpu for gpu in gpus if not isinstance(gpu, GPUReading))
        return f"returned {wrong!r:.80} among its GPUs instead of a GPUReading"
    indices, identities = Counter(gpu.index for gpu in readings), Counter(gpu.identity for gpu in readings)
    for what, named in (("index", indices.most_common(1)), ("UUID", identities.most_common(1))):
        for name, count in named:
            if count > 1:
                return f"gives the same {what} to several GPUs: {name!r}"
    return ""
