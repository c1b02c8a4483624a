"""From a wish ("auto", these GPUs) to cards and to the one set of masks that shows an engine just them.

The runtimes' masks stack, and each counts differently:

* ``ROCR_VISIBLE_DEVICES`` filters first and takes unique ids; what is left is renumbered from 0, which
  is what ``HIP_VISIBLE_DEVICES`` then counts (ROCm's "GPU isolation techniques"). A card without a
  unique id can only be named by its HIP index, and then without the first filter.
* ``CUDA_VISIBLE_DEVICES`` takes UUIDs, but HIP reads it too and vLLM refuses to start when it differs
  from HIP's, so it is set for CUDA only, or to hide everything.
* ``GGML_VK_VISIBLE_DEVICES`` counts as the Vulkan loader sorts on Linux: discrete before integrated,
  then by PCI address. Empty, it hides every device.

Masks that were inherited are always removed: one of them left over from a shell would stack on ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.errors import DeviceMissing
from orchestrator.hardware.gpu import Gpu, Machine

GPU_KINDS = ("cuda", "rocm", "vulkan")  # in the order in which `auto` tries them
KINDS = (*GPU_KINDS, "cpu")

MASKS = (
    "CUDA_DEVICE_ORDER",
    "CUDA_VISIBLE_DEVICES",
    "GGML_VK_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
)
OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"

VENDORS = {"cuda": "NVIDIA", "rocm": "AMD", "vulkan": "AMD or NVIDIA"}
RUNTIMES = {"cuda": "CUDA", "rocm": "ROCm", "vulkan": "Vulkan", "cpu": "CPU"}


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """What an engine shall run on.

    Attributes:
        kind: ``rocm``, ``cuda``, ``vulkan`` or ``cpu``.
        gpus: the cards, in the order in which the engine will number them; none for ``cpu``.
        env: masks to set.
        unset: masks to remove from what is inherited.
        notes: why it came out so, and what was overruled.

    """

    kind: str
    gpus: tuple[Gpu, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def choose(
    machine: Machine,
    device: str = "auto",
    gpus: Sequence[str | int] | None = None,
    *,
    supported: frozenset[str],
    environ: Mapping[str, str],
) -> DeviceChoice:
    """Decide which cards an engine gets, and the masks for it.

    `supported` holds the device kinds that the engine's binary can drive. `gpus` names cards by id (or a
    beginning of it that only one card has), PCI address, render node, or index in the order of the kind's
    runtime; without it every discrete card of the kind is taken. An integrated GPU is used only when it is
    named.

    Raises:
        DeviceMissing: a GPU was asked for and none can be used, or an unknown one was named.

    """
    named = list(dict.fromkeys(gpus or ()))
    if device == "cpu" or (device == "auto" and not named):
        return _automatic(machine, device, named, supported, environ)
    wanted = [device]
    if device == "auto":  # kinds without a card last, so that a refusal speaks of the cards that are there
        able_kinds = [kind for kind in GPU_KINDS if kind in supported]
        wanted = sorted(able_kinds, key=lambda kind: not _ordered(machine, kind))
    if not wanted or wanted[0] not in supported:
        able = ", ".join(RUNTIMES.get(kind, kind) for kind in KINDS if kind in supported) or "nothing"
        what = RUNTIMES.get(device, device) if device != "auto" else "a GPU"
        raise DeviceMissing(
            f"device: {what} was asked for, but this engine's binary can use only: {able}",
            advice="install a binary that was built for it, or set device: auto and name no gpus",
        )
    faults = []
    for kind in wanted:
        try:
            return _result(kind, _cards(machine, kind, named), machine, supported, environ)
        except DeviceMissing as fault:
            faults.append(fault)
    raise faults[0]


def _automatic(
    machine: Machine,
    device: str,
    named: Sequence[str | int],
    supported: frozenset[str],
    environ: Mapping[str, str],
) -> DeviceChoice:
    """Take discrete cards where something can drive them, else the processor, and say why."""
    if device == "auto":
        for kind in GPU_KINDS:
            cards = [gpu for gpu in _ordered(machine, kind) if not gpu.integrated and kind not in gpu.blocked]
            if kind in supported and cards:
                return _result(kind, cards, machine, supported, environ)
    if "cpu" not in supported:
        kinds = [kind for kind in GPU_KINDS if kind in supported]
        if device == "cpu" or not kinds:
            raise DeviceMissing("device: this engine can't run on the CPU", advice="set device: auto")
        reasons = [_missing(machine, kind) for kind in kinds]
        why = "; ".join(text for text, _ in reasons)
        raise DeviceMissing(f"device: this engine needs a GPU, but {why}", advice=reasons[0][1])
    notes = [f"gpus is ignored because device is {device}"] if named else []
    if device == "auto":
        notes += _why_cpu(machine, supported)
    return _result("cpu", [], machine, supported, environ, notes)


def _why_cpu(machine: Machine, supported: frozenset[str]) -> list[str]:
    """Say for each card why it is not used."""
    notes = []
    for gpu in machine.gpus:
        able = [kind for kind in gpu.kinds if kind in supported]
        what = f"{'an integrated' if gpu.integrated else 'a discrete'} {VENDORS[gpu.kinds[0]]} GPU is there"
        if not able:
            notes.append(f"{what}, {gpu.label}, but this binary has no {RUNTIMES[gpu.kinds[0]]}")
        elif gpu.integrated:
            notes.append(f"{what}, {gpu.label}, but such a one is used only when named: {_naming(gpu)}")
        else:
            notes.append(f"{what}, {gpu.label}, but {gpu.blocked[able[0]]}")
    return notes or ["no GPU was found"]


def _ordered(machine: Machine, kind: str) -> list[Gpu]:
    """Return the cards that `kind` could drive, in the order in which its runtime counts them."""
    cards = [gpu for gpu in machine.gpus if kind in gpu.kinds]
    if kind == "vulkan":
        return sorted(cards, key=lambda gpu: (gpu.integrated, gpu.pci))
    return sorted(cards, key=lambda gpu: gpu.index)


def _cards(machine: Machine, kind: str, named: Sequence[str | int]) -> list[Gpu]:
    """Return the named cards, or every discrete one of the kind.

    Raises:
        DeviceMissing: one is unknown, ambiguous or can't be used, or there is none.

    """
    if not named:
        cards = [gpu for gpu in _ordered(machine, kind) if not gpu.integrated and kind not in gpu.blocked]
        if not cards:
            text, advice = _missing(machine, kind)
            raise DeviceMissing(f"device: {RUNTIMES[kind]} was asked for, but {text}", advice=advice)
        return cards
    cards = list({id(gpu): gpu for gpu in (_named(machine, kind, name) for name in named)}.values())
    for gpu in cards:
        if kind in gpu.blocked:
            raise DeviceMissing(
                f"device: {gpu.label} was asked for, but {gpu.blocked[kind]}", advice=mend(gpu.blocked[kind])
            )
    return cards


def _named(machine: Machine, kind: str, name: str | int) -> Gpu:
    cards = _ordered(machine, kind)
    text = str(name).strip().lower()
    if text.isascii() and text.isdecimal() and len(text) < 6:
        found = [gpu for at, gpu in enumerate(cards) if _position(kind, gpu, at) == int(text)]
    else:
        found = [
            gpu for gpu in cards if text in {gpu.id.lower(), gpu.pci, (gpu.render_node or "-").lower()}
        ] or [gpu for gpu in cards if len(text) > 4 and gpu.id.lower().startswith(text)]
    if len(found) == 1:
        return found[0]
    there = "; ".join(f"{_position(kind, gpu, at)} = {gpu.id} {gpu.label}" for at, gpu in enumerate(cards))
    raise DeviceMissing(
        f"device: {'several GPUs match' if found else 'there is no GPU'} {str(name)!r} for {RUNTIMES[kind]}",
        advice=f"there are: {there}"
        if there
        else f"no {VENDORS[kind]} GPU was found; see orchestrator doctor",
    )


def _position(kind: str, gpu: Gpu, at: int) -> int:
    return at if kind == "vulkan" else gpu.index


def _naming(gpu: Gpu) -> str:
    """Return the profile's line that names a card; unquoted, YAML reads 0000:10:00.0 as 600 seconds."""
    return f'gpus: ["{gpu.id}"]'


