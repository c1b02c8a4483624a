"""The sections of a page below its plots: gate, void rounds, method, arms, machine, client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from orchestrator.bench.html.markup import Child, Markup, facts, more, name_of, table, tag
from orchestrator.bench.html.view import Group, began, clock, letter_of, percent, several, shows, size, words
from orchestrator.bench.statistics import median
from orchestrator.bench.text import SHOWN, answer, describe
from orchestrator.bench.values import METRICS, Arm, Comparison, Machine, Measurement, Round, SelfTest
from orchestrator.errors import Incomparable


def section(title: str, *children: Child, class_: str | None = None) -> Markup:
    """Return a section with its heading."""
    key = title.lower().replace(" ", "-")
    return tag("section", tag("h2", title, id=key), children, class_=class_, aria_labelledby=key)


def moment(seconds: float) -> str:
    """Return a moment as people read it."""
    return f"{datetime.fromtimestamp(seconds, UTC):%d %B %Y, %H:%M} UTC".lstrip("0")


# -- figures ----------------------------------------------------------------------------------------


def figures(report: Measurement | Comparison) -> Markup | None:
    """Return every figure as a table."""
    rows: list[list[Child]]
    if isinstance(report, Comparison):
        shown = [*report.decisions, *(each for each in report.others if each.metric in SHOWN)]
        heads = ["Arms", "Metric", "A", "The other", "Ratio", "Interval", "Answer"]
        rows = [
            [
                f"A / {letter_of(report, each.arm_b)}",
                words(each.metric),
                shows(each.metric, each.a),
                shows(each.metric, each.b),
                f"{each.ratio:.3f}" if each.pairs else "-",
                f"{each.low:.3f} to {each.high:.3f}" if each.low and each.high else "-",
                answer(each, report),
            ]
            for each in shown
        ]
        said = f"A is {report.arms[0].name}. A ratio above 1 means that A is faster, for times too."
    else:
        heads = ["Workload", "Metric", "Centre", "95 % interval", "Rounds"]
        rows = [
            [
                part.workload.name,
                words(each.metric),
                shows(each.metric, each.value),
                f"{shows(each.metric, each.low)} to {shows(each.metric, each.high)}" if each.low else "-",
                each.rounds,
            ]
            for part in report.results
            for each in sorted(part.summaries, key=lambda found: found.metric != part.workload.metric)
            if each.metric in SHOWN
        ]
        said = "A workload’s own metric comes first. An interval needs six rounds."
    if not rows:
        return None
    return section("Figures", tag("p", said), table("Every figure", heads, rows, 2))


# -- the gate ---------------------------------------------------------------------------------------


def gate(report: Measurement | Comparison, found: Sequence[Group]) -> Markup:
    """Return what was checked before a round counted, with what was seen in those that do."""
    counted = [group for group in found if group.valid]
    if not counted:
        return section("The gate", tag("p", "No round passed: there is nothing to show."))
    if isinstance(report, Comparison):
        said = (
            "Passed. The arms read the same prompts as the same tokens, and in the warm-up and in every pair "
            "that counts they had the same number of prompt tokens, output tokens and finish reasons."
        )
    else:
        said = "Rounds count that had the lengths asked for, no failure, no cache, and a client at ease."
    checks: list[tuple[str, list[str]]] = [
        ("Rounds that count", [f"{len(group.valid)} of {len(group.rounds)}" for group in counted]),
        ("Prompt tokens", [_counts(each.prompt_tokens for each in group.samples) for group in counted]),
        ("Output tokens", [_counts(each.output_tokens for each in group.samples) for group in counted]),
        ("Finish reasons", [several(each.finish_reason for each in group.samples) for group in counted]),
        ("From a cache, most", [_most_cached(group) for group in counted]),
        ("Client, most of a core", [f"{max(r.client.cpu for r in group.valid):.0%}" for group in counted]),
        ("Client late (p99), most", [_late(group) for group in counted]),
        ("Other programs, mean", [_others(group.valid) for group in counted]),
        ("Off from engine’s own", [_disagreement(group.valid) for group in counted]),
    ]
    heads = ["", *(group.label for group in counted)]
    return section(
        "The gate",
        tag("p", said),
        table("What was checked, and seen in the rounds that count", heads, [[a, *b] for a, b in checks]),
        tag(
            "p",
            "Client: how busy the measuring program was, and how late its event loop woke up. Other "
            "programs: their share of all processors. Engine’s own: the median disagreement of our figures "
            f"with what the engine says of itself ({several(_sources(counted))}).",
            class_="small",
        ),
    )


def _counts(values: Iterable[int | None]) -> str:
    found = sorted({value for value in values if value is not None})
    if len(found) > 4:
        return f"{found[0]} to {found[-1]}"
    return ", ".join(map(str, found)) or "-"


def _most_cached(group: Group) -> str:
    known = [each.cached_tokens for each in group.samples if each.cached_tokens is not None]
    return f"{max(known)} tokens" if known else "not told"


def _late(group: Group) -> str:
    return f"{max(each.client.lag_p99_s for each in group.valid) * 1000:.1f} ms"


def _others(rounds: Sequence[Round]) -> str:
    known = [each.others for each in rounds if each.others is not None]
    return f"{sum(known) / len(known):.0%}" if known else "not known"


def _disagreement(rounds: Sequence[Round]) -> str:
    off: dict[str, list[float]] = {}
    for each in rounds:
        for view in each.server:
            if view.disagreement is not None:
                off.setdefault(view.source, []).append(view.disagreement)
    return "; ".join(percent(median(values)) for values in off.values()) or "it tells none"


def _sources(found: Sequence[Group]) -> list[str]:
    return [view.source for group in found for each in group.valid for view in each.server]


def voids(found: Sequence[Group]) -> Markup:
    """Return the rounds that do not count, with their reasons."""
    start = began(found)
    every = sorted(
        ((each, group) for group in found for each in group.rounds if each.void),
        key=lambda pair: (pair[0].started_at, pair[0].number),
    )
    if not every:
        said = "Every round counts." if any(group.rounds for group in found) else "There was no round."
        return section("Void rounds", tag("p", said))
    heads = ["Round", "Of", "Pair", "Attempt", "Began", "Why"]
    rows: list[list[Child]] = [
        [
            each.number,
            group.label,
            each.pair + 1,
            each.attempt + 1,
            clock(each.started_at - start),
            tag("ul", [tag("li", reason) for reason in each.void]),
        ]
        for each, group in every
    ]
    return section(
        "Void rounds",
        tag(
            "p",
            f"{len(every)} of all rounds do not count. They are in no figure, and are repeated as long as "
            "the budget allows.",
        ),
        table("Void rounds with their reasons", heads, rows, 6),
    )


# -- how and where ----------------------------------------------------------------------------------


def method(report: Measurement | Comparison) -> Markup:
    """Return how it was measured."""
    if isinstance(report, Measurement):
        loads = [tag("li", describe(part.workload)) for part in report.results]
        used = dict.fromkeys(part.workload.metric for part in report.results)
        return section(
            "Method",
            facts([("Workloads", tag("ul", loads)), ("Seed", report.seed), *_definitions(used)]),
        )
    design = report.design
    looks = (
        f"after {', '.join(map(str, design.stop_early))} pairs" if design.stop_early else "once, at the end"
    )
    resident = {
        "together": "all engines stayed resident",
        "alternate": "engines were launched in turns, a launch for each round",
    }
    return section(
        "Method",
        tag(
            "p",
            "Rounds in pairs, AB BA, with the same prompts within a pair, so that a machine that gets "
            "slower favours nobody. A round is one number; a pair gives a ratio; the answer rests on the "
            "Hodges-Lehmann centre of the ratios’ logarithms and its exact signed-rank interval. All of "
            "this was declared beforehand:",
        ),
        facts(
            [
                ("Workload", describe(report.workload)),
                ("Metrics", ", ".join(words(metric) for metric in design.metrics)),
                ("Margin", f"{percent(design.margin)}: a smaller difference does not matter"),
                ("Confidence", f"{percent(design.confidence)} of each look"),
                ("Pairs", f"{design.pairs}; up to {design.void_budget} may be repeated"),
                ("Looked for an answer", looks),
                ("Residency", resident.get(design.residency, design.residency)),
                ("Control", "yes: an arm against itself" if design.control else None),
                ("Seed", report.seed),
                *_definitions(dict.fromkeys([*design.metrics, *(each.metric for each in report.others)])),
            ]
        ),
    )


def _definitions(metrics: Iterable[str]) -> list[tuple[str, Child]]:
    known = [metric for metric in metrics if metric in METRICS]
    items = [tag("li", tag("b", words(metric)), f": {METRICS[metric][1]}") for metric in known]
    return [("Definitions", tag("ul", items))] if items else []


def arms(report: Measurement | Comparison, found: Sequence[Group]) -> Markup:
    """Return what each arm is, and everything about it that may matter."""
    if isinstance(report, Measurement):
        return section("The engine", _arm(report.arm))
    cards = [
        tag("article", tag("h3", f"{group.letter} · ", name_of(group.name)), _arm(group.arm), class_="card")
        for group in found
    ]
    return section("The arms", tag("div", cards, class_="cards"))


def _arm(arm: Arm) -> Markup:
    load = [f"{seconds:.2f} s" for seconds in arm.load_s]
    known = facts(
        [
            ("Engine", " ".join(part for part in (arm.backend, arm.version) if part) or None),
            ("URL", arm.url),
            ("Model", name_of(arm.model) if arm.model else None),
            ("Weights", arm.quantisation),
            ("Hash", tag("code", arm.model_hash) if arm.model_hash else None),
            ("Slots", f"{arm.slots} of {arm.context} tokens" if arm.slots and arm.context else arm.slots),
            ("Device", arm.device),
            ("Overrides", ", ".join(arm.overrides) or None),
            ("Loaded in", several(load, 6) if load else None),
            ("Sampling", ", ".join(f"{key} {value}" for key, value in arm.sampling.items()) or None),
        ]
    )
    details: list[Child] = []
    if arm.model_path:
        details.append(facts([("Model’s path", tag("code", arm.model_path))]))
    if arm.argv:
        details.append(tag("pre", " ".join(arm.argv), tabindex="0", aria_label="Command"))
    changed = [(key, tag("code", value)) for key, value in arm.environment.items()]
    changed += [(key, tag("i", "taken away")) for key in arm.removed]
    if changed:
        details.append(facts(changed))
    return tag("div", known, more("Command and environment", details) if details else None)


def machine(where: Machine) -> Markup:
    """Return where it was measured."""
    clocks = [where.governor, f"{where.cpu_mhz:.0f} MHz" if where.cpu_mhz else None]
    packages = ", ".join(f"{name} {version}" for name, version in where.packages.items())
    return section(
        "The machine",
        facts(
            [
                ("Processor", f"{where.cpu}, {where.cores} cores for us"),
                ("Memory", size(where.memory)),
                ("GPUs", ", ".join(where.gpus) or "none"),
                ("Clock", ", ".join(part for part in clocks if part) or None),
                ("Load before", f"{where.load_average:.2f}"),
                ("Kernel", f"Linux {where.kernel}"),
                ("Python", where.python),
                ("Packages", packages or None),
            ]
        ),
    )


def client(tested: SelfTest) -> Markup:
    """Return what the client itself can do."""
    said = "Fit to measure." if tested.ok else "Not fit to measure."
    return section(
        "The client",
        tag("p", f"{said} Before the run it was measured itself, against a server of known pace:"),
        facts(
            [
                (
                    "Ceiling",
                    f"{tested.ceiling_events_s:,.0f} events/s at {tested.streams} streams on one core",
                ),
                ("Cost", f"{tested.us_per_event:.1f} µs of CPU an event"),
                ("A known rate", f"{tested.decode_error:+.3%} off"),
                ("A known TTFT", f"{tested.ttft_error_s * 1000:+.2f} ms off"),
                ("Reads", f"{tested.read_delay_s * 1000:.2f} ms after the server’s write"),
                ("Reasons", "; ".join(tested.reasons) or None),
            ]
        ),
    )


def refusal(found: Incomparable) -> list[Markup]:
    """Return why there is no figure, and what was measured in vain."""
    why = section(
        "The gate",
        tag(
            "p",
            "A figure counts only if the question was the same and nothing got in the way: the same prompts"
            " read as the same tokens, the lengths that were asked for, nothing from a cache, no failed "
            "request, an engine that was neither restarted nor throttled, and a client that kept up. "
            "Something of that did not hold, and no repetition would mend it, or none that was allowed did.",
        ),
    )
    if not found.voids:
        return [why]
    return [why, section("Void rounds", tag("ul", [tag("li", line) for line in found.voids]))]


def notes(lines: Sequence[str]) -> Markup | None:
    """Return what a careful reader should know."""
    if not lines:
        return None
    return section("Mind", tag("ul", [tag("li", line) for line in lines], class_="notes"), class_="mind")
