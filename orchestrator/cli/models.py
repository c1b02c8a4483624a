"""``orchestrator models``: which models there are, what they are, and what can serve them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from orchestrator.cli import completion, options

if TYPE_CHECKING:
    from orchestrator.cli import documents
    from orchestrator.inventory import Entry, Inventory

SortBy = Literal["path", "name", "architecture", "parameters", "size", "context", "bits"]


def models(
    folders: Annotated[
        list[str] | None, typer.Argument(metavar="[DIR...]", help="Where to look; default: the usual places.")
    ] = None,
    words: Annotated[
        list[str] | None,
        typer.Option("--match", metavar="TEXT", help="Only what has it in path, name or kind. Repeatable."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Only what this engine can serve: llama-server, vllm, ...",
            autocompletion=completion.backends,
        ),
    ] = None,
    sort: Annotated[SortBy, typer.Option(help="By what to sort.")] = "path",
    reverse: Annotated[bool, typer.Option("--reverse", help="The largest or last first.")] = False,
    show_all: Annotated[
        bool, typer.Option("--all", help="Projectors, adapters and other parts too, not models alone.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Read everything anew, whatever is known.")] = False,
    as_json: options.Json = False,
) -> None:
    """List the models in some folders, below them, and where models usually are."""
    from orchestrator import inventory
    from orchestrator.cli import console
    from orchestrator.cli.faults import UsageError

    places = tuple(Path(folder).expanduser() for folder in folders or ()) or inventory.places()
    if missing := [str(place) for place in places if folders and not place.exists()]:
        raise UsageError(f"models: no such folder: {', '.join(missing)}")
    _check(engine)
    found = inventory.scan(places, cache=None if fresh else inventory.cache_file())
    kinds = () if show_all or as_json else ("model", "broken")
    shown = inventory.select(
        found.entries, sort=sort, reverse=reverse, words=words or (), kinds=kinds, engine=engine
    )
    if as_json:
        console.document(_document(found, shown))
        return
    whole = [each for each in shown if each.fault is None]
    if whole:
        console.out(_table(whole))
    elif places:
        console.err(f"models: none found in {', '.join(map(str, places))}; `orchestrator pull` fetches one")
    else:
        console.err("models: none of the usual places is there; name a folder, or set ROCM_MODEL_DIR")
    for each in shown:
        if each.fault:
            console.err(f"broken: {console.printable(each.path)}: {console.printable(each.fault)}")
    for trouble in found.troubles:
        console.err(f"not searched: {console.printable(trouble.path)}: {console.printable(trouble.reason)}")


def _check(engine: str | None) -> None:
    """Refuse an engine that is not installed; a family's name is one too."""
    from orchestrator.discovery import family, installed

    names = sorted({*installed(), *map(family, installed())})
    if engine is not None and engine not in names:
        from orchestrator.cli.faults import UsageError
        from orchestrator.profile_faults import did_you_mean

        hint = did_you_mean(engine, names) or f"; there are {', '.join(names)}"
        raise UsageError(f"models: no engine named {engine!r} is installed{hint}")


def _document(found: Inventory, shown: tuple[Entry, ...]) -> documents.Models:
    from dataclasses import asdict

    from orchestrator.cli import documents

    return documents.Models(
        places=[str(place) for place in found.places],
        models=[documents.FoundModel(**_plain(asdict(each))) for each in shown],
        troubles=[documents.Trouble(path=each.path, reason=each.reason) for each in found.troubles],
    )


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    del fields["width"]
    bits = fields["bits_per_weight"]
    return {
        **fields,
        "bits_per_weight": None if bits is None else round(bits, 2),
        "engines": list(fields["engines"]),
        "mmproj": list(fields["mmproj"]),
    }


def _table(entries: list[Entry]) -> str:
    from orchestrator.cli import console

    home = os.path.expanduser("~") + os.sep  # noqa: PTH111  # text, to be cut off text
    parts = any(each.kind != "model" for each in entries)
    rows = [
        [
            _cut(each.name or "-", 40),
            *([each.kind] if parts else []),
            each.architecture or "-",
            _count(each.parameters),
            each.quantisation or "-",
            "-" if each.bits_per_weight is None else f"{each.bits_per_weight:.2f}",
            console.size(each.size),
            "-" if each.context is None else str(each.context),
            "yes" if each.chat_template else "no",
            (", ".join(each.engines) or "-") + (" +mmproj" if each.mmproj else ""),
            f"~/{each.path[len(home) :]}" if each.path.startswith(home) else each.path,
        ]
        for each in entries
    ]
    headings = ["NAME", *(["KIND"] if parts else []), "ARCH", "PARAMS", "QUANT", "BITS", "SIZE", "CONTEXT"]
    return console.table(rows, [*headings, "TEMPLATE", "ENGINE", "PATH"])


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _count(parameters: int | None) -> str:
    if parameters is None:
        return "-"
    for unit, factor in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if parameters >= factor:
            return f"{parameters / factor:.{1 if parameters < 100 * factor else 0}f}{unit}"
    return str(parameters)
