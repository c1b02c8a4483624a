"""Twenty-four ways in which this kind of software failed in the field, and the tests that each can't here.

The rows are in our own words; the issues say where each was seen. A row that does not apply yet says why.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CONTAINERS = "tests/backends/test_containers.py::test_"
SUPERVISION = "tests/backends/test_supervision.py::test_"
GATEWAY = "tests/gateway/test_failures.py::test_"
COMMAND = "tests/backends/test_llama_server_command.py::test_"


@dataclass(frozen=True)
class Row:
    """One way to fail.

    Attributes:
        number: its place in the list.
        seen: the issues.
        what: what went wrong there.
        tests: what proves that it can't here.
        open: what does not apply yet, and why.

    """

    number: int
    seen: str
    what: str
    tests: tuple[str, ...]
    open: str = ""


ROWS = (
    Row(
        1, "vllm#55510", "the server is killed and the process that holds the GPU lives on",
        (
            SUPERVISION + "what_a_dead_engine_leaves_behind_is_ended_before_the_next_start_ugly",
            "tests/backends/test_guardian.py::test_what_a_dead_engine_leaves_behind_is_ended_and_named_ugly",
            "tests/backends/test_contract_vllm.py::test_nothing_is_left_of_it_when_the_orchestrator_is_killed_ugly",
        ),
    ),
    Row(
        2, "vllm#44751", "a SIGTERM during warm-up leaves workers behind",
        (
            SUPERVISION + "an_end_while_it_warms_up_leaves_no_worker_ugly",
            SUPERVISION + "load_can_be_called_off_ugly",
        ),
    ),
    Row(
        3, "vllm#48966", "the engine died and its server ended with 0, as if asked to",
        (SUPERVISION + "any_exit_not_asked_for_is_a_crash_and_restarts_good",),
    ),
    Row(
        4, "vllm#39863", "health is fine while nothing moves any more",
        (
            SUPERVISION + "hang_in_a_ready_engine_is_noticed_and_mended_ugly",
            "tests/backends/test_readiness.py::test_a_ready_engine_that_no_longer_answers_is_restarted_ugly",
            SUPERVISION + "slow_is_not_hung_good",
            SUPERVISION + "idle_engine_is_never_called_hung_good",
        ),
    ),
    Row(
        5, "vllm#48031, vllm#34113", "a start that takes for ever, or only looks as if",
        (SUPERVISION + "stalled_load_is_noticed_bad", SUPERVISION + "start_deadline_bad"),
    ),
    Row(
        6, "llama-swap#138, llama-swap#100", "engines outlive the one who started them",
        (
            SUPERVISION + "death_of_the_orchestrator_ends_everything_ugly",
            "tests/backends/test_leftovers.py::test_what_a_dead_owner_left_is_swept_ugly",
            "tests/backends/test_leftovers.py::test_a_reused_session_is_a_strangers_good",
            "tests/cli/test_up.py::test_up_that_is_killed_leaves_no_engine_ugly",
        ),
    ),
    Row(
        7, "llama-swap#220, llama-swap#130", "a container outlives its client, and its name is in use",
        (
            CONTAINERS + "client_dies_while_its_container_lives_on_ugly",
            CONTAINERS + "leftover_of_a_dead_launch_gives_its_name_up_ugly",
            CONTAINERS + "name_of_a_strangers_container_is_not_taken_from_it_bad",
            CONTAINERS + "container_of_a_dead_owner_is_swept_ugly",
        ),
    ),
    Row(
        8, "ramalama#807", "a container hangs when it is stopped",
        (
            CONTAINERS + "container_that_ignores_its_stop_is_removed_ugly",
            CONTAINERS + "stop_that_takes_too_long_is_cut_short_ugly",
            CONTAINERS + "container_that_can_not_be_removed_is_stuck_until_it_is_gone_bad",
        ),
    ),
    Row(
        9, "llama-swap#946", "a request races the stop of an idle engine and its slot is wedged",
        ("tests/backends/test_lifecycle_model.py::TestLifecycle",),
        "start and stop race in the model; `idle_timeout` is refused in a profile until it is built",
    ),
    Row(
        10, "llama.cpp PR#20685, llama.cpp#28829", "a crash or a swap deadlocks whoever routes",
        (
            "tests/backends/test_lifecycle_model.py::TestLifecycle",
            "tests/backends/test_chaos.py::test_nothing_is_lost_or_left_whoever_is_killed_ugly",
            GATEWAY + "wait_is_bounded_and_says_when_to_come_back_bad",
        ),
    ),
    Row(
        11, "llama.cpp#24849, llama.cpp#21678", "a swap of engines aborts answers that are on their way",
        (
            GATEWAY + "switch_behind_the_name_loses_nothing_good",
            "tests/gateway/test_life.py::test_stop_lets_answers_end_good",
        ),
    ),
    Row(
        12, "llama.cpp PR#25326, ollama#9160", "the next engine starts before the driver gave memory back",
        (
            SUPERVISION + "stop_waits_until_gpu_memory_is_back_good",
            SUPERVISION + "stuck_when_gpu_memory_does_not_come_back_ugly",
            "tests/hardware/test_memory.py::test_memory_kept_without_a_process_is_named_bad",
        ),
    ),
    Row(
        13, "lemonade PR#3344", "vLLM wants a share of all memory where only a part is free",
        ("tests/backends/test_vllm_command.py::test_one_card_beside_an_integrated_one_good",),
    ),
    Row(
        14, "llama.cpp#20963", "two servers share a port and the wrong model answers",
        (
            SUPERVISION + "two_servers_share_a_port_the_wrong_one_answers_bad",
            "tests/backends/test_readiness.py::test_a_stranger_with_our_models_name_on_our_port_is_not_ours_bad",
            "tests/gateway/test_pool.py::test_stranger_on_a_dead_engines_port_gets_nothing_bad",
        ),
    ),
    Row(
        15, "vllm#51275, llama.cpp#26822", "a port is taken before it is bound, and the second server waits",
        (SUPERVISION + "three_port_conflicts_in_a_row_good", SUPERVISION + "port_always_taken_bad"),
    ),
    Row(
        16, "llama-swap#812", "`localhost` is ::1 and the server listens on IPv4",
        ("tests/contract.py::BackendContract::test_it_listens_on_loopback_only_good",),
    ),
    Row(
        17, "llama-swap#92, llama-swap#574, ramalama#2007", "a fixed limit kills a load that is merely slow",
        (SUPERVISION + "slow_but_moving_load_is_not_killed_good",),
    ),
    Row(
        18, "llama-swap#43, llama-swap#980", "a client leaves and its request is computed to the end",
        (
            GATEWAY + "client_that_leaves_takes_its_request_along_good",
            GATEWAY + "client_that_leaves_within_a_stream_ends_it_good",
            "tests/gateway/test_real.py::test_client_that_leaves_frees_its_slot_while_the_prompt_is_read_good",
            "tests/contract.py::BackendContract::test_a_client_that_leaves_frees_its_slot_ugly",
        ),
    ),
    Row(
        19, "litellm#40578", "comments crash a parser of streams, errors within a stream are lost",
        (
            "tests/test_wire.py::test_comments_are_no_progress_good",
            "tests/test_wire.py::test_failures_are_never_successes_bad",
            "tests/test_sse.py::test_every_byte_split_gives_the_same_events_good",
        ),
    ),
    Row(
        20, "unsloth#6175, unsloth#7624", "masks of HIP and ROCr stack up; an integrated GPU crashes it",
        (
            "tests/hardware/test_devices.py::test_inherited_masks_are_removed_and_said_good",
            "tests/hardware/test_devices.py::test_discrete_card_beside_an_integrated_one_good",
            "tests/hardware/test_devices.py::test_kind_that_the_binary_lacks_is_refused_bad",
            "tests/backends/test_vllm_command.py::test_exactly_one_consistent_set_of_masks_good",
        ),
    ),
    Row(
        21, "ramalama#2552, ollama#7480", "the user's choice of a device is overridden, the order changes",
        (
            "tests/hardware/test_devices.py::test_named_integrated_gpu_is_used_good",
            "tests/hardware/test_devices.py::test_named_order_is_the_engines_order_good",
            COMMAND + "masks_on_captured_machines_good",
        ),
    ),
    Row(
        22, "llama.cpp#11681, llama.cpp#23652", "the context is split among the slots",
        (
            COMMAND + "context_times_slots_on_a_gpu_good",
            "tests/contract.py::BackendContract::test_the_context_is_each_slots_own_good",
        ),
    ),
    Row(
        23, "lemonade#3326", "a log grows to 239 GB",
        (
            SUPERVISION + "flood_of_log_neither_blocks_nor_grows_good",
            "tests/backends/test_guardian.py::test_the_log_keeps_the_end_and_its_cap_good",
        ),
    ),
    Row(
        24, "blackfish PR#327", "quoting mangles an argument that is JSON",
        (
            COMMAND + "every_key_and_option_good",
            "tests/backends/test_vllm_command.py::test_every_option_good",
        ),
    ),
)  # fmt: skip


def names(path: Path) -> set[str]:
    """Return what a test file defines, as it stands in a node id."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
            found |= {f"{node.name}::{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.number}-{row.seen.split(',')[0]}")
def test_a_failure_of_the_field_has_its_test_good(row: Row) -> None:
    assert row.tests or row.open, "a row is proven, or says why it is not yet"
    for test in row.tests:
        file, _, name = test.partition("::")
        assert name in names(ROOT / file), test


def test_the_list_is_whole_good() -> None:
    assert [row.number for row in ROWS] == list(range(1, 25))


def test_a_test_that_is_gone_is_noticed_bad() -> None:
    file = ROOT / "tests/backends/test_supervision.py"
    assert "test_start_and_stop_good" in names(file)
    assert "test_nobody_ever_wrote_this" not in names(file)
