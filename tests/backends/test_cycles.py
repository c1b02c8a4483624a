"""The short form of benchmarks/cycles.py: starting, stopping and crashing leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from backends.llama_server import LlamaServer
from tests.backends.conftest import alive

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("options", [("--cycles", "24"), ("--cycles", "16", "--crash")], ids=" ".join)
def test_nothing_grows_good(options: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "cycles.py"), *options],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
    )
    assert done.stdout, done.stderr
    assert json.loads(done.stdout)["grown"] == []
    assert done.returncode == 0


def test_what_an_engine_starts_now_and_then_is_forgotten_when_it_has_ended_good(
    engine: Callable[..., LlamaServer],
) -> None:
    """Known are those that would have to be ended; an engine that runs a program each minute runs many."""
    backend = engine()
    url = backend.start(timeout=60).url
    stays = httpx.post(url + "/fake/do", json={"child": "double+session"}).json()["pid"]
    goes = httpx.post(url + "/fake/do", json={"child": "plain"}).json()["pid"]
    child = backend.life.child
    assert child
    assert {stays, goes} <= set(child.tree()) <= set(child.known)
    os.kill(goes, signal.SIGKILL)
    while alive([goes]):
        continue
    child.tree()
    assert stays in child.known
    assert goes not in child.known
