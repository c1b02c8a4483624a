"""What ``llama-server --list-devices`` says about a binary: its devices, and what it was built for."""

from __future__ import annotations

import re
from dataclasses import dataclass

MIB = 1 << 20
_DEVICE = re.compile(r"\s+([A-Za-z_]+?)(\d*): (.+?)(?: \((\d{1,9}) MiB, (\d{1,9}) MiB free\))?\s*")
# said on standard error while a runtime starts, even when it then finds no card
_RUNTIME = re.compile(r"(?:initialize|found \d+|loaded) (ROCm|CUDA|Vulkan)\b|^ggml_(vulkan):", re.MULTILINE)
_NAMES = {"rocm": "rocm", "hip": "rocm", "cuda": "cuda", "vulkan": "vulkan"}


@dataclass(frozen=True, slots=True)
class LlamaDevice:
    """One device of a llama.cpp binary.

    Attributes:
        name: as ``--device`` takes it (``ROCm0``).
        kind: ``rocm``, ``cuda``, ``vulkan`` or ``other`` (BLAS, RPC, SYCL).
        index: number within its runtime.
        description: the card's name as the runtime gives it.
        memory_total: bytes, 0 when not given.
        memory_free: bytes, 0 when not given.

    """

    name: str
    kind: str
    index: int
    description: str
    memory_total: int = 0
    memory_free: int = 0


def parse_llama_devices(text: str) -> list[LlamaDevice]:
    """Return the devices that ``--list-devices`` printed, in its order; log lines around are ignored."""
    lines = text.splitlines()
    starts = [at for at, line in enumerate(lines) if line.strip() == "Available devices:"]
    found: list[LlamaDevice] = []
    for line in lines[starts[-1] + 1 :] if starts else []:
        if match := _DEVICE.fullmatch(line):
            runtime, number, description, total, free = match.groups()
            found.append(
                LlamaDevice(
                    name=runtime + number,
                    kind=_NAMES.get(runtime.lower(), "other"),
                    index=int(number[:6] or 0),
                    description=description,
                    memory_total=int(total or 0) * MIB,
                    memory_free=int(free or 0) * MIB,
                )
            )
    return found


def supported_kinds(text: str) -> frozenset[str]:
    """Return the device kinds that a binary can drive, from what it printed on both streams.

    A runtime that is built in but finds no card counts: then the card, not the binary, is what is missing.
    """
    kinds = {device.kind for device in parse_llama_devices(text)} - {"other"}
    for match in _RUNTIME.finditer(text):
        kinds.add((match[1] or match[2]).lower())
    return frozenset({"cpu", *kinds})
