"""From what a profile says about its model to the GGUF file that an engine is given.

A model is one file, the first of its shards, what an installed package brings (`model_package`), or what the
hub has (`model_hub`). What can't be served, because it is a folder, a projector or an adapter, is refused
here by name.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from orchestrator import model_hub
from orchestrator.errors import NotAModel, UnsupportedModel
from orchestrator.gguf_header import read, shards
from orchestrator.home import cache_folder, expand_home
from orchestrator.model_package import Progress, assembled

__all__ = ["Progress", "Spec", "adapters", "default_cache", "projector", "resolve"]

_KINDS = {
    "model": "a model",
    "mmproj": "a projector (mmproj)",
    "adapter": "an adapter (LoRA)",
    "imatrix": "an importance matrix",
    "control-vector": "a control vector",
    "vocabulary": "a vocabulary without weights",
    "shard": "a later shard",
}
_BELONGS = {
    "model": "name it under model.gguf",
    "mmproj": "name it under model.mmproj, and the language model under model.gguf",
    "adapter": "name it under model.lora, and the model it was made for under model.gguf",
}


class Spec(Protocol):
    """A profile's `model`, all forms optional."""

    @property
    def package(self) -> str | None:
        """An installed package that brings the model."""

    @property
    def gguf(self) -> str | None:
        """A file."""

    @property
    def hf(self) -> str | None:
        """A folder with safetensors, a name for the engine to fetch, or ``hf:OWNER/REPO[:QUANT]``."""

    @property
    def mmproj(self) -> str | None:
        """A projector's file."""

    @property
    def lora(self) -> Sequence[str]:
        """Adapters' files."""


def resolve(
    spec: Spec,
    *,
    directory: Path,
    environ: Mapping[str, str] = os.environ,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Return the model's GGUF file, the first of several shards.

    Args:
        spec: the profile's `model`.
        directory: of the profile; relative paths begin there, or else in ``ROCM_MODEL_DIR``.
        environ: the environment.
        cache_dir: where packaged models are put together; default `default_cache`.
        progress: called with bytes done and in total while a packaged model is put together.

    Raises:
        NotAModel: there is no such file, it is broken, or a shard is missing.
        NotFetched: it is on the hub and not here; tells what gets it.
        UnsupportedModel: it is something else than a model, or the model has no GGUF form.
        ModelError: its package is not installed or damaged, the cache can't hold it, or the hub refuses it.

    """
    if spec.package:
        return assembled(spec.package, cache_dir=cache_dir or default_cache(environ), progress=progress)
    named = spec.gguf or (spec.hf if model_hub.is_reference(spec.hf) else None)
    if not named:
        raise UnsupportedModel(
            f"model: {spec.hf} has no GGUF form",
            advice="name a GGUF file under model.gguf, write hf:OWNER/REPO for one on Hugging Face, "
            "or take a backend that reads safetensors",
        )
    if model_hub.is_reference(named):
        return _of_kind("model", "model.gguf", model_hub.gguf(named, environ))
    return _of_kind("model", "model.gguf", _find(named, directory, environ))


def projector(spec: Spec, *, directory: Path, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file of the model's projector, None without one; raises as `resolve` does."""
    if not spec.mmproj:
        return None
    on_hub = model_hub.is_reference(spec.mmproj)
    found = model_hub.projector(spec.mmproj, environ) if on_hub else _find(spec.mmproj, directory, environ)
    return _of_kind("mmproj", "model.mmproj", found)


def adapters(spec: Spec, *, directory: Path, environ: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Return the files of the model's adapters; raises as `resolve` does."""
    return tuple(_of_kind("adapter", "model.lora", _find(each, directory, environ)) for each in spec.lora)


def default_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where models are put that were made here: ``$XDG_CACHE_HOME/orchestrator/models``."""
    return cache_folder(environ) / "models"


def _find(text: str, directory: Path, environ: Mapping[str, str]) -> Path:
    wanted = Path(expand_home(text, environ))
    folders = [directory]
    if models := environ.get("ROCM_MODEL_DIR"):
        folders.append(Path(expand_home(models, environ)))
    places = list(dict.fromkeys(folder / wanted for folder in folders))
    for place in places:
        if os.path.exists(place):  # noqa: PTH110  # Path.exists raises where access is denied
            return place
    siblings = [each.name for place in places for each in place.parent.glob("*.gguf")]
    close = difflib.get_close_matches(wanted.name, siblings, n=1)
    raise NotAModel(
        f"model: {text} does not exist",
        path=places[0],
        advice=f"did you mean {close[0]}?" if close else f"looked for {' and '.join(map(str, places))}",
    )


def _of_kind(kind: str, key: str, path: Path) -> Path:
    if path.is_dir():
        inside = sorted(each.name for each in path.glob("*.gguf"))
        raise UnsupportedModel(
            f"{key}: {path} is a folder",
            path=path,
            advice=f"name a file in it, such as {inside[0]}" if inside else "there is no GGUF file in it",
        )
    first = shards(path)[0]
    found = read(first).kind
    if found != kind:
        raise UnsupportedModel(
            f"{key}: {path} is {_KINDS[found]}, not {_KINDS[kind]}",
            path=path,
            advice=_BELONGS.get(found, f"name {_KINDS[kind]}"),
        )
    return first
