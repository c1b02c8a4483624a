"""The rounds over time, so that drift is seen: each as a share of its own group's median."""

from __future__ import annotations

import math
from collections.abc import Sequence

from orchestrator.bench import statistics
from orchestrator.bench.html import svg
from orchestrator.bench.html.markup import Child, Markup, table
from orchestrator.bench.html.plots import figure
from orchestrator.bench.html.svg import Axis
from orchestrator.bench.html.view import Group, began, clock, percent, shows, size, words
from orchestrator.bench.values import Round

HEIGHT = 112.0  # of a panel
LEAST = 0.03  # of the median that a panel shows at least, to either side: noise is not blown up
MOST = 1.0


def rounds(found: Sequence[Group]) -> Markup | None:
    """Return a panel for each group with all its rounds, void ones too."""
    shown = [group for group in found if group.rounds]
    if not shown:
        return None
    start = began(shown)
    end = max(each.started_at - start for group in shown for each in group.rounds)
    across = Axis(0, max(end, 1.0))
    furthest = max([LEAST, *(abs(part - 1) * 1.1 for group in shown for part in _parts(group))])
    reach = min(MOST, math.ceil(furthest * 100 - 1e-9) / 100)
    parts: list[Child] = []
    for row, group in enumerate(shown):
        parts.append(_panel(group, across, reach, HEIGHT * row, start))
    bottom = HEIGHT * len(shown)
    parts.append(svg.scale(across, bottom, bottom - 4, clock))
    voids = [each for group in shown for each in group.rounds if each.void]
    return figure(
        "Rounds over time",
        [
            "Each round where it was run, against its median (the line): a slope is drift. All panels show "
            f"{percent(reach)} to either side.",
            f" Crosses are void rounds ({len(voids)}), with their numbers; the reasons are listed below."
            if voids
            else " No round was void.",
        ],
        svg.plot("rounds", "Rounds over time", _described(shown), bottom + 24, parts),
        _numbers(shown, start),
        "wide",
    )


def _parts(group: Group) -> list[float]:
    values = group.of_rounds(group.metric)
    middle = statistics.median(values) if values else 0.0
    return [value / middle for value in values] if middle else []


def _panel(group: Group, across: Axis, reach: float, top: float, start: float) -> list[Child]:
    values = group.of_rounds(group.metric)
    middle = statistics.median(values) if values else None
    up = Axis(1 - reach, 1 + reach, start=top + HEIGHT - 14, end=top + 28)
    said = f"{shows(group.metric, middle)}" if middle else "no round counts"
    parts: list[Child] = [
        svg.text("0%", top + 15, svg.short(group.label), "label halo"),
        svg.text("100%", top + 15, said, "value halo", "end"),
        svg.line("0%", up.at(1), "100%", up.at(1), "middle"),
    ]
    parts += [svg.line("0%", up.at(share), "100%", up.at(share), "grid") for share in (1 - reach, 1 + reach)]
    track: list[tuple[str, float]] = []
    marks: list[Child] = []
    told = -100.0
    for each in group.rounds:
        x, value = across.x(each.started_at - start), each.metrics.get(group.metric)
        y = up.at(value / middle) if value is not None and middle else up.at(1 - reach)
        if each.void:
            marks.append(svg.cross(x, y, f"round {each.number}, void: {'; '.join(each.void)}"))
            place = across.at(each.started_at - start)
            if place - told > 7:  # percent: numbers that would lie upon each other are left to the table
                told = place
                marks.append(
                    svg.text(
                        x,
                        y - 8 if y > top + 38 else y + 17,
                        str(each.number),
                        "tick void halo",
                        svg.anchor(place, str(each.number)),
                    )
                )
        elif value is not None:
            track.append((x, y))
            hint = f"round {each.number}, pair {each.pair + 1}: {shows(group.metric, value)}"
            marks.append(svg.mark(x, y, group.style, "mark", hint))
    return [*parts, svg.track(track, f"track arm{group.style}"), *marks]


def _described(shown: Sequence[Group]) -> str:
    found = []
    for group in shown:
        values = group.of_rounds(group.metric)
        voids = len(group.rounds) - len(group.valid)
        between = (
            f", {shows(group.metric, min(values))} to {shows(group.metric, max(values))}" if values else ""
        )
        found.append(f"{group.label}: {words(group.metric)} of {len(values)} rounds{between}, {voids} void")
    return "; ".join(found)


def _numbers(shown: Sequence[Group], start: float) -> Markup:
    pairs = any(group.letter for group in shown)
    every = sorted(
        ((each, group) for group in shown for each in group.rounds),
        key=lambda found: (found[0].started_at, found[0].number),
    )
    heads = ["Round", "Arm" if pairs else "Workload", *(["Pair"] if pairs else []), "Began", "Took", "Metric"]
    heads += ["Figure", "Client CPU", "Loop lag p99", "Others", "RAM", "Counts"]
    return table("All rounds", heads, [_row(each, group, start, pairs) for each, group in every], 2)


def _row(each: Round, group: Group, start: float, pairs: bool) -> list[Child]:
    return [
        each.number,
        group.label,
        *([each.pair + 1] if pairs else []),
        clock(each.started_at - start),
        f"{each.duration_s:.2f} s",
        words(group.metric),
        shows(group.metric, each.metrics.get(group.metric)),
        f"{each.client.cpu:.0%}",
        f"{each.client.lag_p99_s * 1000:.1f} ms",
        "-" if each.others is None else f"{each.others:.0%}",
        size(each.memory.rss) if each.memory else "-",
        "void" if each.void else "yes",
    ]
