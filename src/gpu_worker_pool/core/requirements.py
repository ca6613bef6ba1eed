"""Requirements: what a request demands of its GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from gpu_worker_pool.core.readings import Reading

Policy = Literal["thresholds", "idle"]


@dataclass(frozen=True, slots=True)
class Requirements:
    """Requests with equal requirements form a class: a GPU that serves one of them serves any of them."""

    #: How many GPUs, all on one endpoint.
    count: int = 1
    #: Memory to reserve on each of them; with `share`, others may have the rest.
    memory_mb: float | None = None
    share: bool = False
    #: Memory that must be free at the moment of the grant.
    min_free_memory_mb: float | None = None
    #: Part of the GPU's name, in any case.
    gpu_model: str | None = None
    #: Ids, indices or UUIDs (or the beginning of one); in a fleet also hosts.
    only: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    #: "idle": no foreign process computes there, and no memory in use is unexplained; thresholds count only if named.
    policy: Policy = "thresholds"
    memory_threshold: float | None = None
    utilization_threshold: float | None = None
    #: Higher goes first.
    priority: int = 0
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.only is not None:
            object.__setattr__(self, "only", as_names("only", self.only))
        exclude: object = self.exclude  # None, as JSON may say, excludes nothing
        object.__setattr__(self, "exclude", () if exclude is None else as_names("exclude", exclude))
        self._validate()
        # The key of every queue look-up, so it is hashed once.
        object.__setattr__(
            self, "_hash", hash(tuple(getattr(self, each.name) for each in fields(self) if each.compare))
        )

    def _validate(self) -> None:
        if not _is_integer(self.count) or self.count < 1:
            raise ValueError(f"count must be a whole number of at least 1, not {self.count!r}")
        if not _is_integer(self.priority):
            raise ValueError(f"priority must be a whole number, not {self.priority!r}")
        for name in ("memory_mb", "min_free_memory_mb"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 < value <= _LARGEST):
                raise ValueError(f"{name} must be a number above 0, not {value!r}")
        for name in ("memory_threshold", "utilization_threshold"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 <= value <= 100):
                raise ValueError(f"{name} must be between 0 and 100 percent, not {value!r}")
        if not isinstance(self.share, bool):
            raise ValueError(f"share must be True or False, not {self.share!r}")
        if self.share and self.memory_mb is None:
            raise ValueError("share=True needs memory_mb: say how much of the GPU is yours")
        if self.policy not in ("thresholds", "idle"):
            raise ValueError(f"policy must be 'thresholds' or 'idle', not {self.policy!r}")
        model: object = self.gpu_model
        if model is not None and not (isinstance(model, str) and model.strip()):
            raise ValueError(f"gpu_model must be part of a GPU's name, not {self.gpu_model!r}")
        if self.only is not None and not self.only:
            raise ValueError("only must name at least one GPU; leave it out to allow all of them")

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Requirements], tuple[object, ...]]:
        # Hashes of strings differ between processes, so the hash is not pickled.
        return Requirements, tuple(getattr(self, each.name) for each in fields(self) if each.init)

    @property
    def has_default_thresholds(self) -> bool:
        """Whether the thresholds of the pool or client count where the request names none."""
        return not self.share and self.policy == "thresholds"

    @property
    def needed_memory_mb(self) -> float:
        """The total memory a GPU must have to ever serve this."""
        return max(self.memory_mb or 0.0, self.min_free_memory_mb or 0.0)

    def __str__(self) -> str:
        """In words, as errors and explanations show it."""
        kind = ("idle " if self.policy == "idle" else "") + (f"{self.gpu_model} " if self.gpu_model else "")
        words = [f"one {kind}GPU" if self.count == 1 else f"{self.count} {kind}GPUs"]
        if self.memory_mb is not None:
            words.append(f"{self.memory_mb:g} MB {'of it' if self.share else 'on it'}")
        if self.min_free_memory_mb is not None:
            words.append(f"{self.min_free_memory_mb:g} MB free")
        if self.only is not None:
            words.append(f"only {', '.join(self.only)}")
        if self.exclude:
            words.append(f"not {', '.join(self.exclude)}")
        if self.priority:
            words.append(f"priority {self.priority}")
        return ", ".join(words)


def names_gpu(name: str, reading: Reading) -> bool:
    """Whether a user's `name` means this GPU: its id, its index, its UUID or its beginning.

    In a fleet also its host, and `HOST:NAME` with what it is called there.
    """
    if name == reading.gpu_id or name == str(reading.index):
        return True
    uuid = reading.uuid
    if reading.host:
        host, separator, at_host = name.partition(":")
        if host == reading.host:
            if not separator or at_host == str(reading.host_index) or reading.gpu_id == f"{host}/{at_host}":
                return True
            name = at_host
    return uuid is not None and name.startswith(("GPU-", "MIG-")) and uuid.startswith(name)


def as_names(field_name: str, value: object) -> tuple[str, ...]:
    """GPU ids and UUIDs as `only` and `exclude` hold them."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ValueError(f"{field_name} must be a list of GPU ids or UUIDs, not {value!r}")
    names = []
    for name in value:
        if not (_is_integer(name) or (isinstance(name, str) and name.strip())):
            raise ValueError(f"{field_name} must hold GPU ids or UUIDs, not {name!r}")
        names.append(str(name).strip())
    return tuple(dict.fromkeys(names))


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


#: A whole number may be larger, and cannot be calculated with then.
_LARGEST: Final = math.nextafter(math.inf, 0.0)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Declared(NamedTuple):
    """How long a request says that it takes. Not a requirement: every GPU serves it, and equal requests may differ."""

    expected_seconds: float | None = None
    max_seconds: float | None = None


#: What most requests declare.
NOTHING_DECLARED = Declared()


def make_declared(expected_seconds: float | None, max_seconds: float | None) -> Declared:
    """Raises a `ValueError` for what is no duration."""
    if expected_seconds is None and max_seconds is None:
        return NOTHING_DECLARED
    for name, value in (("expected_seconds", expected_seconds), ("max_seconds", max_seconds)):
        if value is not None and not (_is_number(value) and 0 < value <= _LARGEST):
            raise ValueError(f"{name} must be a number above 0, not {value!r}")
    return Declared(expected_seconds, max_seconds)


#: No special requirements: what `request_gpu()` requests by default; answered from an index of free GPUs.
ANY_GPU = Requirements()


def make_requirements(
    count: int = 1,
    memory_mb: float | None = None,
    share: bool = False,  # the order of the public signatures
    min_free_memory_mb: float | None = None,
    gpu_model: str | None = None,
    only: Iterable[int | str] | None = None,
    exclude: Iterable[int | str] | None = None,
    priority: int = 0,
    policy: Policy = "thresholds",
) -> Requirements:
    """What the arguments of `request_gpu` ask for: for most, `ANY_GPU` itself, which needs no checking."""
    if (
        count == 1
        and memory_mb is None
        and share is False
        and min_free_memory_mb is None
        and gpu_model is None
        and only is None
        and exclude is None
        and priority == 0
        and policy == "thresholds"
    ):
        return ANY_GPU
    return Requirements(
        count=count,
        memory_mb=memory_mb,
        share=share,
        min_free_memory_mb=min_free_memory_mb,
        gpu_model=gpu_model,
        only=None if only is None else as_names("only", only),
        exclude=() if exclude is None else as_names("exclude", exclude),
        priority=priority,
        policy=policy,
    )
