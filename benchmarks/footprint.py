"""What the orchestrator itself costs: the time of ``--help``, and the memory of `up` and of the guardian.

python benchmarks/footprint.py [--repeat 10]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
PROGRAM = Path(sys.executable).parent / "orchestrator"


def timed(argv: list[str], repeat: int) -> list[float]:
    """Return the seconds of each run of a command, after one that is not counted."""
    found = []
    for _ in range(repeat + 1):
        began = time.perf_counter()
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        found.append(time.perf_counter() - began)
    return found[1:]


def show(name: str, values: list[float]) -> None:
    """Print one row of seconds."""
    print(f"{name:34} median {statistics.median(values):.3f} s  ({min(values):.3f} to {max(values):.3f})")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=10)
    args = parser.parse_args()
    show("python -c pass", timed([sys.executable, "-c", "pass"], args.repeat))
    show("orchestrator --help", timed([str(PROGRAM), "--help"], args.repeat))
    show("orchestrator up --help", timed([str(PROGRAM), "up", "--help"], args.repeat))
    with tempfile.TemporaryDirectory() as home:
        argv = [str(PROGRAM), "up", str(ROOT / "profiles" / "gemma.yaml"), "--port", "0"]
        with subprocess.Popen(
            argv,
            env={**os.environ, "ORCHESTRATOR_HOME": home},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as up:
            try:
                assert up.stdout
                print(up.stdout.readline().split()[0])
                process = psutil.Process(up.pid)
                (guardian,) = process.children()
                for name, one in (("up, without the engine", process), ("guardian", guardian)):
                    memory = one.memory_full_info()
                    print(f"{name:34} RSS {memory.rss / 1e6:.1f} MB, of its own {memory.uss / 1e6:.1f} MB")
            finally:  # else leaving the block waits for it for ever
                up.terminate()


if __name__ == "__main__":
    main()
