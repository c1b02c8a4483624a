"""AMD's GPU targets: their spelling, which of them are integrated, and which ones a binary was built for.

Sources: the processor table of LLVM's AMDGPUUsage (dGPU or APU per target); Linux 7.0's
``amdgpu_discovery.c`` (the graphics core versions flagged ``AMD_IS_APU``) and ``kfd_device.c`` (core
version to target, which differ: core 11.0.3 is gfx1101, core 10.3.7 is gfx1036).
"""

from __future__ import annotations

import mmap
import re
from dataclasses import dataclass
from pathlib import Path

APU_TARGETS = frozenset(
    {
        "gfx700", "gfx801", "gfx902", "gfx909", "gfx90c", "gfx1013", "gfx1033", "gfx1035",
        "gfx1036", "gfx1037", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153", "gfx1154",
    }
)  # fmt: skip

# gfx942 is missing on purpose: the MI300A shares it with the MI300X, and both are there to compute
DISCRETE_TARGETS = frozenset(
    {
        "gfx803", "gfx900", "gfx904", "gfx906", "gfx908", "gfx90a", "gfx940", "gfx941", "gfx942",
        "gfx950", "gfx1010", "gfx1011", "gfx1012", "gfx1030", "gfx1031", "gfx1032", "gfx1034",
        "gfx1100", "gfx1101", "gfx1102", "gfx1200", "gfx1201",
    }
)  # fmt: skip

APU_CORES = frozenset(
    {
        "9.1.0", "9.2.2", "9.3.0", "10.1.3", "10.1.4", "10.3.1", "10.3.3", "10.3.6", "10.3.7",
        "11.0.1", "11.0.4", "11.5.0", "11.5.1", "11.5.2", "11.5.3", "11.5.4",
    }
)  # fmt: skip

CORE_TARGETS = {
    "9.0.1": "gfx900", "9.1.0": "gfx902", "9.2.2": "gfx902", "9.2.1": "gfx904", "9.3.0": "gfx90c",
    "9.4.0": "gfx906", "9.4.1": "gfx908", "9.4.2": "gfx90a", "9.4.3": "gfx942", "9.4.4": "gfx942",
    "9.5.0": "gfx950", "10.1.10": "gfx1010", "10.1.2": "gfx1011", "10.1.1": "gfx1012", "10.1.3": "gfx1013",
    "10.1.4": "gfx1013", "10.3.0": "gfx1030", "10.3.2": "gfx1031", "10.3.4": "gfx1032", "10.3.1": "gfx1033",
    "10.3.5": "gfx1034", "10.3.3": "gfx1035", "10.3.6": "gfx1036", "10.3.7": "gfx1036", "11.0.0": "gfx1100",
    "11.0.3": "gfx1101", "11.0.2": "gfx1102", "11.0.1": "gfx1103", "11.0.4": "gfx1103", "11.5.0": "gfx1150",
    "11.5.1": "gfx1151", "11.5.2": "gfx1152", "11.5.3": "gfx1153", "11.5.4": "gfx1154", "12.0.0": "gfx1200",
    "12.0.1": "gfx1201",
}  # fmt: skip

GENERIC_TARGETS = {
    "gfx9-generic": ("gfx900", "gfx902", "gfx904", "gfx906", "gfx909", "gfx90c"),
    "gfx9-4-generic": ("gfx940", "gfx941", "gfx942", "gfx950"),
    "gfx10-1-generic": ("gfx101",),
    "gfx10-3-generic": ("gfx103",),
    "gfx11-generic": ("gfx110", "gfx115"),
    "gfx12-generic": ("gfx120",),
}
"""LLVM's generic targets -> the targets, or their beginnings, that run such code."""


def target_name(version: int) -> str | None:
    """Spell KFD's ``gfx_target_version``: 110001 is gfx1101, 90012 is gfx90c, 0 is no GPU."""
    major, minor, stepping = version // 10000, version // 100 % 100, version % 100
    if not 0 < major < 100 or minor > 9 or stepping > 15:
        return None
    return f"gfx{major}{minor}{stepping:x}"


