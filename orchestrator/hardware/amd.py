"""AMD GPUs as the kernel describes them: the KFD topology joined with the DRM devices.

KFD's nodes give HIP's order, the target and the render minor; the DRM device behind that render minor
gives the memory, the unique id and the PCI address. No ROCm is needed for any of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.hardware.gpu import Gpu, Kfd
from orchestrator.hardware.probe import Tree, whole
from orchestrator.hardware.targets import CORE_TARGETS, Evidence, judge, target_name

VENDOR = 0x1002
NODES = "sys/class/kfd/kfd/topology/nodes"
DRM = "sys/class/drm"
NAME_TABLES = (
    "usr/share/libdrm/amdgpu.ids",
    "opt/amdgpu/share/libdrm/amdgpu.ids",
    "usr/local/share/libdrm/amdgpu.ids",
)
PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True, slots=True)
class Node:
    """One GPU of the KFD topology."""

    number: int
    gpu_id: int | None
    properties: Mapping[str, int]
    bank: int

    @property
    def pci(self) -> str:
        """PCI address, from the location that KFD packs as bus, device and function."""
        domain, place = self.properties.get("domain", 0), self.properties.get("location_id", 0)
        if not 0 < place < 1 << 16 or domain >= 1 << 32:
            return ""
        return f"{domain:04x}:{place >> 8:02x}:{place >> 3 & 31:02x}.{place & 7}"


@dataclass(frozen=True, slots=True)
class Card:
    """One DRM device of AMD's."""

    path: str
    pci: str
    render: str | None
    driver: str | None


def find(tree: Tree, problems: list[str]) -> tuple[tuple[Gpu, ...], Kfd]:
    """Return the AMD GPUs of a machine and the state of KFD; says in `problems` what made no sense."""
    nodes, hidden = _nodes(tree, problems)
    cards = _cards(tree)
    kfd = Kfd(
        present=tree.exists("dev/kfd"),
        permitted=tree.may_open("dev/kfd"),
        topology=bool(nodes) or hidden > 0,
        hidden_nodes=hidden,
    )
    if hidden:
        problems.append(f"kfd: {hidden} of {hidden + len(nodes)} nodes are not readable by this process")
    names = _names(tree) if nodes or cards else {}
    by_render = {card.render: card for card in cards if card.render}
    by_pci = {card.pci: card for card in cards if card.pci}
    gpus: list[Gpu] = []
    taken: set[str] = set()
    for node in nodes:
        minor = node.properties.get("drm_render_minor", 0)
        card = by_render.get(f"renderD{minor}") or by_pci.get(node.pci)
        if card is None:
            problems.append(f"kfd: node {node.number} has no DRM device (render minor {minor})")
            card = Card("", node.pci, f"renderD{minor}" if 127 < minor < 1 << 20 else None, None)
        taken.add(card.path)
        gpus.append(_gpu(tree, len(gpus), card, node, kfd, names, problems))
    for card in sorted(cards, key=lambda card: card.pci):
        if card.path not in taken:
            gpus.append(_gpu(tree, len(gpus), card, None, kfd, names, problems))
    return tuple(gpus), kfd


def _nodes(tree: Tree, problems: list[str]) -> tuple[list[Node], int]:
    """Return the GPU nodes in HIP's order, and how many nodes are hidden from this process."""
    found, hidden = [], 0
    numbers = sorted(int(name) for name in tree.names(NODES, problems) if name.isascii() and name.isdecimal())
    for number in numbers:
        path = f"{NODES}/{number}"
        refusals: list[str] = []
        gpu_id = tree.number(f"{path}/gpu_id", refusals)
        lines = (line.split() for line in (tree.text(f"{path}/properties", refusals) or "").splitlines())
        pairs = ((words[0], whole(words[1])) for words in lines if len(words) == 2)
        properties = {key: value for key, value in pairs if value is not None}
        if refusals and not properties:
            hidden += 1  # a device cgroup answers EPERM here for GPUs that belong to others
            continue
        problems.extend(refusals)
        if not gpu_id and not properties.get("simd_count"):
            continue  # a processor
        bank = sum(
            size
            for name in tree.names(f"{path}/mem_banks")
            for size in [_bank(tree.text(f"{path}/mem_banks/{name}/properties") or "")]
        )
        found.append(Node(number, gpu_id or None, properties, bank))
    return found, hidden


def _bank(text: str) -> int:
    """Return the size of a frame buffer heap (types 1 and 2 of the HSA thunk), 0 for any other."""
    pairs = dict(words for line in text.splitlines() if len(words := line.split()) == 2)
    return whole(pairs.get("size_in_bytes", "")) or 0 if pairs.get("heap_type") in {"1", "2"} else 0


