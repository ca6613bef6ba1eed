"""Replies are hostile input: one bad field spoils its GPU, a bad envelope the reply, and no zero is ever invented."""

from __future__ import annotations

import json
import math
import random
import time
import tracemalloc
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpu_worker_pool.api import summary_decoder
from gpu_worker_pool.api.decoder import decode_explanation, decode_leases, decode_queue, decode_stats
from gpu_worker_pool.api.json_values import LARGEST_BODY_BYTES, cleaned
from gpu_worker_pool.api.lease_decoder import (
    MOST_REASONS,
    LeaseRow,
    QueuePosition,
    decode_lease,
    decode_problem,
    decode_queue_position,
    read_lease_row,
)
from gpu_worker_pool.api.summary_decoder import MOST_GPUS, DecodedSummary, decode_summary
from gpu_worker_pool.api.transport import parse_retry_after
from gpu_worker_pool.errors import ServiceRetryableError
from gpu_worker_pool.models import GPUInfo, GPUStats
from tests.fakes.http_server import gpu_row, summary


def encoded(reply: object) -> bytes:
    return json.dumps(reply).encode()


def parse(*rows: Any, **more: Any) -> DecodedSummary:
    return decode_summary(encoded(summary(*rows, **more)))


def parse_row(**changes: Any) -> tuple[GPUInfo, tuple[str, ...]]:
    """A row beside a good one, which must not suffer from it."""
    good = gpu_row(7, name="beside")
    reply = parse(gpu_row(0, **changes), good)
    bad, beside = reply.stats.gpus_summary
    assert beside == GPUInfo(7, "beside", 20.0, 15)
    return bad, reply.problems


# --- good replies ---


def test_the_documented_reply_of_any_server() -> None:
    reply = parse(gpu_row(0), gpu_row(1, utilization_percent=20))
    assert reply == DecodedSummary(
        GPUStats(
            gpu_count=2,
            total_memory_mb=20480,
            total_used_memory_mb=4096,
            average_utilization_percent=15.0,
            gpus_summary=[
                GPUInfo(0, "NVIDIA GeForce RTX 3080", 20.0, 15),
                GPUInfo(1, "NVIDIA GeForce RTX 3080", 20.0, 20),
            ],
            total_memory_usage_percent=20.0,
            timestamp="2025-07-23T10:30:00.123456",
            sample_age_seconds=0.0,
        ),
        (),
    )


def test_the_reply_of_our_server() -> None:
    row = gpu_row(
        3,
        uuid="GPU-5a1c",
        memory_total_mb=10240,
        memory_used_mb=2048,
        fault=None,
        reports_utilization=False,
        process_count=2,
        leased=True,
    )
    reply = parse(row, sample_age_seconds=0.512)
    assert reply.problems == ()
    assert reply.stats.sample_age_seconds == 0.512
    assert reply.stats.gpus_summary == [
        GPUInfo(
            3,
            "NVIDIA GeForce RTX 3080",
            20.0,
            15,
            uuid="GPU-5a1c",
            memory_total_mb=10240,
            memory_used_mb=2048,
            leased=True,
            reports_utilization=False,
            process_count=2,
        )
    ]


def test_what_a_server_could_not_read_stays_unknown() -> None:
    unread = gpu_row(
        0, memory_usage_percent=None, utilization_percent=None, uuid=None, process_count=None, fault="GPU is lost"
    )
    reply = parse(unread, total_memory_mb=None, average_utilization_percent=None)
    assert reply.problems == ()
    assert reply.stats.gpus_summary == [GPUInfo(0, "NVIDIA GeForce RTX 3080", None, None, fault="GPU is lost")]
    assert (reply.stats.total_memory_mb, reply.stats.average_utilization_percent) == (None, None)


def test_what_is_left_out_is_unknown_and_no_fault() -> None:
    reply = decode_summary(b'{"gpu_count": 1, "gpus_summary": [{"gpu_id": 4}]}')
    assert reply == DecodedSummary(GPUStats(1, None, None, None, [GPUInfo(4, "unknown GPU", None, None)], None, ""), ())


def test_unknown_keys_are_ignored() -> None:
    reply = parse(gpu_row(0, fan_speed=[1, {"deep": None}]), cluster={"name": 1})
    assert reply == parse(gpu_row(0))
    assert reply.problems == ()