def _missing(machine: Machine, kind: str) -> tuple[str, str]:
    """Return why no discrete card of a kind can be used, and what to do about it."""
    cards = _ordered(machine, kind)
    discrete = [gpu for gpu in cards if not gpu.integrated]
    if discrete:
        reason = discrete[0].blocked.get(kind, "it can't be used")
        return f"{discrete[0].label}: {reason}", mend(reason)
    if cards:
        return (
            f"only an integrated GPU is there: {cards[0].label}",
            f"an integrated GPU is used when it is named: {_naming(cards[0])}",
        )
    return f"no {VENDORS[kind]} GPU was found", "orchestrator doctor says what was found"


def mend(reason: str) -> str:
    """Return what to do about a reason in `Gpu.blocked`."""
    if reason.startswith("no permission"):
        return "sudo usermod -aG render,video $USER, then log in again"
    if "/dev/kfd is missing" in reason:
        return "sudo modprobe amdgpu; in a container, start it with --device /dev/kfd --device /dev/dri"
    if "/dev/dri" in reason:
        return "in a container, start it with --device /dev/dri"
    return "orchestrator doctor says more"


def _result(
    kind: str,
    cards: Sequence[Gpu],
    machine: Machine,
    supported: frozenset[str],
    environ: Mapping[str, str],
    notes: Iterable[str] = (),
) -> DeviceChoice:
    env = _masks(kind, cards, machine, supported)
    said = list(notes)
    said += [
        f"{name}={environ[name]} from the environment is {'replaced' if name in env else 'removed'}"
        for name in MASKS
        if name in environ and environ[name] != env.get(name)
    ]
    if kind == "rocm" and environ.get(OVERRIDE):
        said.append(f"{OVERRIDE}={environ[OVERRIDE]} from the environment is passed through")
    unset = tuple(name for name in MASKS if name not in env)
    return DeviceChoice(kind, tuple(cards), env, unset, tuple(said))