def _cards(tree: Tree) -> list[Card]:
    """Return AMD's DRM devices, those with a render node first found under it."""
    found: dict[str, Card] = {}
    entries = [name for name in tree.names(DRM) if re.fullmatch(r"(renderD|card)[0-9]{1,6}", name)]
    # render nodes first, so that card entries add only devices that lack one
    for name in sorted(entries, key=lambda name: (name.startswith("card"), len(name), name)):
        path = f"{DRM}/{name}/device"
        if tree.number(f"{path}/vendor", base=16) != VENDOR:
            continue
        event = dict(
            line.split("=", 1) for line in (tree.text(f"{path}/uevent") or "").splitlines() if "=" in line
        )
        place = event.get("PCI_SLOT_NAME", "").lower() or tree.leads_to(path).lower()
        pci = place if PCI_ADDRESS.fullmatch(place) else ""
        render = name if name.startswith("renderD") else None
        found.setdefault(pci or name, Card(path, pci, render, event.get("DRIVER")))
    return list(found.values())


def _names(tree: Tree) -> dict[tuple[int, int], str]:
    """Return libdrm's marketing names by device and revision; only ever shown, never decided upon."""
    names: dict[tuple[int, int], str] = {}
    for table in NAME_TABLES:
        for line in (tree.text(table) or "").splitlines():
            parts = line.split(",", 2)
            if len(parts) != 3:
                continue
            device, revision = whole(parts[0], 16), whole(parts[1], 16)
            if device is not None and revision is not None:
                names.setdefault((device, revision), parts[2].strip())
    return names


def _gpu(
    tree: Tree,
    index: int,
    card: Card,
    node: Node | None,
    kfd: Kfd,
    names: Mapping[tuple[int, int], str],
    problems: list[str],
) -> Gpu:
    properties = node.properties if node else {}
    bank = node.bank if node else 0
    pci = card.pci or (node.pci if node else "")
    vram, vram_used, gtt, gtt_used = (
        (tree.number(f"{card.path}/mem_info_{name}", problems) or 0) if card.path else 0
        for name in ("vram_total", "vram_used", "gtt_total", "gtt_used")
    )
    if vram_used > vram:
        problems.append(f"amd: {pci or card.path}: more memory in use than there is")
    core = ".".join(
        tree.text(f"{card.path}/ip_discovery/die/0/GC/0/{part}") or "?"
        for part in ("major", "minor", "revision")
    )
    gfx = target_name(properties.get("gfx_target_version", 0)) or CORE_TARGETS.get(core)
    device = tree.number(f"{card.path}/device", base=16) or properties.get("device_id", 0)
    revision = tree.number(f"{card.path}/revision", base=16) or 0
    name = (
        tree.text(f"{card.path}/product_name")
        or names.get((device, revision))
        or f"AMD GPU {VENDOR:04x}:{device & 0xFFFF:04x}"
    )
    # KFD's first: where a card is partitioned, only KFD's differs between the parts
    unique = properties.get("unique_id") or tree.number(f"{card.path}/unique_id", base=16) or 0
    integrated, why = judge(
        Evidence(gfx, core, properties.get("cpu_cores_count", 0), vram, gtt, bank, bool(unique), name)
    )
    return Gpu(
        vendor="amd",
        index=index,
        id=f"GPU-{unique:016x}" if unique else pci or f"amd-{index}",
        name=name,
        pci=pci,
        integrated=integrated,
        why=why,
        gfx=gfx,
        memory_total=vram or bank,
        memory_used=min(vram_used, vram),
        gtt_total=gtt,
        gtt_used=min(gtt_used, gtt),
        render_node=card.render,
        kfd_node=node.number if node else None,
        kfd_gpu_id=node.gpu_id if node else None,
        driver=card.driver,
        blocked=_blocked(tree, card.render, node, kfd),
    )


def _blocked(tree: Tree, render: str | None, node: Node | None, kfd: Kfd) -> dict[str, str]:
    """Return what keeps each device kind from driving a GPU, nothing when it can."""
    blocked: dict[str, str] = {}
    if render is None:
        blocked["vulkan"] = "it has no render node"
    elif not tree.exists(f"dev/dri/{render}"):
        blocked["vulkan"] = f"/dev/dri/{render} is missing"
    elif not tree.may_open(f"dev/dri/{render}"):
        blocked["vulkan"] = f"no permission to open /dev/dri/{render}"
    if not kfd.present:
        blocked["rocm"] = "/dev/kfd is missing"
    elif not kfd.permitted:
        blocked["rocm"] = "no permission to open /dev/kfd"
    elif node is None:
        blocked["rocm"] = "the kernel's compute driver (KFD) does not offer it"
    elif "vulkan" in blocked:
        blocked["rocm"] = blocked["vulkan"]
    return blocked
