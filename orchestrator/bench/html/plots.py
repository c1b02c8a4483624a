"""The plots of a report: throughput, distributions, memory.

Each returns a figure, or None when there is nothing to draw; its table holds the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orchestrator.bench import statistics
from orchestrator.bench.decide import summarise
from orchestrator.bench.html import svg
from orchestrator.bench.html.markup import Child, Markup, more, table, tag
from orchestrator.bench.html.svg import Axis
from orchestrator.bench.html.view import Group, shows, size, unit
from orchestrator.bench.values import Summary

ROW = 46  # pixels for a row with its label above its marks
FOOT = 24
DOTS = 240  # requests in a row; more of them are drawn as a histogram
BINS = 48
FEWEST = 8  # output tokens that a request must have for its decode rate to say anything
SPREAD = (0.05, 0.25, 0.5, 0.75, 0.95)


def figure(title: str, words_: Child, drawn: Markup, numbers: Child, class_: str | None = None) -> Markup:
    """Return a plot with its heading, how to read it, and the same numbers as a table."""
    return tag(
        "figure", tag("h3", title), tag("figcaption", words_), drawn, more("Numbers", numbers), class_=class_
    )


# -- throughput -------------------------------------------------------------------------------------


def throughput(found: Sequence[Group]) -> Markup | None:
    """Return throughput against concurrency where it varies, else by group."""
    rows = [(group, summary) for group in found if (summary := _summary(group, "output_tok_s"))]
    if not rows:
        return None
    if not rows[0][0].letter:
        rows = _alike(rows)
    what, counts = _across(rows)
    top = max(value for _, each in rows for value in (each.value, each.high or 0.0))
    if len(set(counts)) > 1:
        drawn = _throughput_curve(rows, counts, what, top)
        read = f"Output tok/s of all streams together, against the number of {what}, with 95 % intervals."
    else:
        drawn = _throughput_rows(rows, top)
        read = f"Output tok/s at {what}: {counts[0]:g}, with 95 % intervals."
    numbers = table(
        "Output throughput (tok/s)",
        ["", what.capitalize(), "Centre", "95 % interval", "Rounds"],
        [
            [group.label, f"{count:g}", f"{each.value:.2f}", _range(each), each.rounds]
            for (group, each), count in zip(rows, counts, strict=True)
        ],
    )
    return figure("Throughput against concurrency", read, drawn, numbers)


def _summary(group: Group, metric: str) -> Summary | None:
    return next((each for each in summarise(group.rounds) if each.metric == metric), None)


def _alike(rows: list[tuple[Group, Summary]]) -> list[tuple[Group, Summary]]:
    """Return the workloads in which only the streams differ: one each, best those made to measure it."""
    loads = [group.workload for group, _ in rows]
    shapes = [(each.prompt_tokens, each.output_tokens, bool(each.rate)) for each in loads]
    commonest = max(shapes, key=shapes.count)
    found = [row for row, shape in zip(rows, shapes, strict=True) if shape == commonest]
    found.sort(key=lambda row: row[0].metric != "output_tok_s")
    by_count = {count: row for row, count in zip(found[::-1], _across(found)[1][::-1], strict=True)}
    return [by_count[count] for count in sorted(by_count)]


def _across(rows: Sequence[tuple[Group, Summary]]) -> tuple[str, list[float]]:
    """Return what varies: streams, an open loop’s rate, or the slots of arms with the same streams."""
    rates = [group.workload.rate for group, _ in rows]
    if all(rates):
        return "requests/s", rates
    streams = [float(min(group.workload.concurrency, group.workload.requests)) for group, _ in rows]
    slots = [float(group.arm.slots or 0) for group, _ in rows]
    if len(set(streams)) == 1 and len(set(slots)) > 1 and all(slots):
        return "slots", slots
    return "streams", streams


def _range(each: Summary) -> str:
    return f"{each.low:.2f} to {each.high:.2f}" if each.low and each.high else "-"


def _throughput_curve(
    rows: Sequence[tuple[Group, Summary]], counts: Sequence[float], what: str, top: float
) -> Markup:
    height = 210.0
    # streams double, and so the axis does; the left is for the labels of the lines
    across = Axis(min(counts), max(counts), log=True, start=14, end=96)
    up = Axis(0, top * 1.12, start=height, end=14)
    parts: list[Child] = [_levels(up)]
    parts += [
        svg.text(across.x(count), height + 15, f"{count:g}", "tick", "middle")
        for count in sorted(set(counts))
    ]
    parts.append(svg.text("100%", height + 32, f"{what} ▸", "tick", "end"))
    places = sorted(zip(counts, rows, strict=True), key=lambda each: each[0])
    if len({group.letter for group, _ in rows}) == 1 or what == "slots":
        track = [(across.x(count), up.at(each.value)) for count, (_, each) in places]
        parts.append(svg.track(track, "track" if what == "slots" else f"track arm{rows[0][0].style}"))
    for count, (group, each) in places:
        if each.low is not None and each.high is not None:
            at = across.x(count)
            parts.append(svg.line(at, up.at(each.low), at, up.at(each.high), f"whisker arm{group.style}"))
        hint = f"{group.label}: {each.value:.1f} tok/s at {count:g} {what}"
        parts.append(svg.mark(across.x(count), up.at(each.value), group.style, "mark", hint))
        above = up.at(each.high or each.value) - 9
        said = f"{each.value:.3g}"
        stands = svg.anchor(across.at(count), said)
        parts.append(svg.text(across.x(count), above, said, "value halo", stands))
    described = "; ".join(f"{count:g} {what}: {each.value:.1f} tok/s" for count, (_, each) in places)
    return svg.plot("throughput", f"Throughput against {what}", described, height + 38, parts)


def _levels(up: Axis) -> list[Child]:
    found: list[Child] = []
    for tick in up.ticks(4):
        y = up.at(tick)
        found.append(svg.line("0%", y, "100%", y, "grid"))
        found.append(svg.text("0%", y - 3, f"{tick:g}", "tick halo"))
    return found


def _throughput_rows(rows: Sequence[tuple[Group, Summary]], top: float) -> Markup:
    axis = Axis(0, top * 1.05)
    bottom = float(ROW * len(rows)) + 4
    parts: list[Child] = [svg.scale(axis, bottom, 0, lambda tick: f"{tick:g}")]
    for row, (group, each) in enumerate(rows):
        y = ROW * row + 31.0
        hint = f"{group.label}: {shows('output_tok_s', each.value)}"
        parts.append(_row_label(group, shows("output_tok_s", each.value), ROW * row + 15))
        parts.append(svg.line(axis.x(0), y, axis.x(each.value), y, f"stem arm{group.style}"))
        if each.low is not None and each.high is not None:
            parts.append(svg.line(axis.x(each.low), y, axis.x(each.high), y, f"whisker arm{group.style}"))
        parts.append(svg.mark(axis.x(each.value), y, group.style, "mark", hint))
    described = "; ".join(f"{group.label}: {each.value:.1f} tok/s" for group, each in rows)
    return svg.plot("throughput", "Throughput", described, bottom + FOOT, parts)


def _row_label(group: Group, value: str, y: float) -> list[Child]:
    return [
        svg.text("0%", y, svg.short(group.label), "label halo"),
        svg.text("100%", y, value, "value halo", "end"),
    ]


# -- distributions ----------------------------------------------------------------------------------


def distribution(name: str, title: str, metric: str, found: Sequence[Group]) -> Markup | None:
    """Return the requests' values of a metric, a row for each group."""
    every = [(group, sorted(values)) for group in found if (values := group.of_samples(metric))]
    rows = [row for row in every if metric != "decode_tok_s" or max(row[0].workload.output_tokens) >= FEWEST]
    if not rows:
        return None
    everything = [value for _, values in rows for value in values]
    low, high = min(everything), max(everything)
    if log := low > 0 and high / low > 20:
        axis = Axis(low / 1.1, high * 1.1, log=True)
    else:
        axis = Axis(*svg.span(everything))
    tall = ROW + 24.0
    bottom = tall * len(rows) + 4
    label = _in_unit(metric, high)
    parts: list[Child] = [svg.scale(axis, bottom, 0, label)]
    for row, (group, values) in enumerate(rows):
        parts.append(_row_label(group, shows(metric, statistics.median(values)), tall * row + 15))
        parts.append(_swarm(group, values, axis, tall * row + 57, metric))
    described = "; ".join(
        f"{group.label}: median {shows(metric, statistics.median(values))}, "
        f"{shows(metric, values[0])} to {shows(metric, values[-1])}, {len(values)} requests"
        for group, values in rows
    )
    numbers = table(
        title,
        [
            "",
            "Requests",
            "Least",
            *(f"{share:.0%}" if share != 0.5 else "Median" for share in SPREAD),
            "Most",
        ],
        [
            [
                group.label,
                len(values),
                shows(metric, values[0]),
                *(shows(metric, statistics.percentile(values, share)) for share in SPREAD),
                shows(metric, values[-1]),
            ]
            for group, values in rows
        ],
    )
    drawn = " as a histogram" if any(len(values) > DOTS for _, values in rows) else ""
    read = f"All requests of the rounds that count{drawn}; the line is the median, the bar the middle half."
    return figure(
        title,
        [
            read,
            " The axis is logarithmic." if log else None,
            f" Those of fewer than {FEWEST} tokens are left out." if len(rows) < len(every) else None,
        ],
        svg.plot(name, title, described, bottom + FOOT, parts),
        numbers,
    )