def test_no_gpus() -> None:
    reply = parse()
    assert (reply.stats.gpu_count, reply.stats.gpus_summary, reply.problems) == (0, [], ())


def test_ten_thousand_gpus_in_bounded_time() -> None:
    rows = [gpu_row(index, uuid=f"GPU-{index}", memory_total_mb=10240, memory_used_mb=2048) for index in range(10_000)]
    body = encoded(summary(*rows))
    begun = time.perf_counter()
    reply = decode_summary(body)
    assert time.perf_counter() - begun < 5.0
    assert (reply.stats.gpu_count, len(reply.stats.gpus_summary), reply.problems) == (10_000, 10_000, ())


# --- a bad field spoils its GPU and no other ---

PERCENTS = ["memory_usage_percent", "utilization_percent"]
NUMBERS = [*PERCENTS, "memory_total_mb", "memory_used_mb"]
BAD_NUMBERS = [
    (math.nan, "nan"),
    (math.inf, "inf"),
    (-math.inf, "-inf"),
    (-5, "-5"),
    (-0.001, "-0.001"),
    (10**18, "1000000000000000000"),
    (True, "true"),
    (False, "false"),
    ("20", "'20'"),
    ([20], "a list"),
    ({"percent": 20}, "an object"),
]


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize(("value", "shown"), BAD_NUMBERS, ids=[shown for _, shown in BAD_NUMBERS])
def test_a_bad_number_is_a_fault_of_its_gpu(field: str, value: object, shown: str) -> None:
    gpu, problems = parse_row(**{field: value})
    assert getattr(gpu, field) is None
    assert gpu.fault == f"bad value: {field} is {shown}"
    assert problems == (f"GPU 0: {field} is {shown}",)


@pytest.mark.parametrize("field", PERCENTS)
@pytest.mark.parametrize("value", [250, 100.001])
def test_more_than_all_is_a_fault(field: str, value: float) -> None:
    gpu, _ = parse_row(**{field: value})
    assert (getattr(gpu, field), gpu.fault) == (None, f"bad value: {field} is {value}")


@pytest.mark.parametrize("field", PERCENTS)
@pytest.mark.parametrize("value", [0, 0.0, 100, 100.0])
def test_percents_include_both_ends(field: str, value: float) -> None:
    gpu, problems = parse_row(**{field: value})
    assert (getattr(gpu, field), gpu.fault, problems) == (value, None, ())


def test_more_used_than_there_is_is_a_fault() -> None:
    gpu, problems = parse_row(memory_total_mb=100, memory_used_mb=101)
    assert (gpu.memory_total_mb, gpu.memory_used_mb) == (100, None)
    assert gpu.fault == "bad value: memory_used_mb is 101, but memory_total_mb is 100"
    assert problems == ("GPU 0: memory_used_mb is 101, but memory_total_mb is 100",)


@pytest.mark.parametrize(
    ("field", "value", "kept"),
    [
        ("name", 5, ""),
        ("uuid", 5, None),
        ("uuid", "", None),
        ("uuid", "MIG-1,0", None),
        ("uuid", "GPU 1", None),
        ("uuid", "GPU-\x00", None),
        ("uuid", "G" * 129, None),
        ("process_count", -1, None),
        ("process_count", 1.5, None),
        ("process_count", True, None),
        ("leased", "no", False),
        ("leased", 0, False),
        ("leased", None, False),
        ("reports_utilization", 0, True),
        ("reports_utilization", None, True),
    ],
)
def test_any_other_bad_field_is_a_fault_too(field: str, value: object, kept: object) -> None:
    gpu, problems = parse_row(**{field: value})
    assert getattr(gpu, field) == (kept or "unknown GPU" if field == "name" else kept)
    assert gpu.fault is not None
    assert gpu.fault.startswith(f"bad value: {field} is ")
    assert len(problems) == 1


@pytest.mark.parametrize("fault", [True, 0, [], {}, "", "\x00\n"])
def test_a_fault_that_says_nothing_is_still_one(fault: object) -> None:
    gpu, problems = parse_row(fault=fault)
    assert gpu.fault is not None
    assert gpu.fault.startswith("bad value: fault is ")
    assert len(problems) == 1


def test_the_servers_own_fault_comes_first() -> None:
    gpu, problems = parse_row(fault="GPU is lost", utilization_percent=-1)
    assert gpu.fault == "GPU is lost; bad value: utilization_percent is -1"
    assert problems == ("GPU 0: utilization_percent is -1",)


