"""The contract of the statistics server, SERVER.md, ticked off: what its lines promise, and the tests that prove it.

The table covers the document from its first line to its last, and every test it names exists. What no other file proves
is proven here, by the document's own examples.
"""

from __future__ import annotations

import ctypes
import re
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance.checklist import DOCUMENTS, ROOT, check_that_it_is_whole, lines, without_proof
from tests.fakes.nvidia_smi import FakeNvidiaSMI, healthy_gpu
from tests.fakes.nvml import FakeNVML, fake_gpus
from tests.server_process import ServerProcess
from tests.waiting import eventually

from gpu_worker_pool import GPUWorkerPoolClient
from gpu_worker_pool.gpu_server import ServerSettings
from gpu_worker_pool.gpu_server.settings import read_environment

DOCUMENT = DOCUMENTS / "SERVER.md"
LAST_LINE = 647


HERE = "acceptance/test_server_document.py"
EXAMPLES = "acceptance/test_server_examples.py"
SCHEMA = "acceptance/test_server_schema.py"
PAGES = "acceptance/test_docs_pages.py"
SERVER = "integration/test_server.py"
FAULTS = "integration/test_server_faults.py"
SETTINGS = "unit/gpu_server/test_settings.py"
VISIBILITY = "unit/hardware/test_visibility.py"
NVIDIA_SMI = "unit/hardware/test_nvidia_smi.py"
TEXT = "unit/hardware/test_nvidia_smi_text.py"
NVML = "unit/hardware/test_nvml.py"
CAPTURES = "integration/test_captures.py"
CLIENT = "integration/test_client.py"

DEFAULTS = f"{SETTINGS}::test_defaults_are_the_documented_ones"
SETS = f"{SETTINGS}::test_a_variable_sets_its_field"
FILTER = f"{SERVER}::test_the_filter_is_the_same_in_every_route"
TOKENS = f"{VISIBILITY}::test_what_is_named_is_shown_with_its_own_index"
TROUBLE = f"{HERE}::test_the_page_helps_with_every_trouble_of_the_document"