def _in_unit(metric: str, high: float) -> Callable[[float], str]:
    if unit(metric) == "s":
        return lambda value: f"{value * 1000:.4g} ms" if high < 1 else f"{value:.3g} s"
    return lambda value: f"{value:.4g}" if value < 10_000 else f"{value:.0f}"


def _swarm(group: Group, values: Sequence[float], axis: Axis, base: float, metric: str) -> list[Child]:
    """Return the values above their base line, stacked where they are close, and their quartiles below."""
    bins: dict[int, list[float]] = {}
    for value in values:
        bins.setdefault(min(BINS - 1, int(axis.share(value) * BINS)), []).append(value)
    tallest = max(map(len, bins.values()))
    width = (svg.RIGHT - svg.LEFT) / BINS
    parts: list[Child] = []
    if len(values) <= DOTS:
        step = min(7.0, 24.0 / tallest)
        for number, stacked in bins.items():
            for height, value in enumerate(sorted(stacked)):
                place = svg.LEFT + (number + 0.5) * width
                y = base - 9 - step * height
                parts.append(svg.mark(f"{place:.2f}%", y, group.style, "dot", shows(metric, value), 0.6))
    else:
        for number, stacked in bins.items():
            tall = 30.0 * len(stacked) / tallest
            parts.append(
                tag(
                    "rect",
                    tag("title", f"{len(stacked)} requests"),
                    x=f"{svg.LEFT + number * width:.2f}%",
                    y=base - 4 - tall,
                    width=f"{width * 0.9:.2f}%",
                    height=tall,
                    class_=f"heap arm{group.style}",
                )
            )
    quarter, half, most = (statistics.percentile(values, share) for share in (0.25, 0.5, 0.75))
    parts.append(svg.bar(axis, quarter, most, base, 5, f"box arm{group.style}"))
    middle = axis.x(statistics.median(values)) if values else axis.x(half)
    parts.append(svg.line(middle, base - 3, middle, base + 8, f"median arm{group.style}"))
    return parts


