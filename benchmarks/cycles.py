"""Start and stop one backend, or kill its engine, over and over on the fake engine: what grows.

    python benchmarks/cycles.py [--cycles 200] [--crash]

Descriptors, threads, children and private memory of this process and the files of its state folder are noted
after every cycle; the medians of the second and of the last quarter are compared: the first fills caches.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from backends.llama_server import LlamaServer  # noqa: E402
from orchestrator.backend import Event, State  # noqa: E402
from orchestrator.profile import ModelSpec, Profile  # noqa: E402
from tests.fakes import COMMAND  # noqa: E402
from tests.gguf_files import tiny_llama  # noqa: E402

# The allocator takes memory in arenas of a MiB and gives it back when it likes: some of them are no leak.
ALLOWED = {"descriptors": 0, "threads": 0, "files": 0, "children": 0, "private_kib": 4096}


def sample(folder: Path) -> dict[str, int]:
    gc.collect()
    process = psutil.Process()
    return {
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "children": len(process.children()),
        "private_kib": process.memory_full_info().uss >> 10,
        "files": sum(1 for _ in folder.rglob("*")),
    }


def crash(backend: LlamaServer, pids: list[int], restarted: list[float]) -> None:
    """Kill the engine and wait until it is ready again."""
    before = len(restarted)
    os.kill(pids[-1], signal.SIGKILL)
    while len(restarted) == before:
        time.sleep(0.005)
    backend.endpoint(60)


def run(cycles: int, *, crashes: bool, folder: Path) -> list[dict[str, int]]:
    profile = Profile(
        name="cycles", model=ModelSpec(gguf=str(tiny_llama(folder / "tiny.gguf"))), backend="llama-server",
        command=COMMAND, device="cpu", directory=folder,
        restart={"attempts": 1000, "window": 1, "backoff": (0.01, 0.01)},
    )  # fmt: skip
    backend = LlamaServer(profile, environ={**os.environ, "ORCHESTRATOR_HOME": str(folder / "home")})
    pids: list[int] = []
    ready: list[float] = []

    def hear(event: Event) -> None:
        if event.name == "spawned":
            pids.append(event.fields["pid"])
        if event.name == "state" and event.state is State.READY:
            ready.append(event.at)

    backend.subscribe(hear)
    samples = []
    for _ in range(cycles):
        backend.start(timeout=60)
        if crashes:
            crash(backend, pids, ready)
        else:
            backend.stop()
        samples.append(sample(folder))
    backend.stop(0)
    return samples


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--crash", action="store_true", help="kill the engine instead of stopping it")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cycles-") as folder:
        samples = run(options.cycles, crashes=options.crash, folder=Path(folder))
    size = max(1, len(samples) // 4)
    report: dict[str, object] = {"cycles": len(samples), "seconds": round(time.monotonic() - began, 1)}
    grown = []
    for name, allowed in ALLOWED.items():
        second = statistics.median(row[name] for row in samples[size : 2 * size] or samples[-size:])
        last = statistics.median(row[name] for row in samples[-size:])
        report[name] = {"first": samples[0][name], "second_quarter": second, "last_quarter": last}
        if last - second > allowed:
            grown.append(name)
    print(json.dumps({**report, "grown": grown}, indent=1))
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
