"""The words of `gpu-pool map`: what becomes a job, and when it halts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpu_worker_pool.cli.mapping import words
from gpu_worker_pool.cli.mapping.halt import Halt
from gpu_worker_pool.cli.mapping.states import States
from gpu_worker_pool.cli.mapping.words import arguments_of_lines, jobs_of, split_words


def commands(*given: str) -> list[list[str]]:
    return [job.command for job in jobs_of(*split_words(given))]


def test_the_argument_stands_where_the_braces_are() -> None:
    assert commands("train", "--seed={}", "-o", "out/{}.pt", ":::", "1", "a b") == [
        ["train", "--seed=1", "-o", "out/1.pt"],
        ["train", "--seed=a b", "-o", "out/a b.pt"],
    ]


def test_without_braces_it_is_appended() -> None:
    assert commands("echo", "-n", ":::", "1", "2") == [["echo", "-n", "1"], ["echo", "-n", "2"]]


def test_each_combination_of_several_lists_is_a_job() -> None:
    assert commands("x", "{2}", "{1}", ":::", "a", "b", ":::", "1", "2") == [
        ["x", "1", "a"],
        ["x", "2", "a"],
        ["x", "1", "b"],
        ["x", "2", "b"],
    ]
    assert commands("x", "[{}]", ":::", "a", ":::", "1") == [["x", "[a 1]"]]
    assert commands("x", ":::", "a", ":::", "1") == [["x", "a", "1"]]


def test_the_number_of_the_job_and_braces_that_mean_something_else() -> None:
    assert commands("x", "{#}", ":::", "a", "b") == [["x", "1"], ["x", "2"]]
    # Nothing of the shell's, of awk's or of Python's is taken for a placeholder.
    assert commands("x", "${HOME} {print} {0} {3}", ":::", "a") == [["x", "${HOME} {print} {0} {3}", "a"]]


def test_an_argument_that_looks_like_a_placeholder_stays_what_it_is() -> None:
    assert commands("x", "{}", "{#}", ":::", "{#}{}") == [["x", "{#}{}", "1"]]


def test_one_argument_per_line() -> None:
    assert arguments_of_lines([b"a b\n", b"\n", b"c\r\n", b"\xff"]) == ["a b", "c", "\udcff"]


def test_bad_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="null byte"):
        arguments_of_lines([b"a\0b\n"])
    monkeypatch.setattr(words, "MOST_BYTES", 10)
    with pytest.raises(ValueError, match="more than"):
        arguments_of_lines([b"x" * 6, b"y" * 6])


def test_too_many_combinations_are_refused_before_they_are_made() -> None:
    many = [str(number) for number in range(1001)]
    with pytest.raises(ValueError, match="1003003001 jobs"):
        list(jobs_of(["x"], [many, many, many]))


@pytest.mark.parametrize(
    ("text", "failed", "succeeded", "is_reached"),
    [
        ("soon,fail=1", 0, 99, False),
        ("soon,fail=1", 1, 0, True),
        ("now,fail=10%", 9, 0, False),
        ("now,fail=10%", 10, 0, True),
        ("soon,success=2", 5, 1, False),
        ("soon,success=2", 0, 2, True),
        ("now,done=3", 1, 2, True),
    ],
)
def test_when_it_halts(text: str, failed: int, succeeded: int, is_reached: bool) -> None:
    halt = Halt.parse(text)
    assert halt is not None
    assert halt.is_now is text.startswith("now")
    assert halt.is_reached(failed=failed, succeeded=succeeded, jobs=100) is is_reached


@pytest.mark.parametrize(
    "text", ["", "now", "soon,fail", "soon,fail=0", "now,fail=101%", "later,fail=1", "now,fail=-1"]
)
def test_bad_halts(text: str) -> None:
    assert Halt.parse("never") is None
    with pytest.raises(ValueError, match="write never"):
        Halt.parse(text)


def test_the_summary_counts_the_gpus_on_which_a_job_was_started() -> None:
    said: list[str] = []
    progress: Any = SimpleNamespace(say=said.append)
    states = States(progress, is_quiet=False)
    for waited in (2.0, 0.0):  # two were granted, and one was not needed any more
        states.granted(waited)
    states.used([("local", 1)])
    states.used([("local", 1)])
    states.summarize(jobs=2, succeeded=2, failed=[], stopped=0, took_seconds=3.0)
    assert said == ["2 jobs: 2 done, in 3 s on 1 GPU; the first one was granted after 2 s"]
