"""Put a `Machine` together: GPUs of both vendors and the facts around them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

from orchestrator.hardware import amd, nvidia
from orchestrator.hardware.gpu import Gpu, Machine, PciCard
from orchestrator.hardware.probe import Runner, Tree, run_program

PCI = "sys/bus/pci/devices"


def detect(root: Path | Tree = Path("/"), run: Runner | None = None) -> Machine:
    """Say what there is to run engines on.

    `root` is where the machine's files are. `run` starts ``nvidia-smi``; without one it is started only
    for the machine that we run on. Never raises for what a machine may look like: whatever can't be read
    is a line in the result's `problems`.
    """
    tree = root if isinstance(root, Tree) else Tree(root)
    run = run or (run_program if tree.here else None)
    problems: list[str] = []
    amd_gpus, kfd = amd.find(tree, problems)
    total, available = _memory(tree)
    return Machine(
        gpus=_told_apart([*amd_gpus, *nvidia.find(tree, run, problems)]),
        kfd=kfd,
        problems=tuple(dict.fromkeys(problems)),
        memory_total=total,
        memory_available=available,
        cpu=_processor(tree),
        cpu_count=_processors(tree.text("sys/devices/system/cpu/online") or ""),
        kernel=tree.text("proc/sys/kernel/osrelease") or "",
        amdgpu=(tree.text("sys/module/amdgpu/version") or "in-tree")
        if tree.exists("sys/module/amdgpu")
        else None,
        rocm=_rocm(tree),
        container=tree.exists(".dockerenv") or tree.exists("run/.containerenv"),
        cards=_cards(tree),
    )


def _told_apart(gpus: list[Gpu]) -> tuple[Gpu, ...]:
    """Return the GPUs with ids that differ: the parts of a partitioned card may share one."""
    times = Counter(gpu.id for gpu in gpus)
    return tuple(
        gpu if times[gpu.id] == 1 else replace(gpu, id=f"{gpu.pci or gpu.vendor}-{gpu.index}") for gpu in gpus
    )


def _memory(tree: Tree) -> tuple[int, int]:
    """Return total and available system memory in bytes, the cgroup's limit included."""
    figures: dict[str, str] = dict(
        re.findall(r"^(\w+):\s+(\d{1,15}) kB", tree.text("proc/meminfo") or "", re.MULTILINE)
    )
    total = int(figures.get("MemTotal", 0)) * 1024
    available = int(figures.get("MemAvailable", figures.get("MemFree", 0))) * 1024
    # "max" where there is no limit, and no file at all in the root group
    limit, used = tree.number("sys/fs/cgroup/memory.max"), tree.number("sys/fs/cgroup/memory.current")
    if limit is not None and limit < total:
        total, available = limit, min(available, max(0, limit - (used or 0)))
    return total, available


def _processor(tree: Tree) -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", tree.text("proc/cpuinfo") or "", re.MULTILINE)
    return match[1].strip() if match else ""


def _processors(ranges: str) -> int:
    """Count processors in the kernel's list form: ``0-15,32`` is 17."""
    count = 0
    for first, last in re.findall(r"(\d{1,5})(?:-(\d{1,5}))?", ranges):
        count += max(0, int(last or first) - int(first) + 1)
    return count


def _rocm(tree: Tree) -> str | None:
    version = tree.text("opt/rocm/.info/version")
    if version:
        return version.splitlines()[0].split("-")[0]
    versions = [match[1] for name in tree.names("opt") if (match := re.fullmatch(r"rocm-(\d[\d.]*)", name))]
    return max(versions, key=lambda text: [int(part or 0) for part in text.split(".")], default=None)


def _cards(tree: Tree) -> tuple[PciCard, ...]:
    found = []
    for name in sorted(tree.names(PCI)):
        kind = tree.number(f"{PCI}/{name}/class", base=16) or 0
        vendor = tree.number(f"{PCI}/{name}/vendor", base=16)
        # class 03 is display, 12 processing accelerators
        if kind >> 16 in {0x03, 0x12} and vendor in {amd.VENDOR, nvidia.VENDOR}:
            driver = re.search(r"^DRIVER=(.+)$", tree.text(f"{PCI}/{name}/uevent") or "", re.MULTILINE)
            device = tree.number(f"{PCI}/{name}/device", base=16) or 0
            found.append(PciCard(name, vendor, device, driver[1] if driver else None))
    return tuple(found)