# -- memory -----------------------------------------------------------------------------------------


def memory(found: Sequence[Group]) -> Markup | None:
    """Return the peaks of the engines' memory: resident, and on GPUs where there is any."""
    rows: list[tuple[Group, str, int]] = []
    for group in found:
        peaks = [each.memory for each in group.rounds if each.memory is not None]
        if peaks:
            rows.append((group, "RAM", max(peak.rss for peak in peaks)))
        if on_gpu := [peak.vram for peak in peaks if peak.vram is not None]:
            rows.append((group, "VRAM", max(on_gpu)))
    if not rows:
        return None
    axis = Axis(0, max(bytes_ for _, _, bytes_ in rows) * 1.02 or 1)
    parts: list[Child] = []
    for row, (group, kind, bytes_) in enumerate(rows):
        style = f"amount{' gpu' if kind == 'VRAM' else ''} arm{group.style}"
        parts.append(_row_label(group, f"{kind} {size(bytes_)}", ROW * row + 15))
        parts.append(svg.bar(axis, 0, axis.high, ROW * row + 23, 14, "trough"))
        parts.append(svg.bar(axis, 0, bytes_, ROW * row + 23, 14, style))
    described = "; ".join(f"{group.label}: {kind} {size(bytes_)}" for group, kind, bytes_ in rows)
    numbers = table(
        "Peak memory of the engine’s processes",
        ["", "Kind", "Bytes", ""],
        [[group.label, kind, f"{bytes_:,}", size(bytes_)] for group, kind, bytes_ in rows],
        2,
    )
    return figure(
        "Memory",
        "Peak of the engine’s whole process tree, from its launch on. RAM is resident memory, with what it "
        "maps of the model’s file.",
        svg.plot("memory", "Peak memory", described, ROW * len(rows) + 4, parts),
        numbers,
    )