def _masks(kind: str, cards: Sequence[Gpu], machine: Machine, supported: frozenset[str]) -> dict[str, str]:
    if kind == "cpu":
        return {"CUDA_VISIBLE_DEVICES": "-1", "GGML_VK_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1"}
    env: dict[str, str] = {}
    if kind == "cuda":
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.id for gpu in cards)
    elif kind == "rocm":
        if all(re.fullmatch(r"GPU-[0-9a-f]{16}", gpu.id) for gpu in cards):
            env["ROCR_VISIBLE_DEVICES"] = ",".join(gpu.id for gpu in cards)
            env["HIP_VISIBLE_DEVICES"] = ",".join(str(at) for at in range(len(cards)))
        else:
            env["HIP_VISIBLE_DEVICES"] = ",".join(str(gpu.index) for gpu in cards)
    else:
        order = [gpu.id for gpu in _ordered(machine, "vulkan")]
        env["GGML_VK_VISIBLE_DEVICES"] = ",".join(str(order.index(gpu.id)) for gpu in cards)
    # a binary with several runtimes in it would offer the same cards, and hidden ones, a second time
    if kind != "vulkan" and "vulkan" in supported:
        env["GGML_VK_VISIBLE_DEVICES"] = ""
    if kind != "rocm" and "rocm" in supported:
        env["HIP_VISIBLE_DEVICES"] = "-1"
    if kind == "vulkan" and "cuda" in supported:
        env["CUDA_VISIBLE_DEVICES"] = "-1"
    return env
