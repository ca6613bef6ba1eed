"""`--halt`: when `map` stops before all jobs are done. In GNU parallel's words: `soon,fail=1`, `now,success=10%`."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_HALT: Final = re.compile(r"(now|soon),(fail|success|done)=([0-9]{1,7})(%?)")


class Halt(NamedTuple):
    #: Also ends the jobs that run.
    is_now: bool
    #: Which jobs count: `fail`, `success` or `done`.
    what: str
    number: int
    is_percent: bool

    @classmethod
    def parse(cls, text: str) -> Halt | None:
        """None: never. Raises a `ValueError`."""
        if text == "never":
            return None
        found = _HALT.fullmatch(text)
        if found is None or int(found[3]) == 0 or (found[4] and int(found[3]) > 100):
            raise ValueError(
                f"{text!r} does not say when to stop; write never, or soon or now with fail, success or done and a "
                "number: soon,fail=1 or now,fail=10%"
            )
        return cls(found[1] == "now", found[2], int(found[3]), bool(found[4]))

    def is_reached(self, *, failed: int, succeeded: int, jobs: int) -> bool:
        counted = {"fail": failed, "success": succeeded, "done": failed + succeeded}[self.what]
        return counted * 100 >= self.number * jobs if self.is_percent else counted >= self.number
