"""Rounds made of numbers, and profiles of the fake engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.bench.values import Client, Round, Sample, SelfTest
from tests import gguf_files

ENGINE = Path(__file__).parent.parent / "fakes" / "engine.py"

# What a healthy client says of itself, so that not every test measures it again.
HEALTHY = SelfTest(
    streams=64,
    events=2688,
    ceiling_events_s=50_000.0,
    us_per_event=20.0,
    decode_error=0.0,
    ttft_error_s=0.0005,
    read_delay_s=0.0002,
    ok=True,
)


def answer(**changes: Any) -> Sample:
    """Return a sample of a request that went well."""
    settings: dict[str, Any] = {
        "index": 0, "intended_s": 0.0, "sent_s": 0.0, "first_s": 0.1, "last_s": 1.1, "end_s": 1.1,
        "prompt_tokens": 64, "output_tokens": 11, "cached_tokens": 0, "finish_reason": "length",
        "error": None, "ttft_s": 0.1, "decode_tok_s": 10.0, "prefill_tok_s": 640.0, "tpot_s": 0.1,
        "e2e_s": 1.1, "chunks_s": (0.1, 1.1),
    }  # fmt: skip
    return Sample(**{**settings, **changes})


def made_round(
    arm: str,
    pair: int,
    void: tuple[str, ...] = (),
    others: float | None = None,
    samples: tuple[Sample, ...] = (),
    **metrics: float,
) -> Round:
    """Return a round of which only the statistics matter."""
    return Round(
        number=0,
        arm=arm,
        pair=pair,
        position=0,
        attempt=0,
        started_at=0.0,
        duration_s=1.0,
        metrics=metrics,
        samples=samples,
        client=Client(cpu=0.1, lag_p50_s=0, lag_p99_s=0, lag_max_s=0, events_s=100),
        server=(),
        memory=None,
        others=others,
        void=void,
    )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama model of some kilobytes."""
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    gguf_files.tiny_llama(path)
    return path


Write = Callable[..., str]


@pytest.fixture
def fake(tiny_model: Path, tmp_path: Path) -> Write:
    """Write a profile of the fake engine: ``fake("name", {knobs}, slots=2)`` returns its path."""

    def write(stem: str = "fake", knobs: dict[str, Any] | None = None, **keys: Any) -> str:
        profile = {
            "model": str(tiny_model),
            "backend": "llama-server",
            "command": [sys.executable, str(ENGINE)],
            "device": "cpu",
            "context": 512,
            "slots": 4,
            "env": {"FAKE_ENGINE": json.dumps(knobs or {})},
            "timeouts": {"start": 60, "stop": 5, "stall": 60},
            "restart": {"attempts": 5, "window": 300, "backoff": [0.05, 0.1]},
        }
        path = tmp_path / f"{stem}.yaml"
        path.write_text(yaml.safe_dump({**profile, **keys}))
        return str(path)

    return write