CHECKLIST = (
    lines(1, 4, "a server for GPU count, memory and utilization, which clients ask", f"{SERVER}::test_stats"),
    # --- features ---
    lines(5, 7, "counts the GPUs", f"{SERVER}::test_count", f"{CAPTURES}::test_all_recordings_as_one_host"),
    lines(8, 8, "total, used and free memory", f"{SERVER}::test_stats", f"{NVML}::test_all_gpus_with_all_values"),
    lines(9, 9, "utilization", f"{SERVER}::test_stats", f"{NVIDIA_SMI}::test_a_sample_is_two_calls"),
    lines(10, 10, "temperature, where supported", f"{SERVER}::test_what_cannot_be_read_is_null_and_never_zero"),
    lines(11, 11, "power, where supported", f"{SERVER}::test_what_cannot_be_read_is_null_and_never_zero"),
    lines(12, 12, "over HTTP", f"{SCHEMA}::test_nothing_is_found_on_a_server_that_is_well"),
    lines(
        13,
        13,
        "Swagger UI and ReDoc",
        f"{PAGES}::test_only_files_of_this_server_are_named_and_all_are_there",
        f"{PAGES}::test_rendered_by_jsdom",
    ),
    lines(
        14,
        14,
        "asynchronous: nobody waits for the driver",
        f"{FAULTS}::test_a_tool_that_hangs_lets_readings_age_and_is_not_run_twice",
        f"{FAULTS}::test_an_nvml_call_that_hangs_costs_one_thread",
    ),
    lines(15, 15, "the driver is asked once an interval", f"{HERE}::test_requests_do_not_reach_the_driver"),
    lines(
        16,
        16,
        "survives a missing tool and unsupported values",
        f"{FAULTS}::test_no_tool_no_library",
        f"{NVML}::test_unsupported_is_unknown_and_never_zero",
    ),
    lines(
        17,
        17,
        "CORS can be configured",
        f"{SERVER}::test_any_page_may_read_and_none_may_send_credentials",
        f"{SERVER}::test_prefix_title_docs_and_cors_as_configured",
    ),
    lines(
        18, 19, "configured by the environment", SETS, f"{SERVER}::test_bad_settings_are_named_and_the_server_starts"
    ),
    # --- requirements and installation ---
    lines(20, 22, "Python; 3.11 and later, by our decision D17", f"{HERE}::test_what_is_required"),
    lines(
        23,
        24,
        "NVIDIA's driver and its nvidia-smi",
        f"{HERE}::test_the_backend_is_found_by_itself",
        f"{CAPTURES}::test_a_recording",
    ),
    lines(25, 40, "the packages that it needs come with it", f"{HERE}::test_what_is_required"),
    lines(41, 54, "uvicorn.run(app) in a program", f"{SERVER}::test_started_from_python", f"{EXAMPLES}::test_python"),
    lines(55, 60, "the packages by hand", f"{HERE}::test_what_is_required"),
    lines(61, 69, "a .env file", f"{SERVER}::test_a_dotenv_file_in_the_working_directory_counts"),
    # --- ways of starting ---
    lines(
        70, 78, "python -m", f"{SERVER}::test_started_as_documented_it_reloads_and_stops_whole", f"{SERVER}::test_home"
    ),
    lines(79, 86, "from Python, with defaults", f"{SERVER}::test_started_from_python", f"{EXAMPLES}::test_python"),
    lines(
        87,
        96,
        "from Python, with host, port, reload and log level; reload by name, by our decision D23",
        f"{EXAMPLES}::test_python",
        f"{EXAMPLES}::test_uvicorn_refuses_to_reload_an_object",
    ),
    lines(
        97,
        101,
        "uvicorn, also with --reload",
        f"{SERVER}::test_started_by_uvicorn",
        f"{EXAMPLES}::test_commands_that_start_it",
    ),
    lines(102, 106, "a file gpu_server.py", f"{EXAMPLES}::test_python"),
    lines(107, 109, "the port that was configured", f"{SERVER}::test_config"),
    lines(110, 111, "/docs and /redoc", f"{PAGES}::test_only_files_of_this_server_are_named_and_all_are_there"),
    lines(112, 113, "/health", f"{SERVER}::test_health"),
    lines(
        114,
        133,
        "GPUWorkerPoolClient asks /gpu/summary",
        f"{HERE}::test_a_client_asks_for_the_summary",
        f"{CLIENT}::test_an_assignment_with_one_endpoint",
    ),
    # --- routes ---
    lines(134, 140, "both pages", f"{PAGES}::test_only_files_of_this_server_are_named_and_all_are_there"),
    lines(
        141,
        166,
        "/: message, version, endpoints with these texts",
        f"{SERVER}::test_home",
        f"{EXAMPLES}::test_curl",
        f"{HERE}::test_examples_of_the_document",
    ),
    lines(
        167,
        200,
        "/config: server, api, monitoring, with every key",
        f"{SERVER}::test_config",
        f"{EXAMPLES}::test_curl",
        f"{HERE}::test_examples_of_the_document",
    ),
    lines(
        201,
        234,
        "/gpu/stats: rows with id, name, memory, utilization, temperature, power; timestamp",
        f"{SERVER}::test_stats",
        f"{EXAMPLES}::test_curl",
        f"{HERE}::test_examples_of_the_document",
    ),
    lines(
        235,
        250,
        "/gpu/count: count and timestamp",
        f"{SERVER}::test_count",
        f"{EXAMPLES}::test_curl",
        f"{HERE}::test_examples_of_the_document",
    ),
    lines(
        251,
        284,
        "/gpu/summary: sums, averages and rows",
        f"{SERVER}::test_summary_sums_and_averages_what_is_known",
        f"{EXAMPLES}::test_curl",
        f"{HERE}::test_examples_of_the_document",
    ),
    lines(
        285,
        301,
        "/health: status, whether nvidia-smi is there, timestamp",
        f"{SERVER}::test_health",
        f"{EXAMPLES}::test_curl",
        f"{HERE}::test_examples_of_the_document",
    ),
    # --- the filter ---
    lines(
        302,
        305,
        "variables and .env",
        f"{SETTINGS}::test_a_dotenv_file_counts_and_the_environment_wins",
        f"{SERVER}::test_a_dotenv_file_in_the_working_directory_counts",
    ),
    lines(306, 313, "CUDA_VISIBLE_DEVICES filters", FILTER),
    lines(314, 314, "commas", TOKENS),
    lines(315, 315, "blanks", TOKENS),
    lines(316, 316, "both", TOKENS),
    lines(317, 317, "one GPU", TOKENS, FILTER),
    lines(318, 318, "empty: none", TOKENS, FILTER),
    lines(319, 320, "not set: all", f"{VISIBILITY}::test_all_are_shown_where_nothing_is_set", f"{SERVER}::test_stats"),
    lines(321, 328, "0,2", FILTER),
    lines(329, 334, "1", FILTER),
    lines(335, 340, "empty", FILTER),
    lines(341, 345, "in a container: the environment of the process", FILTER),
    lines(346, 349, "the same GPUs in every route", FILTER),
    lines(350, 350, "ids stay those of the system", FILTER, f"{HERE}::test_the_filtered_example_of_the_document"),
    lines(351, 351, "sums over visible GPUs", FILTER, f"{HERE}::test_the_filtered_example_of_the_document"),
    lines(352, 352, "/config shows the filter", FILTER, f"{HERE}::test_the_filtered_example_of_the_document"),
    lines(
        353,
        353,
        "unknown indices are skipped with a warning",
        FILTER,
        f"{VISIBILITY}::test_what_is_not_found_is_said_once_and_again_when_it_changes",
    ),
    lines(354, 355, "nothing valid: all", FILTER, f"{VISIBILITY}::test_all_are_shown_where_nothing_named_is_found"),
    lines(356, 383, "the example, with and without", f"{HERE}::test_the_filtered_example_of_the_document"),
    lines(384, 397, "its /config", f"{HERE}::test_the_filtered_example_of_the_document"),
    # --- variables ---
    lines(398, 401, "HOST", DEFAULTS, SETS, f"{SERVER}::test_config"),
    lines(402, 402, "PORT", DEFAULTS, SETS, f"{SERVER}::test_config"),
    lines(403, 403, "RELOAD", DEFAULTS, SETS, f"{SERVER}::test_started_as_documented_it_reloads_and_stops_whole"),
    lines(404, 404, "LOG_LEVEL", DEFAULTS, SETS, f"{HERE}::test_log_level_and_format"),
    lines(405, 405, "ACCESS_LOG", DEFAULTS, SETS, f"{SERVER}::test_prefix_title_docs_and_cors_as_configured"),
    lines(406, 407, "WORKERS", DEFAULTS, SETS, f"{SERVER}::test_four_workers_give_the_same_answers"),
    lines(408, 409, "TITLE", DEFAULTS, SETS, f"{SERVER}::test_prefix_title_docs_and_cors_as_configured"),
    lines(410, 410, "DESCRIPTION", DEFAULTS, SETS, f"{SCHEMA}::test_every_route_is_in_the_schema"),
    lines(411, 411, "VERSION", DEFAULTS, SETS, f"{SERVER}::test_prefix_title_docs_and_cors_as_configured"),
    lines(412, 412, "DOCS_URL", DEFAULTS, SETS, f"{PAGES}::test_pages_of_other_names"),
    lines(413, 413, "REDOC_URL", DEFAULTS, SETS, f"{PAGES}::test_pages_of_other_names"),
    lines(414, 414, "ENABLE_CORS", DEFAULTS, SETS, f"{SERVER}::test_prefix_title_docs_and_cors_as_configured"),
    lines(415, 416, "API_PREFIX", DEFAULTS, SETS, f"{SERVER}::test_prefix_title_docs_and_cors_as_configured"),
    lines(417, 419, "CUDA_VISIBLE_DEVICES", DEFAULTS, SETS, FILTER),
    lines(420, 421, "REFRESH_INTERVAL", DEFAULTS, SETS, f"{HERE}::test_requests_do_not_reach_the_driver"),
    lines(
        422,
        423,
        "MAX_HISTORY",
        DEFAULTS,
        SETS,
        f"{SERVER}::test_history_is_bounded_oldest_first_and_can_be_narrowed",
    ),
    lines(424, 426, "LOG_FORMAT", DEFAULTS, SETS, f"{HERE}::test_log_level_and_format"),
    lines(427, 431, "get_bool_env", f"{SETTINGS}::test_words_for_true", f"{SETTINGS}::test_words_for_false"),
    lines(432, 432, "get_float_env", f"{SETTINGS}::test_helpers_fall_back"),
    lines(433, 434, "get_int_env", f"{SETTINGS}::test_helpers_fall_back", f"{EXAMPLES}::test_python"),
    lines(435, 457, "the first .env file", f"{HERE}::test_env_files_of_the_document"),
    lines(458, 470, "the one for production", f"{HERE}::test_env_files_of_the_document"),
    lines(471, 485, "the one for development, and a line with blanks", f"{HERE}::test_env_files_of_the_document"),
    # --- errors ---
    lines(
        486,
        490,
        "no GPU: 200 with a count of 0, by our decision D11",
        f"{FAULTS}::test_a_host_without_gpus_is_no_error",
        f"{CAPTURES}::test_a_replayed_host_without_gpus",
        f"{NVML}::test_no_gpu_is_no_failure",
    ),
    lines(
        491,
        491,
        "no nvidia-smi",
        f"{FAULTS}::test_no_tool_no_library",
        f"{EXAMPLES}::test_the_answer_of_a_failing_server",
        f"{NVIDIA_SMI}::test_a_tool_that_is_not_there",
    ),
    lines(
        492,
        492,
        "nvidia-smi is not executable for this user",
        f"{FAULTS}::test_a_tool_that_may_not_be_executed_is_reported_as_such",
        f"{NVIDIA_SMI}::test_a_tool_that_may_not_be_executed",
    ),
    lines(
        493,
        493,
        "bad requests have their codes",
        f"{SERVER}::test_rubbish_gets_a_reason",
        f"{SERVER}::test_only_reading_is_offered",
        f"{SCHEMA}::test_nothing_is_found_on_a_server_that_is_well",
    ),
    lines(
        494,
        494,
        "[N/A] and [Not Supported]",
        f"{SERVER}::test_what_cannot_be_read_is_null_and_never_zero",
        f"{TEXT}::test_what_is_no_number_is_unknown_and_no_fault",
    ),
    lines(
        495,
        496,
        "what is no number: null, by our decision D12",
        f"{TEXT}::test_any_text_is_survived_and_no_number_invented",
        f"{FAULTS}::test_impossible_numbers_spoil_their_gpu_only",
    ),
    lines(497, 500, "[Not Supported]", f"{TEXT}::test_what_is_no_number_is_unknown_and_no_fault"),
    lines(501, 501, "[N/A]", f"{TEXT}::test_what_is_no_number_is_unknown_and_no_fault"),
    lines(
        502,
        502,
        "empty and malformed",
        f"{TEXT}::test_what_is_no_number_is_unknown_and_no_fault",
        f"{TEXT}::test_a_line_with_missing_cells_is_its_gpus_complaint_not_a_shifted_reading",
        f"{FAULTS}::test_a_tool_that_fails_from_the_start_is_a_503_with_the_cause",
    ),
    lines(503, 504, "values that are missing", f"{SERVER}::test_what_cannot_be_read_is_null_and_never_zero"),
    # --- programs ---
    lines(505, 537, "requests", f"{EXAMPLES}::test_python", f"{HERE}::test_examples_of_the_document"),
    lines(538, 575, "axios", f"{EXAMPLES}::test_javascript", f"{HERE}::test_examples_of_the_document"),
    # --- troubleshooting ---
    lines(576, 583, "not found", TROUBLE, f"{FAULTS}::test_no_tool_no_library"),
    lines(584, 587, "denied", TROUBLE, f"{FAULTS}::test_a_tool_that_may_not_be_executed_is_reported_as_such"),
    lines(588, 591, "no GPUs", TROUBLE, f"{FAULTS}::test_a_host_without_gpus_is_no_error"),
    lines(592, 596, "refused", TROUBLE, f"{SERVER}::test_the_start_is_logged"),
    lines(597, 604, "not filtered as expected: the log at the start and /config tell", TROUBLE, FILTER),
    lines(
        605,
        609,
        "the warning by its words",
        TROUBLE,
        FILTER,
        f"{VISIBILITY}::test_what_is_not_found_is_said_once_and_again_when_it_changes",
    ),
    lines(610, 615, "all are shown", TROUBLE, f"{VISIBILITY}::test_debug_shows_the_reasoning"),
    lines(616, 620, "none is shown", TROUBLE, FILTER),
    lines(621, 625, "counts differ: they do not", TROUBLE, FILTER),
    lines(626, 634, "LOG_LEVEL=debug shows the filter at work", FILTER, f"{EXAMPLES}::test_commands_that_start_it"),
    lines(635, 639, "the filter by curl and jq", f"{EXAMPLES}::test_curl"),
    lines(640, 644, "the variable itself", FILTER),
    lines(645, 647, "MIT", f"{HERE}::test_what_is_required"),
)


