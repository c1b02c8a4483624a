"""Time to ready: how much longer with the orchestrator than with the bare llama-server.

Both start the same binary with the same arguments on the same model. *Bare* is from the spawn until /health
is 200, polled every 10 ms by a loop that does nothing else. *Ours* is from `start()` until it returns: plan,
guardian, load, owner of the port, model id, one token. Pairs in the order ABBA; the difference is taken per
pair, so that a machine that drifts does not decide.

    python benchmarks/time_to_ready.py [--pairs 8]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from bare_engine import bare_engine

from backends.llama_server import LlamaServer
from orchestrator import profile as profiles

ROOT = Path(__file__).parent.parent


def healthy(url: str, model: str) -> bool:
    """Say whether the server's health is 200."""
    del model
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False


def bare(profile: profiles.Profile) -> float:
    """Return the seconds until the bare server's health is 200."""
    with bare_engine(LlamaServer(profile), healthy) as took:
        return took


def ours(profile: profiles.Profile) -> float:
    """Return the seconds until our `start` returns."""
    engine = LlamaServer(profile)
    began = time.perf_counter()
    engine.start()
    took = time.perf_counter() - began
    engine.stop()
    return took


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=8)
    args = parser.parse_args()
    profile = profiles.load(ROOT / "profiles" / "gemma.yaml")
    with tempfile.TemporaryDirectory() as home:
        os.environ["ORCHESTRATOR_HOME"] = home
        bare(profile), ours(profile)  # the page cache, and modules
        figures: dict[str, list[float]] = {"bare": [], "ours": []}
        for pair in range(args.pairs):
            order = (bare, ours) if pair % 2 == 0 else (ours, bare)
            for arm in order:
                figures[arm.__name__].append(arm(profile))
    for name, values in figures.items():
        print(f"{name:5} median {statistics.median(values):.3f} s  ({min(values):.3f} to {max(values):.3f})")
    more = [b - a for a, b in zip(figures["bare"], figures["ours"], strict=True)]
    print(f"ours - bare, per pair: {statistics.median(more):+.3f} s  ({min(more):+.3f} to {max(more):+.3f})")


if __name__ == "__main__":
    main()
