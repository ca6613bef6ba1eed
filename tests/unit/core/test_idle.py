"""Rule 1 with `policy="idle"`, when a GPU is really free; unified memory; and rule 3 for shares."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker_pool.core import (
    Event,
    Granted,
    HolderGone,
    PoolSettings,
    ProcessReading,
    Reading,
    Released,
    Request,
    Requested,
    RequestState,
    Requirements,
    explain_requirements,
)
from gpu_worker_pool.testing import History, gpu, snapshot
from tests.unit.core.oracle import Oracle
from tests.unit.core.test_rules import Story, granted

IDLE = Requirements(policy="idle")
NOTEBOOK = ProcessReading(4242, 7_200.0, name="python", user="ada", memory_used_mb=15_360.0)
DESKTOP = ProcessReading(900, 60.0, name="Xorg", user="root", memory_used_mb=1_000.0)


@pytest.fixture
def story() -> Story:
    return Story(PoolSettings())


def why_not(reading: Reading, requirements: Requirements = IDLE, *, at: float = 0.0) -> list[str]:
    story = Story(PoolSettings())
    story.now = at
    story.reads(reading, after=0.0)
    (found,) = explain_requirements(story.pool, requirements, story.now).gpus
    return [str(obstacle) for obstacle in found.obstacles]


# --- processes ---


def test_an_idle_notebook_is_in_the_way_and_is_named_with_its_memory_and_its_age() -> None:
    """Below all thresholds: 19 % of the memory, and it computes nothing."""
    reading = gpu(0, memory_used_mb=15_360.0, processes=(NOTEBOOK,))
    told = "in use by python (pid 4242, ada) with 15.0 GiB for 3 h"
    assert why_not(reading, at=18_000.0) == [told]
    assert why_not(reading, Requirements()) == []


def test_a_process_of_which_little_is_known_is_in_the_way_all_the_same() -> None:
    assert why_not(gpu(0, memory_used_mb=60_000.0, processes=(ProcessReading(7),))) == ["in use by process (pid 7)"]


def test_processes_that_are_only_counted_are_in_the_way() -> None:
    assert why_not(gpu(0, processes=None, unnamed_processes=1)) == ["in use by a process"]
    assert why_not(gpu(0, processes=None, unnamed_processes=3)) == ["in use by 3 processes"]


def test_the_summary_of_a_waiting_request_names_outsiders_and_stays_the_same(story: Story) -> None:
    def summary(age: float) -> str:
        story.reads(gpu(0, processes=(NOTEBOOK,)), gpu(1, processes=(NOTEBOOK,)), after=age)
        return explain_requirements(story.pool, IDLE, story.now).summary

    told = "one idle GPU: next in line; of 2 GPUs: 2 in use by python (pid 4242, ada)"
    assert (summary(1.0), summary(1000.0)) == (told, told)
    others = [ProcessReading(pid, name="x") for pid in (1, 2, 3)]
    story.reads(*(gpu(number, processes=(each,)) for number, each in enumerate(others)))
    assert explain_requirements(story.pool, IDLE, story.now).summary.endswith(
        "of 3 GPUs: 3 in use by x (pid 1), x (pid 2) and others"
    )
    story.reads(gpu(0, memory_used_mb=70_000.0))
    told = explain_requirements(story.pool, Requirements(policy="idle", only=("0",)), story.now).summary
    assert "1 in use by no visible process" in told


@pytest.mark.parametrize(
    ("graphics", "expected"),
    [
        (((900, 1_024.0),), []),
        (((900, 1_024.5),), ["in use for graphics by Xorg (pid 900) with 1.0 GiB"]),
        (
            ((900, 600.0), (901, 600.0)),
            ["in use for graphics by Xorg (pid 900) with 600 MB", "in use for graphics by Xorg (pid 901) with 600 MB"],
        ),
        (((900, None), (901, 600.0)), []),
    ],
)
def test_a_desktop_does_not_count_up_to_one_gib(
    graphics: tuple[tuple[int, float | None], ...], expected: list[str]
) -> None:
    drawing = tuple(ProcessReading(pid, name="Xorg", memory_used_mb=used) for pid, used in graphics)
    used = sum(process.memory_used_mb or 0.0 for process in drawing)
    assert why_not(gpu(0, memory_used_mb=used, graphics=drawing)) == expected


# --- memory that no process explains ---


@pytest.mark.parametrize(
    ("total", "used", "expected"),
    [
        (80_000.0, 3_999.0, []),
        (80_000.0, 4_000.0, ["3.9 GiB in use by no visible process; 3.9 GiB are allowed"]),
        (24_576.0, 1_228.0, []),
        (24_576.0, 3_174.4, ["3.1 GiB in use by no visible process; 1.2 GiB are allowed"]),
        # On a small card 5 % would be less than the driver and a desktop use.
        (8_000.0, 1_023.0, []),
        (8_000.0, 1_024.0, ["1.0 GiB in use by no visible process; 1.0 GiB are allowed"]),
    ],
)
@pytest.mark.parametrize("processes", [(), None])
def test_memory_in_use_that_no_process_explains(total: float, used: float, expected: list[str], processes: Any) -> None:
    """The same where processes cannot be seen: then memory alone decides, and all of it is unexplained."""
    assert why_not(gpu(0, memory_total_mb=total, memory_used_mb=used, processes=processes)) == expected


def test_the_memory_of_graphics_is_explained_where_it_is_known() -> None:
    reading = {"memory_total_mb": 8_000.0, "memory_used_mb": 1_900.0}
    assert why_not(gpu(0, **reading, graphics=(DESKTOP,))) == []
    assert why_not(gpu(0, **reading, graphics=None)) != []
    nameless = ProcessReading(900, name="Xorg", memory_used_mb=None)
    assert why_not(gpu(0, **reading, graphics=(nameless,))) != [], "unknown memory explains nothing"


def test_where_neither_processes_nor_memory_are_known_a_gpu_is_not_idle() -> None:
    assert why_not(gpu(0, memory_used_mb=None, processes=None)) == ["does not report its memory usage"]


def test_a_server_that_tells_only_percentages() -> None:
    percent = {"memory_total_mb": None, "memory_used_mb": None, "processes": None}
    assert why_not(gpu(0, **percent, memory_usage_percent=4.9)) == []
    assert why_not(gpu(0, **percent, memory_usage_percent=5.0)) == [
        "memory 5.0 % in use by no visible process; 5 % are allowed"
    ]


# --- thresholds ---


def test_thresholds_count_for_idle_requests_only_where_they_name_them() -> None:
    loud = gpu(0, utilization_percent=99.0, memory_used_mb=2_000.0)
    assert why_not(loud) == [], "the utilization of the one that has just ended"
    named = Requirements(policy="idle", memory_threshold=2.0, utilization_threshold=50.0)
    assert why_not(loud, named) == ["memory 2.5 % used, not below 2 %", "utilization 99.0 %, not below 50 %"]
    assert why_not(gpu(0, utilization_percent=None)) == ["its utilization could not be read"]


def test_a_mig_device_needs_processes_that_can_be_seen() -> None:
    mig = {"utilization_percent": None, "reports_utilization": False, "is_mig_device": True}
    assert why_not(gpu(0, **mig)) == []
    assert why_not(gpu(0, **mig, processes=None)) == ["its processes cannot be seen"]


# --- GPUs with leases ---


def share(mb: float, policy: Any = "idle") -> Requirements:
    return Requirements(memory_mb=mb, share=True, policy=policy)


def test_beside_holders_foreign_are_the_processes_that_were_there_before_them(story: Story) -> None:
    story.reads(gpu(0, memory_used_mb=15_360.0, processes=(NOTEBOOK,)))
    story.asks("first", share(10_000, "thresholds"))
    ours = ProcessReading(5, 1.0, memory_used_mb=9_000.0)
    story.reads(gpu(0, memory_used_mb=24_360.0, processes=(NOTEBOOK, ours)))
    assert granted(story.asks("second", share(10_000))) == []
    assert granted(story.reads(gpu(0, memory_used_mb=9_000.0, processes=(ours,)))) == [("second", ("0",))]


def test_where_processes_cannot_be_seen_the_memory_before_the_first_holder_decides(story: Story) -> None:
    story.reads(gpu(0, memory_used_mb=15_360.0, processes=None), gpu(1, memory_used_mb=300.0, processes=None))
    story.asks("a", Requirements(memory_mb=10_000, share=True, only=("0",)))
    story.asks("b", Requirements(memory_mb=10_000, share=True, only=("1",)))
    story.reads(gpu(0, memory_used_mb=20_000.0, processes=None), gpu(1, memory_used_mb=20_000.0, processes=None))
    found = explain_requirements(story.pool, share(10_000), story.now).gpus
    assert [[str(obstacle) for obstacle in each.obstacles] for each in found] == [
        ["15.0 GiB in use by no visible process; 3.9 GiB are allowed"],
        [],
    ]


# --- unified memory ---

UNIFIED = {"has_unified_memory": True, "memory_total_mb": 120_000.0}


def test_of_unified_memory_only_processes_say_whether_it_is_idle() -> None:
    assert why_not(gpu(0, **UNIFIED, memory_used_mb=100_000.0)) == []
    assert why_not(gpu(0, **UNIFIED, memory_used_mb=None)) == [], "the host's memory is not needed"
    assert why_not(gpu(0, **UNIFIED, processes=(ProcessReading(7),))) == ["in use by process (pid 7)"]
    assert why_not(gpu(0, **UNIFIED, processes=None)) == ["its processes cannot be seen"]


def test_thresholds_go_by_the_host_s_memory() -> None:
    told = ["host memory 83.3 % used, not below 80 %"]
    assert why_not(gpu(0, **UNIFIED, memory_used_mb=100_000.0), Requirements()) == told
    assert why_not(gpu(0, **UNIFIED, memory_used_mb=60_000.0), Requirements()) == []


def test_a_request_that_nothing_could_ever_answer_is_rejected_at_once(story: Story) -> None:
    """Never a wait without an end."""
    story.reads(gpu(0, **UNIFIED, processes=None, reports_processes=False))
    (ended,) = story.asks("a", IDLE)
    assert ended.state is RequestState.REJECTED  # type: ignore[union-attr]
    assert "policy thresholds goes by its utilization" in str(ended)
    assert granted(story.asks("b")) == [("b", ("0",))], "by its utilization, as was said"
    blind = {"utilization_percent": None, "reports_utilization": False, "reports_processes": False}
    other = Story(PoolSettings())
    other.reads(gpu(0, **UNIFIED, **blind, processes=None))
    assert [ended.state for ended in other.asks("c")] == [RequestState.REJECTED]  # type: ignore[union-attr]


def test_a_list_of_processes_that_failed_once_rejects_nothing(story: Story) -> None:
    story.reads(gpu(0, **UNIFIED, processes=None))
    assert granted(story.asks("a", IDLE)) == []
    assert story.waits() == ["a"]
    assert granted(story.reads(gpu(0, **UNIFIED))) == [("a", ("0",))]


def gone(story: Story, *, is_proven: bool = False, **before: Any) -> None:
    """A holder of unified memory that is gone, and a request that waits for the GPU."""
    story.reads(gpu(0, **UNIFIED, memory_used_mb=10_000.0, **before))
    story.asks("a", ttl=60.0)
    story.asks("b", ttl=60.0)
    story.happens(HolderGone(story.lease("a").lease_id, is_proven=is_proven), after=1.0)


def test_a_quarantine_of_unified_memory_goes_by_processes(story: Story) -> None:
    gone(story)
    worker = ProcessReading(99, 0.5)
    full = {**UNIFIED, "memory_used_mb": 90_000.0}
    assert granted(story.reads(gpu(0, **full, processes=(worker,)), after=6.0)) == [], "it is there yet"
    assert granted(story.reads(gpu(0, **full), after=1.0)) == [("b", ("0",))], "75 % of the host's memory say nothing"


def test_a_process_that_was_there_before_does_not_prolong_it_for_ever(story: Story) -> None:
    gone(story, processes=(NOTEBOOK,))
    full = gpu(0, **UNIFIED, memory_used_mb=80_000.0, processes=(NOTEBOOK,))
    assert granted(story.reads(full, after=6.0)) == [("b", ("0",))]


def test_where_processes_cannot_be_seen_either_it_ends_after_its_shortest_time(story: Story) -> None:
    gone(story, processes=None)
    unseen = gpu(0, **UNIFIED, memory_used_mb=80_000.0, processes=None)
    assert granted(story.reads(unseen, after=4.0)) == [], "not before"
    assert granted(story.reads(unseen, after=1.1)) == [("b", ("0",))]


def test_of_those_who_share_unified_memory_a_dead_one_is_not_taken_for_gone(story: Story) -> None:
    story.reads(gpu(0, **UNIFIED, memory_used_mb=0.0))
    story.asks("dead", share(10_000))
    story.asks("living", share(10_000))
    story.happens(HolderGone(story.lease("dead").lease_id, is_proven=True), after=1.0)
    story.reads(gpu(0, **UNIFIED, memory_used_mb=0.0, processes=(ProcessReading(1, 1.0),)))
    assert story.lease("dead").quarantine is not None, "it may be the dead one's"
    story.reads(gpu(0, **UNIFIED, memory_used_mb=0.0))
    assert "dead" not in {lease.request.request_id for lease in story.pool.leases}


# --- row by row: shares fill a GPU before they open the next ---


def test_rule_3_shares_fill_a_gpu_before_they_open_the_next(story: Story) -> None:
    story.reads(*(gpu(number, memory_total_mb=24_000.0) for number in range(4)))
    for number in range(4):
        story.asks(f"s{number}", share(8_000, "thresholds"))
    assert [story.gpus_of(f"s{number}") for number in range(4)] == [("0",), ("0",), ("0",), ("1",)]
    assert [granted(story.asks(f"w{number}")) for number in range(2)] == [[("w0", ("2",))], [("w1", ("3",))]]


def test_rule_3_the_best_fit_comes_first_and_what_nobody_shares_last(story: Story) -> None:
    story.reads(*(gpu(number) for number in range(4)))
    for number, mb in ((1, 50_000), (2, 60_000), (3, 75_000)):
        story.asks(f"on{number}", Requirements(memory_mb=mb, share=True, only=(str(number),)))
    assert granted(story.asks("a", share(10_000, "thresholds"))) == [("a", ("2",))], "the least left that is enough"
    assert granted(story.asks("b", share(20_000, "thresholds"))) == [("b", ("1",))]
    assert granted(story.asks("c", share(40_000, "thresholds"))) == [("c", ("0",))]


def test_rule_3_a_share_opens_the_least_used_gpu_and_not_one_beside_an_outsider(story: Story) -> None:
    story.reads(gpu(0, memory_used_mb=60_000.0), gpu(1, utilization_percent=80.0), gpu(2, memory_used_mb=500.0))
    assert granted(story.asks("a", share(10_000, "thresholds"))) == [("a", ("2",))]


def test_rule_3_shares_of_several_gpus_are_packed_too(story: Story) -> None:
    story.reads(*(gpu(number) for number in range(4)))
    two = Requirements(count=2, memory_mb=30_000, share=True)
    assert granted(story.asks("a", two)) == [("a", ("0", "1"))]
    assert granted(story.asks("b", two)) == [("b", ("0", "1"))]
    assert granted(story.asks("c", two)) == [("c", ("2", "3"))]
    three = Requirements(count=3, memory_mb=10_000, share=True)
    assert granted(story.asks("d", three)) == [("d", ("0", "1", "2"))]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([5_000, 15_000, 30_000, 60_000]), st.sampled_from([1, 1, 1, 2]), st.integers(0, 5)),
        max_size=30,
    )
)
def test_rule_3_shares_that_come_and_go_are_packed_as_the_oracle_says(steps: list[tuple[int, int, int]]) -> None:
    history, oracle, held = History(PoolSettings()), Oracle(PoolSettings()), list[str]()

    def happens(event: Event, now: float) -> None:
        effects = history.apply(event, now)
        oracle.saw(event, effects, now)
        held.extend(effect.lease.lease_id for effect in effects if isinstance(effect, Granted))

    happens(snapshot([gpu(number) for number in range(4)], at=0.0), 0.0)
    for number, (mb, count, released) in enumerate(steps):
        now = 0.1 * (number + 1)
        requirements = Requirements(count=count, memory_mb=mb, share=True)
        happens(Requested(Request(f"r{number}", requirements), None, None), now)
        if released < len(held):
            happens(Released(held.pop(released)), now)
