"""CUDA_VISIBLE_DEVICES: which of the host's GPUs are shown; says once, not at every sample, what it could not find."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_worker_pool.hardware.samples import GPUReading

logger = logging.getLogger(__name__)

MOST_WARNINGS = 10


@dataclass(frozen=True, slots=True)
class Visibility:
    """What a filter makes of the GPUs that are there."""

    gpus: tuple[GPUReading, ...]
    #: False where nothing is hidden: no filter is set, or nothing it names was found.
    is_filtering: bool
    total_gpus: int
    #: What was named and is not there, in words that may be shown.
    missing: tuple[str, ...] = ()


class VisibilityFilter:
    """Applies one value of `CUDA_VISIBLE_DEVICES` to one sample after the other."""

    def __init__(self, value: str | None) -> None:
        self.value = value
        self._tokens = None if value is None else tuple(dict.fromkeys(re.split(r"[,\s]+", value.strip(", \t\n"))))
        #: What was said of the last sample: the same is not said again.
        self._said: tuple[str, ...] | None = None
        #: Something named was there once: when it is gone, that is no reason to show what was never asked for.
        self._has_found = False

    def apply(self, gpus: Sequence[GPUReading]) -> Visibility:
        if self._tokens is None:
            return Visibility(tuple(gpus), is_filtering=False, total_gpus=len(gpus))
        if self._tokens in {("",), ("-1",)}:  # both hide all, as they do for CUDA
            self._say(gpus, (), [])
            return Visibility((), is_filtering=True, total_gpus=len(gpus))
        #: By index: the MIG devices that were named, or None where the whole GPU was.
        shown: dict[int, set[str] | None] = {}
        missing: list[str] = []
        for token in self._tokens:
            found = _find(token, gpus)
            if found is None:
                missing.append(_printable(token))
                continue
            index, mig_uuid = found
            if mig_uuid is None:
                shown[index] = None
            elif (named := shown.setdefault(index, set())) is not None:
                named.add(mig_uuid)
        self._has_found = self._has_found or bool(shown)
        warnings = [f"GPU {name} in CUDA_VISIBLE_DEVICES not found on system" for name in missing]
        if gpus and not self._has_found:
            warnings.append(f"nothing in CUDA_VISIBLE_DEVICES={self.value!r} was found: showing all GPUs")
            self._say(gpus, gpus, warnings)
            return Visibility(tuple(gpus), is_filtering=False, total_gpus=len(gpus), missing=tuple(missing))
        visible = tuple(_with_devices(gpu, shown[gpu.index]) for gpu in gpus if gpu.index in shown)
        self._say(gpus, visible, warnings)
        return Visibility(visible, is_filtering=True, total_gpus=len(gpus), missing=tuple(missing))

    def _say(self, gpus: Sequence[GPUReading], visible: Sequence[GPUReading], warnings: list[str]) -> None:
        reasoning = (
            f"CUDA_VISIBLE_DEVICES={self.value!r} reads as {list(self._tokens or ())}; "
            f"on system: {[gpu.index for gpu in gpus]}; visible: {[gpu.index for gpu in visible]}"
        )
        said = (reasoning, *warnings)
        if said == self._said:
            return
        self._said = said
        logger.debug("%s", reasoning)
        for warning in warnings[:MOST_WARNINGS]:
            logger.warning("%s", warning)
        if len(warnings) > MOST_WARNINGS:
            logger.warning("CUDA_VISIBLE_DEVICES names %d more that cannot be found", len(warnings) - MOST_WARNINGS)


def _find(token: str, gpus: Sequence[GPUReading]) -> tuple[int, str | None] | None:
    """The one GPU with this index, or whose UUID alone begins so; for a MIG device its GPU's index and its UUID."""
    if re.fullmatch(r"[0-9]{1,9}", token):
        index = int(token)
        return (index, None) if any(gpu.index == index for gpu in gpus) else None
    wanted = token.lower()
    if not re.match(r"(gpu|mig)-.", wanted):
        return None
    matching: list[tuple[int, str | None]] = [
        (gpu.index, None) for gpu in gpus if gpu.uuid and gpu.uuid.lower().startswith(wanted)
    ]
    matching += [
        (gpu.index, mig.uuid) for gpu in gpus for mig in gpu.mig_devices if mig.uuid.lower().startswith(wanted)
    ]
    return matching[0] if len(matching) == 1 else None


def _with_devices(gpu: GPUReading, named: set[str] | None) -> GPUReading:
    if named is None:
        return gpu
    return replace(gpu, mig_devices=tuple(mig for mig in gpu.mig_devices if mig.uuid in named))


def _printable(token: str) -> str:
    return token[:80] if token.isascii() and token.isprintable() else ascii(token[:80])
