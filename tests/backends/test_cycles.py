"""The short form of benchmarks/cycles.py: starting, stopping and crashing leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
