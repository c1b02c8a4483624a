"""The history in words: rows for a list, and a run against an earlier one in sentences and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path

from orchestrator.bench.against import Against, Change, Side
from orchestrator.bench.differences import words
from orchestrator.bench.history import Entry, EntryArm
from orchestrator.bench.text import Rows, figure, markdown_table, quiet
from orchestrator.bench.values import METRICS

LIST_HEADINGS = ["ID", "STARTED", "KIND", "PROFILE", "ENGINE", "MODEL", "WORKLOAD", "RESULT"]
HEADINGS = ["WORKLOAD", "METRIC", "A", "B", "A / B", "INTERVAL", "ANSWER"]


def moment(seconds: float) -> str:
    """Return a moment in local time, to the minute."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")


def list_rows(entries: Sequence[Entry]) -> Rows:
    """Return a row for each run."""
    return [
        [
            str(each.id),
            moment(each.started_at),
            each.kind,
            _few(arm.name for arm in each.arms),
            _few(dict.fromkeys(" ".join(filter(None, (arm.backend, arm.version))) for arm in each.arms)),
            _few(dict.fromkeys(" ".join(filter(None, (_model(arm), arm.quantisation))) for arm in each.arms)),
            _few(each.workloads),
            _result(each),
        ]
        for each in entries
    ]


def _model(arm: EntryArm) -> str | None:
    """Return the model's file, which says more than the id under which an engine of ours serves it."""
    return Path(arm.model_path).stem if arm.model_path else arm.model


def _few(names: Iterable[str], most: int = 3) -> str:
    found = [name or "-" for name in names]
    return ", ".join(found[:most]) + (", ..." if len(found) > most else "")


def _result(each: Entry) -> str:
    unit = METRICS[each.metric][0] if each.metric in METRICS else ""
    if each.ratio is not None:
        said = f"{(each.verdict or '').replace('_', ' ')} ({each.ratio:.3f})"
    else:
        said = figure(each.value, unit)
    return f"{said}, interrupted" if each.interrupted else said


# -- one run against another --------------------------------------------------------------------------


def called(side: Side) -> str:
    """Return what a run is called in a sentence."""
    return f"run {side.id}" if side.id is not None else side.path or "this run"


def side_line(letter: str, side: Side) -> str:
    """Return what a run is, on one line."""
    return f"{letter} is {called(side)}: {side.kind} of {moment(side.started_at)}, {', '.join(side.arms)}"


def rows(found: Against) -> Rows:
    """Return the figures, those with an answer first."""
    several = len({each.arm for each in found.changes}) > 1
    return [
        [
            f"{each.workload} ({each.arm})" if several else each.workload,
            each.metric,
            figure(each.a, each.unit),
            figure(each.b, each.unit),
            f"{each.ratio:.3f}",
            "-" if each.low is None or each.high is None else f"{each.low:.3f} to {each.high:.3f}",
            each.answer.replace("_", " ") if each.primary else "(not declared)",
        ]
        for each in (*found.changes, *found.others)
    ]


def sentence(each: Change, found: Against) -> str:
    """Return an answer in a sentence."""
    a, b = called(found.a), called(found.b)
    subject = f"{each.workload}, {each.metric}"
    size = f"{each.rounds_a} and {each.rounds_b} rounds"
    if each.low is None or each.high is None:
        interval = size
    else:
        interval = f"{each.confidence:.1%} interval {each.low:.3f} to {each.high:.3f}, {size}"
    if each.answer == "equivalent":
        return (
            f"{subject}: {a} and {b} are equivalent within {found.margin:.0%} ({each.ratio:.3f}, {interval})"
        )
    if each.answer == "inconclusive":
        seen = each.smallest_detectable
        more = f"; a difference of {seen:.1%} would have been seen in 4 of 5 cases" if seen else ""
        if each.low is not None and each.high is not None and not each.low <= 1 <= each.high:
            more = f"; other programs may explain up to {1 + each.explainable:.2f}"
        return f"{subject}: inconclusive: {a} / {b} is {each.ratio:.3f} ({interval}){more}"
    worse = each.answer == "a_faster"
    times = each.ratio if worse else 1 / each.ratio
    return f"{subject}: {b} is {'slower' if worse else 'faster'} than {a}, {times:.3f} times ({interval})"


def limit_line(found: Against) -> str | None:
    """Return what became of the limit on slowness, None when there was none."""
    if found.limit is None:
        return None
    slower = [f"{each.workload} ({each.metric})" for each in found.changes if each.slower == "yes"]
    limit = f"{found.limit:.3g}" if found.limit < 0.001 else f"{found.limit * 100:.3g}%"
    if slower:
        return f"slower beyond {limit}: {', '.join(slower)}"
    if found.slower == "no":
        return f"not slower beyond {limit}"
    open_ = [f"{each.workload} ({each.metric})" for each in found.changes if each.slower == "unknown"]
    return f"inconclusive: slower beyond {limit} is neither shown nor ruled out: {', '.join(open_)}"


def fact_lines(found: Against) -> list[str]:
    """Return what differs, and what a careful reader should know."""
    return [
        *(f"differs: {words(each)}" for each in found.differences),
        *(f"note: {note}" for note in found.notes),
    ]


def answer_lines(found: Against) -> list[str]:
    """Return the answers in sentences, and what became of the limit."""
    said = [sentence(each, found) for each in found.changes]
    return said + [line for line in [limit_line(found)] if line]


def markdown(found: Against) -> str:
    """Return it for a pull request."""
    facts = (side_line("A", found.a), side_line("B", found.b), *fact_lines(found))
    return "\n".join(
        [
            f"### {quiet(called(found.b))} against {quiet(called(found.a))}",
            "",
            *(f"**{quiet(said)}**  " for said in answer_lines(found)),
            "",
            *markdown_table(HEADINGS, rows(found)),
            "",
            *(f"- {quiet(fact)}" for fact in facts),
            "",
        ]
    )
