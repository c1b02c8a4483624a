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
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from backends.llama_server import LlamaServer
from backends.process import free_port
from orchestrator import profile as profiles

ROOT = Path(__file__).parent.parent


def bare(profile: profiles.Profile) -> float:
    """Return the seconds until the bare server's health is 200."""
    engine = LlamaServer(profile)
    port = free_port()
    plan = engine.plan()
    command = engine.prepared(plan, port)
    began = time.perf_counter()
    with subprocess.Popen(
        command.argv,
        env=command.environ(os.environ),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as server:
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                    break
            except (urllib.error.URLError, OSError):
                time.sleep(0.01)
        took = time.perf_counter() - began
        server.terminate()
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
