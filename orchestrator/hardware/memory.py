"""GPU memory while things run: how much is in use, by whom, and whether it came back after a stop."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.hardware import nvidia
from orchestrator.hardware.clients import memory_by_process
from orchestrator.hardware.gpu import Gpu
from orchestrator.hardware.probe import Runner, Tree, run_program

KFD_PROCESSES = "sys/class/kfd/kfd/proc"
SLACK = 256 << 20  # bytes; a desktop's compositor and browser move by less between two looks


class GpuMemory:
    """Reads GPU memory, from the kernel for AMD and from the driver for NVIDIA."""

    def __init__(self, root: Path | Tree = Path("/"), run: Runner | None = None) -> None:
        self._tree = root if isinstance(root, Tree) else Tree(root)
        self._run = run or (run_program if self._tree.here else None)

    def used(self, gpu: Gpu) -> int | None:
        """Return the bytes in use by anyone, or None when that can't be read.

        For an integrated GPU the system memory that it maps counts too.
        """
        if gpu.vendor == "nvidia":
            found = {card.id: card.memory_used for card in nvidia.find(self._tree, self._run, [])}
            return found.get(gpu.id)
        folder = (
            f"sys/class/drm/{gpu.render_node}/device" if gpu.render_node else f"sys/bus/pci/devices/{gpu.pci}"
        )
        own = self._tree.number(f"{folder}/mem_info_vram_used")
        if own is None or not gpu.integrated:
            return own
        return own + (self._tree.number(f"{folder}/mem_info_gtt_used") or 0)

    def processes(self, gpu: Gpu, among: Collection[int] | None = None) -> dict[int, int]:
        """Return which process ids use how many bytes of it, `among` some or, by default, all.

        NVIDIA's driver lists processes that compute. For AMD it is the larger of what KFD says (every
        process that computes) and what the DRM driver says (Vulkan and graphics too, of this user's
        processes).
        """
        if gpu.vendor == "nvidia":
            told = nvidia.processes(self._tree, self._run).get(gpu.id, {})
            return told if among is None else {pid: size for pid, size in told.items() if pid in among}
        pools = ("vram", "gtt") if gpu.integrated else ("vram",)
        found = memory_by_process(self._tree, gpu.pci, pools, among) if gpu.pci else {}
        listed = self._tree.names(KFD_PROCESSES) if among is None else map(str, among)
        for name in listed if gpu.kfd_gpu_id is not None else ():
            if name.isascii() and name.isdecimal() and len(name) < 12:
                size = self._tree.number(f"{KFD_PROCESSES}/{name}/vram_{gpu.kfd_gpu_id}")
                if size is not None:
                    found[int(name)] = max(size, found.get(int(name), 0))
        return found


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One GPU at one moment: bytes in use in all, and by process id."""

    used: int | None
    processes: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Returned:
    """Whether memory is back near where it was.

    Attributes:
        missing: GPU id -> bytes that did not come back, only for those beyond the slack.
        holders: process ids of ours that still hold memory -> bytes.
        unread: ids of GPUs about which nothing can be said.

    """

    missing: Mapping[str, int]
    holders: Mapping[int, int]
    unread: tuple[str, ...] = ()

    @property
    def back(self) -> bool:
        """Whether nothing of ours is left, as far as can be seen."""
        return not self.missing and not self.holders


class Watch:
    """Remembers a moment before an engine starts, and compares with it after the engine has ended."""

    def __init__(self, reader: GpuMemory, gpus: Sequence[Gpu], slack: int = SLACK) -> None:
        self._reader = reader
        self._gpus = tuple(gpus)
        self._slack = slack
        self._before = {gpu.id: self._look(gpu) for gpu in self._gpus}

    def _look(self, gpu: Gpu) -> Snapshot:
        return Snapshot(self._reader.used(gpu), self._reader.processes(gpu))

    def look(self, ours: Collection[int] = ()) -> Returned:
        """Compare with the moment before; `ours` are all process ids that the engine ever had.

        What other processes have taken since, as far as they are listed, is not held against us.
        """
        missing: dict[str, int] = {}
        holders: dict[int, int] = {}
        unread = []
        for gpu in self._gpus:
            before, after = self._before[gpu.id], self._look(gpu)
            for pid, size in after.processes.items():
                if size and pid in ours:
                    holders[pid] = holders.get(pid, 0) + size
            if before.used is None or after.used is None:
                unread.append(gpu.id)
                continue
            left = unreturned(before, after, ours)
            if left > self._slack:
                missing[gpu.id] = left
        return Returned(missing, holders, tuple(unread))


def unreturned(before: Snapshot, after: Snapshot, ours: Collection[int] = ()) -> int:
    """Return the bytes in use after that were not before, without what others took since."""
    others = sum(
        max(0, size - before.processes.get(pid, 0))
        for pid, size in after.processes.items()
        if pid not in ours
    )
    return (after.used or 0) - (before.used or 0) - others