# --- the table is whole ---


def test_every_proof_exists() -> None:
    assert without_proof(CHECKLIST) == []


def test_every_line_is_ticked_off() -> None:
    check_that_it_is_whole(CHECKLIST, LAST_LINE)


@pytest.mark.skipif(not DOCUMENT.exists(), reason="the document is not part of the project")
def test_the_document_is_the_one_that_was_ticked_off() -> None:
    text = DOCUMENT.read_text(encoding="utf-8").splitlines()
    assert len(text) == LAST_LINE
    for entry in CHECKLIST:
        promised = "\n".join(text[entry.first - 1 : entry.last])
        if entry.what.isupper():
            assert entry.what in promised, entry
        if route := re.match(r"(/\S*):", entry.what):
            assert f"(`{route[1]}`)" in promised, entry


# --- what no other file proves ---


def rtx_3080(index: int, used: int, utilization: int) -> dict[str, str]:
    return healthy_gpu(
        index,
        name="NVIDIA GeForce RTX 3080",
        memory_total="10240",
        memory_used=str(used),
        memory_free=str(10240 - used),
        utilization_gpu=str(utilization),
        temperature_gpu="45",
        power_draw="120.50",
        power_limit="320.00",
    )


def is_part_of(documented: Any, shown: Any) -> bool:
    """Every key that was documented is there with its value; there may be more."""
    if isinstance(documented, dict):
        return all(key in shown and is_part_of(value, shown[key]) for key, value in documented.items())
    if isinstance(documented, list):
        return len(documented) == len(shown) and all(map(is_part_of, documented, shown))
    return type(documented) is type(shown) and documented == shown


