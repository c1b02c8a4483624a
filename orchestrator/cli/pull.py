"""``orchestrator pull``: a model from the hub, before it is needed, or a newer one."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli import options

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.errors import NotFetched


def pull(
    what: Annotated[
        str,
        typer.Argument(metavar="PROFILE|hf:OWNER/REPO[:QUANT]", help="A profile's file, or a model's name."),
    ],
    backend: options.Backend = None,
    sets: options.Set = None,
) -> None:
    """Fetch a model from Hugging Face, or what is new of it; an interrupted download goes on.

    Prints where it is. What a profile names is fetched in the form that its engine reads.
    """
    from orchestrator import model_hub
    from orchestrator.cli import console

    finds = _named(what) if model_hub.is_reference(what) else _of_profile(what, sets, backend)
    for find in finds:
        console.out(str(got(find)))


def _named(text: str) -> list[Callable[[], Path]]:
    """Return what finds a model that is named: as GGUF, or as safetensors where there is no GGUF."""
    from orchestrator import model_hub
    from orchestrator.errors import UnsupportedModel

    model_hub.refresh(text)

    def find() -> Path:
        try:
            return model_hub.gguf(text)
        except UnsupportedModel as fault:
            if model_hub.Reference.parse(text).quant:
                raise
            with contextlib.suppress(UnsupportedModel):
                return model_hub.snapshot(text)
            raise fault from None

    return [find]


def _of_profile(path: str, sets: list[str] | None, backend: str | None) -> list[Callable[[], Path]]:
    """Return what finds the parts of a profile's model."""
    from orchestrator import model_files, model_hub
    from orchestrator.cli import loading

    wish = loading.load_all([path], sets, backend)[0]
    model = wish.model
    for text in {model.gguf, model.hf, model.mmproj}:
        if text is not None and model_hub.is_reference(text):
            model_hub.refresh(text)
    engine = loading.make_backend(wish)
    finds: list[Callable[[], Path]] = [lambda: engine.find_model(wish, os.environ)[0]]
    if model.mmproj:
        finds.append(lambda: model_files.projector(model, directory=wish.directory))  # type: ignore[arg-type,return-value]
    return finds


def got(find: Callable[[], Path]) -> Path:
    """Find a part, fetching or making what is missing of it."""
    from orchestrator.errors import NotFetched

    while True:
        try:
            return find()
        except NotFetched as missing:
            with _shown(missing) as progress:
                missing.download.fetch(progress)


@contextlib.contextmanager
def _shown(missing: NotFetched) -> Iterator[Callable[[int, int], None]]:
    """Show how far a download or a conversion has come: a bar on a terminal, else that it has begun."""
    from orchestrator.cli import console

    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        console.err(console.printable(f"{missing.download.doing} {missing.download}"))
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(
        *columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as rows:
        task = rows.add_task(console.printable(missing.path.name), total=None)
        yield lambda done, total: rows.update(task, completed=done, total=total)
