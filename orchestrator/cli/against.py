"""``orchestrator history compare``, and ``bench --baseline``: a run against an earlier one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli import options

if TYPE_CHECKING:
    from orchestrator.bench.against import Against
    from orchestrator.bench.differences import Area

SLOWER = 1  # exit code: a check that failed, as for diff and grep


def examples(*lines: str) -> str:
    """Return what stands below a command's help; its lines are kept as they are."""
    return "\b\nExamples:\n" + "\n".join(f"  orchestrator {line}" for line in lines)


def complete(incomplete: str) -> list[str]:
    """Return the runs that a shell may offer; none when the history can't be read."""
    from orchestrator.bench.history import History
    from orchestrator.errors import OrchestratorError

    try:
        known = [str(number) for number in History().ids()]
    except OrchestratorError:
        return []
    return [name for name in ("latest", "latest~1", *known) if name.startswith(incomplete)]


Run = Annotated[
    str,
    typer.Argument(
        metavar="[RUN]",
        help="An id, latest, latest~1, ..., or a report's JSON file.",
        autocompletion=complete,
    ),
]
FailIfSlower = Annotated[
    str | None,
    typer.Option(
        metavar="SHARE", help="Exit with 1 when it is shown to be slower by more than this: 5% or 0.05."
    ),
]
FailIfInconclusive = Annotated[
    bool,
    typer.Option(
        "--fail-if-inconclusive", help="And when it is neither shown nor ruled out that it is so much slower."
    ),
]
Allow = Annotated[
    list[str] | None,
    typer.Option(metavar="machine|engine|model|workload", help="Answer although this differs. Repeatable."),
]

EXAMPLES = examples(
    "history compare 12 latest",
    "history compare main.json latest --fail-if-slower 5%",
    "history compare 12 14 --allow engine --metric ttft_s",
)


def compare(
    a: Annotated[
        str,
        typer.Argument(
            metavar="[A]",
            help="The earlier run: an id, latest, latest~1, ..., or a report's JSON file.",
            autocompletion=complete,
        ),
    ] = "latest~1",
    b: Annotated[
        str, typer.Argument(metavar="[B]", help="The run that may be slower.", autocompletion=complete)
    ] = "latest",
    metric: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Declared metric, for every workload. Repeatable.  [default: each one's own]"
        ),
    ] = None,
    margin: Annotated[float, typer.Option(help="Differences below this don't matter.")] = 0.03,
    fail_if_slower: FailIfSlower = None,
    fail_if_inconclusive: FailIfInconclusive = False,
    allow: Allow = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown for a pull request.")] = False,
    as_json: options.Json = False,
) -> int:
    """Compare a run with an earlier one: slower, faster, equivalent, or inconclusive.

    Two runs are no ABBA pairs: what changed on the machine in between counts as a difference. `orchestrator
    compare` is more exact wherever both sides can run now. Exit code 1 when it is slower than allowed, 5 when
    machine, engine, model or workload differ and that was not allowed.
    """
    from orchestrator.bench import against, history_text
    from orchestrator.bench.history import History
    from orchestrator.cli import console
    from orchestrator.cli.faults import UsageError

    limit = share(fail_if_slower, fail_if_inconclusive)
    if markdown and as_json:
        raise UsageError("history compare: --markdown and --json exclude each other")
    kept = History()
    found = against.against(
        kept.open(a),
        kept.open(b),
        metrics=tuple(metric or ()),
        margin=margin,
        limit=limit,
        allow=areas(allow),
    )
    if as_json:
        console.document(found)
    elif markdown:
        console.out(history_text.markdown(found))
    else:
        console.out(plain(found))
    return verdict(found, fail_if_inconclusive)


def plain(found: Against) -> str:
    """Return it as a person reads it."""
    from orchestrator.bench import history_text
    from orchestrator.cli import console

    lines = [
        history_text.side_line("A", found.a),
        history_text.side_line("B", found.b),
        console.table(history_text.rows(found), history_text.HEADINGS),
        "",
        *history_text.answer_lines(found),
        "",
        *history_text.fact_lines(found),
    ]
    return "\n".join(lines)


def verdict(found: Against, fail_if_inconclusive: bool) -> int:
    """Return the exit code."""
    fails = {"yes", "unknown"} if fail_if_inconclusive else {"yes"}
    return SLOWER if found.slower in fails else 0


def areas(given: list[str] | None) -> tuple[Area, ...]:
    """Read what may differ.

    Raises:
        UsageError: there is no such area.
    """
    from orchestrator.bench.differences import AREAS
    from orchestrator.cli.faults import UsageError

    if unknown := set(given or ()) - set(AREAS):
        raise UsageError(f"--allow {unknown.pop()}: must be one of {', '.join(AREAS)}")
    return tuple(area for area in AREAS if area in (given or ()))


def share(given: str | None, needed: bool = False) -> float | None:
    """Read ``5%`` or ``0.05``.

    Raises:
        UsageError: it is something else, or is missing though `needed`.
    """
    from orchestrator.cli.faults import UsageError

    if given is None:
        if needed:
            raise UsageError("--fail-if-inconclusive: needs --fail-if-slower")
        return None
    found = re.fullmatch(r"\s*(\d{1,3}(?:\.\d{1,6})?|\.\d{1,6})\s*(%?)\s*", given)
    value = float(found[1]) / (100 if found[2] else 1) if found else 0.0
    if not 0 < value < 1:
        raise UsageError(f"--fail-if-slower: must be a share such as 5% or 0.05: {given}")
    return value
