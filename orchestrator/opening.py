"""From a profile or an address to a model: `load`, `connect`, and the same for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

from orchestrator import source as sources
from orchestrator.errors import StartTimeout
from orchestrator.model import AsyncTextModel, TextModel
from orchestrator.switching import Switchable
from orchestrator.waiting import to_its_end


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
    engine = _engine(path, backend, overrides)
    try:
        engine.start()
    except BaseException:
        engine.stop()
        raise
    return TextModel(engine)


async def aload(
    path: str | Path, backend: str | None = None, overrides: Sequence[str] = ()
) -> AsyncTextModel:
    """Do what `load` does, without blocking the event loop; called off, it stops what it has started."""
    engine = await asyncio.to_thread(_engine, path, backend, overrides)
    try:
        await to_its_end(asyncio.to_thread(_begin, engine))  # then there is something that a stop can end
        await asyncio.to_thread(engine.endpoint)
    except BaseException:
        await to_its_end(asyncio.to_thread(engine.stop))
        raise
    return AsyncTextModel(engine)


def _engine(path: str | Path, backend: str | None, overrides: Sequence[str]) -> Switchable:
    from orchestrator import profile as profiles

    return Switchable(profiles.load(path, overrides=overrides, backend=backend))


def _begin(engine: Switchable) -> None:
    with contextlib.suppress(StartTimeout):
        engine.start(timeout=0)


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