def test_an_integer_of_a_million_digits_spoils_its_field_only() -> None:
    body = encoded(summary(gpu_row(0, utilization_percent=777), gpu_row(1))).replace(b"777", b"9" * 1_000_000)
    spoiled, good = decode_summary(body).stats.gpus_summary
    assert (spoiled.utilization_percent, spoiled.fault) == (None, "bad value: utilization_percent is inf")
    assert good.fault is None


def test_a_key_given_twice_is_a_bad_field() -> None:
    body = encoded(summary(gpu_row(0), gpu_row(1))).replace(
        b'"utilization_percent": 15', b'"utilization_percent": 99, "utilization_percent": 0', 1
    )
    reply = decode_summary(body)
    spoiled, good = reply.stats.gpus_summary
    assert (spoiled.utilization_percent, spoiled.fault) == (None, "bad value: utilization_percent is given twice")
    assert (good.utilization_percent, good.fault) == (15, None)
    assert reply.problems == ("GPU 0: utilization_percent is given twice",)


def test_names_are_made_safe_to_show() -> None:
    gpu, problems = parse_row(name="A\x1b[31m100\n\u202e\ud800 X")
    assert (gpu.name, gpu.fault, problems) == ("A[31m100 X", None, ())
    gpu, _ = parse_row(name="x" * 100_000)
    assert gpu.name == "x" * 128 + "…"
    gpu, _ = parse_row(fault="\x07y" * 100_000)
    assert gpu.fault is not None
    assert len(gpu.fault) <= 301


# --- rows that cannot be told apart ---


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (gpu_row(None), "gpu_id is missing"),
        (gpu_row(-1), "gpu_id is -1"),
        (gpu_row("0"), "gpu_id is '0'"),
        (gpu_row(0.0), "gpu_id is 0.0"),
        (gpu_row(True), "gpu_id is true"),
        (gpu_row(2**31), "gpu_id is 2147483648"),
        (gpu_row(math.nan), "gpu_id is nan"),
        ({}, "gpu_id is missing"),
        (None, "it is missing"),
        (["gpu_id", 0], "it is a list"),
        ("gpu_id", "it is 'gpu_id'"),
    ],
)
def test_a_row_without_a_usable_id_is_left_out_and_noted(row: Any, why: str) -> None:
    reply = parse(row, gpu_row(1))
    assert [gpu.gpu_id for gpu in reply.stats.gpus_summary] == [1]
    assert reply.stats.gpu_count == 1
    assert reply.problems == (f"row 0 is left out: {why}",)


def test_the_same_id_twice_is_counted_once() -> None:
    reply = parse(gpu_row(0), gpu_row(1), gpu_row(0))
    assert [gpu.gpu_id for gpu in reply.stats.gpus_summary] == [0, 1]
    assert reply.stats.gpu_count == 2
    assert reply.problems == ("GPU 0 is listed more than once; the busier row counts",)


BUSIER_AND_BUSIER: list[dict[str, Any]] = [
    {},
    {"utilization_percent": 16},
    {"memory_usage_percent": None},
    {"leased": True, "utilization_percent": 0},
    {"fault": "GPU is lost", "utilization_percent": 0},
]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("index", range(len(BUSIER_AND_BUSIER) - 1))
def test_of_two_rows_of_one_gpu_the_busier_counts(index: int, order: int) -> None:
    rows = [gpu_row(0, **changes) for changes in BUSIER_AND_BUSIER[index : index + 2]]
    [gpu] = parse(*rows[::order]).stats.gpus_summary
    [busier] = parse(rows[1]).stats.gpus_summary
    assert gpu == busier


def test_the_same_uuid_under_two_ids_can_be_used_only_once() -> None:
    reply = parse(gpu_row(0, uuid="GPU-a"), gpu_row(1, uuid="GPU-a"))
    first, second = reply.stats.gpus_summary
    assert (first.uuid, first.fault) == ("GPU-a", None)
    assert (second.uuid, second.fault) == (None, "bad value: uuid is that of GPU 0, too")


def test_a_few_problems_stand_for_many() -> None:
    problems = parse(*[gpu_row(-1)] * 1_000).problems
    assert len(problems) == 21
    assert problems[-1] == "and 980 more"


