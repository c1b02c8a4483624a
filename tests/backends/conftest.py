"""Engines for the tests of supervision: the fake one as a real child, with whatever fault is asked for."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from backends.llama_server import LlamaServer
from orchestrator.backend import Event, State
from orchestrator.leftovers import strays
from orchestrator.profile import ModelSpec, Profile
from tests import gguf_files

ENGINE = Path(__file__).parent.parent / "fakes" / "engine.py"


class Recorder:
    """Hears a backend's events; waits for one."""

    def __init__(self, backend: LlamaServer) -> None:
        self.events: list[Event] = []
        self._came = threading.Condition()
        backend.subscribe(self._hear)

    def _hear(self, event: Event) -> None:
        with self._came:
            self.events.append(event)
            self._came.notify_all()

    def wait(self, is_it: Callable[[Event], bool], seconds: float = 60) -> Event:
        """Return the first event, past ones too, of which `is_it` is true."""
        deadline = time.monotonic() + seconds
        with self._came:
            while True:
                for event in self.events:
                    if is_it(event):
                        return event
                left = deadline - time.monotonic()
                assert left > 0, f"no such event in {[(e.name, str(e.state), e.fields) for e in self.events]}"
                self._came.wait(left)

    def states(self) -> list[State]:
        """Return the states entered, in order."""
        return [event.state for event in self.events if event.name == "state"]

    def wait_state(self, state: State, count: int = 1) -> None:
        """Wait until a state was entered `count` times."""
        self.wait(lambda _: self.states().count(state) >= count)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama model of some kilobytes, which the real llama-server loads too."""
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    gguf_files.tiny_llama(path)
    return path


@pytest.fixture
def fake_profile(tiny_model: Path, tmp_path: Path) -> Callable[..., Profile]:
    """Make a profile of the fake engine: ``fake_profile(knobs={...}, slots=2)``."""

    def make(knobs: dict[str, Any] | None = None, **keys: Any) -> Profile:
        told = {"state": str(tmp_path / "launches"), **(knobs or {})}
        settings: dict[str, Any] = {
            "name": "fake",
            "model": ModelSpec(gguf=str(tiny_model)),
            "backend": "llama-server",
            "command": (sys.executable, str(ENGINE)),
            "device": "cpu",
            "env": {"FAKE_ENGINE": json.dumps(told)},
            "timeouts": {"start": 30, "stop": 5, "stall": 30},
            "restart": {"attempts": 5, "window": 300, "backoff": (0.05, 0.2)},
            "directory": tmp_path,
        }
        return Profile(**{**settings, **keys})

    return make


@pytest.fixture
def engine(fake_profile: Callable[..., Profile]) -> Iterator[Callable[..., LlamaServer]]:
    """Make backends of the fake engine; each is stopped in the end, and nothing may be left of it."""
    made: list[LlamaServer] = []

    def make(knobs: dict[str, Any] | None = None, **keys: Any) -> LlamaServer:
        made.append(LlamaServer(fake_profile(knobs, **keys)))
        return made[-1]

    yield make
    for backend in made:
        backend.stop(0)


def launches(tmp_path: Path) -> int:
    """Return how often the fake engine was started."""
    return (tmp_path / "launches").stat().st_size if (tmp_path / "launches").exists() else 0


def alive(pids: list[int]) -> list[int]:
    """Return those that still run (a zombie does not)."""
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


def left_of(backend: LlamaServer, cookie: str) -> list[int]:
    """Return what is left of a launch, by its cookie."""
    del backend
    return strays(0, cookie, {})


def wait_gone(pids: list[int], seconds: float = 20) -> None:
    """Wait until none of `pids` runs."""
    gone, left = psutil.wait_procs([psutil.Process(p) for p in alive(pids)], timeout=seconds)
    del gone
    assert not [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE], left
