"""The statistics of two separate samples: the rank-sum counterpart of `statistics`. Pure.

Rounds of one comparison are pairs; those of two runs, made at different times, are not, and to treat them
as pairs would claim a precision that nobody has. So the Mann-Whitney statistic U takes the place of W+: its
exact null distribution, the Hodges-Lehmann estimate of a shift, and the interval that inverts the test. See
H. B. Mann and D. R. Whitney (1947), and M. Hollander and D. A. Wolfe, "Nonparametric Statistical Methods",
ch. 4.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from statistics import NormalDist

from orchestrator.bench import statistics
from orchestrator.bench.statistics import Interval, median

EXACT_UP_TO = 10_000  # m * n; beyond, the normal approximation of U is right to more digits than are shown


@functools.lru_cache(maxsize=256)
def counts(m: int, n: int) -> tuple[int, ...]:
    """Return how many of the (m+n choose m) orders of two samples give U = 0, 1, ..., m*n.

    They are the coefficients of the Gaussian binomial: the product of (1 - q**(n+i)) / (1 - q**i) for
    i = 1 ... m.
    """
    found = [1] + [0] * (m * n)
    for i in range(1, m + 1):
        for u in range(m * n, n + i - 1, -1):
            found[u] -= found[u - n - i]
        for u in range(i, m * n + 1):
            found[u] += found[u - i]
    return tuple(found)


def _normal(m: int, n: int) -> NormalDist:
    return NormalDist(m * n / 2, math.sqrt(m * n * (m + n + 1) / 12))


@functools.lru_cache(maxsize=256)
def critical(m: int, n: int, alpha: float) -> int | None:
    """Return the largest k with P(U <= k) <= alpha / 2; None when there is none."""
    if m * n > EXACT_UP_TO:
        return math.floor(_normal(m, n).inv_cdf(alpha / 2) - 0.5)
    below, limit = 0, alpha / 2 * math.comb(m + n, m)
    for k, count in enumerate(counts(m, n)):
        below += count
        if below > limit:
            return k - 1 if k else None
    return None


def _lower_tail(m: int, n: int, u: int) -> float:
    """P(U <= u) when both samples come from one and the same distribution."""
    if m * n > EXACT_UP_TO:
        return _normal(m, n).cdf(u + 0.5)
    return float(sum(counts(m, n)[: u + 1]) / math.comb(m + n, m))


def shift(a: Sequence[float], b: Sequence[float], alpha: float = 0.05) -> Interval:
    """Return by how much `a` lies above `b`: the Hodges-Lehmann estimate with the exact rank-sum interval.

    It supposes that the two differ by a shift alone. With too few values for the confidence the interval is
    unbounded.

    Raises:
        ValueError: one of them has no values.

    """
    differences = sorted(x - y for x in a for y in b)
    m, n = len(a), len(b)
    k = critical(m, n, alpha)
    if k is None:
        return Interval(median(differences), -math.inf, math.inf, 1.0)
    return Interval(median(differences), differences[k], differences[-1 - k], 1 - 2 * _lower_tail(m, n, k))


def smallest_detectable(a: Sequence[float], b: Sequence[float], alpha: float = 0.05) -> float | None:
    """Return the smallest shift that samples of these sizes and spreads show in 4 of 5 cases.

    None when there are too few values for any answer.
    """
    m, n = len(a), len(b)
    if critical(m, n, alpha) is None:
        return None
    freedom = m + n - 2
    pooled = math.sqrt(((m - 1) * statistics.spread(a) ** 2 + (n - 1) * statistics.spread(b) ** 2) / freedom)
    quantiles = statistics.student(1 - alpha / 2, freedom) + statistics.student(statistics.POWER, freedom)
    return quantiles * pooled * math.sqrt((1 / m + 1 / n) / statistics.EFFICIENCY)
