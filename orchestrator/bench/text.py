"""Results in words: rows for a table, sentences for an answer, Markdown for a pull request."""

from __future__ import annotations

import re
from collections.abc import Sequence

from orchestrator.bench.values import (
    METRICS,
    NOTABLE,
    Arm,
    Comparison,
    Decision,
    Measurement,
    Round,
    SelfTest,
    Workload,
)
from orchestrator.errors import Incomparable

Rows = list[list[str]]
SHOWN = ("decode_tok_s", "ttft_s", "prefill_tok_s", "output_tok_s", "requests_s", "e2e_s", "chunk_gap_s")


def figure(value: float | None, unit: str) -> str:
    """Return a figure as people read it."""
    if value is None:
        return "-"
    if unit == "s":
        return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"
    digits = 0 if value >= 1000 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {unit}"


def describe(load: Workload) -> str:
    """Return a workload on one line."""
    prompts = f"the prompts of {load.prompts}" if load.prompts else f"{_lengths(load.prompt_tokens)} in"
    arrival = f"Poisson at {load.rate:g}/s" if load.rate else f"{load.concurrency} at once"
    shared = f", {load.prefix_tokens} of them shared" if load.prefix_tokens else ""
    return (
        f"{load.name}: {prompts}{shared}, {_lengths(load.output_tokens)} out, "
        f"{arrival}, {load.requests} request{'' if load.requests == 1 else 's'} a round"
    )


def _lengths(lengths: Sequence[int]) -> str:
    return "/".join(map(str, lengths)) + " tokens"


# -- bench ------------------------------------------------------------------------------------------

BENCH_HEADINGS = ["WORKLOAD", "METRIC", "VALUE", "95 % INTERVAL", "ROUNDS"]


def bench_rows(result: Measurement) -> Rows:
    """Return the figures of a measurement, the workload's own metric first."""
    rows: Rows = []
    for part in result.results:
        own = part.workload.metric
        found = {each.metric: each for each in part.summaries}
        for metric in [own, *(name for name in SHOWN if name != own)]:
            if (each := found.get(metric)) is None:
                continue
            interval = "-"
            if each.low is not None and each.high is not None:
                interval = f"{figure(each.low, each.unit)} to {figure(each.high, each.unit)}"
            name = part.workload.name if metric == own else ""
            rows.append([name, metric, figure(each.value, each.unit), interval, str(each.rounds)])
    return rows


def arm_line(arm: Arm, rounds: Sequence[Round]) -> str:
    """Return what an arm is, on one line."""
    peaks = [each.memory for each in rounds if each.arm == arm.name and each.memory is not None]
    parts = [
        arm.backend,
        arm.version,
        arm.model,
        arm.quantisation,
        f"{arm.slots} slots of {arm.context} tokens" if arm.slots and arm.context else None,
        f"loaded in {sum(arm.load_s) / len(arm.load_s):.2f} s" if arm.load_s else None,
        f"memory {max(peak.rss for peak in peaks) / 2**20:.0f} MiB" if peaks else None,
    ]
    vram = max((peak.vram or 0 for peak in peaks), default=0)
    parts.append(f"GPU memory {vram / 2**20:.0f} MiB" if vram else None)
    return f"{arm.name}: {', '.join(str(part) for part in parts if part)}"


def self_test_line(tested: SelfTest) -> str:
    """Return what the client can do, on one line."""
    return (
        f"client: {tested.us_per_event:.1f} us an event, up to {tested.ceiling_events_s:.0f} events/s at "
        f"{tested.streams} streams on one core; known rate {tested.decode_error:+.2%}, "
        f"known TTFT {tested.ttft_error_s * 1000:+.2f} ms"
    )


def void_lines(rounds: Sequence[Round]) -> list[str]:
    """Return the void rounds with their reasons."""
    return [f"void: round {each.number} ({each.arm}): {'; '.join(each.void)}" for each in rounds if each.void]


# -- compare ----------------------------------------------------------------------------------------

COMPARE_HEADINGS = ["A AGAINST", "METRIC", "A", "B", "A / B", "INTERVAL", "ANSWER"]


def compare_rows(result: Comparison) -> Rows:
    """Return the figures of a comparison, declared metrics first; A is the first arm throughout."""
    shown = [each for each in result.others if each.metric in SHOWN]
    return [
        [
            each.arm_b,
            each.metric,
            figure(each.a, each.unit),
            figure(each.b, each.unit),
            f"{each.ratio:.3f}" if each.pairs else "-",
            _interval(each),
            answer(each, result) if each.primary and not result.refused else f"({answer(each, result)})",
        ]
        for each in (*result.decisions, *shown)
    ]


def answer(each: Decision, result: Comparison) -> str:
    """Return an answer in two words, or why there is none."""
    if not each.primary:
        return "not declared"
    return "refused" if result.refused else each.answer.replace("_", " ")


def _interval(each: Decision) -> str:
    return "-" if each.low is None or each.high is None else f"{each.low:.3f} to {each.high:.3f}"