# --- the envelope ---


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the reply is not JSON: Expecting value (character 0)"),
        (b"<html><body>It works!</body></html>", "the reply is not JSON: Expecting value (character 0)"),
        (b'{"gpus_summary": [{"gpu_id"', "the reply is not JSON: Expecting ':' delimiter (character 27)"),
        (b'{"gpus_summary": []} trailing', "the reply is not JSON: Extra data (character 21)"),
        (b'{"name": "\xff"}', "the reply is not UTF-8: invalid start byte (byte 10)"),
        ('{"gpus_summary": []}'.encode("utf-16"), "the reply is not UTF-8: invalid start byte (byte 0)"),
        (b"[]", "the reply must be a JSON object, not a list"),
        (b"null", "the reply must be a JSON object, not missing"),
        (b"NaN", "the reply must be a JSON object, not nan"),
        (b"{}", "the reply must have a list gpus_summary, not missing"),
        (b'{"gpus_summary": {"0": {}}}', "the reply must have a list gpus_summary, not an object"),
        (b'{"gpus_summary": [], "gpus_summary": []}', "the reply must have a list gpus_summary, not given twice"),
        (b"[" * 1_000_000, "the reply has more than 500000 values"),
        (b"[" * 400_000, "the reply is nested too deeply"),
        (b'{"a":' * 400_000, "the reply is nested too deeply"),
        (b" " * (LARGEST_BODY_BYTES + 1), "the reply has 8388609 bytes; at most 8388608 are read"),
    ],
)
def test_a_bad_envelope_spoils_the_whole_reply(body: bytes, message: str) -> None:
    with pytest.raises(ServiceRetryableError) as caught:
        decode_summary(body)
    assert str(caught.value) == message


def test_more_gpus_than_any_host_has_are_not_believed() -> None:
    with pytest.raises(ServiceRetryableError, match="lists 16385 GPUs; at most 16384"):
        parse(*[gpu_row(0)] * (MOST_GPUS + 1))


@pytest.mark.parametrize("body", [b"[" + b"[]," * 2_790_000 + b"[]]", b"[" + b"1.5," * 2_090_000 + b"1]"])
def test_small_values_by_the_million_do_not_fill_the_memory(body: bytes) -> None:
    assert len(body) <= LARGEST_BODY_BYTES
    peaks = []
    for _ in range(5):  # all threads are counted, and one of the test runner's may read a message meanwhile
        tracemalloc.start()
        try:
            with pytest.raises(ServiceRetryableError, match="more than 500000 values"):
                decode_summary(body)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert min(peaks) < 1_000_000


@pytest.mark.parametrize("age", [None, -0.001, math.nan, math.inf, "1", True, [], 10**400])
def test_readings_of_unknown_age_spoil_the_whole_reply(age: object) -> None:
    with pytest.raises(
        ServiceRetryableError, match=r"^sample_age_seconds is .+, so the age of the readings is unknown$"
    ):
        parse(gpu_row(0), sample_age_seconds=age)


def test_an_age_given_twice_is_unknown() -> None:
    with pytest.raises(ServiceRetryableError, match="sample_age_seconds is given twice"):
        decode_summary(b'{"gpus_summary": [], "sample_age_seconds": 100, "sample_age_seconds": 0}')


@pytest.mark.parametrize("age", [0, 0.0, 17.25, 1e300])
def test_readings_of_any_known_age_are_told_with_it(age: float) -> None:
    assert parse(gpu_row(0), sample_age_seconds=age).stats.sample_age_seconds == age


@pytest.mark.parametrize(
    "field",
    ["total_memory_mb", "total_used_memory_mb", "total_memory_usage_percent", "average_utilization_percent"],
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -5, True, "20", [], {}, 10**400])
def test_a_bad_total_is_unknown(field: str, value: object) -> None:
    reply = parse(gpu_row(0), **{field: value})
    assert getattr(reply.stats, field) is None
    assert reply.stats.gpus_summary[0].fault is None
    assert len(reply.problems) == 1
    assert reply.problems[0].startswith(f"{field} is ")


def test_a_total_below_what_is_used_is_not_believed() -> None:
    reply = parse(gpu_row(0), total_memory_mb=1, total_used_memory_mb=2)
    assert (reply.stats.total_memory_mb, reply.stats.total_used_memory_mb) == (1, None)
    assert reply.problems == ("total_used_memory_mb is 2, but total_memory_mb is 1",)


