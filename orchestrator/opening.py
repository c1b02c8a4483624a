"""From a profile or an address to a model: `load`, `connect`, and the same for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import source as sources
from orchestrator.model import AsyncTextModel, TextModel
from orchestrator.switching import Switchable

if TYPE_CHECKING:
    from orchestrator.source import Source


def load(path: str | Path, backend: str | None = None, overrides: Sequence[str] = ()) -> TextModel:
    """Start the engine of a profile and return its model; `close` it, or use it in a ``with``.

    Args:
        path: the profile.
        backend: another engine than the profile names.
        overrides: ``KEY=VALUE`` each, over what the profile says.

    Raises:
        ProfileError: the profile is at fault.
        ModelError: the model can't be read or served.
        BackendError: the engine is missing or did not start.

    """
    return TextModel(_start(path, backend, overrides))


async def aload(
    path: str | Path, backend: str | None = None, overrides: Sequence[str] = ()
) -> AsyncTextModel:
    """Do what `load` does, without blocking the event loop."""
    return AsyncTextModel(await asyncio.to_thread(_start, path, backend, overrides))


def _start(path: str | Path, backend: str | None, overrides: Sequence[str]) -> Source:
    from orchestrator import profile as profiles

    profile = profiles.load(path, overrides=overrides, backend=backend)
    engine = Switchable(profile)
    try:
        engine.start()
    except BaseException:
        engine.stop()
        raise
    return engine


def connect(url: str, key: str | None = None, model: str | None = None) -> TextModel:
    """Return the model of a server that someone else runs; closing it leaves the server alone.

    Args:
        url: its address, with or without ``/v1``.
        key: its API key.
        model: the model's id; default: the first that the server lists.

    Raises:
        Unreachable: nobody answers there.
        BadStatus: it refuses, for instance the key.
        ProtocolError: it does not speak the OpenAI API.

    """
    return TextModel(sources.probe(url, key, model))


async def aconnect(url: str, key: str | None = None, model: str | None = None) -> AsyncTextModel:
    """Do what `connect` does, without blocking the event loop."""
    return AsyncTextModel(await asyncio.to_thread(sources.probe, url, key, model))
