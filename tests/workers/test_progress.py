"""The line that `progress=True` writes to stderr: while tasks run, and once when all are done."""

from __future__ import annotations

import io
import math

from gpu_worker_pool.workers.progress import Bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Line:
    """A bar, and what it writes."""

    def __init__(self, stream: io.StringIO) -> None:
        self.stream = stream
        self.now = 100.0
        self.bar = Bar(stream, lambda: self.now)

    def after(self, seconds: float, busy: int = 0, workers: int = 0, waiting_for: str = "") -> str:
        self.now += seconds
        self.bar.show(busy, workers, waiting_for)
        return self.written()

    def written(self) -> str:
        found = self.stream.getvalue()
        self.stream.seek(0)
        self.stream.truncate()
        return found


def test_a_log_gets_a_line_now_and_then_and_one_at_the_end() -> None:
    line = Line(io.StringIO())
    assert line.after(0.0) == "", "nothing was submitted"
    line.bar.submitted(4)
    assert line.after(1.0, waiting_for="next in line") == ""
    assert (
        line.after(9.0, waiting_for="next in line")
        == "gpu-pool: [....................] 0/4 tasks, 0 of 0 workers busy, waiting for a GPU: next in line, 10 s\n"
    )
    assert line.after(10.0, waiting_for="next in line") == "", "the same again"
    assert line.bar.next_show > line.now, "else its executor would show it without a pause"
    line.bar.finished(3)
    assert line.after(10.0, 1, 2) == "gpu-pool: [###############.....] 3/4 tasks, 1 of 2 workers busy, 30 s\n"
    line.bar.finished(1)
    assert line.after(10.0, 0, 2) == "gpu-pool: [####################] 4/4 tasks, 40 s\n"
    assert line.after(99.0, 0, 1, "next in line") == "", "a worker that ends is no progress"
    line.bar.submitted(1)
    line.bar.finished(1)
    assert line.after(2.0) == "gpu-pool: [####################] 5/5 tasks, 2 s\n", "at once, after a long silence"


def test_tasks_that_end_one_by_one_get_no_line_each() -> None:
    line = Line(io.StringIO())
    written = []
    for _ in range(30):
        line.bar.submitted(1)
        line.bar.finished(1)
        written.append(line.after(1.0))
    assert [text.split()[2] for text in written if text] == ["1/1", "11/11", "21/21"]
    assert line.bar.next_show == 131.0
    line.bar.close()
    assert line.written() == "gpu-pool: [####################] 30/30 tasks, 1 s\n"


def test_on_a_terminal_one_line_is_written_again_and_again() -> None:
    line = Line(Terminal())
    line.bar.submitted(2)
    assert line.after(0.1, 1, 1) == ""
    assert line.after(0.2, 1, 1) == "\r[....................] 0/2 tasks, 1 of 1 worker busy, 0 s\x1b[K"
    assert line.after(0.3, 1, 1).startswith("\r[....................] 0/2 tasks, "), "its time has changed"
    line.bar.finished(2)
    assert line.after(0.2, 0, 1).startswith("\r[####################] 2/2 tasks, ")
    assert line.after(9.0, 0, 0) == ""
    assert line.bar.next_show == math.inf, "else its executor would wake for nothing"
    line.bar.close()
    assert line.written() == "\n"