@pytest.mark.parametrize("count", [0, 2, 10**9, -1, None, "1", math.nan])
def test_gpus_are_counted_not_believed(count: object) -> None:
    reply = parse(gpu_row(0), gpu_count=count)
    assert reply.stats.gpu_count == 1
    assert len(reply.problems) == 1
    assert reply.problems[0].startswith("gpu_count is ")


def test_a_timestamp_is_only_for_people() -> None:
    assert parse(timestamp=5).stats.timestamp == ""
    assert parse(timestamp="now\n" * 100).stats.timestamp == "now" * 16 + "…"


# --- anything at all ---

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=10)
    | st.sampled_from([0, 0.0, 1, 100, 250, -5, 10**400, ""]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
row_keys = st.sampled_from(
    ["gpu_id", *NUMBERS, "name", "uuid", "fault", "leased", "reports_utilization", "process_count"]
)
rows = st.dictionaries(row_keys, json_values, max_size=11) | st.builds(
    lambda gpu_id, changes: {**gpu_row(gpu_id), **changes}, st.integers(0, 3), st.dictionaries(row_keys, json_values)
)
envelopes = st.builds(
    lambda rows, changes: summary(*rows, **changes),
    st.lists(rows | json_values, max_size=5),
    st.dictionaries(st.sampled_from([*summary(), "sample_age_seconds"]), json_values, max_size=3),
)


def every_number(value: object) -> set[float]:
    if isinstance(value, dict):
        return set().union(*map(every_number, value.values()))
    if isinstance(value, list):
        return set().union(*map(every_number, value))
    return {value} if isinstance(value, int | float) and not isinstance(value, bool) else set()


def parse_or_refuse(body: bytes) -> DecodedSummary | ServiceRetryableError:
    try:
        return decode_summary(body)
    except ServiceRetryableError as error:
        return error


def check(body: bytes) -> None:
    reply = parse_or_refuse(body)
    if isinstance(reply, ServiceRetryableError):
        assert len(str(reply)) < 300
        return
    stats = reply.stats
    json.dumps(asdict(stats), allow_nan=False).encode()
    given_numbers = every_number(json.loads(body))
    for gpu in stats.gpus_summary:
        known = {gpu.gpu_id, *(getattr(gpu, field) for field in NUMBERS), gpu.process_count} - {None}
        assert known <= given_numbers, "a number that nobody sent"
    for text in (*reply.problems, *(gpu.fault or "" for gpu in stats.gpus_summary)):
        assert text.isprintable()
        assert len(text) < 700


@settings(deadline=None)
@given(json_values | envelopes)
@example(summary(gpu_row(0, memory_usage_percent=-0.0)))
def test_any_json_is_a_valid_reply_or_a_retryable_error(value: object) -> None:
    check(encoded(value))


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_retryable_error(body: bytes) -> None:
    with pytest.raises(ServiceRetryableError):
        decode_summary(body)


@settings(deadline=None)
@given(rows, st.integers(0, 2**32))
def test_a_reply_damaged_anywhere_is_a_valid_reply_or_a_retryable_error(row: dict[str, Any], seed: int) -> None:
    damaged = bytearray(encoded(summary(row, gpu_row(9))))
    draw = random.Random(seed)
    for _ in range(draw.randint(1, 3)):
        damaged[draw.randrange(len(damaged))] = draw.randrange(256)
    reply = parse_or_refuse(bytes(damaged))
    if isinstance(reply, DecodedSummary):
        assert len(reply.stats.gpus_summary) <= reply.stats.gpu_count <= 2


# --- what else an answer says ---


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (b'{"detail": "nvidia-smi was not found", "error": "nvidia_smi_not_found"}', "nvidia-smi was not found"),
        (b'{"detail": "a\\nb\\u0007"}', "ab"),
        (b'{"detail": ""}', ""),
        (b'{"detail": [{"msg": "no"}]}', ""),
        (b'{"detail": "a", "detail": "b"}', ""),
        (b"{}", ""),
        (b"[]", ""),
        (b"<html>", ""),
        (b"\xff", ""),
        (None, ""),
    ],
)
def test_the_detail_of_an_error(body: bytes | None, detail: str) -> None:
    assert decode_problem(body).detail == detail


def test_the_codes_of_an_error() -> None:
    problem = decode_problem(
        encoded({"error": "impossible", "detail": "no\nnever", "reasons": ["too large"], "state": "cancelled"})
    )
    assert (problem.error, problem.detail, problem.reasons) == ("impossible", "nonever", ("too large",))
    assert problem.state == "cancelled"


