"""The statistics of two samples against published tables, scipy's figures, brute force, and known truths."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from orchestrator.bench import ranksum

# Critical values of the two-sided Mann-Whitney test, as in most textbooks (Mann and Whitney 1947, Hollander
# and Wolfe, table A.6): it rejects at U <= k.
TABLE_5 = {
    (3, 5): 0, (4, 4): 0, (4, 5): 1, (4, 6): 2, (5, 5): 2, (5, 6): 3, (5, 7): 5, (5, 8): 6, (5, 9): 7,
    (5, 10): 8, (6, 6): 5, (6, 7): 6, (6, 8): 8, (6, 9): 10, (6, 10): 11, (7, 7): 8, (7, 8): 10, (7, 9): 12,
    (7, 10): 14, (8, 8): 13, (8, 9): 15, (8, 10): 17, (9, 9): 17, (9, 10): 20, (10, 10): 23, (20, 20): 127,
}  # fmt: skip
TABLE_1 = {
    (5, 5): 0, (6, 6): 2, (6, 8): 4, (7, 7): 4, (8, 8): 7, (9, 9): 11, (10, 10): 16, (20, 20): 105,
}  # fmt: skip

# Permeability of the human chorioamnion, Hollander and Wolfe (1973), p. 69, and the example of R's
# wilcox.test: W = 35, p = 0.2544 (two-sided), estimate 0.305, interval -0.15 to 0.76.
TERM = [0.80, 0.83, 1.89, 1.04, 1.45, 1.38, 1.91, 1.64, 0.73, 1.46]
EARLY = [1.15, 0.88, 0.90, 0.74, 1.21]


@pytest.mark.parametrize(("alpha", "table"), [(0.05, TABLE_5), (0.01, TABLE_1)])
def test_critical_values_are_the_published_ones_good(alpha: float, table: dict[tuple[int, int], int]) -> None:
    assert {sizes: ranksum.critical(*sizes, alpha) for sizes in table} == table
    assert {sizes: ranksum.critical(*reversed(sizes), alpha) for sizes in table} == table


@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 6), (2, 5), (4, 4), (5, 3), (6, 5)])
def test_the_null_distribution_is_that_of_all_orders_good(m: int, n: int) -> None:
    counts = [0] * (m * n + 1)
    for places in itertools.combinations(range(m + n), m):
        counts[sum(place - at for at, place in enumerate(places))] += 1
    assert ranksum.counts(m, n) == tuple(counts)


def test_the_published_example_good() -> None:
    found = ranksum.shift(TERM, EARLY)
    assert (found.estimate, found.low, found.high) == pytest.approx((0.305, -0.15, 0.76))
    assert found.confidence == pytest.approx(0.96004, abs=1e-5)  # 1 - 2 P(U <= 8), as scipy.stats has it
    other = ranksum.shift(EARLY, TERM)
    assert (other.low, other.high) == pytest.approx((-0.76, 0.15))


@pytest.mark.parametrize("sizes", [(6, 6), (6, 12), (10, 8)])
def test_the_interval_covers_as_it_says_good(sizes: tuple[int, int]) -> None:
    chance = random.Random(7)
    hits, tries = 0, 2000
    for _ in range(tries):
        found = ranksum.shift(
            *([chance.gauss(at, 1) for _ in range(n)] for at, n in zip((1, 0), sizes, strict=True))
        )
        hits += found.low <= 1 <= found.high
    assert hits / tries == pytest.approx(found.confidence, abs=0.015)
    assert found.confidence >= 0.95


def test_one_spoiled_round_moves_little_good() -> None:
    chance = random.Random(3)
    a, b = ([chance.gauss(0, 0.01) for _ in range(8)] for _ in range(2))
    before, after = ranksum.shift(a, b), ranksum.shift([*a[:-1], -5.0], b)
    assert after.estimate == pytest.approx(before.estimate, abs=0.01)
    assert after.low > -0.1


@pytest.mark.parametrize("sizes", [(3, 3), (1, 30), (2, 6)])
def test_too_few_rounds_bound_nothing_bad(sizes: tuple[int, int]) -> None:
    a, b = ([float(each) for each in range(size)] for size in sizes)
    found = ranksum.shift(a, b)
    assert (found.low, found.high, found.confidence) == (-math.inf, math.inf, 1.0)
    assert ranksum.smallest_detectable(a, b) is None


def test_no_rounds_are_a_mistake_of_the_caller_bad() -> None:
    with pytest.raises(ValueError, match="no values"):
        ranksum.shift([], [1.0])


def test_equal_values_claim_nothing_ugly() -> None:
    found = ranksum.shift([2.0] * 8, [2.0] * 8)
    assert (found.low, found.estimate, found.high) == (0, 0, 0)
    assert ranksum.smallest_detectable([2.0] * 8, [2.0] * 8) == 0


def test_large_samples_go_over_into_the_normal_approximation_ugly(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = ranksum.critical(60, 60, 0.05)
    ranksum.critical.cache_clear()
    monkeypatch.setattr(ranksum, "EXACT_UP_TO", 100)
    near = ranksum.critical(60, 60, 0.05)
    ranksum.critical.cache_clear()
    assert exact is not None
    assert near is not None
    assert abs(exact - near) <= 1


def test_the_forecast_keeps_what_it_promises_good() -> None:
    """A shift as large as the smallest detectable is found in about 4 of 5 pairs of runs."""
    chance = random.Random(13)
    unit = [math.sqrt(7 / 8) * (1 if at % 2 else -1) for at in range(8)]
    smallest = ranksum.smallest_detectable(unit, unit)
    assert smallest is not None
    found = 0
    for _ in range(1000):
        interval = ranksum.shift(
            [chance.gauss(smallest, 1) for _ in range(8)], [chance.gauss(0, 1) for _ in range(8)]
        )
        found += interval.low > 0
    assert 740 <= found <= 880
