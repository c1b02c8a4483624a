"""The ratios of speeds with their intervals: what the verdict rests on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from orchestrator.bench.html import svg
from orchestrator.bench.html.markup import Child, Markup, table, tag
from orchestrator.bench.html.plots import FOOT, ROW, figure
from orchestrator.bench.html.svg import Axis
from orchestrator.bench.html.view import brief, letter_of, percent, shows, words
from orchestrator.bench.text import SHOWN, answer
from orchestrator.bench.values import NOTABLE, Comparison, Decision

MOST = 21  # rows that are worth drawing


def ratio(report: Comparison) -> Markup | None:
    """Return the ratios of every metric with their intervals, declared ones first."""
    every = [*report.decisions, *(each for each in report.others if each.metric in SHOWN)]
    rows = [each for each in every if each.pairs]
    if len(rows) > MOST:  # of many arms, the others are left to the table
        rows = [each for each in rows if each.primary]
    if not rows:
        return None
    margin = 1 + report.design.margin
    axis = _ratio_axis(rows, margin)
    top, bottom = 22.0, 22.0 + ROW * len(rows)
    parts: list[Child] = [
        svg.bar(axis, 1 / margin, margin, top, bottom - top, "band"),
        svg.scale(axis, bottom, top, lambda tick: f"{tick:.3g}", about=6),
        svg.line(axis.x(1), top, axis.x(1), bottom, "one"),
        svg.text("0%", 13, f"◂ {_rivals(report)} faster", "side"),
        svg.text("100%", 13, "A faster ▸", "side", "end"),
    ]
    for row, each in enumerate(rows):
        parts.append(_ratio_row(report, each, axis, top + ROW * row))
    described = "; ".join(f"{_against(report, each)} {_interval(each)}" for each in rows)
    read = (
        "Right of 1, A is faster, for times too. A dot is a pair of rounds, the bar the interval of their "
        f"centre; the band holds differences below {percent(report.design.margin)}, declared not to matter."
    )
    if any(not each.primary for each in rows):
        read += " Hollow marks were not declared: figures without a claim."
    if any(each.primary and each.explainable > NOTABLE for each in rows):
        read += " The dashed line is what other programs on the machine may explain."
    return figure(
        "A’s speed over the others’" if len(report.arms) > 2 else "A’s speed over B’s",
        read,
        svg.plot("ratio", "Ratio of speeds with its interval", described, bottom + FOOT, parts),
        _ratio_table(report, every),
        "wide",
    )


def _rivals(report: Comparison) -> str:
    return "B" if len(report.arms) == 2 else "the other"


def _ratio_axis(rows: Sequence[Decision], margin: float) -> Axis:
    values = [1 / margin, margin]
    for each in rows:
        values += [value for value in (each.low, each.high, each.ratio, *each.ratios) if value]
    low, high = math.log(min(values)), math.log(max(values))
    room = 0.06 * (high - low)
    return Axis(math.exp(low - room), math.exp(high + room), log=True)


def _against(report: Comparison, each: Decision) -> str:
    pair = "" if len(report.arms) == 2 else f"A / {letter_of(report, each.arm_b)} · "
    return f"{pair}{brief(each.metric)}"


def _interval(each: Decision) -> str:
    if each.low is None or each.high is None:
        return f"{_short(each.ratio)}, no interval"
    return f"{_short(each.ratio)} ({_short(each.low)} to {_short(each.high)})"


def _short(value: float) -> str:
    return f"{value:.3f}" if value < 100 else f"{value:.0f}"


def _ratio_row(report: Comparison, each: Decision, axis: Axis, top: float) -> list[Child]:
    middle, style = top + 31, "declared" if each.primary else "undeclared"
    parts: list[Child] = [
        svg.text("0%", top + 15, _against(report, each), f"label {style} halo"),
        svg.text("100%", top + 15, _interval(each), f"value {style} halo", "end"),
    ]
    if each.primary and each.explainable > NOTABLE:
        reach = 1 + each.explainable
        parts.append(svg.line(axis.x(1 / reach), middle + 10, axis.x(reach), middle + 10, "explainable"))
    parts += [
        svg.mark(axis.x(value), middle, 0, "pair", f"pair {number}: {value:.3f}", 0.6)
        for number, value in enumerate(each.ratios, 1)
    ]
    if each.low is not None and each.high is not None:
        parts.append(svg.line(axis.x(each.low), middle, axis.x(each.high), middle, f"interval {style}"))
        parts += [
            svg.line(axis.x(end), middle - 6, axis.x(end), middle + 6, f"interval {style}")
            for end in (each.low, each.high)
        ]
    hint = f"{words(each.metric)}: {_interval(each)}"
    return [*parts, svg.mark(axis.x(each.ratio), middle, 3, f"centre {style}", hint, 1.25)]


def _ratio_table(report: Comparison, every: Sequence[Decision]) -> Markup:
    rows: list[list[Child]] = [
        [
            f"A / {letter_of(report, each.arm_b)}",
            words(each.metric),
            shows(each.metric, each.a),
            shows(each.metric, each.b),
            f"{each.ratio:.4f}" if each.pairs else "-",
            f"{each.low:.4f} to {each.high:.4f}" if each.low and each.high else "-",
            each.pairs,
            answer(each, report),
        ]
        for each in every
    ]
    heads = [
        "Arms",
        "Metric",
        "A",
        "Other",
        "Ratio",
        f"{percent(every[0].confidence)} interval",
        "Pairs",
        "Answer",
    ]
    found = [table("Ratios of speeds: above 1, A is faster", heads, rows, 2)]
    for each in every:
        if each.primary and each.ratios:
            values = ", ".join(f"{value:.4f}" for value in each.ratios)
            found.append(tag("p", f"Each pair, {_against(report, each)}: {values}", class_="small"))
    return tag("div", found)
