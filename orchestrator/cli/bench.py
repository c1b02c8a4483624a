"""``orchestrator bench``: measure one engine."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli import against, history, options
from orchestrator.cli.faults import INTERRUPTED, UsageError
from orchestrator.errors import OrchestratorError

if TYPE_CHECKING:
    from orchestrator.bench import Comparison, Measurement
    from orchestrator.bench.differences import Area
    from orchestrator.bench.history import Report
    from orchestrator.bench.session import Step

Numbers = "N[,N...]"
Prompt = Annotated[
    str | None,
    typer.Option("--prompt-tokens", metavar=Numbers, help="Prompt lengths, taken in turn."),
]
Output = Annotated[
    str | None, typer.Option("--output-tokens", metavar=Numbers, help="Output lengths, taken in turn.")
]
Requests = Annotated[int | None, typer.Option(min=1, metavar="N", help="Requests in each round.")]
Rate = Annotated[
    float | None,
    typer.Option(min=0, metavar="PER_S", help="Open loop: Poisson arrivals at this rate; 0 is closed."),
]
Prompts = Annotated[
    str | None, typer.Option(metavar="FILE", help="Prompts from a file: JSONL, or ShareGPT's JSON.")
]
Prefix = Annotated[
    int | None,
    typer.Option(
        "--prefix-tokens", min=0, metavar="N", help="Let all prompts share N tokens: measures the cache."
    ),
]
Seed = Annotated[int, typer.Option(help="Of prompts and arrivals.")]
Folder = Annotated[
    Path | None, typer.Option("--output", metavar="DIR", help="Write report.html, .json and .md there.")
]
NoHistory = Annotated[bool, typer.Option("--no-history", help="Don't keep it for `orchestrator history`.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown for a pull request.")]
KeyVariable = Annotated[
    str | None, typer.Option(metavar="VAR", help="Variable with the key of a server that runs already.")
]


def bench(
    subject: Annotated[
        str | None, typer.Argument(metavar="[PROFILE|URL]", help="A profile, or a server that runs already.")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME...]",
            help="decode, ttft, slots, prefill, mixed, prefix.  [default: decode,ttft,slots]",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each workload; 6 for an interval.")] = 6,
    prompt_tokens: Prompt = None,
    output_tokens: Output = None,
    concurrency: Annotated[
        str | None, typer.Option(metavar=Numbers, help="Streams at once; each number is a workload.")
    ] = None,
    requests: Requests = None,
    rate: Rate = None,
    prompts: Prompts = None,
    prefix_tokens: Prefix = None,
    seed: Seed = 1,
    backend: options.Backend = None,
    sets: options.Set = None,
    api_key_env: KeyVariable = None,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Measure the client itself at known rates, and leave.")
    ] = False,
    folder: Folder = None,
    markdown: Markdown = False,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Compare with an earlier run: an id, latest (of this profile), or a report's file.",
            autocompletion=against.complete,
        ),
    ] = None,
    fail_if_slower: against.FailIfSlower = None,
    fail_if_inconclusive: against.FailIfInconclusive = False,
    allow: against.Allow = None,
    no_history: NoHistory = False,
    as_json: options.Json = False,
) -> int:
    """Measure an engine: decode and prefill rates, time to the first token, throughput at several streams.

    Without options it runs the three classics: 128 tokens of decode, time to the first token, and 1, 2, 4,
    ... streams up to the slots there are. Ctrl-C or SIGTERM keeps what was measured, and `orchestrator
    history` shows it again.
    """
    if self_test:
        return _self_test(as_json)
    if subject is None:
        raise UsageError("bench: PROFILE or URL is missing", advice="orchestrator bench --help")
    limit, allowed = against.share(fail_if_slower, fail_if_inconclusive), against.areas(allow)
    if baseline is None and (limit is not None or allowed):
        raise UsageError("bench: --fail-if-slower and --allow need --baseline")
    from orchestrator import bench as benches
    from orchestrator.bench.arms import own_name
    from orchestrator.bench.history import History, Report
    from orchestrator.bench.workload import SOURCE
    from orchestrator.cli import report

    # before anything is measured: a mistyped name should cost no minutes
    earlier = History().open(baseline, kind="bench", profile=own_name(subject)) if baseline else None
    changes = {
        "prompt_tokens": numbers(prompt_tokens, "--prompt-tokens"),
        "output_tokens": numbers(output_tokens, "--output-tokens"),
        "requests": requests,
        "rate": rate,
        "prompts": prompts,
        "prefix_tokens": prefix_tokens,
    }
    saved = salvage(markdown=markdown, as_json=as_json, no_history=no_history)
    with saved, report.kept(folder), progress(as_json) as tell:
        result = benches.measure(
            subject,
            preset.split(",") if preset else SOURCE,
            changes=changes,
            streams=numbers(concurrency, "--concurrency") or (),
            rounds=rounds,
            backend=backend,
            overrides=tuple(sets or ()),
            key=key_of(api_key_env),
            seed=seed,
            progress=tell,
        )
    try:
        written = show(result, folder, markdown=markdown, as_json=as_json)
    finally:  # a reader that left is no reason to forget it
        number = None if no_history else history.record(result)
    code = INTERRUPTED if result.interrupted else written
    if earlier is None:
        return code
    return _judge(earlier, Report(result, id=number), limit, fail_if_inconclusive, allowed, as_json) or code


def _judge(
    earlier: Report,
    now: Report,
    limit: float | None,
    fail_if_inconclusive: bool,
    allow: tuple[Area, ...],
    as_json: bool,
) -> int:
    """Say what became of it since an earlier run; stdout holds one document if that was asked for."""
    from orchestrator.bench.against import against as compared
    from orchestrator.cli import console, faults
    from orchestrator.errors import Incomparable

    try:
        found = compared(earlier, now, limit=limit, allow=allow, context="bench")
    except Incomparable as error:  # the run itself has been printed already
        console.err(faults.render(faults.describe(error)))
        return error.exit_code
    words = against.plain(found)
    if as_json:
        console.err(words)
    else:
        console.out(f"\n{words}")
    return against.verdict(found, fail_if_inconclusive)


def _self_test(as_json: bool) -> int:
    from orchestrator.bench import text
    from orchestrator.bench.selftest import self_test
    from orchestrator.bench.session import run
    from orchestrator.cli import console

    tested = run(self_test())
    if as_json:
        console.document(tested)
    else:
        console.out("\n".join([text.self_test_line(tested), *tested.reasons]))
    return 0 if tested.ok else 5


# -- shared with compare ----------------------------------------------------------------------------


def numbers(given: str | None, option: str) -> tuple[int, ...] | None:
    """Read ``1,2,4``.

    Raises:
        UsageError: it is something else.

    """
    if given is None:
        return None
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isdecimal() and 0 < int(part) < 10**8 for part in parts):
        raise UsageError(f"{option}: must be numbers above 0, with commas between them: {given}")
    return tuple(map(int, parts))


def key_of(variable: str | None) -> str | None:
    """Return the key in a variable.

    Raises:
        UsageError: it is not set.

    """
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise UsageError(f"--api-key-env: {variable} is not set")
    return os.environ[variable]


@contextlib.contextmanager
def progress(as_json: bool) -> Iterator[Callable[[Step], None]]:
    """Show how far it is: a bar on a terminal, lines elsewhere; nothing of it on stdout."""
    from orchestrator.cli import console, logs_setup

    logs_setup.configure()
    try:
        with _shown(as_json) as show:
            yield show
    except KeyboardInterrupt:  # later on, what was measured is the result
        console.err("interrupted before anything was measured")
        raise


@contextlib.contextmanager
def _shown(as_json: bool) -> Iterator[Callable[[Step], None]]:
    from orchestrator.cli import console

    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda step: None if as_json else console.err(_line(step))
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[left]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("self-test", total=None, left="")
        yield lambda step: bar.update(
            task, description=step.text, completed=step.done, total=step.total or None, left=_left(step)
        )


def _left(step: Step) -> str:
    from orchestrator.cli import console

    return f"about {console.duration(step.left_s)} left" if step.left_s is not None else ""


def _line(step: Step) -> str:
    left = _left(step)
    far = f"{step.done}/{step.total} " if step.total else ""
    return f"{far}{step.text}" + (f", {left}" if left else "")


@contextlib.contextmanager
def salvage(*, markdown: bool, as_json: bool, no_history: bool) -> Iterator[None]:
    """Of a fault that ends a measurement half-way, show and keep what was measured; the fault goes on.

    With ``--json`` it is shown in the fault's own document, for there is only one.
    """
    from orchestrator.bench import text
    from orchestrator.cli import console, report

    try:
        yield
    except OrchestratorError as fault:
        if fault.measured is not None:
            try:
                if not as_json:
                    console.out(text.markdown(fault.measured) if markdown else report.plain(fault.measured))
            finally:  # a reader that left is no reason to forget it
                if not no_history:
                    history.record(fault.measured)
        raise


def show(result: Measurement | Comparison, folder: Path | None, *, markdown: bool, as_json: bool) -> int:
    """Write a result where it was asked for, and print it; return the exit code."""
    from orchestrator.bench import text
    from orchestrator.cli import console, report

    code = 0 if folder is None else report.write(folder, result)
    if as_json:
        console.document(result)
    else:
        console.out(text.markdown(result) if markdown else report.plain(result))
    return code
