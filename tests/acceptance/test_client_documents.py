"""The contract of the client, ticked off: API.md, MIGRATION_GUIDE.md, MULTI_ENDPOINT_DESIGN.md, IMPLEMENTATION_PLAN.md.

Each table covers its document from the first line to the last, and every test it names exists. What no other file
proves is proven here, with real servers.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance.checklist import DOCUMENTS, ROOT, Lines, check_that_it_is_whole, lines, without_proof
from tests.fakes.http_server import HostileServer, answer_json, silent
from tests.fakes.nvidia_smi import FakeNvidiaSMI, healthy_gpu
from tests.server_process import ServerProcess

from gpu_worker_pool import GPUWorkerPoolClient, WorkerTimeoutError

HERE = "acceptance/test_client_documents.py"
EXAMPLES = "acceptance/test_client_examples.py"
CLIENT = "integration/test_client.py"
FAULTS = "integration/test_client_faults.py"
STRATEGIES = "integration/test_strategies.py"
HTTP = "integration/test_http_client.py"
MONITOR = "unit/test_gpu_monitor.py"
CONFIG = "unit/test_config.py"
MODELS = "unit/test_models.py"
ERRORS = "unit/test_errors.py"
REPLIES = "unit/test_replies.py"
MANAGER = "unit/test_worker_pool_manager.py"
SHUTDOWN = "unit/test_shutdown.py"
ORDER = "unit/test_order.py"
BREAKER = "unit/core/test_breaker.py"
BACKOFF = "unit/core/test_backoff.py"
BALANCING = "unit/core/test_balancing.py"
RULES = "unit/core/test_rules.py"
STRUCTURES = "unit/core/test_structures.py"
IMPORTS = "unit/test_imports.py"

#: Every example of the documents, and of our own pages, against live servers.
RUN = f"{EXAMPLES}::test_pages_of_the_contract"
OURS = f"{EXAMPLES}::test_our_pages"
NAMES = f"{HERE}::test_every_documented_name_is_where_the_documents_say"
LIFE = f"{CLIENT}::test_life"
NOT_STARTED = f"{HERE}::test_what_needs_a_started_client_of_many_endpoints_says_so"
ONE = f"{CLIENT}::test_an_assignment_with_one_endpoint"
MANY = f"{CLIENT}::test_an_assignment_with_many_endpoints"
DEFAULTS = f"{CONFIG}::test_everything_has_its_documented_default"
MODE = f"{CONFIG}::test_the_mode_follows_from_how_endpoints_were_given"
VARIABLE = f"{CONFIG}::test_a_variable_is_read"
VARIABLES_LIVE = f"{HERE}::test_variables_decide_which_servers_are_asked"
THRESHOLDS_LIVE = f"{HERE}::test_thresholds_decide_which_gpu_is_given"
TIMEOUTS = f"{HERE}::test_which_timeout_counts"
FIELDS = f"{MODELS}::test_is_made_from_the_documented_fields_by_keyword_and_by_position"
REFUSES = f"{MODELS}::test_refuses_nonsense_and_names_it"
METRICS = f"{CLIENT}::test_detailed_metrics_in_both_modes"
RECOVERY = f"{CLIENT}::test_recovery_status_in_both_modes"
SUMMARY = f"{HERE}::test_the_printed_summary_is_the_documented_one"
ENDPOINTS = f"{CLIENT}::test_what_is_told_of_endpoints"
ONE_FAILS = f"{FAULTS}::test_one_endpoint_fails_and_the_others_go_on"
ALL_FAIL = f"{FAULTS}::test_all_fail_and_requests_wait_until_one_returns"
GRADUALLY = f"{FAULTS}::test_an_endpoint_comes_back_gradually"
OPENS = f"{MONITOR}::test_the_breaker_opens_when_a_fetch_and_its_retries_have_failed"
PROBE = f"{MONITOR}::test_one_probe_when_half_open_and_a_recovery_closes_it"
EVENTS = f"{CLIENT}::test_events_are_logged_for_those_who_want_them"
AVAILABILITY = (
    f"{STRATEGIES}::test_availability_prefers_the_larger_share_and_then_the_larger_number",
    f"{STRATEGIES}::test_availability_takes_turns_among_equals",
    f"{STRATEGIES}::test_availability_keeps_the_share_in_use_equal",
)
ROUND_ROBIN = f"{STRATEGIES}::test_round_robin_is_even_whatever_the_sizes"
WEIGHTED = f"{STRATEGIES}::test_weighted_is_in_proportion_to_the_number_of_gpus"
GUIDE_COVERS = f"{EXAMPLES}::test_the_guide_covers_every_scenario_and_trouble_of_the_contract"
FILES = f"{EXAMPLES}::test_configuration_files"
TWICE = f"{CLIENT}::test_nobody_is_held_twice_and_all_are_served"
THREADS = f"{HERE}::test_thirty_two_threads_share_a_blocking_client"
TOGETHER = f"{HERE}::test_two_clients_in_one_program_do_not_disturb_each_other"

API = (
    lines(
        1,
        14,
        "an API document with these chapters",
        OURS,
        f"{EXAMPLES}::test_every_method_has_a_section_with_an_example",
    ),
    lines(15, 22, "GPUWorkerPoolClient in client", NAMES),
    # --- constructor ---
    lines(23, 36, "arguments, their order and defaults", f"{EXAMPLES}::test_signatures_of_the_contract"),
    lines(37, 41, "service_endpoint, or GPU_SERVICE_ENDPOINT, or port 8080 here", DEFAULTS, VARIABLES_LIVE),
    lines(
        42,
        42,
        "service_endpoints with commas, or GPU_STATS_SERVICE_ENDPOINTS",
        f"{CONFIG}::test_several_endpoints_in_a_string_or_a_list",
        VARIABLES_LIVE,
    ),
    lines(43, 43, "load_balancing_strategy, or its variable, or availability", DEFAULTS, VARIABLE, VARIABLES_LIVE),
    lines(44, 44, "memory_threshold, or its variable, or 80", DEFAULTS, VARIABLE, THRESHOLDS_LIVE),
    lines(45, 45, "utilization_threshold, or its variable, or 90", DEFAULTS, VARIABLE, THRESHOLDS_LIVE),
    lines(
        46,
        46,
        "polling_interval, or its variable, or 5",
        DEFAULTS,
        VARIABLE,
        f"{HERE}::test_the_polling_interval_is_kept",
        f"{CONFIG}::test_whole_polling_intervals_are_ints",
    ),
    lines(
        47,
        47,
        "worker_timeout, or 300",
        DEFAULTS,
        f"{HERE}::test_the_client_s_timeout_counts_where_a_request_names_none",
    ),
    lines(48, 49, "request_timeout, or 30", DEFAULTS, TIMEOUTS),
    lines(50, 51, "service_endpoints means many", MODE),
    lines(52, 52, "service_endpoint alone means one", MODE),
    lines(53, 53, "given both, service_endpoints counts", MODE),
    lines(54, 55, "given neither, variables decide likewise", MODE, VARIABLES_LIVE),
    lines(56, 76, "clients made of arguments, one also over https", RUN),
    # --- methods ---
    lines(77, 82, "start", LIFE),
    lines(83, 84, "RuntimeError if started already", LIFE),
    lines(
        85,
        86,
        "an error if it cannot start; a server that is down is none, by our decision D7",
        f"{FAULTS}::test_a_server_that_is_down_at_the_start_is_waited_for",
        f"{CLIENT}::test_a_start_that_is_cancelled_leaves_nothing_behind",
    ),
    lines(87, 92, "its example", RUN),
    lines(
        93,
        101,
        "stop cleans up",
        LIFE,
        f"{CLIENT}::test_stopping_ends_those_who_wait_with_an_error_that_says_so",
        f"{FAULTS}::test_stopping_with_silent_endpoints_is_quick",
        f"{HERE}::test_nothing_is_left_behind",
    ),
    lines(
        102,
        108,
        "request_gpu(timeout), else worker_timeout",
        ONE,
        f"{HERE}::test_the_client_s_timeout_counts_where_a_request_names_none",
    ),
    lines(109, 111, "returns GPU, worker and time", ONE, MANY),
    lines(112, 113, "RuntimeError if not started", LIFE),
    lines(
        114,
        114,
        "WorkerTimeoutError",
        f"{CLIENT}::test_wishes",
        f"{CLIENT}::test_a_timeout_that_races_the_grant_has_one_outcome",
    ),
    lines(115, 116, "an error if it cannot be assigned", f"{CLIENT}::test_wishes", ALL_FAIL),
    lines(117, 125, "its example", RUN),
    lines(126, 131, "release_gpu(assignment)", ONE),
    lines(132, 134, "RuntimeError if not started", LIFE),
    lines(135, 136, "ValueError if it is not valid", ONE, f"{MANAGER}::test_another_pools_assignment_is_refused"),
    lines(137, 141, "its example", RUN),
    lines(142, 148, "get_pool_status: GPUs and workers", ONE, MANY),
    lines(149, 151, "RuntimeError if not started", LIFE),
    lines(152, 158, "its example", RUN),
    lines(159, 165, "get_detailed_metrics: a dictionary", METRICS, f"{EXAMPLES}::test_every_key_is_explained"),
    lines(166, 168, "RuntimeError if not started", LIFE),
    lines(169, 175, "gpu_metrics and thresholds in it", RUN, METRICS),
    lines(176, 187, "get_endpoints_info: a list with these keys", ENDPOINTS),
    lines(188, 189, "None if not started, or with one endpoint", LIFE, ONE),
    lines(190, 197, "its example", RUN),
    lines(198, 208, "get_error_recovery_status: these four keys", RECOVERY),
    lines(209, 211, "RuntimeError if not started", LIFE),
    lines(212, 219, "healthy and degraded are lists", RUN, RECOVERY, ONE_FAILS),
    lines(220, 226, "trigger_endpoint_recovery(endpoint_id)", ALL_FAIL),
    lines(227, 229, "True if triggered; False for an unknown id", RECOVERY),
    lines(230, 232, "RuntimeError if not started, or with one endpoint", NOT_STARTED, ONE),
    lines(233, 239, "its example", RUN),
    lines(240, 246, "queue_request_for_retry(function) waits for an endpoint", ALL_FAIL),
    lines(247, 249, "returns what the function returns", f"{CLIENT}::test_a_request_queued_for_retry_runs_when_it_can"),
    lines(250, 252, "RuntimeError if not started, or with one endpoint", NOT_STARTED, ONE),
    lines(253, 261, "its example", RUN),
    lines(262, 265, "print_error_recovery_summary", SUMMARY),
    lines(266, 268, "RuntimeError if not started", LIFE),
    lines(269, 277, "its first two lines", SUMMARY, RUN),
    lines(278, 292, "is_multi_endpoint_mode", ONE, MANY, RUN),
    lines(
        293,
        305,
        "async with",
        RUN,
        f"{CLIENT}::test_the_factory",
        f"{SHUTDOWN}::test_leaving_a_with_block_stops_also_on_an_error",
    ),
    # --- around it ---
    lines(306, 313, "GPUContextManager in client", NAMES),
    lines(314, 323, "its arguments", f"{EXAMPLES}::test_signatures_of_the_contract"),
    lines(
        324,
        332,
        "gives the GPU, releases at the end",
        RUN,
        f"{CLIENT}::test_the_context_manager_yields_a_number_and_releases",
    ),
    lines(333, 353, "gpu_worker_pool_client(**kwargs)", RUN, f"{CLIENT}::test_the_factory"),
    # --- models ---
    lines(354, 377, "GPUAssignment", NAMES, FIELDS, RUN, ONE),
    lines(378, 399, "PoolStatus", NAMES, FIELDS, RUN, ONE),
    lines(400, 413, "GPUInfo", NAMES, FIELDS, f"{MODELS}::test_percents_include_both_ends"),
    lines(414, 430, "GPUStats", NAMES, FIELDS, f"{REPLIES}::test_the_reply_of_our_server"),
    lines(
        431,
        444,
        "WorkerInfo, whose callbacks are called",
        NAMES,
        FIELDS,
        f"{MANAGER}::test_a_worker_is_called_back_with_its_gpu",
    ),
    lines(445, 473, "GlobalGPUAssignment", NAMES, FIELDS, RUN, MANY),
    lines(474, 496, "MultiEndpointPoolStatus is a PoolStatus, and more", NAMES, FIELDS, RUN, MANY),
    lines(497, 526, "EndpointInfo", NAMES, FIELDS, RUN),
    lines(527, 556, "GlobalGPUInfo", NAMES, FIELDS, RUN),
    # --- configuration ---
    lines(557, 568, "EnvironmentConfigurationManager in config", NAMES),
    lines(569, 574, "get_service_endpoint", VARIABLE, f"{CONFIG}::test_unset_and_empty_variables_mean_the_default"),
    lines(575, 580, "get_memory_threshold", VARIABLE, f"{CONFIG}::test_unset_and_empty_variables_mean_the_default"),
    lines(
        581, 586, "get_utilization_threshold", VARIABLE, f"{CONFIG}::test_unset_and_empty_variables_mean_the_default"
    ),
    lines(587, 591, "get_polling_interval", VARIABLE, f"{CONFIG}::test_whole_polling_intervals_are_ints"),
    lines(592, 599, "its example", RUN),
    lines(600, 606, "GPU_SERVICE_ENDPOINT", DEFAULTS, VARIABLES_LIVE),
    lines(607, 607, "GPU_MEMORY_THRESHOLD_PERCENT", DEFAULTS, VARIABLE, THRESHOLDS_LIVE),
    lines(608, 608, "GPU_UTILIZATION_THRESHOLD_PERCENT", DEFAULTS, VARIABLE, THRESHOLDS_LIVE),
    lines(609, 610, "GPU_POLLING_INTERVAL", DEFAULTS, VARIABLE, f"{HERE}::test_the_polling_interval_is_kept"),
    lines(611, 618, "an environment for one endpoint", RUN),
    lines(619, 623, "GPU_STATS_SERVICE_ENDPOINTS", f"{CONFIG}::test_the_first_list_of_endpoints_wins", VARIABLES_LIVE),
    lines(624, 624, "GPU_LOAD_BALANCING_STRATEGY", DEFAULTS, VARIABLE, VARIABLES_LIVE),
    lines(625, 625, "GPU_ENDPOINT_TIMEOUT", DEFAULTS, VARIABLE, TIMEOUTS),
    lines(
        626,
        626,
        "GPU_ENDPOINT_MAX_RETRIES",
        DEFAULTS,
        VARIABLE,
        OPENS,
        f"{HERE}::test_a_server_is_given_up_after_its_retries",
    ),
    lines(627, 627, "GPU_MEMORY_THRESHOLD_PERCENT", THRESHOLDS_LIVE),
    lines(628, 628, "GPU_UTILIZATION_THRESHOLD_PERCENT", THRESHOLDS_LIVE),
    lines(629, 630, "GPU_POLLING_INTERVAL", f"{HERE}::test_the_polling_interval_is_kept"),
    lines(631, 642, "an environment for many endpoints", RUN),
    lines(643, 645, "set both, and the list counts", VARIABLES_LIVE, MODE),
    lines(646, 647, "thresholds and interval count in both modes", THRESHOLDS_LIVE),
    # --- errors ---
    lines(
        648,
        657,
        "WorkerTimeoutError in worker_pool_manager",
        NAMES,
        f"{MANAGER}::test_a_timeout_is_an_ordinary_timeout_error_too",
    ),
    lines(658, 665, "its example", RUN),
    lines(
        666,
        673,
        "StaleAssignmentError in worker_pool_manager",
        NAMES,
        f"{MANAGER}::test_a_late_release_says_that_it_was_taken_back",
    ),
    lines(674, 681, "ServiceUnavailableError in http_client", NAMES, ALL_FAIL),
    lines(
        682,
        693,
        "RetryableError and its two kinds in http_client",
        NAMES,
        f"{HTTP}::test_errors_are_found_where_the_documents_say",
        f"{HTTP}::test_refused",
        f"{HTTP}::test_an_error_that_may_pass",
    ),
    # --- utilities and patterns ---
    lines(
        694,
        715,
        "ConfigurationValidator in examples",
        RUN,
        f"{EXAMPLES}::test_good_thresholds",
        f"{EXAMPLES}::test_thresholds_that_the_client_refuses",
        f"{EXAMPLES}::test_good_endpoints",
    ),
    lines(716, 730, "metrics by GPU, and thresholds", RUN, METRICS),
    lines(731, 747, "utilization of the pool, and who waits", RUN, METRICS),
    lines(748, 764, "a timeout", RUN, f"{EXAMPLES}::test_our_pages"),
    lines(765, 777, "a service that fails", RUN, ALL_FAIL, f"{EXAMPLES}::test_a_program_says_that_no_server_answers"),
    lines(778, 797, "work that can wait", RUN),
    lines(798, 806, "recommended memory thresholds", FILES),
    lines(807, 811, "recommended utilization thresholds", FILES),
    lines(812, 816, "recommended polling intervals", FILES),
    lines(
        817,
        831,
        "context managers, then the status; with a client that runs, as the first half has stopped its own",
        RUN,
    ),
    lines(832, 849, "several workers at once", RUN, TWICE, f"{CLIENT}::test_first_come_first_served"),
)

GUIDE = (
    lines(1, 19, "a guide from one endpoint to many", OURS, GUIDE_COVERS),
    lines(20, 20, "GPUs of several servers", MANY),
    lines(21, 21, "failover", ONE_FAILS),
    lines(22, 22, "load balancing", *AVAILABILITY, ROUND_ROBIN, WEIGHTED),
    lines(23, 33, "the server with most available is chosen", *AVAILABILITY),
    lines(34, 53, "what one has: one endpoint", RUN, OURS),
    lines(54, 60, "what to decide", OURS),
    lines(61, 83, "service_endpoint becomes service_endpoints", RUN, MODE),
    lines(84, 100, "the same by variables", RUN, VARIABLES_LIVE),
    lines(101, 119, "ids: numbers, or endpoint and number; released the same way", RUN, ONE, MANY),
    lines(120, 136, "the status has more fields", RUN, MANY),
    lines(137, 145, "many with one URL", RUN, f"{HERE}::test_one_url_in_the_list_is_the_new_mode"),
    lines(146, 153, "a second one", RUN, f"{CLIENT}::test_endpoints_come_and_go"),
    lines(154, 162, "health of each endpoint", RUN, ENDPOINTS),
    lines(163, 172, "variables: which become which", VARIABLES_LIVE),
    lines(173, 176, "GPU_STATS_SERVICE_ENDPOINTS counts more", VARIABLES_LIVE),
    lines(177, 178, "service_endpoints counts more", MODE),
    lines(179, 192, "code that works with one and with many", RUN),
    lines(193, 209, "what many offer", RUN, RECOVERY, ENDPOINTS),
    lines(210, 219, "service_endpoint goes on working", ONE, MODE),
    lines(220, 224, "request_gpu: local or global id", ONE, MANY),
    lines(225, 225, "release_gpu: either", ONE, MANY),
    lines(226, 226, "get_pool_status: either kind", ONE, MANY),
    lines(
        227, 227, "context managers in both", f"{CLIENT}::test_the_context_manager_yields_a_number_and_releases", MANY
    ),
    lines(228, 229, "the same errors", f"{HERE}::test_errors_are_the_same_in_both_modes"),
    # --- scenarios ---
    lines(230, 243, "redundancy", RUN, GUIDE_COVERS, ONE_FAILS),
    lines(244, 256, "more servers, evenly", RUN, GUIDE_COVERS, ROUND_ROBIN),
    lines(257, 268, "servers that differ, by their number of GPUs", RUN, GUIDE_COVERS, WEIGHTED),
    lines(269, 280, "servers far away", RUN, GUIDE_COVERS, f"{HERE}::test_a_silent_endpoint_delays_no_other"),
    # --- troubles ---
    lines(
        281,
        291,
        "mode not detected",
        GUIDE_COVERS,
        MODE,
        f"{CONFIG}::test_bad_urls_in_a_list_are_dropped_and_logged_once",
    ),
    lines(292, 304, "an int was expected; split gives it", GUIDE_COVERS, RUN, MANY),
    lines(305, 317, "an endpoint is unhealthy; the summary says why", GUIDE_COVERS, RUN, SUMMARY),
    lines(318, 329, "uneven: what each strategy does", GUIDE_COVERS, *AVAILABILITY, ROUND_ROBIN, WEIGHTED),
    lines(330, 346, "slow: timeouts and response times", GUIDE_COVERS, RUN, TIMEOUTS, ENDPOINTS),
    lines(
        347,
        358,
        "good habits; breakers keep failures from spreading",
        OURS,
        ONE_FAILS,
        f"{HERE}::test_a_server_is_given_up_after_its_retries",
    ),
    lines(359, 372, "a checklist", OURS),
    lines(
        373,
        378,
        "the API document, the example and the README are there",
        "unit/test_docs.py::test_links_and_named_files_exist",
        f"{EXAMPLES}::test_multi_endpoint_usage",
    ),
)

DESIGN = (
    lines(1, 8, "several servers, and one as before", MANY, ONE),
    lines(9, 12, "a configuration for many endpoints", NAMES, VARIABLE),
    lines(13, 13, "one or several", MODE),
    lines(14, 14, "URLs with commas in a variable", f"{CONFIG}::test_the_first_list_of_endpoints_wins", VARIABLES_LIVE),
    lines(
        15,
        16,
        "URLs are checked, duplicates removed",
        f"{CONFIG}::test_refused_urls",
        f"{CONFIG}::test_the_same_url_is_one_endpoint",
    ),
    lines(
        17,
        18,
        "an endpoint manager, from the first connection to the last",
        NAMES,
        f"{CLIENT}::test_endpoints_come_and_go",
    ),
    lines(19, 19, "their health and availability", ENDPOINTS, f"{MONITOR}::test_metrics_of_an_endpoint"),
    lines(
        20,
        20,
        "connections are pooled and closed",
        f"{HTTP}::test_one_connection_serves_many_fetches_also_after_an_error",
        f"{HTTP}::test_the_pool_has_one_client_an_endpoint_and_owns_the_session",
        f"{HERE}::test_nothing_is_left_behind",
    ),
    lines(21, 22, "endpoints come and go, and are watched", f"{CLIENT}::test_endpoints_come_and_go", ONE_FAILS),
    lines(
        23,
        24,
        "ids are unique over all endpoints",
        f"{CONFIG}::test_any_urls_have_ids_that_are_unique_and_without_a_colon",
        MANY,
    ),
    lines(25, 25, "endpoint, colon, number", f"{MODELS}::test_global_ids_come_apart_as_they_were_put_together", MANY),
    lines(26, 26, "and back", f"{MODELS}::test_global_ids_come_apart_as_they_were_put_together"),
    lines(
        27,
        28,
        "an assignment is of the right endpoint",
        MANY,
        f"{HERE}::test_an_assignment_is_released_where_it_was_made",
    ),
    lines(
        29,
        30,
        "a pool of AsyncGPUStatsHTTPClient",
        NAMES,
        f"{HTTP}::test_the_pool_has_one_client_an_endpoint_and_owns_the_session",
    ),
    lines(31, 31, "a breaker and retries for each", OPENS, f"{HERE}::test_a_server_is_given_up_after_its_retries"),
    lines(32, 32, "answers are added up", MANY, METRICS),
    lines(33, 34, "some may fail", ONE_FAILS),
    lines(35, 37, "availability", *AVAILABILITY),
    lines(38, 38, "round robin", ROUND_ROBIN, f"{STRATEGIES}::test_round_robin_passes_over_those_that_are_full"),
    lines(39, 39, "weighted", WEIGHTED),
    lines(
        40,
        40,
        "failures and recoveries are adapted to",
        ONE_FAILS,
        GRADUALLY,
        f"{BALANCING}::test_an_endpoint_that_was_away_does_not_catch_up",
    ),
    lines(41, 42, "metrics of balancing", METRICS),
    lines(
        43,
        44,
        "a monitor of several endpoints",
        NAMES,
        f"{MONITOR}::test_it_asks_again_and_again_and_tells",
        f"{CLIENT}::test_callbacks_hear_of_every_endpoint",
    ),
    lines(45, 45, "adds up what they say", MANY),
    lines(46, 46, "some may fail", ONE_FAILS),
    lines(47, 48, "knows the health of each", ENDPOINTS, ONE_FAILS),
    # --- models ---
    lines(49, 63, "EndpointInfo", RUN, FIELDS, REFUSES),
    lines(64, 76, "GlobalGPUInfo", RUN, FIELDS, REFUSES),
    lines(
        77,
        90,
        "MultiEndpointPoolStatus, with `endpoints` too, by our decision D5",
        RUN,
        f"{MODELS}::test_a_multi_endpoint_status_is_made_from_endpoints_or_from_details",
        MANY,
    ),
    # --- configuration ---
    lines(91, 97, "GPU_SERVICE_ENDPOINTS, too", RUN, VARIABLES_LIVE),
    lines(98, 100, "GPU_SERVICE_ENDPOINT", RUN, VARIABLES_LIVE),
    lines(101, 103, "GPU_LOAD_BALANCING_STRATEGY", RUN, VARIABLES_LIVE),
    lines(
        104,
        106,
        "GPU_ENDPOINT_HEALTH_CHECK_INTERVAL",
        RUN,
        VARIABLE,
        f"{MONITOR}::test_a_sick_endpoint_is_tried_at_the_next_health_check",
    ),
    lines(107, 108, "GPU_ENDPOINT_TIMEOUT", RUN, TIMEOUTS),
    lines(109, 111, "GPU_ENDPOINT_MAX_RETRIES", RUN, f"{HERE}::test_a_server_is_given_up_after_its_retries"),
    lines(
        112,
        125,
        "a list of URLs, endpoint_timeout, endpoint_health_check_interval as arguments",
        RUN,
        f"{CONFIG}::test_an_argument_wins_over_every_variable",
        f"{EXAMPLES}::test_every_argument_is_in_its_table_with_its_default",
    ),
    # --- strategies ---
    lines(126, 129, "the larger share first", *AVAILABILITY),
    lines(130, 130, "then the larger number", AVAILABILITY[0]),
    lines(131, 132, "as it changes", AVAILABILITY[2]),
    lines(133, 134, "round robin over healthy endpoints", ROUND_ROBIN, ONE_FAILS),
    lines(135, 137, "predictably", ROUND_ROBIN),
    lines(138, 139, "by total GPUs", WEIGHTED),
    lines(140, 142, "in proportion", WEIGHTED, f"{BALANCING}::test_weighted_spreads_its_turns"),
    # --- failures ---
    lines(
        143,
        146,
        "no connection",
        f"{HTTP}::test_refused",
        f"{HTTP}::test_a_black_hole",
        f"{HTTP}::test_a_name_that_does_not_resolve",
    ),
    lines(
        147,
        147,
        "an error as an answer",
        f"{HTTP}::test_an_error_that_may_pass",
        f"{HTTP}::test_an_error_that_will_not_pass",
        f"{FAULTS}::test_a_refusal_says_what_to_look_at",
    ),
    lines(148, 148, "no answer in time", f"{HTTP}::test_a_server_that_takes_its_time_is_given_up", TIMEOUTS),
    lines(149, 150, "some fail, others do not", ONE_FAILS),
    lines(
        151,
        152,
        "a breaker for each endpoint",
        OPENS,
        PROBE,
        f"{BREAKER}::test_half_open_lets_exactly_one_in_until_it_says_how_it_went",
        f"{BREAKER}::test_every_failed_probe_doubles_the_open_time_up_to_the_longest",
        f"{BREAKER}::test_jitter_spreads_the_open_time_by_a_quarter_each_way",
        f"{MONITOR}::test_a_cancelled_probe_frees_its_place",
        f"{MONITOR}::test_a_refusal_is_told_and_not_counted",
    ),
    lines(
        153,
        153,
        "growing delays",
        f"{BACKOFF}::test_the_bound_doubles_up_to_the_longest",
        f"{BACKOFF}::test_is_a_share_of_the_bound",
    ),
    lines(
        154,
        154,
        "health checks find a recovery",
        f"{MONITOR}::test_a_sick_endpoint_is_tried_at_the_next_health_check",
        ONE_FAILS,
    ),
    lines(155, 156, "less capacity, and no end", ONE_FAILS, ALL_FAIL),
    lines(157, 163, "the four parts of the ground", NAMES),
    lines(164, 169, "strategies, monitor, health, sums", NAMES, MANY, METRICS),
    lines(170, 175, "in the client, as before with one, tested", ONE, MANY, ONE_FAILS),
    lines(
        176,
        184,
        "what worked with one endpoint works",
        ONE,
        LIFE,
        VARIABLES_LIVE,
        f"{EXAMPLES}::test_signatures_of_the_contract",
    ),
    # --- speed, security, observation ---
    lines(
        185, 188, "connections are used again", f"{HTTP}::test_one_connection_serves_many_fetches_also_after_an_error"
    ),
    lines(189, 189, "endpoints are asked at the same time", f"{HERE}::test_a_silent_endpoint_delays_no_other"),
    lines(190, 190, "health is kept, not asked for", f"{HERE}::test_views_asks_nobody"),
    lines(191, 192, "one look serves all who want one", f"{MONITOR}::test_one_fetch_serves_everybody_who_waits_for_it"),
    lines(
        193,
        195,
        "URLs are checked",
        f"{CONFIG}::test_refused_urls",
        f"{CONFIG}::test_a_password_is_refused_and_never_shown",
    ),
    lines(
        196,
        196,
        "authentication: said to come later, and refused in a URL until then",
        f"{CONFIG}::test_whoever_gives_a_password_is_told_about_keys",
    ),
    lines(
        197,
        197,
        "https is checked",
        RUN,
        f"{HTTP}::test_a_certificate_that_is_trusted",
        f"{HTTP}::test_a_self_signed_certificate_is_refused",
        f"{HTTP}::test_an_expired_certificate_is_refused",
        f"{HTTP}::test_a_certificate_of_another_host_is_refused",
    ),
    lines(
        198,
        199,
        "limits of a server are heeded",
        f"{HTTP}::test_retry_after",
        f"{MONITOR}::test_a_server_that_asks_for_patience_gets_it",
        f"{MONITOR}::test_a_server_that_asks_for_much_patience_is_lost_meanwhile",
    ),
    lines(
        200,
        202,
        "success rate, response time and availability of each",
        METRICS,
        f"{MONITOR}::test_metrics_of_an_endpoint",
    ),
    lines(203, 203, "how requests were spread", METRICS),
    lines(204, 204, "health in detail", RECOVERY, ONE_FAILS),
    lines(205, 206, "the whole in numbers", METRICS),
    # --- tests ---
    lines(
        207,
        213,
        "tests of each part",
        OPENS,
        f"{REPLIES}::test_any_bytes_are_a_retryable_error",
        f"{CONFIG}::test_refused_urls",
    ),
    lines(214, 215, "with real servers", MANY),
    lines(216, 216, "failover and recovery", ONE_FAILS, GRADUALLY, ALL_FAIL),
    lines(217, 218, "balancing", *AVAILABILITY, ROUND_ROBIN, WEIGHTED),
    lines(219, 223, "speed: measured, not tested", f"{HERE}::test_the_benchmarks_are_there"),
    lines(224, 225, "as before", ONE, MODE),
    lines(226, 226, "migration", OURS, f"{HERE}::test_one_url_in_the_list_is_the_new_mode"),
    lines(227, 227, "the API", f"{EXAMPLES}::test_signatures_of_the_contract", NAMES),
)

PLAN = (
    lines(1, 4, "a package", NAMES, f"{IMPORTS}::test_only_a_server_imports_a_server"),
    lines(5, 5, "the models", FIELDS),
    lines(6, 8, "typed and checked", REFUSES, f"{MODELS}::test_says_what_was_expected"),
    lines(9, 10, "ConfigurationManager reads variables", NAMES, VARIABLE),
    lines(11, 11, "defaults", f"{CONFIG}::test_unset_and_empty_variables_mean_the_default"),
    lines(12, 12, "0 to 100", f"{CONFIG}::test_thresholds", f"{CONFIG}::test_refused_thresholds"),
    lines(13, 15, "tests of it", f"{CONFIG}::test_a_bad_variable_is_logged_once_and_its_default_used"),
    lines(
        16,
        18,
        "an HTTP client with URL and timeout",
        f"{HTTP}::test_a_good_reply",
        f"{HTTP}::test_a_server_that_takes_its_time_is_given_up",
    ),
    lines(
        19,
        19,
        "JSON is checked",
        f"{REPLIES}::test_the_documented_reply_of_any_server",
        f"{REPLIES}::test_a_bad_envelope_spoils_the_whole_reply",
        f"{FAULTS}::test_a_bad_field_spoils_its_gpu_only",
    ),
    lines(
        20, 20, "network failures and bad answers", f"{HTTP}::test_refused", f"{HTTP}::test_a_reply_that_cannot_be_used"
    ),
    lines(21, 23, "tests of it", f"{HTTP}::test_what_is_asked"),
    lines(24, 25, "GPUMonitor polls", NAMES, f"{MONITOR}::test_it_asks_again_and_again_and_tells"),
    lines(26, 26, "every 5 seconds, or as configured", DEFAULTS, f"{HERE}::test_the_polling_interval_is_kept"),
    lines(27, 27, "backs off", OPENS, f"{BACKOFF}::test_the_bound_doubles_up_to_the_longest"),
    lines(28, 28, "calls back with new statistics", f"{CLIENT}::test_callbacks_hear_of_every_endpoint"),
    lines(29, 31, "tests of it", f"{MONITOR}::test_a_callback_that_fails_stops_nothing"),
    lines(
        32,
        35,
        "GPUAllocator and thresholds",
        NAMES,
        f"{RULES}::test_rule_1_what_a_reading_shows_can_forbid_a_grant",
        THRESHOLDS_LIVE,
    ),
    lines(
        36,
        36,
        "memory and utilization added up",
        f"{RULES}::test_rule_3_the_least_used_then_the_one_granted_longest_ago_then_by_id",
    ),
    lines(37, 39, "tests of it", f"{MANAGER}::test_available_means_strictly_below_both_thresholds"),
    lines(40, 42, "the least used is given", f"{MANAGER}::test_the_least_used_gpu_is_given_first", THRESHOLDS_LIVE),
    lines(43, 43, "and is known to be", f"{MANAGER}::test_one_worker_a_gpu_however_idle_it_looks", TWICE),
    lines(44, 46, "tests of it", f"{MANAGER}::test_among_equals_the_one_given_longest_ago_is_next"),
    lines(47, 49, "WorkerQueue; threads are served by the blocking client, by our decision D21", NAMES, THREADS),
    lines(
        50,
        50,
        "enqueue, dequeue, size, clear",
        f"{STRUCTURES}::test_the_queue_is_in_order_of_priority_then_arrival",
        f"{STRUCTURES}::test_clearing_the_queue_gives_back_who_waited",
    ),
    lines(
        51,
        51,
        "callbacks and error handlers",
        f"{MANAGER}::test_a_worker_is_called_back_with_its_gpu",
        f"{MANAGER}::test_a_worker_hears_of_its_timeout",
    ),
    lines(
        52,
        54,
        "tests of it, threads too",
        THREADS,
        f"{MANAGER}::test_from_another_thread_everything_is_refused_and_nothing_happens",
    ),
    lines(55, 56, "workers wait while there is nothing", f"{CLIENT}::test_first_come_first_served", ALL_FAIL),
    lines(
        57,
        57,
        "and are served when there is",
        f"{CLIENT}::test_first_come_first_served",
        f"{MANAGER}::test_a_released_gpu_goes_to_the_next_in_the_same_step",
    ),
    lines(58, 58, "both are logged", EVENTS),
    lines(59, 61, "tests of it", f"{ORDER}::test_plain_requests_are_granted_strictly_in_order_of_arrival"),
    lines(62, 65, "GPUResourceState", NAMES, f"{STRUCTURES}::test_the_tracker_knows_who_holds_what"),
    lines(66, 66, "many at once", TWICE, THREADS),
    lines(67, 69, "tests of it", f"{STRUCTURES}::test_a_lease_moves_only_along_its_table"),
    lines(
        70,
        72,
        "WorkerAssignmentTracker: assign, release, lookup",
        NAMES,
        f"{STRUCTURES}::test_the_tracker_knows_who_holds_what",
    ),
    lines(73, 73, "what was released is forgotten", f"{MANAGER}::test_releasing_twice_is_harmless", ONE),
    lines(74, 76, "tests of it", f"{MANAGER}::test_what_this_pool_did_not_assign_is_refused_and_changes_nothing"),
    lines(77, 79, "WorkerPoolManager", NAMES),
    lines(80, 80, "request_gpu waits", f"{MANAGER}::test_first_come_first_served"),
    lines(
        81,
        81,
        "release_gpu lets the next one have it",
        f"{MANAGER}::test_a_released_gpu_goes_to_the_next_in_the_same_step",
    ),
    lines(82, 84, "tests of it", f"{MANAGER}::test_a_newcomer_does_not_overtake_who_waits"),
    lines(85, 86, "get_pool_status", f"{MANAGER}::test_the_status_counts_gpus_and_workers", ONE),
    lines(87, 87, "assignments and releases are logged", EVENTS),
    lines(
        88,
        88,
        "errors say what was the case",
        f"{MANAGER}::test_a_timeout_says_who_waited_for_what_and_what_each_gpu_did",
        ALL_FAIL,
    ),
    lines(89, 91, "tests of it", f"{MANAGER}::test_the_pools_own_log_says_who_got_and_gave_back_what"),
    lines(92, 93, "start and stop", LIFE),
    lines(94, 94, "the monitor with it", LIFE, f"{FAULTS}::test_stopping_with_silent_endpoints_is_quick"),
    lines(95, 95, "nothing is left", f"{HERE}::test_nothing_is_left_behind"),
    lines(96, 98, "tests of it", f"{SHUTDOWN}::test_stopped_at_whatever_step_everybody_is_told"),
    lines(99, 101, "retries with growing delays", OPENS, f"{BACKOFF}::test_the_bound_doubles_up_to_the_longest"),
    lines(
        102,
        102,
        "goes on without a service",
        ALL_FAIL,
        f"{FAULTS}::test_a_bad_reply_keeps_what_was_known",
    ),
    lines(
        103,
        103,
        "timeouts, and assignments that were forgotten",
        f"{MANAGER}::test_a_request_times_out_at_its_own_time_and_not_before",
        f"{MANAGER}::test_when_the_task_has_finished_and_the_gpu_is_empty_it_is_taken_back",
    ),
    lines(104, 106, "tests of it", ONE_FAILS, f"{FAULTS}::test_old_readings_grant_nothing"),
    lines(107, 108, "structured logs", EVENTS, f"{HERE}::test_an_endpoint_s_fall_and_return_are_logged_once_each"),
    lines(109, 109, "metrics", METRICS),
    lines(110, 110, "health", RECOVERY, ALL_FAIL),
    lines(111, 113, "tests of it", EVENTS, METRICS, RECOVERY),
    lines(114, 116, "a client that is easy to use", OURS, ONE),
    lines(
        117,
        117,
        "context managers",
        f"{CLIENT}::test_the_context_manager_yields_a_number_and_releases",
        f"{CLIENT}::test_the_factory",
    ),
    lines(118, 118, "examples", f"{EXAMPLES}::test_basic_usage", f"{EXAMPLES}::test_multi_endpoint_usage"),
    lines(119, 121, "tests of the whole", f"{EXAMPLES}::test_basic_usage", TWICE),
    lines(122, 123, "configuration files", FILES),
    lines(124, 124, "examples of use", f"{EXAMPLES}::test_every_program_and_file_is_run_here", OURS),
    lines(
        125,
        125,
        "common mistakes are found",
        f"{EXAMPLES}::test_thresholds_that_are_hardly_meant",
        f"{EXAMPLES}::test_endpoints_that_are_hardly_meant",
        f"{EXAMPLES}::test_an_environment",
    ),
    lines(126, 127, "tests from end to end", f"{EXAMPLES}::test_config_examples", TOGETHER),
)

CHECKLISTS: dict[str, tuple[Sequence[Lines], int]] = {
    "API.md": (API, 849),
    "MIGRATION_GUIDE.md": (GUIDE, 378),
    "MULTI_ENDPOINT_DESIGN.md": (DESIGN, 227),
    "IMPLEMENTATION_PLAN.md": (PLAN, 127),
}


# --- the tables are whole ---


@pytest.mark.parametrize("name", CHECKLISTS)
def test_every_proof_exists(name: str) -> None:
    assert without_proof(CHECKLISTS[name][0]) == []


@pytest.mark.parametrize("name", CHECKLISTS)
def test_every_line_is_ticked_off(name: str) -> None:
    check_that_it_is_whole(*CHECKLISTS[name])


@pytest.mark.skipif(not DOCUMENTS.exists(), reason="the documents are not part of the project")
@pytest.mark.parametrize("name", CHECKLISTS)
def test_the_document_is_the_one_that_was_ticked_off(name: str) -> None:
    checklist, last_line = CHECKLISTS[name]
    text = (DOCUMENTS / name).read_text(encoding="utf-8").splitlines()
    assert len(text) == last_line
    for entry in checklist:
        promised = "\n".join(text[entry.first - 1 : entry.last])
        # Names in the table are names in the document.
        for word in re.findall(r"\b(?:GPU_[A-Z_]+|[a-z]+_[a-z_]+|[A-Z][a-z]\w+[A-Z]\w+)\b", entry.what):
            assert word in promised, entry


# --- what no other file proves ---


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    folder = tmp_path_factory.mktemp("servers")
    with (
        ServerProcess(folder / "first", GPU_BACKEND="simulated:4") as first,
        ServerProcess(folder / "second", GPU_BACKEND="simulated:2") as second,
    ):
        yield [first, second]


async def until(condition: Any, within_seconds: float = 20.0) -> None:
    deadline = time.monotonic() + within_seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.02)


#: By module, what the documents and our decision D21 place there.
PLACES = {
    "client": "GPUWorkerPoolClient GPUContextManager gpu_worker_pool_client",
    "models": "GPUAssignment PoolStatus GPUInfo GPUStats WorkerInfo GlobalGPUAssignment MultiEndpointPoolStatus "
    "EndpointInfo GlobalGPUInfo",
    "config": "ConfigurationManager EnvironmentConfigurationManager MultiEndpointConfigurationManager",
    "worker_pool_manager": "WorkerPoolManager WorkerTimeoutError StaleAssignmentError",
    "http_client": "AsyncGPUStatsHTTPClient MultiEndpointHTTPClientPool ServiceUnavailableError RetryableError "
    "NetworkRetryableError ServiceRetryableError",
    "gpu_monitor": "GPUMonitor MultiEndpointGPUMonitor",
    "endpoints": "EndpointManager",
    "core": "GPUAllocator WorkerQueue WorkerAssignmentTracker GPUResourceState",
}


def test_every_documented_name_is_where_the_documents_say() -> None:
    for module, names in PLACES.items():
        found = importlib.import_module(f"gpu_worker_pool.{module}")
        assert [name for name in names.split() if not hasattr(found, name)] == [], module
    core = importlib.import_module("gpu_worker_pool.core")
    for name in ("enqueue", "dequeue", "size", "clear"):
        assert callable(getattr(core.WorkerQueue, name))
    for name in ("assign", "release", "lookup"):
        assert callable(getattr(core.WorkerAssignmentTracker, name))
    http = importlib.import_module("gpu_worker_pool.http_client")
    assert issubclass(http.NetworkRetryableError, http.RetryableError)
    assert issubclass(http.ServiceRetryableError, http.RetryableError)


async def test_what_needs_a_started_client_of_many_endpoints_says_so(servers: list[ServerProcess]) -> None:
    many = GPUWorkerPoolClient(service_endpoints=servers[0].url, environ={})
    one = GPUWorkerPoolClient(service_endpoint=servers[0].url, environ={})

    def calls(client: GPUWorkerPoolClient) -> list[Any]:
        return [
            client.trigger_endpoint_recovery("x"),
            client.queue_request_for_retry(client.request_gpu),
            client.add_endpoint("http://127.0.0.1:9"),
            client.remove_endpoint("x"),
        ]

    for call in calls(many) + calls(one):
        with pytest.raises(RuntimeError, match="not started"):
            await call
    async with one:
        for call in calls(one):
            with pytest.raises(RuntimeError, match="many endpoints"):
                await call


async def test_variables_decide_which_servers_are_asked(servers: list[ServerProcess]) -> None:
    first, second = (server.url for server in servers)

    async def look(**environ: str) -> tuple[bool, int, str]:
        async with GPUWorkerPoolClient(environ=environ) as client:
            strategy = client.get_detailed_metrics().get("load_balancer", {}).get("strategy", "none")
            return client.is_multi_endpoint_mode(), client.get_pool_status().total_gpus, strategy

    assert await look(GPU_SERVICE_ENDPOINT=first) == (False, 4, "none")
    assert await look(GPU_STATS_SERVICE_ENDPOINTS=f"{first},{second}") == (True, 6, "availability")
    assert await look(GPU_SERVICE_ENDPOINTS=second, GPU_LOAD_BALANCING_STRATEGY="weighted") == (True, 2, "weighted")
    assert await look(GPU_STATS_SERVICE_ENDPOINTS=second, GPU_SERVICE_ENDPOINT=first) == (True, 2, "availability")
    assert await look(GPU_STATS_SERVICE_ENDPOINTS=second, GPU_SERVICE_ENDPOINTS=first) == (True, 2, "availability")
    async with GPUWorkerPoolClient(first, environ={"GPU_STATS_SERVICE_ENDPOINTS": second}) as client:
        assert (client.is_multi_endpoint_mode(), client.get_pool_status().total_gpus) == (False, 4)
    async with GPUWorkerPoolClient(first, f"{first},{second}", environ={}) as client:
        assert (client.is_multi_endpoint_mode(), client.get_pool_status().total_gpus) == (True, 6)


@pytest.mark.parametrize("mode", ["GPU_SERVICE_ENDPOINT", "GPU_STATS_SERVICE_ENDPOINTS"])
async def test_thresholds_decide_which_gpu_is_given(tmp_path: Path, mode: str) -> None:
    def gpu(index: int, memory_percent: int, utilization: int) -> dict[str, str]:
        used = 10_000 * memory_percent // 100
        memory = {"memory_total": "10000", "memory_used": str(used), "memory_free": str(10_000 - used)}
        return healthy_gpu(index, utilization_gpu=str(utilization), **memory)

    smi = FakeNvidiaSMI(tmp_path)
    #: At a threshold, above one, below both, and still less used.
    smi.set_gpus(gpu(0, 80, 0), gpu(1, 0, 90), gpu(2, 79, 89), gpu(3, 50, 60), gpu(4, 60, 40))
    environment: dict[str, Any] = {"GPU_BACKEND": "nvidia-smi"} | smi.env
    with ServerProcess(tmp_path / "server", **environment) as server:

        async def given(**environ: str) -> list[int]:
            # In process: a server gives a GPU that was leased again when it was read anew, and so in another order.
            async with GPUWorkerPoolClient(coordination="local", environ={mode: server.url} | environ) as client:
                found = []
                while client.get_pool_status().available_gpus:
                    found.append(await client.request_gpu())
                with pytest.raises(WorkerTimeoutError):
                    await client.request_gpu(timeout=0)
                return [assignment.local_gpu_ids[0] for assignment in found]

        assert await given() == [4, 3, 2]
        assert await given(GPU_MEMORY_THRESHOLD_PERCENT="55") == [3]
        assert await given(GPU_UTILIZATION_THRESHOLD_PERCENT="50") == [4]
        assert await given(GPU_UTILIZATION_THRESHOLD_PERCENT="91", GPU_MEMORY_THRESHOLD_PERCENT="81") == [0, 1, 4, 3, 2]


async def test_the_client_s_timeout_counts_where_a_request_names_none(servers: list[ServerProcess]) -> None:
    async with GPUWorkerPoolClient(servers[1].url, worker_timeout=0.3, environ={}) as client:
        held = [await client.request_gpu() for _ in range(2)]
        begun = time.monotonic()
        with pytest.raises(WorkerTimeoutError):
            await client.request_gpu()
        assert 0.25 < time.monotonic() - begun < 5
        waiting = asyncio.create_task(client.request_gpu(timeout=20))
        await asyncio.sleep(0.6)
        assert not waiting.done(), "its own timeout counts more"
        await client.release_gpu(held[0])
        await client.release_gpu(await waiting)
        await client.release_gpu(held[1])


async def test_which_timeout_counts() -> None:
    with HostileServer(silent) as server:
        short: dict[str, Any] = {"endpoint_max_retries": 0, "environ": {}}
        async with GPUWorkerPoolClient(server.url, request_timeout=0.2, endpoint_timeout=60, **short) as client:
            await until(lambda: client.get_health()["errors"])
            assert "within 0.2 s" in str(client.get_health()["errors"])
        many: dict[str, Any] = {"service_endpoints": server.url, "request_timeout": 60}
        async with GPUWorkerPoolClient(endpoint_timeout=0.3, **many, **short) as client:
            await until(lambda: client.get_health()["errors"])
            assert "within 0.3 s" in str(client.get_health()["errors"])
        variables = {"GPU_ENDPOINT_TIMEOUT": "0.4", "GPU_ENDPOINT_MAX_RETRIES": "0"}
        async with GPUWorkerPoolClient(**many, environ=variables) as client:
            await until(lambda: client.get_health()["errors"])
            assert "within 0.4 s" in str(client.get_health()["errors"])


SUMMARY_BODY = {
    "gpu_count": 1,
    "total_memory_mb": 24576,
    "total_used_memory_mb": 0,
    "total_memory_usage_percent": 0.0,
    "average_utilization_percent": 0.0,
    "gpus_summary": [{"gpu_id": 0, "name": "Some GPU", "memory_usage_percent": 0.0, "utilization_percent": 0}],
    "timestamp": "2024-01-01T00:00:00",
}


async def test_the_polling_interval_is_kept() -> None:
    with HostileServer(answer_json(SUMMARY_BODY)) as server:
        async with GPUWorkerPoolClient(environ={"GPU_SERVICE_ENDPOINT": server.url, "GPU_POLLING_INTERVAL": "0.3"}):
            await asyncio.sleep(1.6)
        assert 3 <= len(server.requests) <= 7


async def test_a_server_is_given_up_after_its_retries() -> None:
    with HostileServer(answer_json({"detail": "broken"}, 500)) as server:
        environ = {"GPU_STATS_SERVICE_ENDPOINTS": f"sick={server.url}", "GPU_ENDPOINT_MAX_RETRIES": "2"}
        # Where leases may be had, the first look that succeeds is two: what the server offers, and its readings.
        async with GPUWorkerPoolClient(coordination="local", environ=environ) as client:

            def breaker() -> dict[str, Any]:
                stats: dict[str, Any] = client.get_error_recovery_status()["circuit_breaker_stats"]["sick"]
                return stats

            await until(lambda: breaker()["state"] == "open")
            assert len(server.requests) == 3, "a look and its two retries"
            assert 0 < breaker()["retry_in_seconds"] <= 6.25
            await asyncio.sleep(1)
            assert len(server.requests) == 3, "then it is left alone"
            server.behaviour = answer_json(SUMMARY_BODY)
            assert await client.trigger_endpoint_recovery("sick")
            await until(lambda: breaker()["state"] == "closed")
            assert len(server.requests) == 4, "one probe"
            assert (await client.request_gpu(timeout=45)).gpu_id == "sick:0"


async def test_the_printed_summary_is_the_documented_one(
    servers: list[ServerProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    urls = f"server1={servers[0].url},server2={servers[1].url},server3=http://127.0.0.1:9"
    async with GPUWorkerPoolClient(service_endpoints=urls, endpoint_max_retries=0, environ={}) as client:
        client.print_error_recovery_summary()
        printed = capsys.readouterr().out.splitlines()
        assert printed[:4] == [
            "=== Error Recovery Status ===",
            "Degradation Status: Partial (2/3 endpoints healthy)",
            "  server1: healthy, circuit breaker closed",
            "  server2: healthy, circuit breaker closed",
        ]
        assert re.fullmatch(
            r"  server3: degraded, circuit breaker open, next attempt in \d s: GET .*refused.*", printed[4]
        )
        status = client.get_error_recovery_status()
        assert status["degradation_manager"]["degraded_endpoints"] == ["server3"]
        (recovering,) = status["recovery_orchestrator"]["recovering_endpoints"]
        assert recovering["endpoint_id"] == "server3"
        assert client.get_health()["status"] == "degraded"
        assert json.loads(json.dumps(status)) == status


async def test_one_url_in_the_list_is_the_new_mode(servers: list[ServerProcess]) -> None:
    async with GPUWorkerPoolClient(service_endpoints=servers[0].url, environ={}) as client:
        assert client.is_multi_endpoint_mode()
        assignment = await client.request_gpu()
        assert assignment.gpu_id == f"127.0.0.1_{servers[0].port}:0"
        await client.release_gpu(assignment)


async def test_errors_are_the_same_in_both_modes(servers: list[ServerProcess]) -> None:
    async def errors_of(client: GPUWorkerPoolClient) -> list[type[BaseException] | None]:
        async with client:
            held = [await client.request_gpu() for _ in range(2)]
            outcomes = await asyncio.gather(
                client.request_gpu(timeout=0.05),
                client.request_gpu(count=3),
                client.request_gpu(memory_mb=-1),
                client.release_gpu("GPU 0"),  # type: ignore[arg-type]  # a mistake that people make
                client.start(),
                return_exceptions=True,
            )
            for assignment in held:
                await client.release_gpu(assignment)
            return [type(outcome) if isinstance(outcome, BaseException) else None for outcome in outcomes]

    with_one = await errors_of(GPUWorkerPoolClient(service_endpoint=servers[1].url, environ={}))
    with_many = await errors_of(GPUWorkerPoolClient(service_endpoints=servers[1].url, environ={}))
    assert with_one == with_many
    assert None not in with_one


async def test_an_assignment_is_released_where_it_was_made(servers: list[ServerProcess]) -> None:
    urls = f"a={servers[0].url},b={servers[1].url}"
    async with GPUWorkerPoolClient(service_endpoints=urls, environ={}) as client:

        def free() -> dict[str, int]:
            return {info["endpoint_id"]: info["available_gpus"] for info in client.get_endpoints_info() or []}

        on_b = await client.request_gpu(only=["b:0"])
        on_a = await client.request_gpu(only=["a:0"])
        assert free() == {"a": 3, "b": 1}
        # What was released is free once it is read again.
        await client.release_gpu(on_b)
        await until(lambda: free() == {"a": 3, "b": 2})
        await client.release_gpu(on_a)
        await until(lambda: free() == {"a": 4, "b": 2})


async def test_a_silent_endpoint_delays_no_other(servers: list[ServerProcess]) -> None:
    with HostileServer(silent) as mute:
        urls = [f"mute={mute.url}", f"well={servers[0].url}"]
        async with GPUWorkerPoolClient(service_endpoints=urls, polling_interval=0.2, environ={}) as client:
            begun = time.monotonic()
            assignment = await client.request_gpu(timeout=45)
            assert time.monotonic() - begun < 1
            assert str(assignment.gpu_id).startswith("well:")

            def successes() -> int:
                looks: dict[str, int] = {
                    endpoint["endpoint_id"]: endpoint["successes"]
                    for endpoint in client.get_detailed_metrics()["endpoints"]
                }
                return looks["well"]

            before = successes()
            await until(lambda: successes() >= before + 5, within_seconds=5)
            await client.release_gpu(assignment)
        assert len(mute.requests) == 1, "one look at a time"


async def test_views_asks_nobody() -> None:
    with HostileServer(answer_json(SUMMARY_BODY)) as server:
        async with GPUWorkerPoolClient(service_endpoints=server.url, polling_interval=60, environ={}) as client:
            for _ in range(100):
                client.get_pool_status()
                client.get_health()
                client.get_endpoints_info()
                client.get_detailed_metrics()
                client.get_error_recovery_status()
                await client.release_gpu(await client.request_gpu())
            await asyncio.sleep(0.1)
        assert [request.split()[1] for request in server.requests] == [b"/", b"/gpu/summary"]


async def test_nothing_is_left_behind(servers: list[ServerProcess]) -> None:
    """Nor is there anything before the start: no task, no thread, no socket."""
    descriptors = Path("/proc/self/fd")

    def now() -> tuple[int, int, int]:
        return len(asyncio.all_tasks()), threading.active_count(), len(list(descriptors.iterdir()))

    # Once, for what the loop keeps for itself: its resolver's thread.
    async with GPUWorkerPoolClient(servers[0].url.replace("127.0.0.1", "localhost"), environ={}):
        pass
    await asyncio.sleep(0.05)
    before = now()
    client = GPUWorkerPoolClient(service_endpoints=[servers[0].url, servers[1].url, "http://127.0.0.1:9"], environ={})
    assert now() == before
    async with client:
        await client.release_gpu(await client.request_gpu())
        waiting = asyncio.create_task(client.request_gpu(only=["127.0.0.1_9:0"]))
        await asyncio.sleep(0.05)
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.sleep(0.05)
    assert now() == before


async def test_an_endpoint_s_fall_and_return_are_logged_once_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gpu_worker_pool")
    with HostileServer(answer_json(SUMMARY_BODY)) as server:
        settings: dict[str, Any] = {"polling_interval": 0.1, "endpoint_max_retries": 0, "environ": {}}
        async with GPUWorkerPoolClient(service_endpoints=f"it={server.url}", **settings) as client:
            server.behaviour = answer_json({}, 500)
            await until(lambda: client.get_health()["status"] == "unhealthy")
            await client.trigger_endpoint_recovery("it")
            await asyncio.sleep(0.3)
            server.behaviour = answer_json(SUMMARY_BODY)
            await client.trigger_endpoint_recovery("it")
            await until(lambda: client.get_health()["status"] == "healthy")
    events = [record.__dict__ for record in caplog.records if "endpoint_" in record.__dict__.get("event", "")]
    assert [event["event"] for event in events] == ["endpoint_down", "endpoint_up"]
    assert [event["endpoint_id"] for event in events] == ["it", "it"]
    assert events[0]["levelname"] == "WARNING"


def test_thirty_two_threads_share_a_blocking_client(servers: list[ServerProcess]) -> None:
    sync = pytest.importorskip("gpu_worker_pool.sync")
    held: Counter[object] = Counter()
    wrong: list[str] = []
    lock = threading.Lock()

    with sync.GPUWorkerPoolClient(servers[0].url, environ={}) as client:

        def work() -> None:
            for _ in range(5):
                with sync.GPUContextManager(client, timeout=30) as gpu_id:
                    with lock:
                        held[gpu_id] += 1
                        if held[gpu_id] > 1:
                            wrong.append(f"GPU {gpu_id} is held twice")
                    time.sleep(0.002)
                    with lock:
                        held[gpu_id] -= 1

        threads = [threading.Thread(target=work) for _ in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        assert client.get_pool_status().available_gpus == 4
        assert client.get_detailed_metrics()["assignment_metrics"]["granted_total"] == 160
    assert wrong == []


async def test_two_clients_in_one_program_do_not_disturb_each_other(servers: list[ServerProcess]) -> None:
    async with (
        GPUWorkerPoolClient(servers[0].url, environ={}) as first,
        GPUWorkerPoolClient(service_endpoints=servers[1].url, environ={}) as second,
    ):
        mine, yours = await first.request_gpu(), await second.request_gpu()
        with pytest.raises(ValueError, match="another"):
            await second.release_gpu(mine)
        await first.release_gpu(mine)
        await second.release_gpu(yours)


def test_the_benchmarks_are_there() -> None:
    bench = (ROOT / "bench" / "client.py").read_text(encoding="utf-8")
    assert "GPUWorkerPoolClient" in bench
    assert "service_endpoints" in bench
    assert "bench.client" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert inspect.getdoc(importlib.import_module("bench.client"))
