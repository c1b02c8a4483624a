"""The verdict in words, for somebody who reads nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.bench.html.view import letter_of, percent, shows, words
from orchestrator.bench.text import describe, figure
from orchestrator.bench.values import NOTABLE, Comparison, Decision, Measurement
from orchestrator.errors import Incomparable

Report = Measurement | Comparison | Incomparable


@dataclass(frozen=True, slots=True)
class Verdict:
    """What stands at the top of a page.

    Attributes:
        kind: what the answer is, in a word: it gives the colour.
        stamp: what the answer is, in two or three.
        headline: the answer.
        reasons: sentences that say why, and what it is worth.
        tiles: (what, figure, how sure) each.

    """

    kind: str
    stamp: str
    headline: str
    reasons: tuple[str, ...]
    tiles: tuple[tuple[str, str, str], ...] = ()


def verdict(report: Report) -> Verdict:
    """Return what to say first."""
    if isinstance(report, Incomparable):
        reasons = [*report.reasons, *([f"What to do: {report.advice}"] if report.advice else [])]
        return Verdict("refused", "not comparable", "The gate refused: no verdict", tuple(reasons))
    if isinstance(report, Measurement):
        return _measured(report)
    return _compared(report)


# -- bench ------------------------------------------------------------------------------------------


def _measured(report: Measurement) -> Verdict:
    tiles, headline = [], ""
    for part in report.results:
        own = next((each for each in part.summaries if each.metric == part.workload.metric), None)
        if own is None:
            continue
        sure = _count(own.rounds, "round")
        if own.low is not None and own.high is not None:
            sure = f"{figure(own.low, own.unit)} to {figure(own.high, own.unit)}, {sure}"
        headline = headline or f"{words(own.metric)} {figure(own.value, own.unit)}"
        tiles.append((f"{part.workload.name} · {words(own.metric)}", figure(own.value, own.unit), sure))
    rounds = [each for part in report.results for each in part.rounds]
    valid = sum(not each.void for each in rounds)
    reasons = list(report.refused)
    if report.refused:
        reasons.append(
            "For that it was refused before its end: the figures are those of the rounds until then."
        )
    elif report.interrupted:
        reasons.append("It was interrupted: the figures are those of the rounds until then.")
    if not tiles:
        reasons.insert(0, f"Of {len(rounds)} rounds none counts; why is listed below.")
        return Verdict("refused", "no figures", f"No figures of {report.arm.name}", tuple(reasons))
    reasons.append(
        f"{valid} of {len(rounds)} rounds count. Each figure is the centre of its rounds (Hodges-Lehmann), "
        "with its 95 % interval where there are six rounds or more."
    )
    if report.refused:
        return Verdict(
            "refused", "refused half-way", f"{report.arm.name}: {headline}", tuple(reasons), tuple(tiles)
        )
    return Verdict("measured", "measured", f"{report.arm.name}: {headline}", tuple(reasons), tuple(tiles))


# -- compare ----------------------------------------------------------------------------------------


def _compared(report: Comparison) -> Verdict:
    first = report.decisions[0]
    reasons = [_because(each, report) for each in report.decisions]
    if report.design.control and not report.refused:
        reasons.insert(0, _control(first))
    if report.refused:
        reasons = [*report.refused, *reasons]
    elif report.interrupted:
        done = f"after {first.pairs} of {report.design.pairs} pairs: the answer is for these alone"
        reasons.append(f"It was interrupted {done if first.pairs else 'before a pair was complete'}.")
    if first.smallest_detectable is not None:
        reasons.append(
            f"A difference of {percent(first.smallest_detectable)} would have been seen in 4 of 5 "
            "comparisons like this."
        )
    if report.refused:
        headline = f"Refused before its end: no verdict on {first.arm_a} and {first.arm_b}"
        return Verdict("refused", "no verdict", headline, tuple(reasons), _tiles(first, report))
    stamps = {
        "a_faster": "A is faster",
        "b_faster": f"{letter_of(report, first.arm_b)} is faster",
        "equivalent": "equivalent",
        "inconclusive": "inconclusive",
    }
    return Verdict(
        first.answer, stamps[first.answer], _headline(first, report), tuple(reasons), _tiles(first, report)
    )


def _headline(each: Decision, report: Comparison) -> str:
    a, b = each.arm_a, each.arm_b
    if each.answer == "equivalent":
        return f"{a} and {b} are equivalent within {percent(report.design.margin)}"
    if each.answer == "inconclusive":
        return f"No verdict on {a} and {b}"
    fast, slow, ratio = (a, b, each.ratio) if each.answer == "a_faster" else (b, a, 1 / each.ratio)
    if ratio >= 1.5:
        return f"{fast} is {ratio:.2f} times as fast as {slow}"
    return f"{fast} is {percent(ratio - 1)} faster than {slow}"


def _because(each: Decision, report: Comparison) -> str:
    what = words(each.metric)
    subject = f"{what[0].upper()}{what[1:]}"
    if len(report.arms) > 2:
        subject += f", {each.arm_a} and {each.arm_b}"
    if not each.pairs:
        return f"{subject}: no pair of rounds counts, so nothing can be said."
    interval = "with too few pairs for an interval"
    if each.low is not None and each.high is not None:
        interval = f"{percent(each.confidence)} interval {each.low:.3f} to {each.high:.3f}"
    figures = f"{shows(each.metric, each.a)} against {shows(each.metric, each.b)}"
    said = f"{subject}: {figures}; A / B is {each.ratio:.3f}, {interval}, from {_count(each.pairs, 'pair')}"
    if report.refused:
        return f"{said}. What ended it chose these pairs, so no answer is given."
    if each.answer == "inconclusive":
        return f"{said}. {_undecided(each)}"
    if each.answer == "equivalent":
        return f"{said}: equivalent within {percent(report.design.margin)}."
    return f"{said}: {each.arm_a if each.answer == 'a_faster' else each.arm_b} is faster."


def _undecided(each: Decision) -> str:
    if each.p_difference <= 1 - each.confidence and each.explainable > NOTABLE:
        return (
            f"The difference is certain, but other programs used the processors and may explain ratios up to "
            f"{1 + each.explainable:.2f}: it is not claimed."
        )
    if each.low is None:
        return "Six pairs are the fewest for an answer."
    more = f" About {each.pairs_needed} more pairs are needed." if each.pairs_needed else ""
    return f"The interval allows both a difference and none that matters.{more}"


def _control(first: Decision) -> str:
    if first.answer in ("equivalent", "inconclusive"):
        return "A control: both arms are the same, and no difference is claimed, as it should be."
    return (
        "A control: both arms are the same, and yet a difference is claimed. Once in twenty that is chance; "
        "if it happens again, this machine is not fit for measuring."
    )


def _tiles(first: Decision, report: Comparison) -> tuple[tuple[str, str, str], ...]:
    if not first.pairs:
        return ()
    other = letter_of(report, first.arm_b)
    sure = "no interval"
    if first.low is not None and first.high is not None:
        sure = f"{percent(first.confidence)} interval {first.low:.3f} to {first.high:.3f}"
    what = words(first.metric)
    return (
        (f"A · {first.arm_a}", shows(first.metric, first.a), f"{what}, median of rounds"),
        (f"{other} · {first.arm_b}", shows(first.metric, first.b), f"{what}, median of rounds"),
        (f"A / {other}, above 1 A is faster", f"{first.ratio:.3f}", sure),
    )


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def subtitle(report: Report) -> str:
    """Return what was asked, on one line."""
    if isinstance(report, Incomparable):
        return "No figure is shown, for none could be believed"
    if isinstance(report, Measurement):
        arm = report.arm
        slots = f"{arm.slots} slots of {arm.context} tokens" if arm.slots and arm.context else None
        known = [arm.backend, arm.version, arm.model, arm.quantisation, slots, report.machine.cpu]
        return ", ".join(dict.fromkeys(part for part in known if part))
    return describe(report.workload)
