"""The commands and the options before them. Each command's module is tiny: heavy imports are inside."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli import (
    bench,
    chat,
    check,
    compare,
    convert,
    doctor,
    down,
    engines,
    history,
    logs,
    logs_setup,
    models,
    plan,
    ps,
    pull,
    run,
    schema,
    switch,
    up,
)

app = typer.Typer(
    name="orchestrator",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: it is read by people, pipes and the reference page alike
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

for command in (
    up.up,
    ps.ps,
    logs.logs,
    down.down,
    switch.switch,
    run.run,
    chat.chat,
    plan.plan,
    check.check,
    schema.schema,
    models.models,
    pull.pull,
    bench.bench,
    compare.compare,
    doctor.doctor,
    convert.convert,
):
    app.command()(command)
app.add_typer(engines.app)
app.add_typer(history.app)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        from orchestrator.cli import console

        console.out(f"orchestrator {version('inference-orchestrator')}")
        raise typer.Exit


@app.callback()
def orchestrator(
    log_level: Annotated[
        logs_setup.Level | None, typer.Option(help="What our own log holds at least.")
    ] = None,
    log_format: Annotated[logs_setup.Format | None, typer.Option(help="How its lines are written.")] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Run language models on your own machine: one profile, one API, one yardstick for every engine."""
    del version
    logs_setup.choose(log_level, log_format)
