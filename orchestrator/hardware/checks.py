"""What is wrong with a machine's graphics, and what mends it: drivers, permissions, targets, masks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from orchestrator.hardware import amd, nvidia
from orchestrator.hardware.devices import MASKS, OVERRIDE
from orchestrator.hardware.gpu import Gpu, Machine
from orchestrator.hardware.probe import Tree
from orchestrator.hardware.targets import overridden

ROCBLAS = "opt/rocm/lib/rocblas/library"
HAND_IN = "--device /dev/kfd --device /dev/dri --group-add video --group-add render"


Level = Literal["ok", "info", "warning", "blocker"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at.

    Attributes:
        level: ``blocker`` has to be mended first, ``warning`` will hurt sooner or later.
        subject: what it is about.
        message: what was found, lower case, without a full stop.
        command: what mends or shows it, None when there is nothing to do.

    """

    level: Level
    subject: str
    message: str
    command: str | None = None


def human(size: int) -> str:
    """Spell a size in GiB, or in MiB below one."""
    return f"{size / 2**30:.1f} GiB" if size >= 1 << 30 else f"{size >> 20} MiB"


def graphics(machine: Machine, tree: Tree, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Look at everything about GPUs."""
    if not machine.gpus and not machine.cards:
        yield Finding("info", "GPU", "none was found, so engines run on the CPU")
    yield from _drivers(machine)
    if any(gpu.vendor == "amd" for gpu in machine.gpus):
        yield from _kfd(machine, tree)
        yield from _render_nodes(machine, tree)
        yield from _rocm(machine, tree)
    for gpu in machine.gpus:
        yield _gpu(machine, gpu)
    yield from _integrated(machine)
    yield from _masks(machine, environ)


def _drivers(machine: Machine) -> Iterator[Finding]:
    if machine.amdgpu is not None and any(gpu.vendor == "amd" for gpu in machine.gpus):
        yield Finding("ok", "kernel driver", f"amdgpu {machine.amdgpu}, kernel {machine.kernel or 'unknown'}")
    for driver in sorted({gpu.driver or "nvidia" for gpu in machine.gpus if gpu.vendor == "nvidia"}):
        yield Finding("ok", "kernel driver", driver)
    for card in machine.cards:
        what = f"{card.pci} ({card.vendor:04x}:{card.device:04x})"
        if card.vendor == nvidia.VENDOR and card.driver in {None, "nouveau"}:
            message = f"{what} is not served by NVIDIA's driver but by {card.driver or 'none'}"
            yield Finding("blocker", "kernel driver", message, "install the nvidia driver, then nvidia-smi")
        elif card.vendor == amd.VENDOR and card.driver is None:
            message = f"{what} has no driver" + ("" if machine.amdgpu else ": amdgpu is not loaded")
            yield Finding("blocker", "kernel driver", message, "sudo modprobe amdgpu && sudo dmesg | tail")
        elif card.driver == "vfio-pci":
            yield Finding("info", "kernel driver", f"{what} is set aside for virtual machines")
        elif card.driver == "radeon":
            message = f"{what} is served by radeon, which can't compute"
            yield Finding(
                "warning", "kernel driver", message, "boot with radeon.si_support=0 amdgpu.si_support=1"
            )


def _kfd(machine: Machine, tree: Tree) -> Iterator[Finding]:
    kfd = machine.kfd
    if not kfd.present:
        if machine.container:
            message = "missing: this container was not given a GPU"
            yield Finding("warning", "/dev/kfd", message, f"start it with {HAND_IN}")
        else:
            message = "missing: the kernel offers no computing on AMD GPUs"
            yield Finding("blocker", "/dev/kfd", message, "sudo modprobe amdgpu && sudo dmesg | grep -i kfd")
    elif not kfd.permitted:
        yield _forbidden(tree, "/dev/kfd")
    else:
        yield Finding("ok", "/dev/kfd", f"may be opened by {tree.user()[0]}")


def _render_nodes(machine: Machine, tree: Tree) -> Iterator[Finding]:
    for gpu in machine.gpus:
        if gpu.vendor != "amd" or gpu.render_node is None:
            continue
        path = f"/dev/dri/{gpu.render_node}"
        if not tree.exists(path[1:]):
            # another container's card, or one that nobody was given, of which /dev/kfd tells
            if not machine.container:
                yield Finding(
                    "blocker", path, f"missing, so {gpu.label} can't be used", "sudo udevadm trigger"
                )
        elif not tree.may_open(path[1:]):
            yield _forbidden(tree, path)
        else:
            yield Finding("ok", path, f"may be opened by {tree.user()[0]}")


def _forbidden(tree: Tree, path: str) -> Finding:
    """Say why a device may not be opened, and by what group membership it could be."""
    name, groups = tree.user()
    group = tree.group(path[1:]) or "render"
    message = f"{name} may not open it: it belongs to the group {group}"
    members = [
        line.split(":")[3].split(",")
        for line in (tree.text("etc/group") or "").splitlines()
        if line.startswith(f"{group}:") and line.count(":") == 3
    ]
    if group in groups:
        return Finding("blocker", path, f"{message}, whose rights don't suffice", f"ls -l {path}")
    if any(name in names for names in members):
        message = f"{message}, which {name} joined after this session began"
        return Finding("blocker", path, message, "log out and in again")
    return Finding("blocker", path, message, f"sudo usermod -aG {group} {name}, then log out and in again")


def _rocm(machine: Machine, tree: Tree) -> Iterator[Finding]:
    if machine.rocm is None:
        message = "not installed under /opt; programs that bring their own libraries don't need it"
        yield Finding("info", "rocm", message)
        return
    yield Finding("ok", "rocm", f"version {machine.rocm}")
    libraries = tree.names(ROCBLAS)
    if not any("gfx" in name for name in libraries):
        return
    for gfx in sorted({gpu.gfx for gpu in machine.gpus if gpu.gfx and "rocm" not in gpu.blocked}):
        if not any(f"{gfx}." in name or f"{gfx}-" in name or f"{gfx}_" in name for name in libraries):
            spared = all(gpu.integrated for gpu in machine.gpus if gpu.gfx == gfx)
            message = f"its rocBLAS has no code for {gfx}, so programs that use it abort there"
            yield Finding("info" if spared else "warning", "rocm", message, "rocminfo | grep gfx")


def _gpu(machine: Machine, gpu: Gpu) -> Finding:
    size = f"{human(gpu.free)} of {human(gpu.total)} free" if gpu.total else "memory unknown"
    message = f"{gpu.label}, {size}, {gpu.driver or 'no driver'}"
    if gpu.id != gpu.pci and gpu.pci:
        message += f", {gpu.pci}"
    reason = gpu.blocked.get(gpu.kinds[0])
    if reason:
        return Finding("info", gpu.id, f"{message}; can't be used for computing: {reason}")
    if gpu.integrated:
        message += f"; integrated: {gpu.why}"
        alone = all(other.integrated for other in machine.gpus)
        return Finding("ok" if alone else "info", gpu.id, message)
    return Finding("ok", gpu.id, message)


def _integrated(machine: Machine) -> Iterator[Finding]:
    """Warn of an integrated GPU that programs would pick, or spread a model over."""
    cards = [gpu for gpu in machine.gpus if gpu.vendor == "amd" and gpu.kfd_node is not None]
    discrete = [gpu for gpu in cards if not gpu.integrated]
    for gpu in cards:
        if not gpu.integrated:
            continue
        if not any(not other.integrated for other in machine.gpus):
            message = f"{gpu.label} is the only GPU; it is used when a profile names it"
            yield Finding("info", "integrated GPU", message, f"--set 'gpus=[\"{gpu.id}\"]'")
        elif discrete:
            mask = f"export ROCR_VISIBLE_DEVICES={','.join(other.id for other in discrete)}"
            if gpu.index < discrete[0].index:
                message = f"{gpu.label} is HIP's device {gpu.index}, before {discrete[0].label}"
                yield Finding(
                    "warning", "integrated GPU", f"{message}; ours are masked, other programs pick it", mask
                )
            else:
                message = f"{gpu.label} is HIP's device {gpu.index}"
                yield Finding(
                    "info", "integrated GPU", f"{message}; ours are masked, other programs may use it", mask
                )


def _masks(machine: Machine, environ: Mapping[str, str]) -> Iterator[Finding]:
    for name in MASKS:
        if name in environ and name != "CUDA_DEVICE_ORDER":
            message = (
                f"{name}={environ[name]} is set in this shell; ours are set anew, other programs obey it"
            )
            yield Finding("warning", "masks", message, f"unset {name}")
    value = environ.get(OVERRIDE)
    if value:
        target = overridden(value)
        own = sorted({gpu.gfx for gpu in machine.gpus if gpu.gfx and not gpu.integrated})
        if target is None:
            message = f"{OVERRIDE}={value} is no version such as 11.0.0"
            yield Finding("warning", "masks", message, f"unset {OVERRIDE}")
        elif own and own != [target]:
            message = (
                f"{OVERRIDE}={value} makes every AMD GPU pass for {target}, and yours is {', '.join(own)}"
            )
            yield Finding("warning", "masks", message, f"unset {OVERRIDE}, unless your binary needs it")
        else:
            yield Finding("info", "masks", f"{OVERRIDE}={value} is passed on to engines")
