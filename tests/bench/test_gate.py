"""What may count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.bench import declared, gate, server_view
from orchestrator.bench.arms import Spec
from orchestrator.bench.prompts import Ask
from orchestrator.bench.values import Arm, Client, EngineFigures, Workload
from orchestrator.bench.workload import WorkloadError
from tests.bench.conftest import answer

PROMPT = Workload(name="x")
LOGS = Path(__file__).parent.parent / "data" / "engine_messages"


ASK = Ask([1] * 64, 11)


def faults(load: Workload = PROMPT, **changes: Any) -> list[str]:
    return gate.sample_faults([answer(**changes)], [ASK], load)


def test_a_good_answer_counts_good() -> None:
    assert faults() == []
    assert faults(cached_tokens=None) == []
    assert faults(cached_tokens=8) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"error": "the connection broke"}, "a request failed: the connection broke"),
        ({"output_tokens": 10}, "10 output tokens instead of 11"),
        ({"cached_tokens": 9}, "9 of 64 prompt tokens came from a cache"),
        ({"first_s": None}, "no output was seen"),
        ({"chunks_s": (0.1,)}, "all 11 tokens came at once"),
    ],
)
def test_an_answer_that_does_not_count_bad(changes: dict[str, Any], said: str) -> None:
    assert said in faults(**changes)[0]


def test_a_shared_prefix_may_come_from_the_cache_good() -> None:
    assert faults(Workload(name="x", prefix_tokens=50), cached_tokens=50) == []


def test_the_same_fault_many_times_is_one_reason_ugly() -> None:
    many = gate.sample_faults([answer(output_tokens=1)] * 5, [ASK] * 5, PROMPT)
    assert len(many) == 1
    assert many[0].endswith("(5 requests)")


@pytest.mark.parametrize(
    "line",
    [
        "INFO 11-30 Compiling a graph for dynamic shape takes 12.1 s",
        "WARNING Sequence group 3 is preempted by PreemptionMode.RECOMPUTE",
        "INFO Capturing CUDA graph shapes: 100%",
        "recompiling function foo",
        "thermal: CPU throttled",
        "slot update_slots: context shift, n_keep = 0",
    ],
)
def test_lines_of_a_disturbed_engine_bad(line: str) -> None:
    assert gate.log_faults(["all is well", line])


def test_a_healthy_engines_log_is_no_reason_good() -> None:
    logs = sorted(LOGS.glob("llama-server.healthy*.txt"))
    assert logs
    for path in logs:
        assert gate.log_faults(path.read_text(errors="replace").splitlines()) == []


def test_what_a_healthy_vllm_says_while_it_serves_is_no_reason_good() -> None:
    lines = (
        'INFO:     127.0.0.1:38164 - "POST /tokenize HTTP/1.1" 200 OK',
        "(APIServer pid=8571) INFO 11-30 17:45:29 [loggers.py:335] Engine 000: Avg prompt throughput: "
        "0.1 tokens/s, Avg generation throughput: 0.0 tokens/s, Running: 0 reqs, Waiting: 0 reqs, "
        "CPU KV cache usage: 0.0%, Prefix cache hit rate: 0.0%",
        "(EngineCore pid=11256) INFO 11-30 17:39:14 [shm_broadcast.py:871] No available shared memory "
        "broadcast block found in 60 seconds.",
    )
    assert gate.log_faults(lines) == []


def client(**changes: float) -> Client:
    settings = {"cpu": 0.2, "lag_p50_s": 0.0, "lag_p99_s": 0.001, "lag_max_s": 0.01, "events_s": 100.0}
    return Client(**{**settings, **changes})


def test_a_client_that_keeps_up_good() -> None:
    assert gate.client_faults(client(), 10_000, gate.Limits()) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"cpu": 0.9}, "busy"), ({"lag_p99_s": 0.06}, "late"), ({"events_s": 6000.0}, "over half of what")],
)
def test_a_client_that_does_not_keep_up_bad(changes: dict[str, float], said: str) -> None:
    assert said in gate.client_faults(client(**changes), 10_000, gate.Limits())[0]


def test_arms_with_different_cache_hits_are_not_comparable_bad() -> None:
    found = gate.arm_faults("a", "b", [answer(cached_tokens=50)], [answer(cached_tokens=0)])
    assert found == ["a took 50 prompt tokens from a cache where b took 0"]


def test_precision_is_pointed_out_good() -> None:
    arms = [Arm(name="a", quantisation="Q4_K_M"), Arm(name="b", quantisation="BF16")]
    notes = gate.notes(arms, [[answer()], [answer(cached_tokens=None)]])
    assert "another experiment" in notes[0]
    assert notes[1].startswith("b can't say")
    assert gate.notes([arms[0], arms[0]], [[answer()]] * 2) == []
    same = [arms[1], Arm(name="c", quantisation="bfloat16"), Arm(name="d", quantisation="bf16")]
    assert gate.notes(same, [[answer()]] * 3) == []  # one form by the names of two formats


# -- the engine's own figures -----------------------------------------------------------------------


def test_timings_that_disagree_are_seen_good() -> None:
    figures = EngineFigures(decode_tok_s=12.5, prefill_s=0.09, cached_tokens=0)
    (view,) = server_view.views([answer(engine=figures)], {}, {})
    assert view.disagreement == pytest.approx(0.2)
    assert view.decode_tok_s == 12.5


METRICS = """\
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total {tokens}
llamacpp:broken_total NaN?
vllm:generation_tokens_total{{model="m",engine="0"}} {tokens}
vllm:generation_tokens_total{{model="m",engine="1"}} 0
vllm:time_to_first_token_seconds_sum{{model="m"}} {ttft}
vllm:time_to_first_token_seconds_count{{model="m"}} {count}
vllm:request_time_per_output_token_seconds_sum{{model="m"}} {ttft}
vllm:request_time_per_output_token_seconds_count{{model="m"}} {count}
"""


def test_metrics_of_both_engines_are_read_as_growth_good() -> None:
    before = server_view.parse_counters(METRICS.format(tokens=100, ttft=1.0, count=10))
    after = server_view.parse_counters(METRICS.format(tokens=111, ttft=1.1, count=11))
    llama, vllm = server_view.views([answer()], before, after)
    assert (llama.output_tokens, llama.disagreement) == (11, 0)
    assert vllm.ttft_s == pytest.approx(0.1)
    assert vllm.decode_tok_s == pytest.approx(10)
    assert vllm.disagreement == pytest.approx(0, abs=1e-9)


def test_a_server_that_counted_something_else_is_seen_bad() -> None:
    before = server_view.parse_counters("llamacpp:tokens_predicted_total 100\n")
    after = server_view.parse_counters("llamacpp:tokens_predicted_total 122\n")
    (view,) = server_view.views([answer()], before, after)
    assert view.disagreement == pytest.approx(0.5)


# -- declared ---------------------------------------------------------------------------------------


def declare(count: int = 2, **settings: Any) -> declared.Declared:
    return declared.Declared(arms=[Spec(str(n), "x.yaml") for n in range(count)], **settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pairs": 5}, "5 pairs are too few"),
        ({"pairs": 6, "count": 3}, "7 are needed"),
        ({"pairs": 6, "metrics": ("ttft_s", "decode_tok_s")}, "7 are needed"),
        (
            {"pairs": 24, "stop_early": True, "metrics": ("ttft_s", "decode_tok_s", "e2e_s")},
            "first of 3 looks",
        ),
        ({"margin": 3}, "makes no sense"),
        ({"margin": 0}, "makes no sense"),
        ({"metrics": ("speed",)}, "no metric"),
    ],
)
def test_a_design_that_can_answer_nothing_bad(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        declare(**settings)


def test_designs_that_can_answer_good() -> None:
    assert declare(pairs=6).looks == (6,)
    assert declare(pairs=24, stop_early=True).alpha == pytest.approx(0.05 / 3)
    assert declare(count=7, pairs=8).pairs == 8