def test_examples_of_the_document(tmp_path: Path) -> None:
    smi = FakeNvidiaSMI(tmp_path)
    smi.set_gpus(rtx_3080(0, 2048, 15), rtx_3080(1, 2048, 20))
    with ServerProcess(tmp_path, GPU_BACKEND="nvidia-smi", **smi.env) as server:
        stats = server.get("/gpu/stats").json
        first = {
            "gpu_id": 0,
            "name": "NVIDIA GeForce RTX 3080",
            "memory": {"total_mb": 10240, "used_mb": 2048, "free_mb": 8192, "usage_percent": 20.0},
            "utilization_percent": 15,
            "temperature_c": 45,
            "power": {"draw_w": 120.5, "limit_w": 320.0},
        }
        assert is_part_of({"gpu_count": 2, "gpus": [first, first | {"gpu_id": 1, "utilization_percent": 20}]}, stats)
        summary = server.get("/gpu/summary").json
        row = {"name": "NVIDIA GeForce RTX 3080", "memory_usage_percent": 20.0}
        documented = {
            "gpu_count": 2,
            "total_memory_mb": 20480,
            "total_used_memory_mb": 4096,
            "total_memory_usage_percent": 20.0,
            "average_utilization_percent": 17.5,
            "gpus_summary": [
                {"gpu_id": 0, "utilization_percent": 15} | row,
                {"gpu_id": 1, "utilization_percent": 20} | row,
            ],
        }
        assert is_part_of(documented, summary)
        assert is_part_of({"gpu_count": 2}, server.get("/gpu/count").json)
        health = server.get("/health").json
        assert is_part_of({"status": "healthy", "nvidia_smi_available": True}, health)
        for answer in (stats, summary, server.get("/gpu/count").json, health):
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}", answer["timestamp"])
        # The documented defaults, but for what a test must choose for itself.
        config = server.get("/config").json
        assert config["server"].keys() == {"host", "port", "reload", "log_level", "access_log", "workers"}
        assert is_part_of({"server": {"log_level": "info", "access_log": True, "workers": 1}}, config)
        assert config["api"] == {
            "title": "GPU Statistics Server",
            "version": "1.0.0",
            "docs_url": "/docs",
            "redoc_url": "/redoc",
            "enable_cors": True,
            "api_prefix": "",
        }
        assert is_part_of({"monitoring": {"refresh_interval": 1.0, "max_history": 100}}, config)
        assert {"message", "version", "endpoints"} <= server.get("/").json.keys()


