"""``orchestrator compare``: decide which engine, or which setting, is faster."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from orchestrator.cli import bench as shared
from orchestrator.cli import history, options
from orchestrator.cli.faults import INTERRUPTED, UsageError


def compare(
    subjects: Annotated[
        list[str], typer.Argument(metavar="PROFILE|URL...", help="Profiles, or servers that run already.")
    ],
    backends: Annotated[
        str | None, typer.Option(metavar="NAME,NAME", help="Compare these engines on the profile.")
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B", help="Compare these values of a profile's key. Repeatable."),
    ] = None,
    aa: Annotated[bool, typer.Option("--aa", help="Control: compare the first one with itself.")] = False,
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Declared metric, the first decides. Repeatable."),
    ] = None,
    margin: Annotated[float, typer.Option(help="Differences below this don't matter.")] = 0.03,
    pairs: Annotated[int, typer.Option(min=6, help="Pairs of rounds.")] = 8,
    stop_early: Annotated[
        bool, typer.Option("--stop-early", help="Look for an answer up to three times instead of once.")
    ] = False,
    residency: Annotated[
        str,
        typer.Option(
            metavar="auto|together|alternate", help="Keep the engines resident, or launch them in turns."
        ),
    ] = "auto",
    void_budget: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Pairs that may be repeated.  [default: all]")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="decode, ttft, slots, prefill, mixed, prefix.  [default: decode]"),
    ] = None,
    prompt_tokens: shared.Prompt = None,
    output_tokens: shared.Output = None,
    concurrency: Annotated[int | None, typer.Option(min=1, metavar="N", help="Streams at once.")] = None,
    requests: shared.Requests = None,
    rate: shared.Rate = None,
    prompts: shared.Prompts = None,
    prefix_tokens: shared.Prefix = None,
    seed: shared.Seed = 1,
    sets: options.Set = None,
    api_key_env: shared.KeyVariable = None,
    folder: shared.Folder = None,
    markdown: shared.Markdown = False,
    no_history: shared.NoHistory = False,
    as_json: options.Json = False,
) -> int:
    """Compare engines or settings, with a verdict: a faster, b faster, equivalent, or inconclusive.

    Rounds run in ABBA pairs with the same prompts. Exit code 5 when the arms can't be compared. Ctrl-C or
    SIGTERM keeps what was measured and says what it is worth. `orchestrator history` shows it again.
    """
    from orchestrator import bench as benches
    from orchestrator.bench.gate import short_rounds
    from orchestrator.cli import console, report

    if residency not in ("auto", "together", "alternate"):
        raise UsageError(f"compare: --residency {residency}: must be auto, together or alternate")
    changes: dict[str, Any] = {
        "prompt_tokens": shared.numbers(prompt_tokens, "--prompt-tokens"),
        "output_tokens": shared.numbers(output_tokens, "--output-tokens"),
        "concurrency": concurrency,
        "requests": requests,
        "rate": rate,
        "prompts": prompts,
        "prefix_tokens": prefix_tokens,
    }
    saved = shared.salvage(markdown=markdown, as_json=as_json, no_history=no_history)
    with saved, report.kept(folder), shared.progress(as_json) as tell:
        result = benches.compare(
            *subjects,
            workload=preset,
            changes=changes,
            metrics=tuple(metric or ()),
            margin=margin,
            pairs=pairs,
            backends=tuple(backends.split(",")) if backends else (),
            vary=tuple(vary or ()),
            overrides=tuple(sets or ()),
            control=aa,
            stop_early=stop_early,
            void_budget=void_budget,
            residency=residency,  # type: ignore[arg-type]  # checked above
            key=shared.key_of(api_key_env),
            seed=seed,
            progress=tell,
        )
    try:
        written = shared.show(result, folder, markdown=markdown, as_json=as_json)
    finally:  # a reader that left is no reason to forget it
        if not no_history:
            history.record(result)
    if said := short_rounds(result.rounds, result.workload):
        console.err(console.plain(f"warning: {said}"))
    return INTERRUPTED if result.interrupted else written
