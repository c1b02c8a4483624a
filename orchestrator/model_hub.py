"""Models on the Hugging Face hub: ``hf:OWNER/REPO[:QUANT]`` to what is on this machine, or what gets it.

    model_hub_choice    the files of a repository -> those that are meant
    model_hub_store     where they are on this machine
    model_hub_fetch     the hub: what a repository holds, and getting files from it

What is here is used as it is, without asking the hub, so that a model starts as well without a network;
`refresh` looks for a newer one. Nothing is fetched unasked: what is missing is raised as `NotFetched`, with
the `Download` that gets it. Only what talks to the hub imports ``huggingface_hub``.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator import model_hub_choice as choice
from orchestrator import model_hub_fetch
from orchestrator.errors import ModelError, NotFetched, UnsupportedModel
from orchestrator.model_hub_choice import File, Listing
from orchestrator.model_hub_faults import HubUnreachable
from orchestrator.model_hub_fetch import Download
from orchestrator.model_hub_store import Hub

__all__ = ["Download", "Reference", "gguf", "is_reference", "projector", "refresh", "snapshot"]

PREFIX = "hf:"
FORM = "hf:OWNER/REPO or hf:OWNER/REPO:QUANT"

_NAME = r"[A-Za-z0-9](?:[\w.-]{0,94}[\w])?"
_REFERENCE = re.compile(rf"hf:(?P<repo>{_NAME}/{_NAME})(?::(?P<quant>[\w./-]+))?", re.ASCII)

Choose = Callable[[Listing], tuple[File, ...]]


@dataclass(frozen=True, slots=True)
class Reference:
    """What a profile names.

    Attributes:
        repo: ``OWNER/REPO``.
        quant: a quantisation, or a file's name; None leaves it to `model_hub_choice.ORDER`.

    """

    repo: str
    quant: str | None

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Read ``hf:OWNER/REPO[:QUANT]``.

        Raises:
            ModelError: it is something else.

        """
        found = _REFERENCE.fullmatch(text)
        if found is None or "--" in found["repo"] or ".." in found["repo"]:
            raise ModelError(f"model: {text!r} is not {FORM}")
        return cls(found["repo"], found["quant"])


def is_reference(text: str | None) -> bool:
    """Say whether a text names a model on the hub."""
    return text is not None and text.startswith(PREFIX)


def gguf(text: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the model's GGUF file, the first of its shards.

    Raises:
        NotFetched: it is not here; tells what gets it.
        UnsupportedModel: the repository holds none, or not in this quantisation.
        ModelError: the hub has no such repository, doesn't give it to us, or can't be reached.

    """
    wanted = Reference.parse(text)
    return _here(wanted, environ, lambda listing: choice.gguf(listing, wanted.quant))


def projector(text: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the file of a projector; raises as `gguf` does."""
    wanted = Reference.parse(text)
    return _here(wanted, environ, lambda listing: choice.projector(listing, wanted.quant))


def snapshot(text: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder with the model as safetensors; raises as `gguf` does."""
    wanted = Reference.parse(text)
    if wanted.quant:
        raise UnsupportedModel(
            f"model: {text}: {wanted.quant} chooses among GGUF files, and this engine reads safetensors",
            advice=f"write hf:{wanted.repo}, or each form apart: model: {{gguf: {text}, hf: ...}}",
        )
    return _here(wanted, environ, choice.snapshot, whole=True)


def refresh(text: str, environ: Mapping[str, str] = os.environ) -> None:
    """Ask the hub what a repository holds now; a newer model is what is wanted from then on.

    Raises:
        ModelError: the hub has no such repository, doesn't give it to us, or can't be reached.

    """
    hub, repo = Hub.of(environ), Reference.parse(text).repo
    hub.store(repo).remember(model_hub_fetch.listing(hub, repo))


def _here(wanted: Reference, environ: Mapping[str, str], choose: Choose, *, whole: bool = False) -> Path:
    """Return the first of the chosen files, or the folder they are in.

    What is known is enough when all of them are here. Else the hub is asked, and if that can't be done,
    what another tool has left in the cache must do.
    """
    hub = Hub.of(environ)
    store = hub.store(wanted.repo)

    def place(listing: Listing, files: tuple[File, ...]) -> Path:
        return store.place(listing, None if whole else files[0])

    def complete(listing: Listing | None) -> Path | None:
        with contextlib.suppress(ModelError):  # by now the hub may have what this list lacks
            if listing is not None and not store.missing(listing, files := choose(listing)):
                return place(listing, files)
        return None

    if found := complete(store.recall()):
        return found
    try:
        listing = model_hub_fetch.listing(hub, wanted.repo)
    except HubUnreachable:
        if found := complete(store.found()):
            return found
        raise
    store.remember(listing)
    files = choose(listing)
    missing = store.missing(listing, files)
    if not missing:
        return place(listing, files)
    download = Download(hub, listing, missing)
    raise NotFetched(
        f"model: hf:{wanted.repo} is not here: {download} would be downloaded",
        path=place(listing, files),
        download=download,
        advice="`orchestrator pull` gets it, and so does whatever starts it",
    )
