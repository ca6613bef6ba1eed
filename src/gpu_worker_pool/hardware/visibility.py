"""Applies CUDA_VISIBLE_DEVICES to the GPUs of a sample, and warns once about entries it does not find."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from gpu_worker_pool.core.record import frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_worker_pool.hardware.samples import GPUReading

logger: logging.Logger = logging.getLogger(__name__)

MOST_WARNINGS = 10


@frozen
class Visibility:
    """The result of a filter."""

    gpus: tuple[GPUReading, ...]
    #: False if nothing is hidden: no filter is set, or none of its entries was found.
    is_filtering: bool
    total_gpus: int
    #: Entries that were not found, in printable form.
    missing: tuple[str, ...] = ()


class VisibilityFilter:
    """Applies one value of `CUDA_VISIBLE_DEVICES` to each sample."""

    def __init__(self, value: str | None) -> None:
        self.value = value
        #: ("",) for an empty value; a value of nothing but separators names nothing.
        self._tokens: tuple[str, ...] | None = None
        if value is not None:
            names = [name for name in re.split(r"[,\s]+", value) if name]
            self._tokens = tuple(dict.fromkeys(names)) if value.strip() else ("",)
        #: What was logged for the last sample, to log it only once.
        self._said: tuple[str, ...] | None = None
        #: If an entry was found once and disappears, the other GPUs stay hidden.
        self._has_found = False

    def apply(self, gpus: Sequence[GPUReading]) -> Visibility:
        if self._tokens is None:
            return Visibility(tuple(gpus), is_filtering=False, total_gpus=len(gpus))
        if self._tokens in {("",), ("-1",)}:  # both hide all, as they do for CUDA
            self._say(gpus, (), [])
            return Visibility((), is_filtering=True, total_gpus=len(gpus))
        #: By index: the listed MIG devices, or None for the whole GPU.
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
    """By index or unambiguous beginning of a UUID: the GPU's index, and the UUID of a MIG device."""
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