NOW = 1_445_412_480.0  # Wed, 21 Oct 2015 07:28:00 GMT


@pytest.mark.parametrize(
    ("value", "date", "seconds"),
    [
        (None, None, None),
        ("", None, None),
        ("0", None, 0.0),
        (" 7 ", None, 7.0),
        ("301", None, 300.0),
        ("9" * 10_000, None, 300.0),
        ("-1", None, None),
        ("1.5", None, None),
        ("nan", None, None),
        ("soon", None, None),
        ("²", None, None),
        ("Wed, 21 Oct 2015 07:28:30 GMT", None, 30.0),
        ("Wed, 21 Oct 2015 07:27:00 GMT", None, 0.0),
        ("Wed, 21 Oct 2099 07:27:00 GMT", None, 300.0),
        # The server's clock is a year behind, and it means 10 seconds.
        ("Tue, 21 Oct 2014 07:28:10 GMT", "Tue, 21 Oct 2014 07:28:00 GMT", 10.0),
        ("Wed, 21 Oct 2015 07:28:30 GMT", "nonsense", 30.0),
        ("Wed, 99 Oct 2015 07:28:30 GMT", None, None),
        ("Wed, 21 Oct 99999 07:28:30 GMT", None, None),
        ("Fri, 31 Dec 9999 23:59:59 -2359", None, 300.0),
    ],
)
def test_retry_after(value: str | None, date: str | None, seconds: float | None) -> None:
    assert parse_retry_after(value, date, NOW) == seconds


def test_a_date_without_a_zone_is_not_local_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        assert parse_retry_after("Wed, 21 Oct 2015 07:28:30", None, NOW) == 30.0
    finally:
        monkeypatch.undo()
        time.tzset()


@given(st.text() | st.from_regex(r"\w{3}, \d{1,3} \w{3} \d{1,6} \d+:\d+:\d+ [-+A-Z0-9]{0,6}"), st.none() | st.text())
def test_retry_after_is_bounded_whatever_is_sent(value: str, date: str | None) -> None:
    seconds = parse_retry_after(value, date, NOW)
    assert seconds is None or 0.0 <= seconds <= 300.0


@given(st.text(), st.integers(1, 20))
def test_cleaned_text_is_one_short_line(text: str, longest: int) -> None:
    shown = cleaned(text, longest)
    assert shown.isprintable()
    assert len(shown) <= longest + 1
    shown.encode()


@pytest.mark.parametrize("blank", ["", " ", "\t", "\n", "\r", "  "])
@pytest.mark.parametrize("is_first_blank", [True, False])
def test_a_key_given_twice_is_found_however_it_is_spaced(blank: str, is_first_blank: bool) -> None:
    """Otherwise a busy GPU could be made to look idle by a second value behind the first."""
    before, after = (blank, "") if is_first_blank else ("", blank)
    row = (
        '{"gpu_id": 0, "name": "A", "memory_usage_percent": 1, '
        f'"utilization_percent"{before}: 95, "utilization_percent"{after}: 0}}'
    )
    (gpu,) = decode_summary(f'{{"gpu_count": 1, "gpus_summary": [{row}], "timestamp": ""}}'.encode()).stats.gpus_summary
    assert gpu.utilization_percent is None
    assert gpu.fault is not None


def test_a_key_given_twice_is_found_behind_an_escaped_colon() -> None:
    row = r'{"gpu_id": 0, "name": "\u003a", "memory_usage_percent": 1, "utilization_percent": 9,'
    row += '"utilization_percent": 0}'
    (gpu,) = decode_summary(f'{{"gpu_count": 1, "gpus_summary": [{row}], "timestamp": ""}}'.encode()).stats.gpus_summary
    assert gpu.utilization_percent is None
    assert gpu.fault is not None


_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 200), st.floats(-5, 200), st.sampled_from(["A", "GPU-1", "a b", ""])
)
_ROWS = st.fixed_dictionaries(
    {"gpu_id": st.integers(0, 3)},
    optional=dict.fromkeys(
        (
            "name",
            "uuid",
            "memory_usage_percent",
            "utilization_percent",
            "memory_total_mb",
            "memory_used_mb",
            "fault",
            "leased",
            "reports_utilization",
            "process_count",
        ),
        _VALUES,
    ),
)


