"""What records sum up to, over spans that cut leases, and the picture of it."""

from __future__ import annotations

import time
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from gpu_worker_pool.ledger.records import moment
from gpu_worker_pool.ledger.report import Span, course_of, percentile, summarize, total_of
from gpu_worker_pool.ledger.report_svg import draw

NOON = 1_700_000_000.0
HOUR = 3600.0


def lease(who: str, granted: float, hours: float, *, gpus: int = 1, waited: float = 0.0, **more: Any) -> dict[str, Any]:
    """Granted so many hours after noon."""
    begin = NOON + granted * HOUR
    return {
        "kind": "lease",
        "request": "r",
        "account": who,
        "how": "released",
        "asked": moment(begin - waited),
        "granted": moment(begin),
        "ended": moment(begin + hours * HOUR),
        "waited_seconds": waited,
        "held_seconds": hours * HOUR,
        "gpu_seconds": hours * HOUR * gpus,
        "gpus": [f"GPU-{number}" for number in range(gpus)],
        "indices": list(range(gpus)),
        "observed_seconds": hours * HOUR,
        "idle_seconds": 0.0,
        "within": None,
        "label": None,
        **more,
    }


def request(who: str, at: float, how: str) -> dict[str, Any]:
    ended = moment(NOON + at * HOUR)
    return {"kind": "request", "request": "r", "account": who, "how": how, "ended": ended, "within": None}


def whole(hours: float = 24.0) -> Span:
    return Span(NOON, NOON + hours * HOUR)


def rows(records: list[dict[str, Any]], by: Any = "user", span: Span | None = None) -> dict[str, dict[str, Any]]:
    found = summarize(records, by, span or whole(), lambda record: str(record["account"]))
    return {row.name: row.as_json() for row in found}


def test_hours_idle_hours_waits_and_refusals_by_person() -> None:
    records = [
        lease("ada", 1, 2.0, gpus=4, waited=60.0, idle_seconds=HOUR),
        lease("ada", 5, 1.0, waited=600.0),
        lease("bob", 2, 0.5, idle_seconds=None, observed_seconds=0.0),
        request("bob", 3, "rejected"),
        request("bob", 3, "timed_out"),
        request("bob", 3, "given_up"),
    ]
    found = rows(records)
    assert list(found) == ["ada", "bob"]
    assert found["ada"] == {
        "name": "ada",
        "leases": 2,
        "gpu_hours": 9.0,
        "idle_gpu_hours": 4.0,
        "observed_gpu_hours": 9.0,
        "wait_median_seconds": 60.0,
        "wait_p90_seconds": 600.0,
        "refused": 0,
        "not_served": 0,
    }
    bob = found["bob"]
    assert (bob["gpu_hours"], bob["idle_gpu_hours"], bob["refused"], bob["not_served"]) == (0.5, None, 1, 2)
    total = total_of(records, whole()).as_json()
    assert (total["leases"], total["gpu_hours"], total["refused"]) == (3, 9.5, 1)


def test_of_a_lease_that_is_cut_by_the_span_only_that_part_counts() -> None:
    records = [lease("ada", -5, 10.0), lease("ada", 23, 100.0), lease("ada", -50, 1.0), lease("ada", 50, 1.0)]
    found = rows(records)["ada"]
    assert (found["gpu_hours"], found["leases"]) == (6.0, 1), "the first was granted before, the second within"


def test_by_gpu_the_hours_are_divided_and_by_day_they_are_cut_at_midnight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        found = rows([lease("ada", 1, 2.0, gpus=2)], "gpu")
        assert {name: row["gpu_hours"] for name, row in found.items()} == {"0 (GPU-0)": 2.0, "1 (GPU-1)": 2.0}
        # "Noon" is 22:13:20.
        by_day = rows([lease("ada", 0, 48.0)], "day", whole(48))
        assert {name: row["gpu_hours"] for name, row in by_day.items()} == {
            "2023-11-14": 1.778,
            "2023-11-15": 24.0,
            "2023-11-16": 22.222,
        }
        assert [row["leases"] for row in by_day.values()] == [1, 0, 0]
    finally:
        monkeypatch.delenv("TZ")
        time.tzset()


def test_what_does_not_count() -> None:
    records = [
        lease("ada", 1, 1.0, within="lease-1", gpu_seconds=0.0),
        lease("ada", 1, 0.01, how="unclaimed", gpu_seconds=0.0),
        lease("ada", 1, 1.0, ended="yesterday"),
    ]
    assert rows(records) == {}
    assert total_of(records, whole()).leases == 0


def test_labels() -> None:
    found = rows(
        [lease("ada", 1, 1.0, label="night"), lease("bob", 1, 1.0), lease("bob", 2, 1.0, label="night")], "label"
    )
    assert {name: row["gpu_hours"] for name, row in found.items()} == {"night": 2.0, "(no label)": 1.0}


def test_percentiles_are_values_that_occurred() -> None:
    assert percentile([], 50) is None
    assert percentile([3.0], 90) == 3.0
    assert percentile([float(each) for each in range(1, 11)], 90) == 9.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.0


def test_the_course_averages_over_steps() -> None:
    course = course_of([lease("ada", 1, 1.5, gpus=2, waited=HOUR / 2), lease("bob", 2, 9.0)], whole(4), 4)
    assert course.gpus_held == [0.0, 2.0, 2.0, 1.0]
    assert course.waiting == [0.5, 0.0, 0.0, 0.0]
    assert course.gpus == 2


@pytest.mark.parametrize("records", [[], [lease("ada", 1, 1.5, gpus=2, waited=HOUR / 2)]])
def test_the_picture_is_valid_and_stays_within_its_frame(records: list[dict[str, Any]]) -> None:
    root = ET.fromstring(draw(course_of(records, whole(), 24), 'GPUs <of> "the lab"'))  # noqa: S314  # our own
    assert root.findtext("{http://www.w3.org/2000/svg}title") == 'GPUs <of> "the lab"'
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for path in root.iter("{http://www.w3.org/2000/svg}path"):
        numbers = path.attrib["d"].replace("M", " ").replace("L", " ").replace("Z", "").replace(",", " ").split()
        xs, ys = list(map(float, numbers[::2])), list(map(float, numbers[1::2]))
        assert min(xs) >= 0
        assert max(xs) <= width
        assert min(ys) >= 0
        assert max(ys) <= height