def test_the_filtered_example_of_the_document(tmp_path: Path) -> None:
    smi = FakeNvidiaSMI(tmp_path)
    loads = [(0, 2560, 30), (1, 5120, 60), (2, 1024, 15), (3, 8192, 90)]
    smi.set_gpus(*(rtx_3080(*load) for load in loads))

    def rows(*indices: int) -> list[dict[str, Any]]:
        return [
            {"gpu_id": index, "memory": {"usage_percent": used / 102.4}, "utilization_percent": utilization}
            for index, used, utilization in loads
            if index in indices
        ]

    with ServerProcess(tmp_path / "all", GPU_BACKEND="nvidia-smi", **smi.env) as server:
        assert is_part_of({"gpu_count": 4, "gpus": rows(0, 1, 2, 3)}, server.get("/gpu/stats").json)
    settings = {"GPU_BACKEND": "nvidia-smi", "CUDA_VISIBLE_DEVICES": "0,2"} | smi.env
    with ServerProcess(tmp_path / "some", **settings) as server:
        assert is_part_of({"gpu_count": 2, "gpus": rows(0, 2)}, server.get("/gpu/stats").json)
        summary = server.get("/gpu/summary").json
        assert (summary["total_memory_mb"], summary["total_used_memory_mb"]) == (20480, 3584)
        assert (summary["total_memory_usage_percent"], summary["average_utilization_percent"]) == (17.5, 22.5)
        assert server.get("/config").json["gpu_filtering"] == {
            "cuda_visible_devices": "0,2",
            "visible_gpu_ids": [0, 2],
            "filtering_active": True,
            "total_system_gpus": 4,
            "visible_gpu_count": 2,
        }
        assert "CUDA_VISIBLE_DEVICES='0,2' is in force: showing GPUs [0, 2] of 4" in server.log


