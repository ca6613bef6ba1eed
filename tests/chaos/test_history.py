"""The judge itself can find fault: each kind of crime, and none where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chaos.history import History, Span


def written(folder: Path, **workers: list[tuple[object, ...]]) -> None:
    for name, lines in workers.items():
        text = ""
        for what, request, at, *more in lines:
            names = {"granted": ("gpu", "fence"), "refused": ("why",), "stalled": ("since",)}.get(str(what), ())
            details = dict(zip(names, more, strict=True))
            text += json.dumps({"what": what, "request": request, "at": at, **details}) + "\n"
        (folder / f"worker-{name[1:]}.jsonl").write_text(text)


def test_one_after_the_other_is_fine(tmp_path: Path) -> None:
    written(
        tmp_path,
        w1=[("asked", "a", 0), ("granted", "a", 1, "gpu", 1), ("releasing", "a", 2)],
        w2=[("asked", "b", 0), ("granted", "b", 2.1, "gpu", 2), ("releasing", "b", 3)],
    )
    history = History.read(tmp_path, {})
    assert len(history.holdings) == 2
    assert history.problems() == []


def test_one_gpu_held_by_two_is_found(tmp_path: Path) -> None:
    written(
        tmp_path,
        w1=[("asked", "a", 0), ("granted", "a", 1, "gpu", 1), ("releasing", "a", 2)],
        w2=[("asked", "b", 0), ("granted", "b", 1.9, "gpu", 2)],
    )
    assert [problem[:18] for problem in History.read(tmp_path, {}).problems()] == ["gpu was held twice"]


def test_one_that_was_killed_holds_nothing_after_that(tmp_path: Path) -> None:
    written(
        tmp_path,
        w1=[("asked", "a", 0), ("granted", "a", 1, "gpu", 1)],
        w2=[("asked", "b", 0), ("granted", "b", 5, "gpu", 2)],
    )
    assert History.read(tmp_path, {1: 4.0}).problems() == []
    assert len(History.read(tmp_path, {1: 6.0}).problems()) == 1


def test_one_fence_for_two_is_found(tmp_path: Path) -> None:
    written(
        tmp_path,
        w1=[("asked", "a", 0), ("granted", "a", 1, "gpu", 1), ("releasing", "a", 2)],
        w2=[("asked", "b", 0), ("granted", "b", 3, "other", 1)],
    )
    assert History.read(tmp_path, {}).problems() == ["two grants have one fence"]


def test_one_that_was_told_nothing_is_found(tmp_path: Path) -> None:
    written(tmp_path, w1=[("asked", "a", 0)], w2=[("asked", "b", 0)])
    history = History.read(tmp_path, {2: 1.0})
    assert history.problems() == ["a was told nothing"]
    assert history.unknown == ["b"]


def test_a_refusal_that_nobody_expected_is_found(tmp_path: Path) -> None:
    written(
        tmp_path,
        w1=[("asked", "a", 0), ("refused", "a", 1, "WorkerTimeoutError: no GPU came free")],
        w2=[("asked", "b", 0), ("refused", "b", 1, "LeaseEndedError: it has ended")],
    )
    assert History.read(tmp_path, {}).problems() == ["b was refused: LeaseEndedError: it has ended"]


@pytest.mark.parametrize(
    "ending", [[("lost", "a", 4), ("releasing", "a", 4)], [("releasing", "a", 4), ("lost", "a", 5)]]
)
def test_a_loss_needs_a_reason(tmp_path: Path, ending: list[tuple[object, ...]]) -> None:
    written(tmp_path, w1=[("asked", "a", 0), ("granted", "a", 2, "gpu", 1), *ending])
    assert History.read(tmp_path, {}).problems() == ["a lost gpu without a reason"]
    assert History.read(tmp_path, {}, [Span(1, 3)]).problems() == [], "its server was away"
    assert len(History.read(tmp_path, {}, [Span(0, 1), Span(6, 7)]).problems()) == 1, "not meanwhile"


def test_one_that_stood_still_may_lose_it_and_nobody_else(tmp_path: Path) -> None:
    granted = [("asked", "a", 0), ("granted", "a", 1, "gpu", 1)]
    written(tmp_path, w1=[*granted, ("stalled", "", 4, 2), ("lost", "a", 4)])
    assert History.read(tmp_path, {}).problems() == []
    written(tmp_path, w1=[*granted, ("lost", "a", 4)], w2=[("stalled", "", 4, 2)])
    assert History.read(tmp_path, {}).problems() == ["a lost gpu without a reason"]
