"""Answers from rounds: known truths, simulated; and the rules of claiming."""

from __future__ import annotations

import math
import random

import pytest

from orchestrator.bench import decide, statistics
from orchestrator.bench.measure import percentiles
from orchestrator.bench.values import Round
from tests.bench.conftest import answer, made_round

PAIRS = 8
COMPARISONS = 100


def simulated(
    ratio: float, seed: int, *, drift: float, noise: float = 0.01, order: list[tuple[int, ...]] | None = None
) -> list[Round]:
    """Return the rounds of a comparison in which a is `ratio` times as fast as b.

    The machine gets slower by `drift` over the whole run, wanders slowly besides, has noise in every round,
    and now and then a round that something disturbed.
    """
    chance = random.Random(f"simulated/{ratio:g}/{seed}")
    rounds, wander, at = [], 0.0, 0
    order = order or statistics.abba(2, PAIRS)
    for pair, arms in enumerate(order):
        for index in arms:
            wander += chance.gauss(0, noise / 4)
            speed = 100 * (ratio if index == 0 else 1.0)
            speed *= 1 - drift * at / (2 * PAIRS)
            speed *= math.exp(wander + chance.gauss(0, noise))
            if chance.random() < 0.03:
                speed *= 0.9
            rounds.append(made_round("ab"[index], pair, decode_tok_s=speed, ttft_s=1 / speed))
            at += 1
    return rounds


def answered(rounds: list[Round], metric: str = "decode_tok_s") -> decide.Decision:
    return decide.decide([decide.pairs_of(rounds, "a", "b", metric)])[0]


@pytest.mark.parametrize("ratio", [1.0, 1.02, 1.05, 1.5, 4.0])
@pytest.mark.parametrize("metric", ["decode_tok_s", "ttft_s"])
def test_the_interval_covers_the_truth_good(ratio: float, metric: str) -> None:
    covered = 0
    for seed in range(COMPARISONS):
        found = answered(simulated(ratio, seed, drift=0.05), metric)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= ratio <= found.high
    assert covered >= 93


def test_coverage_is_the_nominal_one_in_the_long_run_good() -> None:
    """The exact interval of 8 pairs covers in 96.1 %; in 19 of 20 sets of 100 that is 93 and more."""
    covered = 0
    for seed in range(10 * COMPARISONS):
        found = answered(simulated(1.02, seed, drift=0.05))
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 1.02 <= found.high
    assert covered >= 950


def test_drift_alone_is_no_difference_good() -> None:
    answers = [answered(simulated(1.0, seed, drift=0.05)).answer for seed in range(COMPARISONS)]
    assert sum(answer in ("a_faster", "b_faster") for answer in answers) <= 7
    assert answers.count("equivalent") >= 50


def test_without_abba_drift_would_be_taken_for_a_difference_bad() -> None:
    """The simulation can tell right from wrong: the same machine, all of a before all of b, errs."""
    wrong = 0
    for seed in range(COMPARISONS):
        rounds = simulated(1.0, seed, drift=0.05, order=[(0, 0)] * 4 + [(1, 1)] * 4)
        # pair the n-th of one with the n-th of the other, as AAAA BBBB would
        a = [each.metrics["decode_tok_s"] for each in rounds if each.arm == "a"]
        b = [each.metrics["decode_tok_s"] for each in rounds if each.arm == "b"]
        pairs = decide.Pairs("a", "b", "decode_tok_s", tuple(zip(a, b, strict=True)))
        wrong += decide.decide([pairs], margin=0.001)[0].answer == "a_faster"
    assert wrong >= 60


def test_pooled_requests_would_err_where_rounds_do_not_bad() -> None:
    """Requests of a round share the machine's mood: taken for independent ones they claim far too often."""
    pooled = ours = 0
    for seed in range(200):
        chance = random.Random(f"pooled/{seed}")
        every: dict[str, list[float]] = {"a": [], "b": []}
        rounds = []
        for pair in range(PAIRS):
            for arm in "ab":
                mood = chance.gauss(0, 0.01)
                logs = [math.log(100) + mood + chance.gauss(0, 0.01) for _ in range(8)]
                every[arm] += logs
                rounds.append(made_round(arm, pair, decode_tok_s=math.exp(statistics.median(logs))))
        variance = sum(statistics.spread(logs) ** 2 / len(logs) for logs in every.values())
        gap = abs(sum(every["a"]) - sum(every["b"])) / len(every["a"])
        pooled += gap > 1.96 * math.sqrt(variance)
        ours += decide.decide([decide.pairs_of(rounds, "a", "b", "decode_tok_s")], margin=1e-6)[0].answer in (
            "a_faster",
            "b_faster",
        )
    assert pooled >= 34  # of 200: 17 %
    assert ours <= 14  # 7 %


@pytest.mark.parametrize(("requests", "known"), [(19, 1), (20, 2), (1000, 2), (1001, 3)])
def test_high_percentiles_need_many_requests_bad(requests: int, known: int) -> None:
    rounds = [made_round("a", 0, samples=tuple(answer(ttft_s=1 + n / 1e6) for n in range(requests)))]
    (found,) = [each for each in percentiles(rounds) if each.metric == "ttft_s"]
    assert [found.p50, found.p90, found.p99][known:] == [None] * (3 - known)
    assert None not in [found.p50, found.p90, found.p99][:known]


