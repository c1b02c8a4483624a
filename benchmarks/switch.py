"""A switch under load: how long until the new engine serves, against its own bare start, and what is lost.

    python benchmarks/switch.py [--old llama-server] [--new llama-server] [--rounds 5] [--after] [--clients 4]
                                [--set KEY=VALUE ...]

One `orchestrator up` with the embedded Gemma; `--clients` stream through its address all the time. In each
round the new engine is started bare (same argv; from the spawn until it has answered one token) and by a
switch (from the order until it gets requests), in turn first and second, both while the clients stream from
the old one; then the old one is put back. Every stream has to end whole. Goal: at most 0.7 s more.
vLLM compiles for a minute or more, each time another one: `--set vllm.eager=true` leaves that out.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bare_engine import bare_engine  # noqa: E402

from orchestrator import profile as profiles  # noqa: E402
from orchestrator.cli import services  # noqa: E402
from orchestrator.discovery import find  # noqa: E402

GOAL = 0.7  # seconds
PROFILE = str(ROOT / "profiles" / "gemma.yaml")
DRAIN_S = 120.0


def client(url: str, over: threading.Event, waits: list[float]) -> tuple[int, int]:
    """Stream until the end; returns the streams that were whole, and the others."""
    whole = lost = 0
    with httpx.Client(timeout=300, trust_env=False) as http:
        while not over.is_set():
            asked = {"model": "gemma", "prompt": "Once", "max_tokens": 32, "stream": True}
            began = time.perf_counter()
            try:
                with http.stream("POST", f"{url}/completions", json=asked) as answer:
                    text = b""
                    for piece in answer.iter_raw():
                        if not text:
                            waits.append(time.perf_counter() - began)
                        text += piece
                good = b"data: [DONE]" in text and b'"error"' not in text
            except httpx.HTTPError as error:
                print(f"lost: {error!r}")
                good = False
            whole, lost = whole + good, lost + (not good)
    return whole, lost


def bare(name: str, overrides: list[str]) -> float:
    """Return the seconds until the bare engine has answered one token."""
    engine: Any = find(name)(profiles.load(PROFILE, backend=name, overrides=overrides))

    def answers(url: str, model: str) -> bool:
        try:
            if httpx.get(f"{url}{engine.health_path}", timeout=5).status_code != 200:
                return False
        except httpx.HTTPError:
            return False
        asked = {"model": model, "prompt": "a", "max_tokens": 1}
        httpx.post(f"{url}/v1/completions", json=asked, timeout=60).raise_for_status()
        return True

    with bare_engine(engine, answers) as took:
        return took


def switch(name: str, beside: bool | None) -> dict[str, Any]:
    """Switch, and return what came of it."""
    (service,) = services.running()
    asked = {"do": "switch", "name": "gemma", "backend": name, "drain_s": DRAIN_S, "beside": beside}
    said = service.ask(asked, timeout=None)
    if "error" in said:
        raise SystemExit(str(said["error"]))
    return said


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--old", default="llama-server", help="backend that serves at first")
    parser.add_argument("--new", default="llama-server", help="backend to switch to")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--after", action="store_true", help="stop the old one first")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="over the profile")
    options = parser.parse_args()
    sets = [word for each in options.set for word in ("--set", each)]
    bares: list[float] = []
    waits: list[float] = []
    outcomes: list[dict[str, Any]] = []

    def one_switch() -> None:
        outcomes.append(switch(options.new, False if options.after else None))
        print(outcomes[-1])

    over = threading.Event()
    with tempfile.TemporaryDirectory() as home, ThreadPoolExecutor(options.clients) as pool:
        os.environ["ORCHESTRATOR_HOME"] = home
        argv = [
            sys.executable,
            "-m",
            "orchestrator",
            "up",
            PROFILE,
            "--port",
            "0",
            "--backend",
            options.old,
            *sets,
        ]
        up = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert up.stdout is not None
            url = up.stdout.readline().split()[2]
            clients = [pool.submit(client, url, over, waits) for _ in range(options.clients)]
            put_back = 0
            for number in range(options.rounds):
                arms = [lambda: bares.append(bare(options.new, options.set)), one_switch]
                for arm in arms if number % 2 == 0 else reversed(arms):
                    if len(outcomes) > put_back and options.old != options.new:
                        switch(options.old, None)
                        put_back = len(outcomes)
                    arm()
            over.set()
            results = [each.result() for each in clients]
        finally:
            over.set()
            up.send_signal(signal.SIGTERM)
            up.wait(60)
    print(f"{options.old} -> {options.new}, {options.clients} clients: ", end="")
    print(f"{sum(whole for whole, _ in results)} streams whole, {sum(lost for _, lost in results)} lost")
    ready = [done["ready_s"] for done in outcomes]
    total = [done["total_s"] for done in outcomes]
    for name, values in {"bare": bares, "ready": ready, "total": total, "first token": waits}.items():
        print(f"{name:11} median {statistics.median(values):.3f} s  ({min(values):.3f} to {max(values):.3f})")
    more = [b - a for a, b in zip(bares, ready, strict=True)]
    print(
        f"ready - bare, per round: {statistics.median(more):+.3f} s  ({min(more):+.3f} to {max(more):+.3f})"
    )
    print(f"goal: at most +{GOAL} s")


if __name__ == "__main__":
    main()
