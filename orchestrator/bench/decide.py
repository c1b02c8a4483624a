"""From valid rounds to answers: per-pair log-ratios, their interval, and what may be claimed. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from orchestrator.bench import statistics
from orchestrator.bench.values import METRICS, Answer, Decision, Round, Summary

CONFIDENCE = 0.95
MARGIN = 0.03


@dataclass(frozen=True, slots=True)
class Pairs:
    """What one metric says of two arms in every valid pair, in the metric's own unit.

    Attributes:
        a: the first arm's name.
        b: the second's.
        metric: one of `values.METRICS`.
        values: (a's figure, b's figure) of each pair.

    """

    a: str
    b: str
    metric: str
    values: tuple[tuple[float, float], ...]

    @property
    def logs(self) -> list[float]:
        """The logarithms of a's speed over b's."""
        sign = 1 if METRICS[self.metric][2] else -1
        return [sign * math.log(a / b) for a, b in self.values]


def pairs_of(rounds: Sequence[Round], a: str, b: str, metric: str) -> Pairs:
    """Collect the valid pairs in which both arms have the metric."""
    by_pair: dict[int, dict[str, float]] = {}
    for each in rounds:
        if not each.void and each.metrics.get(metric, 0.0) > 0:
            by_pair.setdefault(each.pair, {})[each.arm] = each.metrics[metric]
    found = [
        (both[a], both[b]) for _, both in sorted(by_pair.items()) if a in both and b in both and both[a] > 0
    ]
    return Pairs(a, b, metric, tuple(found))


def decide(
    every: Sequence[Pairs],
    margin: float = MARGIN,
    alpha: float = 1 - CONFIDENCE,
    explainable: float = 0.0,
) -> tuple[Decision, ...]:
    """Answer every declared metric at once; all claims together err with at most `alpha` (Holm, Shaffer).

    "Faster" needs an interval without 1; "equivalent" one that lies between 1 / (1 + margin) and 1 + margin,
    and goes before: a difference that small was declared not to matter. A difference is claimed only if the
    whole interval lies beyond 1 + `explainable`, see `explained_by`. With fewer than
    `statistics.FEWEST_PAIRS` pairs the answer is always "inconclusive".
    """
    limit = math.log1p(margin)
    p_values = [
        (statistics.difference_p(each.logs), statistics.equivalence_p(each.logs, limit)) for each in every
    ]
    claims = statistics.holm(p_values, alpha)
    return tuple(
        _decision(each, p, claim, limit, alpha, explainable, primary=True)
        for each, p, claim in zip(every, p_values, claims, strict=True)
    )


def withheld(every: Sequence[Decision]) -> tuple[Decision, ...]:
    """Return the same figures without an answer and without a forecast.

    For a comparison that was refused half-way. What ended it chose which pairs are left: an engine that
    breaks down in its slow moments leaves only its quick ones, and no interval knows of the others.
    """
    return tuple(msgspec.structs.replace(each, answer="inconclusive", pairs_needed=None) for each in every)


def describe(pairs: Pairs, margin: float = MARGIN, alpha: float = 1 - CONFIDENCE) -> Decision:
    """Return the figures of a metric that was not declared: with an interval, without a claim."""
    limit = math.log1p(margin)
    p_values = (statistics.difference_p(pairs.logs), statistics.equivalence_p(pairs.logs, limit))
    return _decision(pairs, p_values, (False, False), limit, alpha, 0.0, primary=False)


def explained_by(rounds: Sequence[Round]) -> float:
    """Return up to which difference (0.1 is 10 %) other programs may be its cause.

    An engine that has to share its processor with another program is slow for as long as the scheduler
    leaves it there: for many rounds on end, while its rival is spared. The pairs are then not independent,
    and no interval made of them holds. With a share u of the machine taken by others, an engine loses about
    u of its speed if they all fall upon it in the average way: a factor of 1 / (1 - u).
    """
    shares = [(each.others, each.duration_s) for each in rounds if not each.void and each.others is not None]
    time = sum(seconds for _, seconds in shares)
    share = sum(share * seconds for share, seconds in shares) / time if time else 0.0
    return 1 / (1 - min(0.95, max(0.0, share))) - 1


def _decision(
    pairs: Pairs,
    p_values: tuple[float, float],
    claims: tuple[bool, bool],
    limit: float,
    alpha: float,
    explainable: float,
    *,
    primary: bool,
) -> Decision:
    logs = pairs.logs
    n = len(logs)
    differs, alike = claims if n >= statistics.FEWEST_PAIRS else (False, False)
    if logs:
        interval = statistics.hodges_lehmann(logs, alpha)
    else:
        interval = statistics.Interval(0.0, -math.inf, math.inf, 1.0)
    answer: Answer = "inconclusive"
    if alike:
        answer = "equivalent"
    elif differs and max(interval.low, -interval.high) > math.log1p(explainable):
        answer = "a_faster" if interval.estimate > 0 else "b_faster"
    smallest = statistics.smallest_detectable(logs, alpha)
    # more pairs do not make a busy machine quiet
    open_ = answer == "inconclusive" and primary and not (differs and n)
    needed = statistics.still_needed(logs, limit, alpha) if open_ else None
    return Decision(
        arm_a=pairs.a,
        arm_b=pairs.b,
        metric=pairs.metric,
        unit=METRICS[pairs.metric][0],
        primary=primary,
        answer=answer,
        a=statistics.median([a for a, _ in pairs.values]) if logs else None,
        b=statistics.median([b for _, b in pairs.values]) if logs else None,
        ratio=math.exp(interval.estimate),
        low=math.exp(interval.low) if math.isfinite(interval.low) else None,
        high=math.exp(interval.high) if math.isfinite(interval.high) else None,
        confidence=interval.confidence,
        pairs=n,
        ratios=tuple(math.exp(value) for value in logs),
        p_difference=p_values[0],
        p_equivalence=p_values[1],
        smallest_detectable=math.expm1(smallest) if smallest is not None else None,
        explainable=explainable,
        pairs_needed=needed,
    )


def summarise(rounds: Sequence[Round], alpha: float = 1 - CONFIDENCE) -> tuple[Summary, ...]:
    """Return every metric's centre over the valid rounds, with its interval."""
    found: Mapping[str, list[float]] = {
        name: [each.metrics[name] for each in rounds if not each.void and name in each.metrics]
        for name in METRICS
    }
    summaries = []
    for name, values in found.items():
        if not values or min(values) <= 0:
            continue
        interval = statistics.hodges_lehmann([math.log(value) for value in values], alpha)
        summaries.append(
            Summary(
                metric=name,
                unit=METRICS[name][0],
                value=math.exp(interval.estimate),
                low=math.exp(interval.low) if math.isfinite(interval.low) else None,
                high=math.exp(interval.high) if math.isfinite(interval.high) else None,
                rounds=len(values),
            )
        )
    return tuple(summaries)


def voided(rounds: Sequence[Round], reason: str) -> tuple[Round, ...]:
    """Return rounds of which none counts: those that were valid are void for this reason."""
    return tuple(each if each.void else msgspec.structs.replace(each, void=(reason,)) for each in rounds)
