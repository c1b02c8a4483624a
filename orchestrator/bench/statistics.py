"""The statistics of a comparison: pure functions of numbers, no measuring and no text.

Everything is built on the Wilcoxon signed-rank statistic W+ of per-pair log-ratios: its exact null
distribution, the Hodges-Lehmann estimate, and the interval that inverts the test. It needs no normality,
bears outliers, and is exact for small samples; see F. Wilcoxon (1945), J. L. Hodges and E. L. Lehmann (1963),
and M. Hollander and D. A. Wolfe, "Nonparametric Statistical Methods", ch. 3. docs/explanation/measuring.md
says why it was taken.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

FEWEST_PAIRS = 6
"""With fewer no 95 % interval exists: 2 / 2**5 > 0.05."""

EXACT_UP_TO = 200  # pairs; beyond, the normal approximation of W+ is right to more digits than are shown
EFFICIENCY = 3 / math.pi  # of the signed-rank test against the t test on normal data (Pitman)
POWER = 0.8


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its confidence interval.

    Attributes:
        estimate: the Hodges-Lehmann estimate.
        low: lower end.
        high: upper end.
        confidence: the coverage that the interval really has, at least what was asked for.

    """

    estimate: float
    low: float
    high: float
    confidence: float


@functools.lru_cache(maxsize=256)
def signed_rank_counts(n: int) -> tuple[int, ...]:
    """Return how many of the 2**n sign patterns give W+ = 0, 1, ..., n(n+1)/2."""
    counts = [1] + [0] * (n * (n + 1) // 2)
    for rank in range(1, n + 1):
        for total in range(len(counts) - 1, rank - 1, -1):
            counts[total] += counts[total - rank]
    return tuple(counts)


def _lower_tail(n: int, w: float) -> float:
    """P(W+ <= w) when the truth is 0."""
    if n > EXACT_UP_TO:
        deviation = math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
        return NormalDist(n * (n + 1) / 4, deviation).cdf(w + 0.5)
    counts = signed_rank_counts(n)
    return float(sum(counts[: math.floor(w) + 1]) / 2**n)


@functools.lru_cache(maxsize=256)
def critical(n: int, alpha: float) -> int | None:
    """Return the largest k with P(W+ <= k) <= alpha / 2; None when there is none."""
    if n > EXACT_UP_TO:
        deviation = math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
        return math.floor(NormalDist(n * (n + 1) / 4, deviation).inv_cdf(alpha / 2) - 0.5)
    below, limit = 0, alpha / 2 * 2**n
    for k, count in enumerate(signed_rank_counts(n)):
        below += count
        if below > limit:
            return k - 1 if k else None
    return None


def fewest_pairs(claims: int, alpha: float) -> int:
    """Return the fewest pairs with which one of several claims can be made at all, whatever is measured."""
    return next(n for n in itertools.count(FEWEST_PAIRS) if 2 / 2**n <= alpha / claims)


def walsh(values: Sequence[float]) -> list[float]:
    """Return the n(n+1)/2 means of all pairs of values, each with itself too, sorted."""
    pairs = itertools.combinations_with_replacement(values, 2)
    return sorted((a + b) / 2 for a, b in pairs)


def median(values: Sequence[float]) -> float:
    """Return the median.

    Raises:
        ValueError: there are no values.

    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("median: no values")
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def hodges_lehmann(values: Sequence[float], alpha: float = 0.05) -> Interval:
    """Return the Hodges-Lehmann estimate of the centre with the exact signed-rank interval.

    With too few values for the confidence the interval is unbounded.
    """
    means = walsh(values)
    n, k = len(values), critical(len(values), alpha)
    if k is None:
        return Interval(median(means), -math.inf, math.inf, 1.0)
    return Interval(median(means), means[k], means[-1 - k], 1 - 2 * _lower_tail(n, k))


def signed_rank_p(values: Sequence[float], shift: float = 0.0) -> tuple[float, float]:
    """Return the one-sided p-values for "the centre is below `shift`" and "above `shift`".

    Zeros are dropped and ties get mid-ranks; the p-values are then conservative: W is rounded away from
    significance.
    """
    moved = [value - shift for value in values if value != shift]
    n = len(moved)
    if not n:
        return 1.0, 1.0
    ordered = sorted(map(abs, moved))
    first: dict[float, int] = {}
    for at, size in enumerate(ordered):
        first.setdefault(size, at)
    last = {size: at for at, size in enumerate(ordered)}
    ranks = {size: (first[size] + last[size]) / 2 + 1 for size in first}
    plus = sum(ranks[abs(value)] for value in moved if value > 0)
    total = n * (n + 1) / 2
    return min(1.0, _lower_tail(n, math.ceil(plus))), min(1.0, _lower_tail(n, math.ceil(total - plus)))


def difference_p(values: Sequence[float]) -> float:
    """Return the two-sided p-value for "the centre is not 0"."""
    return min(1.0, 2 * min(signed_rank_p(values)))


def equivalence_p(values: Sequence[float], margin: float) -> float:
    """Return the p-value for "the centre lies within -margin and +margin": two one-sided tests.

    It is doubled, so that at 0.05 it agrees with a 95 % interval that lies within the margin.
    """
    below_top, _ = signed_rank_p(values, margin)
    _, above_bottom = signed_rank_p(values, -margin)
    return min(1.0, 2 * max(below_top, above_bottom))


def student(share: float, freedom: int) -> float:
    """Return a quantile of Student's t, by the expansion of Cornish and Fisher.

    Good to 1 % from 5 degrees of freedom on, which is plenty for a forecast. Source: M. Abramowitz and
    I. A. Stegun, 26.7.5.
    """
    z = NormalDist().inv_cdf(share)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


def spread(values: Sequence[float]) -> float:
    """Return the standard deviation; 0 for fewer than two values."""
    n = len(values)
    if n < 2:
        return 0.0
    centre = math.fsum(values) / n
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (n - 1))


def _reach(deviation: float, n: int, alpha: float) -> float:
    """Return the distance that a test of n values sees with 80 % power."""
    quantiles = student(1 - alpha / 2, n - 1) + student(POWER, n - 1)
    return quantiles * deviation / math.sqrt(n * EFFICIENCY)


def smallest_detectable(values: Sequence[float], alpha: float = 0.05) -> float | None:
    """Return the smallest distance from 0 that these many values of this spread show in 4 of 5 cases."""
    if len(values) < FEWEST_PAIRS:
        return None
    return _reach(spread(values), len(values), alpha)


def still_needed(
    values: Sequence[float], margin: float, alpha: float = 0.05, most: int = 10_000
) -> int | None:
    """Return about how many more values lead to an answer in 4 of 5 cases; None if more than `most`.

    The answer may be a difference (the estimate is the truth and gets outside the noise) or an equivalence
    (it lies within the margin, and the interval shrinks into it), whichever comes first.
    """
    n = len(values)
    if n < 2:
        return FEWEST_PAIRS - n
    centre, deviation = abs(median(walsh(values))), spread(values)
    room = max(centre, margin - centre)
    if room <= 0:
        return None
    low, high = max(n, FEWEST_PAIRS - 1), most
    if _reach(deviation, high, alpha) > room:
        return None
    while high - low > 1:  # _reach falls with n
        middle = (low + high) // 2
        low, high = (low, middle) if _reach(deviation, middle, alpha) <= room else (middle, high)
    return high - n


def holm(p_values: Sequence[tuple[float, float]], alpha: float = 0.05) -> list[tuple[bool, bool]]:
    """Return which claims hold for several metrics at once: (there is a difference, they are equivalent).

    Holm's step-down procedure over both hypotheses of each metric, with Shaffer's remark that the two can't
    both be false claims at once: a metric counts once in the divisor until both its claims are accepted.

    Args:
        p_values: for each metric that of the difference and that of the equivalence.
        alpha: the chance of any false claim.

    """
    order = sorted((p, metric, kind) for metric, pair in enumerate(p_values) for kind, p in enumerate(pair))
    accepted = [[False, False] for _ in p_values]
    for p, metric, kind in order:
        left = sum(not all(claims) for claims in accepted)
        if p > alpha / left:
            break
        accepted[metric][kind] = True
    return [(difference, equivalence) for difference, equivalence in accepted]


def abba(arms: int, pairs: int) -> list[tuple[int, ...]]:
    """Return the order of the arms within each pair: AB, BA, AB, ... so that even drift cancels."""
    forward = tuple(range(arms))
    return [forward if pair % 2 == 0 else forward[::-1] for pair in range(pairs)]


def looks(pairs: int, most: int = 3) -> list[int]:
    """Return after how many pairs a declared sequential rule looks: up to three times, evenly, from 8 on.

    Each look tests at alpha / number of looks, so that all of them together err at most with alpha (the
    union bound: valid whatever the data are, a little wasteful).
    """
    return sorted({look for part in range(1, most + 1) if (look := pairs * part // most) >= 8} | {pairs})
