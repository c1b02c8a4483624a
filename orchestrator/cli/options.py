"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli import completion

ProfileFile = Annotated[str, typer.Argument(metavar="PROFILE", help="A profile's YAML file.")]
ProfileFiles = Annotated[
    list[str], typer.Argument(metavar="PROFILE...", help="YAML files, each the wish for one engine.")
]
Backend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        metavar="NAME",
        help="The engine to use instead of the profile's.",
        autocompletion=completion.backends,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a key of the profile, e.g. timeouts.start=60. Repeatable."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
