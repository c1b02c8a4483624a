"""A run against an earlier one: is it slower, faster, or as fast? Pure.

Two runs are not a comparison: their rounds are no pairs, what the machine did in between counts as a
difference, and each engine was launched once. So the statistics are those of two separate samples
(`ranksum`), what differs between the runs is told, and where that alone may explain a difference there is no
answer unless it was allowed.
All claims together err with at most 5 %: each interval has its share of that (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Literal

from orchestrator.bench import differences as differing
from orchestrator.bench import ranksum
from orchestrator.bench.decide import CONFIDENCE, MARGIN, explained_by
from orchestrator.bench.differences import AREAS, Area, Difference, Part
from orchestrator.bench.history import Report
from orchestrator.bench.statistics import median
from orchestrator.bench.text import SHOWN
from orchestrator.bench.values import FORMAT, METRICS, NOTABLE, Answer, Comparison, Value
from orchestrator.bench.workload import WorkloadError
from orchestrator.errors import Incomparable

Slower = Literal["yes", "no", "unknown"]

NOTE = (
    "two runs at two times, each with one launch: what changed on the machine in between counts as a "
    "difference; compare runs both sides in turns"
)


class Side(Value, frozen=True, kw_only=True):
    """One of the two runs: `id` in the history, or `path` of its file, or neither when it was just made."""

    id: int | None
    path: str | None
    kind: str
    version: str
    started_at: float
    arms: tuple[str, ...]
    interrupted: bool


class Change(Value, frozen=True, kw_only=True):
    """One metric of one workload (and arm) in both runs.

    `ratio` is a's speed over b's, above 1 when b is slower, whatever the metric's direction; `low` and `high`
    are its interval (null: unbounded, too few rounds) with the coverage `confidence`. `a` and `b` are medians
    of the valid rounds in the metric's unit, `rounds_a` and `rounds_b` their numbers. `smallest_detectable`:
    the smallest advantage that 4 of 5 such pairs of runs would have shown. `explainable`: up to which
    difference other programs may be its cause. `slower` answers whether b is slower beyond the limit that was
    given, null without one. With `primary` false there are figures and no claim.
    """

    workload: str
    arm: str
    metric: str
    unit: str
    primary: bool
    answer: Answer
    a: float
    b: float
    ratio: float
    low: float | None
    high: float | None
    confidence: float
    rounds_a: int
    rounds_b: int
    smallest_detectable: float | None
    explainable: float
    slower: Slower | None


class Against(Value, frozen=True, kw_only=True):
    """What ``orchestrator history compare A B`` found; `a` is the earlier run, `b` the one in question.

    `verdict` is the answer of the first change. `limit` is how much slower b may be (0.05 is 5 %), null when
    nobody asked; `slower` says whether any declared metric is slower beyond it: "unknown" is neither shown
    nor ruled out.
    """

    kind: Literal["history-compare"] = "history-compare"
    format: str = FORMAT
    a: Side
    b: Side
    verdict: Answer
    margin: float
    limit: float | None
    slower: Slower | None
    allowed: tuple[Area, ...]
    differences: tuple[Difference, ...]
    changes: tuple[Change, ...]
    others: tuple[Change, ...]
    notes: tuple[str, ...]


def against(
    a: Report,
    b: Report,
    *,
    metrics: Sequence[str] = (),
    margin: float = MARGIN,
    limit: float | None = None,
    allow: Collection[Area] = (),
    context: str = "history",
) -> Against:
    """Compare two reports, each of bench or of compare.

    Args:
        a: the earlier one, the baseline.
        b: the one that may be slower.
        metrics: declared, for every workload; default: each workload's own.
        margin: differences below it don't matter: 0.03 is 3 %.
        limit: how much slower b may be: 0.05 is 5 %.
        allow: what may differ.
        context: what a refusal begins with: the command that asks.

    Raises:
        Incomparable: what differs forbids an answer, or they have nothing in common.
        WorkloadError: there is no such metric, or the margin or limit makes no sense.

    """
    _check(metrics, margin, limit)
    matched, notes = differing.match(a, b, context)
    differences = tuple(differing.differences(a, b, matched))
    if forbidden := [each for each in differences if each.area is not None and each.area not in allow]:
        areas = " ".join(f"--allow {area}" for area in AREAS if area in {each.area for each in forbidden})
        raise Incomparable(
            [differing.words(each) for each in forbidden],
            context=context,
            advice=f"if that is what you want: {areas}",
        )
    wanted = [(one, two, metrics or (one.workload.metric,)) for one, two in matched]
    claims = [
        (one, two, metric)
        for one, two, declared in wanted
        for metric in dict.fromkeys(declared)
        if one.values(metric) and two.values(metric)
    ]
    if not claims:
        raise Incomparable(
            ["the runs have no metric in common that was declared, or no round that counts"],
            context=context,
            advice="`orchestrator history show RUN` lists a run's metrics and its void rounds; "
            "--metric declares another one",
        )
    alpha = (1 - CONFIDENCE) / len(claims)
    changes = tuple(_change(*claim, margin, alpha, limit, primary=True) for claim in claims)
    others = tuple(
        _change(one, two, metric, margin, 1 - CONFIDENCE, None, primary=False)
        for one, two, declared in wanted
        for metric in SHOWN
        if metric not in declared and one.values(metric) and two.values(metric)
    )
    return Against(
        a=_side(a),
        b=_side(b),
        verdict=changes[0].answer,
        margin=margin,
        limit=limit,
        slower=_worst([each.slower for each in changes]),
        allowed=tuple(area for area in AREAS if area in allow),
        differences=differences,
        changes=changes,
        others=others,
        notes=(NOTE, *notes, *_notes(a, b, changes)),
    )


def _check(metrics: Sequence[str], margin: float, limit: float | None) -> None:
    for name in metrics:
        if name not in METRICS:
            raise WorkloadError(
                f"history: no metric named {name!r}", advice=f"there are: {', '.join(METRICS)}"
            )
    for value in (margin, limit):
        if value is not None and not 0 < value < 1:
            raise WorkloadError(f"history: a share of {value:g} makes no sense", advice="0.05 is 5 %")


def _side(report: Report) -> Side:
    result = report.result
    arms = result.arms if isinstance(result, Comparison) else (result.arm,)
    return Side(
        id=report.id,
        path=report.path,
        kind=result.kind,
        version=result.version,
        started_at=result.started_at,
        arms=tuple(arm.name for arm in arms),
        interrupted=result.interrupted,
    )


# -- what changed -------------------------------------------------------------------------------------


def _change(
    a: Part, b: Part, metric: str, margin: float, alpha: float, limit: float | None, *, primary: bool
) -> Change:
    unit, _, more_is_better = METRICS[metric]
    sign = 1 if more_is_better else -1
    logs = [[sign * math.log(value) for value in part.values(metric)] for part in (a, b)]
    interval = ranksum.shift(logs[0], logs[1], alpha)
    smallest = ranksum.smallest_detectable(logs[0], logs[1], alpha)
    explainable = max(explained_by(a.rounds), explained_by(b.rounds))
    answer: Answer = "inconclusive"
    if not primary:
        pass
    elif max(interval.high, -interval.low) < math.log1p(margin):
        answer = "equivalent"
    elif max(interval.low, -interval.high) > math.log1p(explainable):
        answer = "a_faster" if interval.estimate > 0 else "b_faster"
    slower: Slower | None = None
    if limit is not None:
        slower = "unknown"
        if interval.low > math.log1p(max(limit, explainable)):
            slower = "yes"
        elif interval.high < math.log1p(limit):
            slower = "no"
    return Change(
        workload=a.workload.name,
        arm=b.arm.name,
        metric=metric,
        unit=unit,
        primary=primary,
        answer=answer,
        a=median(a.values(metric)),
        b=median(b.values(metric)),
        ratio=math.exp(interval.estimate),
        low=math.exp(interval.low) if math.isfinite(interval.low) else None,
        high=math.exp(interval.high) if math.isfinite(interval.high) else None,
        confidence=interval.confidence,
        rounds_a=len(logs[0]),
        rounds_b=len(logs[1]),
        smallest_detectable=math.expm1(smallest) if smallest is not None else None,
        explainable=explainable,
        slower=slower,
    )


def _worst(found: Sequence[Slower | None]) -> Slower | None:
    order: tuple[Slower, ...] = ("yes", "unknown", "no")
    return next((each for each in order if each in found), None)


def _notes(a: Report, b: Report, changes: Sequence[Change]) -> Iterator[str]:
    for name, report in (("A", a), ("B", b)):
        if report.result.refused:
            why = "; ".join(report.result.refused)
            yield f"{name} was refused before its end ({why}): the answer is for the rounds that it has"
        elif report.result.interrupted:
            yield f"{name} was interrupted: the answer is for the rounds that it has"
        if not report.result.self_test.ok:
            yield f"{name}: {'; '.join(report.result.self_test.reasons)}"
    explainable = max(each.explainable for each in changes)
    if explainable > NOTABLE:
        yield (
            f"other programs used up to {1 - 1 / (1 + explainable):.0%} of the processors: a difference of "
            f"up to {explainable:.0%} may be their work and is not claimed"
        )
    if any(each.low is None for each in changes):
        yield "too few rounds for an interval: 4 in each run are the fewest for one metric, 6 do for many"
