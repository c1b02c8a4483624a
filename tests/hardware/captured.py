"""Unfold a captured machine (tests/data/machines) into a tree of files as its kernel lays them out."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from orchestrator.hardware import Ran, Tree

FOLDER = Path(__file__).parent.parent / "data" / "machines"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
NODES = "sys/class/kfd/kfd/topology/nodes"


@functools.cache
def load(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


class CapturedTree(Tree):
    """A tree whose permissions are those of the captured machine, whoever runs the tests."""

    def __init__(self, root: Path, machine: Mapping[str, Any]) -> None:
        super().__init__(root)
        self.denied = {*machine.get("denied", ())}
        self.hidden = {
            f"{NODES}/{number}" for number, node in machine.get("kfd", {}).items() if node.get("hidden")
        }
        self.overlay: dict[str, bytes | OSError] = {}  # path -> what reading it gives instead
        self._user = machine.get("user", {"name": "ada", "groups": ["ada", "render", "video"]})

    def read(self, path: str) -> bytes:
        if path in self.denied:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if any(path.startswith(f"{node}/") for node in self.hidden):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        content = self.overlay.get(self.real(path))
        if isinstance(content, OSError):
            raise content
        return super().read(path) if content is None else content

    def real(self, path: str) -> str:
        """Return where a path leads, from the root; only looked up when something is laid over."""
        return os.path.relpath(os.path.realpath(self.root / path), self.root) if self.overlay else path

    def exists(self, path: str) -> bool:
        return super().exists(path) and not isinstance(self.overlay.get(self.real(path)), FileNotFoundError)

    def may_open(self, path: str) -> bool:
        return self.exists(path) and path not in self.denied

    def group(self, path: str) -> str | None:
        return "render" if self.exists(path) else None

    def user(self) -> tuple[str, frozenset[str]]:
        return self._user["name"], frozenset(self._user["groups"])


def unfold(name: str, root: Path) -> CapturedTree:
    """Write the machine's files under `root` and return the tree that reads them."""
    machine = load(name)
    for path, content in files(machine).items():
        write(root, path, content)
    for path, target in links(machine).items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.path.relpath(root / target, place.parent))
    return CapturedTree(root, machine)


def write(root: Path, path: str, content: str) -> None:
    place = root / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(content, encoding="utf-8")


def files(machine: Mapping[str, Any]) -> dict[str, str]:
    """Return path -> content of every plain file of a machine."""
    found = {
        "proc/cpuinfo": f"processor\t: 0\nmodel name\t: {machine['cpu']['model']}\n",
        "sys/devices/system/cpu/online": f"{machine['cpu']['online']}\n",
        "proc/meminfo": "".join(f"{key}: {value} kB\n" for key, value in machine["meminfo"].items()),
        "proc/sys/kernel/osrelease": "6.17.0-14-generic\n",
        "usr/share/libdrm/amdgpu.ids": (FOLDER / "amdgpu.ids").read_text(encoding="utf-8"),
        **machine.get("files", {}),
    }
    if machine.get("rocm"):
        found["opt/rocm/.info/version"] = f"{machine['rocm']}\n"
    if machine.get("container"):
        found[".dockerenv"] = ""
    if machine.get("drm"):
        found["sys/module/amdgpu/version"] = "6.16.13\n"
    if not machine.get("no_kfd"):
        found["dev/kfd"] = ""
    if machine.get("kfd"):
        found[f"{NODES}/0/gpu_id"] = "0\n"
        found[f"{NODES}/0/properties"] = (
            "cpu_cores_count 16\nsimd_count 0\ngfx_target_version 0\nvendor_id 0\n"
        )
    for number, node in machine.get("kfd", {}).items():
        found.update(_node(f"{NODES}/{number}", dict(node)))
    for render, card in machine.get("drm", {}).items():
        found.update(_device({"vendor": "0x1002", "driver": "amdgpu", **card}))
        if not card.get("missing"):
            found[f"dev/dri/{render}"] = ""
    for address, card in machine.get("pci", {}).items():
        found.update(_device({"pci": address, **card}))
    return found


def _node(path: str, node: dict[str, Any]) -> dict[str, str]:
    gpu_id, bank = node.pop("gpu_id", 0), node.pop("bank", 0)
    if "unique_id" in node:
        node["unique_id"] = int(node["unique_id"], 16)
    properties = {"cpu_cores_count": 0, "vendor_id": 4098, "domain": 0, **node}
    return {
        f"{path}/gpu_id": f"{gpu_id}\n",
        f"{path}/properties": "".join(f"{key} {value}\n" for key, value in properties.items()),
        f"{path}/mem_banks/0/properties": f"heap_type 1\nsize_in_bytes {bank}\nflags 0\nwidth 256\n",
    }


def _device(card: Mapping[str, Any]) -> dict[str, str]:
    device = {
        "vendor": card["vendor"],
        "device": card["device"],
        "class": card.get("class", "0x030000"),
        "revision": card.get("revision", "0x00"),
        "uevent": f"DRIVER={card['driver']}\nPCI_SLOT_NAME={card['pci']}\n"
        if card.get("driver")
        else f"PCI_SLOT_NAME={card['pci']}\n",
    }
    for pool in ("vram", "gtt"):
        if pool in card:
            device[f"mem_info_{pool}_total"], device[f"mem_info_{pool}_used"] = map(str, card[pool])
    for part, value in zip(("major", "minor", "revision"), card.get("core", "").split("."), strict=False):
        device[f"ip_discovery/die/0/GC/0/{part}"] = value
    for name in ("unique_id", "product_name"):
        if name in card:
            device[name] = card[name]
    return {f"sys/devices/pci0000:00/{card['pci']}/{name}": f"{text}\n" for name, text in device.items()}


def links(machine: Mapping[str, Any]) -> dict[str, str]:
    """Return path -> target of every link of a machine, both from its root."""
    found = {}
    for render, card in machine.get("drm", {}).items():
        folder = f"sys/devices/pci0000:00/{card['pci']}"
        number = int(render.removeprefix("renderD")) - 128
        found[f"sys/class/drm/{render}/device"] = folder
        found[f"sys/class/drm/card{number}/device"] = folder
        found[f"sys/bus/pci/devices/{card['pci']}"] = folder
    for address in machine.get("pci", {}):
        found[f"sys/bus/pci/devices/{address}"] = f"sys/devices/pci0000:00/{address}"
    return found


class Programs:
    """A runner that answers as the captured machine's nvidia-smi does; everything else is not there."""

    def __init__(self, machine: Mapping[str, Any]) -> None:
        self._answers = machine.get("programs", {})
        self.calls: list[list[str]] = []

    def __call__(self, argv: Sequence[str], timeout: float) -> Ran:
        self.calls.append(list(argv))
        if argv[0] != "nvidia-smi" or not self._answers:
            return Ran(None, err="no such file or directory")
        what, _, fields = argv[1].removeprefix("--query-").partition("=")
        unknown = self._answers.get("unknown")
        if unknown and unknown in fields.split(","):
            return Ran(2, f'Field "{unknown}" is not a valid field to query.\n\n')
        return Ran(0, self._answers.get(what, ""))
