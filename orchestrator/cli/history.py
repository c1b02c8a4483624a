"""``orchestrator history``: what was measured before."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from orchestrator.cli import against, options

if TYPE_CHECKING:
    from orchestrator.bench import Comparison, Measurement

app = typer.Typer(name="history", rich_markup_mode=None, invoke_without_command=True)

Kind = Literal["bench", "compare"]
Profile = Annotated[
    str, typer.Option(metavar="TEXT", show_default=False, help="Only of profiles: name or file.")
]
Model = Annotated[
    str,
    typer.Option(metavar="TEXT", show_default=False, help="Only of models: name, file or quantisation."),
]
Backend = Annotated[str, typer.Option(metavar="TEXT", show_default=False, help="Only of these engines.")]
OfKind = Annotated[Kind | None, typer.Option("--kind", help="Only what this command measured.")]
Since = Annotated[
    str | None, typer.Option(metavar="WHEN", help="Only since then: 2026-11-30, 2026-11-30T18:00, 7d, 12h.")
]
Limit = Annotated[int | None, typer.Option(min=1, metavar="N", help="The newest N only.")]


@app.callback(
    epilog=against.examples(
        "history --profile gemma --since 7d",
        "history show latest",
        "history compare 12 latest --fail-if-slower 5%",
    )
)
def history(
    context: typer.Context,
    profile: Profile = "",
    model: Model = "",
    backend: Backend = "",
    kind: OfKind = None,
    since: Since = None,
    limit: Limit = None,
    as_json: options.Json = False,
) -> None:
    """List what bench and compare have measured, newest first; show it again; compare with an earlier run.

    A run is named by its id, or as latest, latest~1, ... for the newest and those before it.
    """
    if context.invoked_subcommand is None:
        _list(profile, model, backend, kind, since, limit, as_json)
    elif profile or model or backend or kind or since or limit or as_json:
        from orchestrator.cli.faults import UsageError

        raise UsageError(f"history: options go behind `{context.invoked_subcommand}`")


@app.command("list")
def list_(
    profile: Profile = "",
    model: Model = "",
    backend: Backend = "",
    kind: OfKind = None,
    since: Since = None,
    limit: Limit = None,
    as_json: options.Json = False,
) -> None:
    """List runs, newest first; the same as `orchestrator history`."""
    _list(profile, model, backend, kind, since, limit, as_json)


def _list(
    profile: str,
    model: str,
    backend: str,
    kind: str | None,
    since: str | None,
    limit: int | None,
    as_json: bool,
) -> None:
    from orchestrator.bench import history_text
    from orchestrator.bench.history import History, Listing
    from orchestrator.cli import console

    kept = History()
    found = kept.entries(
        profile=profile, model=model, backend=backend, kind=kind or "", since=_since(since), limit=limit
    )
    if as_json:
        console.document(Listing(path=str(kept.path), runs=found))
    elif found:
        rows = [[console.printable(cell) for cell in row] for row in history_text.list_rows(found)]
        console.out(console.table(rows, history_text.LIST_HEADINGS))
    else:
        console.err("history: no such run yet; `orchestrator bench PROFILE` makes one")


@app.command(
    epilog=against.examples(
        "history show",
        "history show 12 --markdown",
        "history show 12 --json > report.json",
        "history show 12 --html report.html",
    )
)
def show(
    run: against.Run = "latest",
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown for a pull request.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one self-contained page with plots there.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show a run again, as it was printed when it was made."""
    from orchestrator.bench import text
    from orchestrator.bench.history import History
    from orchestrator.cli import console, report
    from orchestrator.cli.faults import UsageError

    if markdown and as_json:
        raise UsageError("history show: --markdown and --json exclude each other")
    result = History().open(run).result
    if html is not None:
        from orchestrator.bench.html import page

        try:
            html.write_text(page(result), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"history show: {html} can't be written: {error.strerror}") from error
    if as_json:
        console.document(result)
    elif markdown:
        console.out(text.markdown(result))
    elif html is None:
        console.out(report.plain(result))
    else:
        console.err(f"wrote {html}")


app.command("compare", epilog=against.EXAMPLES)(against.compare)


@app.command(
    "import", epilog=against.examples("history import out/report.json", "history import other-machine/*.json")
)
def import_(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Reports: report.json of --output.")],
) -> None:
    """Take reports from files into the history, of another machine for example; prints their ids."""
    from orchestrator.bench.frames import from_json
    from orchestrator.bench.history import History, read
    from orchestrator.cli import console

    results = [from_json(read(str(file))) for file in files]  # all of them, before any is kept
    kept = History()
    for file, result in zip(files, results, strict=True):
        number, new = kept.record(result)
        console.out(str(number))
        if not new:
            console.err(f"{file} is run {number} already")


@app.command(epilog=against.examples("history remove 12 13", "history remove latest"))
def remove(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...", help="Ids, or latest, latest~1, ...", autocompletion=against.complete
        ),
    ],
) -> None:
    """Forget runs for good."""
    from orchestrator.bench.history import History
    from orchestrator.cli import console

    kept = History()
    numbers = [kept.resolve(run) for run in runs]
    kept.remove(numbers)
    console.err(f"removed {', '.join(map(str, dict.fromkeys(numbers)))}")


def _since(given: str | None) -> float | None:
    """Return the moment that ``--since`` means.

    Raises:
        UsageError: it means none.
    """
    import time
    from datetime import datetime

    from orchestrator.cli.faults import UsageError

    if given is None:
        return None
    if span := re.fullmatch(r"(\d{1,6})\s*([mhdw])", given):
        return time.time() - int(span[1]) * {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}[span[2]]
    with contextlib.suppress(ValueError, OverflowError, OSError):
        return datetime.fromisoformat(given).timestamp()
    raise UsageError(f"history: --since {given}: must be a date, or an age such as 7d, 12h or 30m")


def record(result: Measurement | Comparison) -> int | None:
    """Keep a result that has been shown already; what keeps it from being kept is told, and no more.

    One that was interrupted before anything was measured is not kept.
    """
    from orchestrator.bench.frames import rounds_of
    from orchestrator.bench.history import History
    from orchestrator.cli import console
    from orchestrator.errors import OrchestratorError

    if all(each.void for _, each in rounds_of(result)):
        return None
    try:
        number, _ = History().record(result)
    except OrchestratorError as error:
        console.err(f"warning: this run is not in the history: {error.message}")
        if error.advice:
            console.err(f"advice: {error.advice}")
        return None
    console.err(f"kept as run {number}: orchestrator history show {number}")
    return number
