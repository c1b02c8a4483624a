"""Memory by process as the DRM drivers tell it: ``/proc/PID/fdinfo``, Vulkan and graphics included.

The keys are those of Linux's ``drm-usage-stats.rst``. Only processes that this user may look into are seen.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from orchestrator.hardware.probe import Tree

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20}
_LINE = re.compile(r"^drm-([a-z0-9-]+):[ \t]*(\S{1,32})[ \t]*([KM]iB)?[ \t]*$", re.MULTILINE)
_PREFERENCE = ("resident", "memory")  # the second is what older kernels call it


def memory_by_process(
    tree: Tree, pci: str, pools: Iterable[str], among: Collection[int] | None = None
) -> dict[int, int]:
    """Return which process ids hold how many bytes in these pools (``vram``, ``gtt``) of a device.

    Looks into the processes `among` these, by default into all: that takes some ten thousand links.

    A process that opened the device several times is one client each time; a client that is reached
    through several descriptors counts once.
    """
    found: dict[int, int] = {}
    for name in tree.names("proc") if among is None else map(str, among):
        if not (name.isascii() and name.isdecimal() and len(name) < 12):
            continue
        clients: dict[str, int] = {}
        for number in tree.names(f"proc/{name}/fd"):
            # most descriptors are files and sockets: looking where they lead is cheaper than reading them
            if tree.link(f"proc/{name}/fd/{number}").startswith("/dev/dri/"):
                lines = _LINE.findall(tree.text(f"proc/{name}/fdinfo/{number}") or "")
                facts = {key: (value, unit) for key, value, unit in lines}
                if facts.get("pdev", ("", ""))[0].lower() == pci:
                    client = facts.get("client-id", (f"descriptor {number}", ""))[0]
                    clients[client] = sum(_size(facts, pool) for pool in pools)
        if clients:
            found[int(name)] = sum(clients.values())
    return found


def _size(facts: dict[str, tuple[str, str]], pool: str) -> int:
    for key in _PREFERENCE:
        value, unit = facts.get(f"{key}-{pool}", ("", ""))
        if value.isascii() and value.isdecimal() and len(value) < 16:
            return int(value) * _UNITS[unit]
    return 0
