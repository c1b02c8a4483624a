"""A model for the time of one command: one that runs already, else an engine of our own."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from orchestrator.cli import loading, logs_setup, services

if TYPE_CHECKING:
    from orchestrator.backend import Dialect, Event
    from orchestrator.model import TextModel
    from orchestrator.profile import Profile


@dataclass(frozen=True, slots=True)
class Model:
    """What answers.

    Attributes:
        text: the model.
        name: the profile's name.
        backend: the engine's name.
        load_s: seconds from the launch until it was ready; None when it ran already.

    """

    text: TextModel
    name: str
    backend: str
    load_s: float | None


@contextlib.contextmanager
def model(path: str, sets: list[str] | None, backend: str | None) -> Iterator[Model]:
    """Give a model; what had to be started for it is stopped at the end, twice as fast when asked twice."""
    logs_setup.configure()
    profile = loading.load_all([path], sets, backend)[0]
    running = None if sets else _running(profile, backend)
    if running is not None:
        with contextlib.closing(running.text):
            yield running
        return
    engine = loading.make_backend(profile)
    try:
        load_s = _start(engine)
        from orchestrator.model import TextModel

        text = TextModel(engine)
        yield Model(text, profile.name, profile.backend, load_s)
        text.close()
    finally:
        try:
            engine.stop()
        except KeyboardInterrupt:
            engine.stop(0)
            raise


def _start(engine: Any) -> float:
    """Start an engine and show how it loads on a terminal; returns the seconds."""
    from orchestrator.cli import console, progress

    shown = progress.choose()
    began = time.monotonic()

    def hear(event: Event) -> None:
        if isinstance(shown, progress.Live):
            shown.hear(progress.of_event(event))
        elif said := progress.remark(event.profile, event.name, event.fields):
            console.err(said)

    unsubscribe = engine.subscribe(hear)
    try:
        engine.start()
    finally:
        unsubscribe()
        shown.close()
    return time.monotonic() - began


def _running(profile: Profile, backend: str | None) -> Model | None:
    """Return a model on the engine that `up` serves from the same file; None when there is none.

    What serves now counts, whatever it was started with: a switch changes the engine, and may serve a file
    under another one's name. Only an engine that was asked for by name has to be that one.
    """
    from orchestrator import source as sources
    from orchestrator.backend import ALIVE, Endpoint
    from orchestrator.model import TextModel

    for service in services.running():
        for status in service.backends:
            name, engine = str(status["name"]), str(status["backend"])
            if (
                backend in {None, engine}
                and status["state"] in ALIVE
                and Path(status["profile"]) == profile.source
                and service.url is not None
            ):
                key = os.environ.get(service.api_key_env) if service.api_key_env else None
                url = sources.base_url(service.url)
                dialect, engine = _spoken(service, name)
                server = sources.Server(
                    Endpoint(url, key, name, dialect), sources.settings(SimpleNamespace(profile=profile))
                )
                return Model(TextModel(server), name, engine, None)
    return None


def _spoken(service: services.Service, name: str) -> tuple[Dialect, str]:
    """Return how the engine of a name wants its options, and which it is; waits until it is ready."""
    from orchestrator.backend import Dialect
    from orchestrator.errors import BackendError

    said = service.ask({"do": "dialect", "name": name}, timeout=None)
    if "error" in said:
        fault = said["error"]
        raise BackendError(
            fault["message"], profile=name, log_tail=fault.get("log_tail", ()), advice=fault["advice"]
        )
    return Dialect(**said["dialect"]), str(said["backend"])
