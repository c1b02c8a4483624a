"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli import completion

PORT = 8080  # where `up` listens unless told otherwise

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

MaxTokens = Annotated[int | None, typer.Option(min=1, metavar="N", help="Tokens at most.")]
Temperature = Annotated[float | None, typer.Option(min=0, help="0 takes the likeliest token always.")]
TopK = Annotated[int | None, typer.Option(min=0, help="Choose among the k likeliest.")]
TopP = Annotated[float | None, typer.Option(min=0, max=1, help="Choose among the likeliest up to this sum.")]
MinP = Annotated[
    float | None, typer.Option(min=0, max=1, help="Drop those below this share of the likeliest.")
]
Seed = Annotated[int | None, typer.Option(min=0, help="The same seed, the same choices.")]
Stop = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="Text that ends the answer. Repeatable.")
]
RepeatPenalty = Annotated[float | None, typer.Option(min=0, help="Above 1 makes repeats rarer.")]