def sentence(each: Decision, result: Comparison) -> str:
    """Return the answer in a sentence."""
    margin, a, b = result.design.margin, each.arm_a, each.arm_b
    if each.low is None or each.high is None:
        interval = f"{each.pairs} pairs"
    else:
        level = f"{each.confidence:.1%} interval" if result.design.stop_early else "95 % interval"
        interval = f"{level} {each.low:.3f} to {each.high:.3f}, {each.pairs} pairs"
    if result.refused:
        figures = f"{a} / {b} was {each.ratio:.3f} ({interval})" if each.pairs else "no pair of rounds counts"
        return f"{each.metric}: no answer, for the comparison was refused; {figures}"
    if each.answer == "equivalent":
        return f"{each.metric}: {a} and {b} are equivalent within {margin:.0%} ({each.ratio:.3f}, {interval})"
    if each.answer == "inconclusive":
        more = f"about {each.pairs_needed} more pairs needed" if each.pairs_needed else "no forecast"
        if each.p_difference <= 1 - each.confidence and each.explainable > NOTABLE:
            more = f"other programs may explain up to {1 + each.explainable:.2f}"
        return f"{each.metric}: inconclusive: {a} / {b} is {each.ratio:.3f} ({interval}); {more}"
    fast, slow, ratio = (a, b, each.ratio) if each.answer == "a_faster" else (b, a, 1 / each.ratio)
    return f"{each.metric}: {fast} is faster than {slow}, {ratio:.3f} times ({a} / {b}: {interval})"


def sensitivity(result: Comparison) -> str | None:
    """Return what the comparison could have seen."""
    first = result.decisions[0]
    if first.smallest_detectable is None:
        return None
    return (
        f"a difference of {first.smallest_detectable:.1%} in {first.metric} would have been seen in 4 of 5 "
        "comparisons like this"
    )


# -- Markdown ---------------------------------------------------------------------------------------


def markdown(result: Measurement | Comparison | Incomparable) -> str:
    """Return a result, or why there is none, for a pull request."""
    if isinstance(result, Incomparable):
        lines = ["### Not comparable: no verdict", "", *(f"- {quiet(reason)}" for reason in result.reasons)]
        lines += ["", quiet(result.advice)] if result.advice else []
        lines += ["", *(f"- {quiet(line)}" for line in result.voids)] if result.voids else []
        return "\n".join([*lines, ""])
    if isinstance(result, Comparison):
        a, b = quiet(result.arms[0].name), quiet(", ".join(arm.name for arm in result.arms[1:]))
        lines = [f"### {a} against {b}", "", *_refusal(result.refused)]
        lines += [f"**{quiet(sentence(each, result))}**" + "  " for each in result.decisions]
        lines += [*([seen] if (seen := sensitivity(result)) else []), "", f"A is {a}.", ""]
        lines += markdown_table(COMPARE_HEADINGS, compare_rows(result))
        lines += ["", f"Workload {quiet(describe(result.workload))}.", ""]
        arms, rounds = result.arms, result.rounds
    else:
        lines = [f"### {quiet(result.arm.name)}", "", *_refusal(result.refused)]
        lines += [*markdown_table(BENCH_HEADINGS, bench_rows(result)), ""]
        lines += [f"- {quiet(describe(part.workload))}" for part in result.results] + [""]
        arms, rounds = (result.arm,), tuple(each for part in result.results for each in part.rounds)
    facts = [arm_line(arm, rounds) for arm in arms]
    facts += [machine_line(result), self_test_line(result.self_test), *result.notes, *void_lines(rounds)]
    return "\n".join([*lines, *(f"- {quiet(fact)}" for fact in facts), ""])


def _refusal(reasons: Sequence[str]) -> list[str]:
    """Return why a measurement ended early, before any of its figures."""
    if not reasons:
        return []
    return [
        "**Refused before its end, so there is no verdict:**",
        "",
        *(f"- {quiet(each)}" for each in reasons),
        "",
    ]


def quiet(words: str) -> str:
    """Return what others may have written (a model's name, a line of a log) without Markdown's meaning."""
    flat = "".join(character if character.isprintable() else " " for character in words)
    return re.sub(r"([\\`*<\[|])", r"\\\1", flat)


def machine_line(result: Measurement | Comparison) -> str:
    """Return where it was measured, on one line."""
    where = result.machine
    parts = [where.cpu, f"{where.cores} cores", *where.gpus, f"Linux {where.kernel}"]
    return f"machine: {', '.join(part for part in parts if part)}"


def markdown_table(headings: Sequence[str], rows: Rows) -> list[str]:
    """Return the lines of a table in Markdown."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(map(quiet, cells)) + " |"

    return [line(headings), line(["---"] * len(headings)), *map(line, rows)]


def definitions() -> dict[str, str]:
    """Return every metric's definition."""
    return {name: f"{what} ({unit})" for name, (unit, what, _) in METRICS.items()}
