"""What the guardian beside every engine costs: start-up time and memory.

    python benchmarks/guardian.py [--repeat 40]

Start-up is the time until /bin/true runs, through the guardian less without it, in pairs whose order changes
(ABBA). Memory is the guardian's resident and private size while an engine runs, and while that logs 40 MB.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backends import guardian

GOAL_MS, GOAL_MB = 60, 15
QUIET = [sys.executable, "-S", "-c", "import time; time.sleep(300)"]
LOUD = [
    sys.executable,
    "-S",
    "-c",
    "import os\nfor _ in range(400): os.write(1, b'x' * 100_000)\nos._exit(0)",
]


def start(argv: list[str], folder: Path) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a guardian, and wait until it says that its engine runs."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()], start_new_session=True, env={},
        )  # fmt: skip
    order = {
        "argv": argv, "env": {}, "cwd": "/", "log": str(folder / "engine.log"), "log_bytes": 16 << 20,
        "log_files": 3, "grace": 0, "temporary": str(folder / secrets.token_hex(4)),
    }  # fmt: skip
    ours.sendall(guardian.pack(order))
    return process, ours


def wait_for(ours: socket.socket, word: bytes) -> None:
    said = b""
    while word not in said:
        data = ours.recv(1 << 16)
        if not data:
            raise SystemExit("guardian: ended early")
        said += data


def guarded(folder: Path) -> float:
    """Return the seconds until the engine's program runs (exec has succeeded), through the guardian."""
    began = time.perf_counter()
    process, ours = start(["/bin/true"], folder)
    wait_for(ours, b"spawned")
    took = time.perf_counter() - began
    ours.close()
    process.wait()
    return took


def bare() -> float:
    """Return the same without it."""
    began = time.perf_counter()
    process = subprocess.Popen(["/bin/true"], env={}, start_new_session=True)  # returns once exec succeeded
    took = time.perf_counter() - began
    process.wait()
    return took


def memory(argv: list[str], folder: Path, word: bytes) -> tuple[float, float]:
    """Return resident and private megabytes once the guardian has said `word`."""
    process, ours = start(argv, folder)
    wait_for(ours, word)
    seen = psutil.Process(process.pid).memory_full_info()
    ours.close()
    process.wait()
    return seen.rss / 1e6, seen.uss / 1e6


def loud(folder: Path) -> tuple[float, float]:
    """Return the sizes while a flood of log passes, the largest seen."""
    process, ours = start(LOUD, folder)
    wait_for(ours, b"spawned")
    seen, sizes = psutil.Process(process.pid), [(0.0, 0.0)]
    while process.poll() is None:
        try:
            now = seen.memory_full_info()
        except (psutil.Error, FileNotFoundError):
            break
        sizes.append((now.rss / 1e6, now.uss / 1e6))
    ours.close()
    process.wait()
    return max(sizes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeat", type=int, default=40)
    repeat = parser.parse_args().repeat
    extra: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        guarded(folder), bare()  # warm
        for number in range(repeat):
            pair = [lambda: ("with", guarded(folder)), lambda: ("bare", bare())]
            times = dict(run() for run in (pair if number % 2 else reversed(pair)))
            extra.append((times["with"] - times["bare"]) * 1e3)
        rss, private = memory(QUIET, folder, b"spawned")
        flooded = loud(folder)
    extra.sort()
    middle = statistics.median(extra)
    print(
        f"start-up  {middle:5.1f} ms more  (quartiles {extra[len(extra) // 4]:.1f} to "
        f"{extra[3 * len(extra) // 4]:.1f}, least {extra[0]:.1f}, n={repeat}; goal < {GOAL_MS})"
    )
    print(f"memory    {rss:5.1f} MB resident, {private:.1f} MB private  (goal < {GOAL_MB})")
    print(f"in flood  {flooded[0]:5.1f} MB resident, {flooded[1]:.1f} MB private, 40 MB logged")
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return 0 if middle < GOAL_MS and max(rss, flooded[0]) < GOAL_MB else 1


if __name__ == "__main__":
    sys.exit(main())
