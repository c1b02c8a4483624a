"""The statistics against published tables, brute force, and known cases."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from orchestrator.bench import statistics as stats

# Critical values of the two-sided signed-rank test, as in most textbooks (Hollander and Wolfe, table A.4):
# it rejects at W <= k.
TABLE_5 = {
    6: 0, 7: 2, 8: 3, 9: 5, 10: 8, 11: 10, 12: 13, 13: 17, 14: 21, 15: 25, 16: 29, 17: 34, 18: 40,
    19: 46, 20: 52, 21: 58, 22: 65, 23: 73, 24: 81, 25: 89, 26: 98, 27: 107, 28: 116, 29: 126, 30: 137,
}  # fmt: skip
TABLE_1 = {
    8: 0, 9: 1, 10: 3, 11: 5, 12: 7, 13: 9, 14: 12, 15: 15, 16: 19, 17: 23, 18: 27, 19: 32, 20: 37,
    21: 42, 22: 48, 23: 54, 24: 61, 25: 68, 26: 75, 27: 83, 28: 91, 29: 100, 30: 109,
}  # fmt: skip

# Darwin's differences of plant heights, in eighths of an inch, as in Fisher's "Design of Experiments". The
# signed-rank test gives W+ = 96, p = 0.0413, as R's wilcox.test and scipy.stats.wilcoxon do.
DARWIN = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]


@pytest.mark.parametrize(("alpha", "table"), [(0.05, TABLE_5), (0.01, TABLE_1)])
def test_critical_values_are_the_published_ones_good(alpha: float, table: dict[int, int]) -> None:
    assert {n: stats.critical(n, alpha) for n in table} == table


def test_below_six_pairs_there_is_no_interval_good() -> None:
    assert stats.critical(5, 0.05) is None
    assert stats.critical(6, 0.05) == 0
    found = stats.hodges_lehmann([0.1, 0.2, 0.3, 0.4, 0.5])
    assert (found.low, found.high, found.confidence) == (-math.inf, math.inf, 1.0)


@pytest.mark.parametrize("n", range(1, 11))
def test_the_null_distribution_is_that_of_all_sign_patterns_good(n: int) -> None:
    counts = [0] * (n * (n + 1) // 2 + 1)
    for signs in itertools.product((0, 1), repeat=n):
        counts[sum(rank for rank, sign in enumerate(signs, 1) if sign)] += 1
    assert stats.signed_rank_counts(n) == tuple(counts)


def test_darwins_plants_good() -> None:
    found = stats.hodges_lehmann(DARWIN)
    assert found.estimate / 8 == pytest.approx(3.125)
    assert (found.low / 8, found.high / 8) == (0.5, 5.1875)
    assert found.confidence == pytest.approx(1 - 2 * 0.0239, abs=1e-3)
    assert stats.difference_p(DARWIN) == pytest.approx(0.04126, abs=1e-5)


def test_interval_and_test_agree_good() -> None:
    chance = random.Random(3)
    for _ in range(200):
        values = [chance.gauss(0.3, 1) for _ in range(chance.randrange(6, 20))]
        found = stats.hodges_lehmann(values)
        assert (found.low > 0 or found.high < 0) == (stats.difference_p(values) <= 0.05)
        within = found.low > -0.8 and found.high < 0.8
        assert within == (stats.equivalence_p(values, 0.8) <= 0.05)


def test_interval_covers_as_it_says_good() -> None:
    chance = random.Random(5)
    hits = 0
    for _ in range(2000):
        found = stats.hodges_lehmann([chance.gauss(1, 1) for _ in range(8)])
        hits += found.low <= 1 <= found.high
    assert hits / 2000 == pytest.approx(found.confidence, abs=0.012)
    assert found.confidence == pytest.approx(1 - 10 / 256)


def test_large_samples_go_over_into_the_normal_approximation_good() -> None:
    n = stats.EXACT_UP_TO
    exact, limit = stats.critical(n, 0.05), stats.critical(n + 1, 0.05)
    assert exact is not None
    assert limit is not None
    assert 0 < limit - exact < n


def test_zeros_and_ties_never_help_a_claim_ugly() -> None:
    assert stats.difference_p([0.0] * 8) == 1.0
    assert stats.difference_p([1.0] * 8) == pytest.approx(2 / 256)
    assert stats.signed_rank_p([1, -1, 1, -1]) == (
        pytest.approx(0.6875, abs=0.2),
        pytest.approx(0.6875, abs=0.2),
    )


@pytest.mark.parametrize(
    ("share", "freedom", "published"),
    [(0.975, 5, 2.571), (0.975, 7, 2.365), (0.975, 30, 2.042), (0.8, 7, 0.896)],
)
def test_students_quantiles_are_near_the_published_ones_good(
    share: float, freedom: int, published: float
) -> None:
    assert stats.student(share, freedom) == pytest.approx(published, rel=0.01)


def test_the_forecast_keeps_what_it_promises_good() -> None:
    """A difference as large as the smallest detectable is found in about 4 of 5 comparisons."""
    chance = random.Random(11)
    smallest = stats.smallest_detectable([math.sqrt(7 / 8) * (1 if at % 2 else -1) for at in range(8)])
    assert smallest is not None
    found = sum(
        stats.difference_p([chance.gauss(smallest, 1) for _ in range(8)]) <= 0.05 for _ in range(1000)
    )
    assert 720 <= found <= 880


def test_fewer_pairs_are_needed_when_the_difference_is_larger_good() -> None:
    noise = [0.01, -0.02, 0.015, -0.01, 0.02, -0.015, 0.012, -0.012]
    small = stats.still_needed([0.031 + each * 5 for each in noise], 0.03)
    large = stats.still_needed([0.06 + each * 5 for each in noise], 0.03)
    assert small is not None
    assert large is not None
    assert 1 <= large < small
    assert stats.still_needed([0.1], 0.03) == 5
    assert stats.still_needed([each * 1000 for each in noise], 0.03) is None


def test_holm_gives_each_claim_what_it_may_have_good() -> None:
    # one metric: both its claims are tested in full, for they can't both be false
    assert stats.holm([(0.04, 0.05)]) == [(True, True)]
    assert stats.holm([(0.06, 0.2)]) == [(False, False)]
    # two metrics: the smallest p is halved against, the next stands alone once a metric is spent
    assert stats.holm([(0.03, 0.9), (0.04, 0.9)]) == [(False, False), (False, False)]
    assert stats.holm([(0.02, 0.9), (0.024, 0.9)]) == [(True, False), (True, False)]
    assert stats.holm([(0.02, 0.024), (0.04, 0.9)]) == [(True, True), (True, False)]


def test_abba_puts_each_arm_first_as_often_good() -> None:
    assert stats.abba(2, 4) == [(0, 1), (1, 0), (0, 1), (1, 0)]
    assert stats.abba(3, 2) == [(0, 1, 2), (2, 1, 0)]


@pytest.mark.parametrize(
    ("pairs", "looks"),
    [(6, [6]), (8, [8]), (12, [8, 12]), (16, [10, 16]), (24, [8, 16, 24]), (30, [10, 20, 30])],
)
def test_looks_are_few_and_end_with_the_last_pair_good(pairs: int, looks: list[int]) -> None:
    assert stats.looks(pairs) == looks


def test_percentiles_are_values_that_occurred_good() -> None:
    values = [float(each) for each in range(1, 101)]
    assert [stats.percentile(values, share) for share in (0.5, 0.9, 0.99, 1.0)] == [50, 90, 99, 100]
    assert stats.percentile([7.0], 0.99) == 7
    with pytest.raises(ValueError, match="no values"):
        stats.median([])