@given(row=_ROWS)
def test_the_quick_way_to_read_a_row_says_nothing_else_than_the_thorough_one(row: dict[str, object]) -> None:
    quick = summary_decoder._sound_gpu(0, row, {})
    faults: list[str] = []
    thorough = summary_decoder._gpu(0, row, faults, {})
    if quick is not None:
        assert (quick, faults) == (thorough, [])


# --- rows of the other routes ---


def test_rows_hold_the_documented_keys_and_a_bad_value_is_a_fault_of_its_gpu() -> None:
    bad = {"gpu_id": 1, "name": "x" * 5000, "uuid": "a\nb\x00c", "extra": {"deep": [1]}, "temperature_c": True}
    rows = [bad, {"name": "no number"}, None, {"gpu_id": 2, "leases": None}]
    stats = decode_stats(encoded({"gpus": rows, "sample_age_seconds": "now", "more": 1}))
    assert stats["sample_age_seconds"] is None
    first, second = stats["gpus"]
    assert len(first["name"]) <= 129
    assert (first["uuid"], first["temperature_c"], first["memory"]) == ("abc", None, None)
    assert first["fault"] == "bad value: temperature_c is true"
    assert "extra" not in first
    assert "leases" not in first, "an older server does not know them"
    assert (second["leases"], second["fault"]) == (None, None)


def test_a_bad_value_deep_in_a_row_is_named() -> None:
    row = {"gpu_id": 0, "memory": {"used_mb": "much"}, "processes": [{"pid": 7}, None], "fault": "GPU is lost"}
    (gpu,) = decode_stats(encoded({"gpus": [row]}))["gpus"]
    assert gpu["memory"] == {"total_mb": None, "used_mb": None, "free_mb": None, "usage_percent": None}
    unknown = dict.fromkeys(("name", "user", "memory_used_mb", "running_seconds"))
    assert gpu["processes"] == [{"pid": 7, **unknown}]
    assert gpu["fault"] == (
        "GPU is lost; bad value: memory.used_mb is 'much'; bad value: processes has a row that cannot be used"
    )


@pytest.mark.parametrize("absurd", ["1e300", "-9e15", "1e999", "9" * 400, "-1", "true", '"long"', "NaN"])
def test_a_duration_that_cannot_be_is_not_known(absurd: str) -> None:
    body = b'{"leases": [{"lease_id": "lease-1", "held_seconds": %b}]}' % absurd.encode()
    (lease,) = decode_leases(body)["leases"]
    assert (lease["held_seconds"], lease["gpus"]) == (None, [])


def test_a_number_beyond_all_measure_is_not_known() -> None:
    body = b'{"gpus": [{"gpu_id": 0, "temperature_c": -1e300, "utilization_percent": 7}], "sample_age_seconds": -5}'
    stats = decode_stats(body)
    assert stats["sample_age_seconds"] is None
    assert (stats["gpus"][0]["temperature_c"], stats["gpus"][0]["utilization_percent"]) == (None, 7)


def test_lists_within_rows_are_bounded() -> None:
    waiting = [{"request_id": str(number), "reasons": ["why"] * 500} for number in range(100)]
    rows = decode_queue(encoded({"queue": [*waiting, {"reasons": []}]}))["queue"]
    assert len(rows) == 100
    assert len(rows[0]["reasons"]) == MOST_REASONS


@settings(deadline=None)
@given(json_values, st.sampled_from(["gpus", "leases", "queue"]))
def test_whatever_rows_a_server_sends_they_can_be_printed_as_json(value: object, name: str) -> None:
    body = encoded({name: [value, {"gpu_id": 1, "lease_id": "a", "request_id": "b", "memory": value, "gpus": value}]})
    for decode in (decode_stats, decode_leases, decode_queue, decode_explanation):
        try:
            json.dumps(decode(body), allow_nan=False)
        except ServiceRetryableError:
            continue