def test_requests_do_not_reach_the_driver(tmp_path: Path) -> None:
    smi = FakeNvidiaSMI(tmp_path)

    def queries() -> int:
        return len([call for call in smi.calls if "--query-gpu" in " ".join(call)])

    with ServerProcess(
        tmp_path, GPU_BACKEND="nvidia-smi", REFRESH_INTERVAL="0.5", ACCESS_LOG="false", **smi.env
    ) as server:
        earlier, begun = queries(), time.monotonic()
        requests = 0
        while (found := queries() - earlier) < 4:
            assert server.get("/gpu/stats").status == 200
            requests += 1
        assert found <= (time.monotonic() - begun) / 0.5 + 1
        assert server.get("/gpu/stats").json["sample_age_seconds"] < time.monotonic() - begun
        assert requests > 2 * found


def test_the_backend_is_found_by_itself(tmp_path: Path) -> None:
    nvml = FakeNVML(tmp_path, gpus=fake_gpus(3))
    smi = FakeNvidiaSMI(tmp_path)
    with ServerProcess(tmp_path / "both", **nvml.env, **smi.env) as server:
        assert (server.get("/health").json["backend"], server.get("/gpu/count").json["gpu_count"]) == ("nvml", 3)
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        with ServerProcess(tmp_path / "tool", **smi.env) as server:
            health = server.get("/health").json
            assert (health["backend"], health["gpu_count"]) == ("nvidia-smi", 1)