@pytest.mark.parametrize(("ratio", "answer"), [(1.5, "a_faster"), (4.0, "a_faster"), (1 / 1.5, "b_faster")])
def test_large_differences_are_found_good(ratio: float, answer: str) -> None:
    assert [answered(simulated(ratio, seed, drift=0.05)).answer for seed in range(20)] == [answer] * 20


def test_a_small_difference_is_found_when_the_machine_is_quiet_good() -> None:
    answers = [answered(simulated(1.05, seed, drift=0.02, noise=0.004)).answer for seed in range(50)]
    assert answers.count("a_faster") >= 35
    assert "b_faster" not in answers


def test_an_early_stop_by_the_declared_rule_does_not_err_more_good() -> None:
    looks = statistics.looks(24)
    wrong = 0
    for seed in range(200):
        chance = random.Random(seed)
        logs = [chance.gauss(0, 0.05) for _ in range(24)]
        for look in looks:
            pairs = decide.Pairs("a", "b", "decode_tok_s", tuple((math.exp(x), 1.0) for x in logs[:look]))
            answer = decide.decide([pairs], alpha=0.05 / len(looks))[0].answer
            if answer in ("a_faster", "b_faster"):
                wrong += 1
                break
    assert wrong <= 14


def quiet(ratio: float, n: int = 8) -> list[Round]:
    chance = random.Random(n)
    return [
        made_round(arm, pair, decode_tok_s=100 * speed * (1 + chance.uniform(-0.001, 0.001)))
        for pair in range(n)
        for arm, speed in (("a", ratio), ("b", 1.0))
    ]


def test_a_difference_declared_not_to_matter_is_equivalence_good() -> None:
    found = answered(quiet(1.01))
    assert found.low is not None
    assert found.low > 1
    assert found.answer == "equivalent"
    narrow = decide.decide([decide.pairs_of(quiet(1.01), "a", "b", "decode_tok_s")], margin=0.005)[0]
    assert narrow.answer == "a_faster"


@pytest.mark.parametrize(
    ("ratio", "others", "answer"),
    [
        (1.5, 0.0, "a_faster"),
        (1.5, 0.2, "a_faster"),
        (1.5, 0.5, "inconclusive"),
        (4.0, 0.5, "a_faster"),
        (0.5, 0.6, "inconclusive"),
        (0.25, 0.6, "b_faster"),
        (1.01, 0.9, "equivalent"),
    ],
)
def test_what_other_programs_can_explain_is_not_claimed_bad(ratio: float, others: float, answer: str) -> None:
    rounds = [made_round(each.arm, each.pair, others=others, **each.metrics) for each in quiet(ratio)]
    explainable = decide.explained_by(rounds)
    assert explainable == pytest.approx(1 / (1 - others) - 1)
    found = decide.decide([decide.pairs_of(rounds, "a", "b", "decode_tok_s")], explainable=explainable)[0]
    assert found.answer == answer
    assert found.pairs_needed is None


def test_nobody_knows_of_others_where_the_engine_is_not_ours_ugly() -> None:
    assert decide.explained_by(quiet(2.0)) == 0
    assert decide.explained_by([]) == 0
    assert decide.explained_by([made_round("a", 0, others=-0.01)]) == 0


def test_five_pairs_never_claim_bad() -> None:
    found = answered(quiet(4.0, n=5))
    assert (found.answer, found.low, found.high, found.pairs) == ("inconclusive", None, None, 5)
    assert found.pairs_needed == 1


def test_no_pairs_at_all_ugly() -> None:
    found = answered([])
    assert (found.answer, found.pairs, found.a, found.ratio) == ("inconclusive", 0, None, 1.0)


def test_void_rounds_take_their_pair_with_them_bad() -> None:
    rounds = [
        *quiet(1.5),
        made_round("a", 8, decode_tok_s=1.0),
        made_round("b", 8, ("why",), decode_tok_s=900.0),
    ]
    assert answered(rounds).pairs == 8


def test_the_direction_of_a_metric_is_heeded_good() -> None:
    rounds = [
        made_round(arm, pair, ttft_s=seconds + pair * 1e-5)
        for pair in range(8)
        for arm, seconds in (("a", 0.2), ("b", 0.1))
    ]
    found = answered(rounds, "ttft_s")
    assert found.answer == "b_faster"
    assert found.ratio == pytest.approx(0.5, rel=0.01)
    assert found.a == pytest.approx(0.2, rel=0.01)


def test_several_metrics_pay_for_each_other_bad() -> None:
    """With p just below 0.05 for each of three metrics, none may be claimed."""
    logs = [0.1, 0.1, 0.1, 0.1, 0.1, 0.1, -0.05, -0.06]
    values = tuple((math.exp(x + at * 1e-4), 1.0) for at, x in enumerate(logs))
    alone = decide.decide([decide.Pairs("a", "b", "decode_tok_s", values)])
    assert alone[0].answer == "a_faster"
    names = ("decode_tok_s", "output_tok_s", "requests_s")
    together = decide.decide([decide.Pairs("a", "b", name, values) for name in names])
    assert [each.answer for each in together] == ["inconclusive"] * 3


def test_summaries_have_an_interval_from_six_rounds_on_good() -> None:
    six = decide.summarise([made_round("a", n, decode_tok_s=100.0 + n) for n in range(6)])
    assert [(each.metric, each.rounds) for each in six] == [("decode_tok_s", 6)]
    assert six[0].low == pytest.approx(100)
    assert six[0].high == pytest.approx(105)
    five = decide.summarise([made_round("a", n, decode_tok_s=100.0 + n) for n in range(5)])
    assert five[0].low is None