HOLDER = {"user": "ada", "host": "gpu-1", "pid": 4242, "program": "train.py", "verified": True}
NO_HOLDER = {"user": None, "host": None, "pid": None, "program": None, "verified": False}


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (HOLDER, HOLDER),
        ({**HOLDER, "secret": "x"}, HOLDER),
        ({"user": "ada"}, {**NO_HOLDER, "user": "ada"}),
        ({"user": "a\x1b[31m\u202eda", "program": "x\ny"}, {**NO_HOLDER, "user": "a[31mda", "program": "xy"}),
        ({"user": ["ada"], "host": 7, "pid": "4242", "program": {}, "verified": 1}, NO_HOLDER),
        ({"pid": -1}, NO_HOLDER),
        ({"pid": True}, NO_HOLDER),
        ({"pid": 10**400}, NO_HOLDER),
        (None, None),
        ("ada", None),
        ([HOLDER], None),
    ],
)
def test_a_holder_is_read_with_care(sent: object, read: object) -> None:
    (lease,) = decode_leases(encoded({"leases": [{"lease_id": "a", "holder": sent}]}))["leases"]
    (waiter,) = decode_queue(encoded({"queue": [{"request_id": "a", "holder": sent}]}))["queue"]
    promise = {"lease_id": "a", "holder": sent}
    (gpu,) = decode_stats(encoded({"gpus": [{"gpu_id": 0, "leases": [promise]}]}))["gpus"]
    assert [lease["holder"], waiter["holder"], gpu["leases"][0]["holder"]] == [read] * 3


def test_the_names_of_a_holder_are_short() -> None:
    body = encoded({"leases": [{"lease_id": "a", "holder": {"user": "x" * 5000, "program": "y" * 5000}}]})
    holder = decode_leases(body)["leases"][0]["holder"]
    assert (len(holder["user"]), len(holder["program"])) == (65, 65), "with the sign that something was cut"


def test_an_older_server_says_nothing_of_holders() -> None:
    assert decode_leases(encoded({"leases": [{"lease_id": "a"}]}))["leases"][0]["holder"] is None


# --- one lease ---

LEASE: dict[str, Any] = {
    "lease_id": "lease-1",
    "request_id": "train-7",
    "fence": 4,
    "gpus": [{"gpu_id": 2, "uuid": "GPU-6ec5", "name": "H100"}],
    "env": {"LD_PRELOAD": "evil.so", "CUDA_VISIBLE_DEVICES": "0"},
}


def test_a_lease() -> None:
    assert read_lease_row(LEASE) == LeaseRow("lease-1", "train-7", 4, "", ((2, "GPU-6ec5", "H100"),), None, None)
    timed = read_lease_row(LEASE | {"waited_seconds": 7.25, "expires_in_seconds": 59.5})
    assert (timed.waited_seconds, timed.expires_in_seconds) == (7.25, 59.5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lease_id": None},
        {"lease_id": "../../admin"},
        {"lease_id": "x" * 65},
        {"fence": -1},
        {"fence": "4"},
        {"fence": True},
        {"fence": 10**30},
        {"waited_seconds": "a while"},
        {"expires_in_seconds": -1},
        {"gpus": None},
        {"gpus": [None]},
        {"gpus": [{"gpu_id": None}]},
        {"gpus": [{"gpu_id": -1}]},
        {"gpus": [{"gpu_id": 0, "uuid": "0,1,2"}]},
        {"gpus": [{"gpu_id": 0, "uuid": 7}]},
    ],
)
def test_what_cannot_be_a_lease_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ServiceRetryableError, match="the lease cannot be used: "):
        read_lease_row(LEASE | wrong)


@pytest.mark.parametrize("value", [None, [], "lease", 3])
def test_what_is_no_object_is_no_lease(value: object) -> None:
    with pytest.raises(ServiceRetryableError, match="the lease cannot be used: lease_id is missing"):
        read_lease_row(value)


def test_a_grant_must_be_that_of_the_request() -> None:
    assert decode_lease(encoded(LEASE), "train-7", 1).fence == 4
    with pytest.raises(ServiceRetryableError, match="that of another request"):
        decode_lease(encoded(LEASE), "train-8", 1)
    for gpus in ([], LEASE["gpus"] * 2):
        with pytest.raises(ServiceRetryableError, match="the lease must have 1 GPUs"):
            decode_lease(encoded(LEASE | {"gpus": gpus}), "train-7", 1)


def test_a_position_in_the_queue() -> None:
    body = encoded({"position": 3, "reasons": ["busy", 7, "very\x1b[31m busy"]})
    assert decode_queue_position(body) == QueuePosition(3, ("busy", "very[31m busy"))
    assert decode_queue_position(b'{"position": -1, "reasons": "many"}') == QueuePosition(None, ())