def test_log_level_and_format(tmp_path: Path) -> None:
    settings = {
        "GPU_BACKEND": "simulated:2",
        "CUDA_VISIBLE_DEVICES": "0,9",
        "LOG_FORMAT": "<%(levelname)s> %(message)s",
    }
    with ServerProcess(tmp_path / "debug", LOG_LEVEL="debug", **settings) as server:
        eventually(lambda: '"GET /health HTTP/1.1" 200' in server.log)
        assert all(re.match(r"<[A-Z]+> ", line) for line in server.log.splitlines())
        levels = set(re.findall(r"^<([A-Z]+)>", server.log, re.M))
        assert levels == {"DEBUG", "INFO", "WARNING"}
    with ServerProcess(tmp_path / "warning", LOG_LEVEL="warning", **settings) as server:
        assert server.log.splitlines() == ["<WARNING> GPU 9 in CUDA_VISIBLE_DEVICES not found on system"]


FIRST_ENV = """\
# Server
HOST=0.0.0.0
PORT=8000
RELOAD=false
LOG_LEVEL=info
ACCESS_LOG=true
WORKERS=1

# The rest
TITLE=My GPU Statistics Server
VERSION=1.0.0
ENABLE_CORS=true
REFRESH_INTERVAL=1.0
MAX_HISTORY=100
LOG_FORMAT=%(asctime)s - %(name)s - %(levelname)s - %(message)s
"""
PRODUCTION_ENV = """\
HOST=127.0.0.1
PORT=8000
RELOAD=false
LOG_LEVEL=warning
ACCESS_LOG=false
WORKERS=4
ENABLE_CORS=false
REFRESH_INTERVAL=2.0
"""
DEVELOPMENT_ENV = """\
HOST=0.0.0.0
PORT=8000
RELOAD=true
LOG_LEVEL=debug
ACCESS_LOG=true
WORKERS=1
ENABLE_CORS=true
REFRESH_INTERVAL=0.5
"""
PRODUCTION = ServerSettings(
    host="127.0.0.1",
    reload=False,
    log_level="warning",
    access_log=False,
    workers=4,
    enable_cors=False,
    refresh_interval=2.0,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(FIRST_ENV, ServerSettings(reload=False, title="My GPU Statistics Server"), id="first"),
        pytest.param(PRODUCTION_ENV, PRODUCTION, id="production"),
        pytest.param(DEVELOPMENT_ENV, ServerSettings(log_level="debug", refresh_interval=0.5), id="development"),
        pytest.param("REFRESH_INTERVAL = 0.5  # often\n", ServerSettings(refresh_interval=0.5), id="blanks"),
    ],
)
def test_env_files_of_the_document(
    text: str,
    expected: ServerSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / ".env").write_text(text)
    monkeypatch.chdir(tmp_path)
    for variable in ServerSettings.__dataclass_fields__:
        monkeypatch.delenv(variable.upper(), raising=False)
    assert ServerSettings.from_environment(read_environment()) == expected
    assert caplog.records == []


def test_what_is_required() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == "gpu-worker-pool"
    assert project["requires-python"] == ">=3.11"
    needed = {re.split(r"[>=;]", requirement)[0] for requirement in project["dependencies"]}
    # pydantic comes with FastAPI, which is built on it.
    assert {"fastapi", "uvicorn", "python-dotenv"} <= needed
    assert project["license"] == "MIT"
    assert "MIT License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_the_page_helps_with_every_trouble_of_the_document() -> None:
    page = (ROOT / "docs" / "SERVER.md").read_text(encoding="utf-8").partition("## Troubleshooting")[2]
    symptoms = [row.split(" | ")[0].strip("| ") for row in page.splitlines() if row.startswith("| ")]
    for trouble in (
        '"nvidia-smi not found"',
        "`permission_denied`",
        "no GPUs",
        "connection refused",
        "not filtered as expected",
        "GPU 9 in CUDA_VISIBLE_DEVICES not found on system",
        "all GPUs are shown though",
        "an empty list though",
        "counts differ between routes",
    ):
        assert [symptom for symptom in symptoms if trouble in symptom], trouble


async def test_a_client_asks_for_the_summary(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, GPU_BACKEND="simulated:2") as server:
        async with GPUWorkerPoolClient(service_endpoint=server.url, environ={}) as client:
            assignment = await client.request_gpu()
            assert assignment.gpu_id == 0
            await client.release_gpu(assignment)
        eventually(lambda: '"GET /gpu/summary HTTP/1.1" 200' in server.log)