def overridden(value: str) -> str | None:
    """Return the target that ``HSA_OVERRIDE_GFX_VERSION`` makes of every GPU: 11.0.0 is gfx1100."""
    match = re.fullmatch(r"(\d{1,2})\.(\d)\.(\d{1,2})", value.strip())
    return target_name(int(match[1]) * 10000 + int(match[2]) * 100 + int(match[3])) if match else None


@dataclass(frozen=True, slots=True)
class Evidence:
    """What speaks for or against a GPU being integrated; see `judge`. Sizes are bytes.

    Attributes:
        gfx: LLVM target, None when it is not known.
        core: version of the graphics core (``11.0.3``), ``?`` for a part that can't be read.
        node_cpu_cores: processor cores in its KFD node.
        vram: its own memory.
        gtt: system memory that it may map.
        bank: what KFD counts as its memory.
        unique_id: whether it has one.
        name: marketing name.

    """

    gfx: str | None
    core: str | None
    node_cpu_cores: int
    vram: int
    gtt: int
    bank: int
    unique_id: bool
    name: str


def judge(seen: Evidence) -> tuple[bool, str]:
    """Say whether a GPU is integrated, and on what evidence.

    The target and the core version decide when they are known. For silicon newer than the tables several
    weaker signs have to agree: the size of the memory alone never decides, since a firmware may carve
    out 512 MB or 96 GB.
    """
    if seen.gfx in APU_TARGETS:
        return True, f"{seen.gfx} is the target of processors with integrated graphics"
    if seen.core in APU_CORES:
        return True, f"graphics core {seen.core} is integrated according to the kernel"
    if seen.node_cpu_cores:
        return True, "its KFD node holds processor cores too"
    if seen.gfx in DISCRETE_TARGETS:
        return False, f"{seen.gfx} is the target of discrete cards"
    signs = []
    if seen.vram > 0 and seen.gtt >= 4 * seen.vram:
        signs.append("little memory of its own beside much mapped system memory")
    if seen.gtt and seen.bank == seen.gtt != seen.vram:
        signs.append("KFD counts system memory as its memory")
    if not seen.unique_id:
        signs.append("no unique id")
    if re.search(r"\b(\d{3,4}[SM]|Vega \d+|Radeon(\(TM\))?) Graphics\b", seen.name):
        signs.append(f"named {seen.name!r}")
    if len(signs) >= 2:
        return True, "; ".join(signs)
    return False, "nothing says that it is integrated" + (f" but {signs[0]}" if signs else "")


def runs_on(targets: frozenset[str], gfx: str) -> bool:
    """Say whether code for `targets` has some that runs on `gfx`."""
    return gfx in targets or any(
        gfx.startswith(beginning) for target in targets for beginning in GENERIC_TARGETS.get(target, ())
    )


_OFFLOAD = re.compile(
    rb"amdgcn-amd-amdhsa--(gfx[0-9]+(?:-[0-9])?-generic|gfx1[0-9]{2}[0-9a-f]|gfx[789][0-9][0-9a-f])"
)


def built_for(program: Path) -> frozenset[str]:
    """Return the AMD targets for which a llama.cpp binary carries code.

    They are named in the clear in the offload bundle of ``libggml-hip*.so`` beside the program, or of
    the program itself. Empty when there are none, or when the bundle is compressed.
    """
    program = program.resolve()
    libraries = [
        library
        for folder in (program.parent, program.parent.parent / "lib")
        for library in sorted(folder.glob("libggml-hip*.so*"))
    ]
    found: set[str] = set()
    for file in libraries or [program]:
        try:
            with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content:
                found.update(match[1].decode() for match in _OFFLOAD.finditer(content))
        except (OSError, ValueError):
            continue
    return frozenset(found)
