"""The checker of the fleet's promises finds what breaks them, and nothing in a history that keeps them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.promises import Asked, Span, problems, read

GPU = "gpu-1/GPU-0"


def granted(request: str, told_at: float, until: float, fence: int, **more: Any) -> Asked:
    values = {"pid": 1, "asked_at": told_at, "count": 1, "gpus": (GPU,), "lease": f"gpu-1:lease-{fence}"} | more
    return Asked(request, told_at=told_at, until=until, fence=fence, **values)


def waiting(request: str, asked_at: float, *polls: float, count: int = 1, told_at: float = 1000.0) -> Asked:
    gpus = tuple(f"gpu-9/{request}-{number}" for number in range(count))
    it = Asked(request, 1, asked_at, count, [(at, at + 1) for at in polls], told_at, gpus, fence=1, lease=request)
    it.until = told_at + 1
    return it


KEPT = [granted("a", 0, 1, 1), granted("b", 1.5, 2, 2), waiting("c", 0, 0.1, 2)]


def test_nothing_is_found_where_everything_was_kept() -> None:
    assert problems(KEPT, {}, []) == []


@pytest.mark.parametrize(
    ("history", "found"),
    [
        ([granted("a", 0, 2, 1), granted("b", 1.5, 3, 2)], "held twice"),
        ([granted("a", 0, 1, 1), granted("b", 1.5, 2, 1)], "same fence"),
        ([granted("a", 0, 1, 1), granted("b", 2, 3, 2, lease="gpu-1:lease-1")], "granted twice"),
        ([granted("a", 0, 1, 1, count=2)], "asked for 2 GPUs"),
        ([granted("a", 0, 1, 1, count=2, gpus=(GPU, "gpu-2/GPU-0"))], "of one host"),
        ([Asked("a", 1, 0, 1)], "was told nothing"),
        ([Asked("a", 1, 0, 1, refused="404 unknown")], "404 unknown"),
        ([granted("a", 0, 1, 1, lost="409 lease_ended")], "lost gpu-1:lease-1: 409"),
        ([waiting("a", 0, 0.1, 40), granted("b", 5, 6, 7, asked_at=2)], "was served at 5"),
        ([waiting("a", 0, 0.1, 99, count=4), granted("b", 70, 71, 7, asked_at=2)], "was served at 70"),
    ],
)
def test_what_breaks_a_promise_is_found(history: list[Asked], found: str) -> None:
    assert found in "; ".join(problems(history, {}, []))


@pytest.mark.parametrize(
    "history",
    [
        # Before it was told its place.
        [waiting("a", 0, 3, 40), granted("b", 5, 6, 7, asked_at=2)],
        # It may itself be placed at a host that is silent.
        [waiting("a", 0, 0.1, 28), granted("b", 5, 6, 7, asked_at=2)],
        # A small one goes first where it delays a large one little.
        [waiting("a", 0, 0.1, 80, count=4), granted("b", 5, 6, 7, asked_at=2)],
        # A large one cannot take what a small one waits for, but it may be served before it elsewhere: not here.
        [Asked("a", 1, 0, 1, refused="410 given_up", longest_silence=9)],
    ],
)
def test_what_the_rules_allow_is_not_held_against_it(history: list[Asked]) -> None:
    assert problems(history, {}, []) == []


def test_places_may_be_lost_with_the_commits_and_the_dispatcher_that_knew_of_them() -> None:
    history = [waiting("a", 0, 0.1, 40), granted("b", 5, 6, 7, asked_at=2)]
    assert problems(history, {}, [Span(3, 4)]) == []
    assert problems(history, {}, [Span(6, 7)]) != []


@pytest.mark.parametrize(("silent_until", "is_allowed"), [(8.0, True), (3.0, False)])
def test_a_lease_that_a_client_was_not_told_of_may_end_if_it_had_no_answer(
    tmp_path: Path, silent_until: float, is_allowed: bool
) -> None:
    said = {"error": "request_ended", "reasons": ["its lease was not renewed in time"]}
    lines = [
        {"what": "asked", "request": "a", "at": 1.0, "count": 1},
        {"what": "silent", "request": "a", "at": 2.0, "sent_at": 1.0},
        {"what": "silent", "request": "a", "at": silent_until, "sent_at": 2.0},
        {"what": "refused", "request": "a", "at": silent_until + 0.1, "status": 409, "said": said},
    ]
    (tmp_path / "client-7.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert (problems(read(tmp_path, {}), {}, []) == []) is is_allowed


def test_files_are_read_also_of_those_that_were_killed(tmp_path: Path) -> None:
    lines = [
        {"what": "asked", "request": "a", "at": 1.0, "count": 1},
        {"what": "waiting", "request": "a", "at": 2.0, "sent_at": 1.1, "position": 1},
        {"what": "granted", "request": "a", "at": 3.0, "gpus": [GPU], "fence": 4, "lease": "x", "valid_until": 5.0},
        {"what": "renewed", "request": "a", "at": 4.0, "valid_until": 7.0},
        {"what": "asked", "request": "b", "at": 6.0, "count": 1},
    ]
    (tmp_path / "client-7.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"what": "gra')
    first, second = read(tmp_path, {7: 6.5})
    assert (first.told_at, first.until, first.waits) == (3.0, 6.5, [(1.1, 2.0)])
    assert problems([first, second], {7: 6.5}, []) == []
    assert problems([first, second], {}, []) == ["b was told nothing"]
