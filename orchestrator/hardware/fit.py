"""How much memory a model takes, whether that fits, and the most that would: pure arithmetic.

`estimate` follows what llama.cpp allocates: weights (the tensors' bytes), the cache (`fit_layers`), the
compute buffer (`fit_compute`), and what the runtime takes besides. How far it holds is in
docs/reference/memory.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

from orchestrator.gguf_header import Header
from orchestrator.hardware import fit_compute, fit_layers

MIB: Final = 1 << 20
CELL: Final = fit_layers.CELL
MARGIN: Final = 256 * MIB  # left free: what a desktop's compositor takes and gives back meanwhile
UBATCH: Final = 512  # tokens computed at once, llama.cpp's default

# What a runtime takes on a card besides what llama.cpp asks for: its context, kernels, and workspaces.
# HIP's 0.3 to 1 GiB is the widest; the others are their vendors' usual figures, not measured here.
RUNTIME: Final = {"rocm": 512 * MIB, "cuda": 448 * MIB, "vulkan": 256 * MIB, "cpu": 0}
# Of a llama-server process on the host, measured: docs/reference/memory.md.
PROCESS: Final = 20 * MIB
TOKEN: Final = 216  # bytes that each token of the vocabulary takes there: its text, its score, two look-ups


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What an engine is asked to do with a model.

    Attributes:
        context: tokens a slot.
        slots: requests served at once.
        kv_type: storage type of the cache.
        gpu_layers: layers on the cards, the output layer counting as one; None for all of them.
        ubatch: tokens computed at once.
        outputs: tokens of a ubatch whose logits are kept; None for all. llama-server keeps one a slot since
            June 2026 (llama.cpp#23861), older ones and llama-fit-params count all.
        kind: device kind.
        cards: number of GPUs that share the model by layers.
        flash_attention: whether attention is computed without the whole matrix of scores.
        mmproj: the projector that is loaded too.
        adapters: adapters that are loaded too.

    """

    context: int
    slots: int = 1
    kv_type: str = "f16"
    gpu_layers: int | None = None
    ubatch: int = UBATCH
    outputs: int | None = None
    kind: str = "cpu"
    cards: int = 1
    flash_attention: bool = True
    mmproj: Header | None = None
    adapters: tuple[Header, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes in one place: on the cards together, or in the system's memory."""

    weights: int = 0
    kv: int = 0
    compute: int = 0
    overhead: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv + self.compute + self.overhead


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a wish takes.

    Attributes:
        device: on the cards; all 0 for the CPU.
        host: in the system's memory.
        gpu_layers: layers on the cards, the output layer counting as one.
        source: ``formula`` or ``llama-fit-params``.
        notes: what is not counted.

    """

    device: Part
    host: Part
    gpu_layers: int
    source: str = "formula"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that are free now, None where nobody can tell or nothing is there.

    Attributes:
        device: on the chosen cards together.
        host: system memory.

    """

    device: int | None
    host: int | None


Answer = Literal["fits", "tight", "no", "unknown"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether it fits.

    Attributes:
        answer: ``fits`` with the margin, ``tight`` without it, ``no``, or ``unknown`` as the free memory is.
        short: bytes missing, 0 unless the answer is ``no``.
        where: ``device`` or ``host``, the place that decides.

    """

    answer: Answer
    short: int = 0
    where: Literal["device", "host"] = "host"


def layers_on_cards(header: Header, wish: Wish) -> int:
    """Return the layers that go to the cards, the output layer counting as one; 0 on the CPU."""
    most = (header.layers or 0) + 1
    if wish.kind == "cpu":
        return 0
    return most if wish.gpu_layers is None else min(wish.gpu_layers, most)


def estimate(header: Header, wish: Wish) -> Estimate:
    """Return what the model takes as wished, by formula."""
    kept = fit_layers.layers(header)
    on_cards = layers_on_cards(header, wish)
    first = len(kept) + 1 - on_cards  # this layer and those after it are on the cards
    kv = [0, 0]  # host, device
    for number, layer in enumerate(kept):
        kv[number >= first] += fit_layers.cache(layer, wish.context, wish.slots, wish.ubatch, wish.kv_type)
    host_weights, device_weights = _weights(header, first, bool(on_cards))
    attached = (*wish.adapters, *((wish.mmproj,) if wish.mmproj else ()))
    more = sum(each.tensor_bytes for each in attached)
    compute, inputs = fit_compute.buffer(
        header,
        kept,
        fit_compute.Batch(wish.context, wish.slots, wish.ubatch, wish.outputs, wish.flash_attention),
    )
    sight = fit_compute.projector(wish.mmproj) if wish.mmproj else 0
    tokens = header.vocabulary or 0
    process = PROCESS + tokens * (TOKEN + 4 * wish.slots)  # the logits of each slot's last token
    notes = []
    if header.architecture in fit_layers.UNCOUNTED:
        notes.append(f"{header.architecture} keeps further caches, which are not counted")
    if not on_cards:
        part = Part(host_weights + more, kv[0], compute + sight, process + RUNTIME[wish.kind])
        return Estimate(Part(), part, 0, notes=tuple(notes))
    device = Part(device_weights + more, kv[1], compute + sight, RUNTIME[wish.kind] * wish.cards)
    return Estimate(device, Part(host_weights, kv[0], inputs, process), on_cards, notes=tuple(notes))


def verdict(estimated: Estimate, free: Room, margin: int = MARGIN) -> Verdict:
    """Say whether an estimate fits into what is free."""
    worst = Verdict("fits")
    order: tuple[Answer, ...] = ("fits", "unknown", "tight", "no")
    place: Literal["device", "host"]
    for place, part, room in (("device", estimated.device, free.device), ("host", estimated.host, free.host)):
        if not part.total:
            continue
        if room is None:
            found = Verdict("unknown", 0, place)
        elif part.total > room:
            found = Verdict("no", part.total - room, place)
        else:
            found = Verdict("fits" if part.total + margin <= room else "tight", 0, place)
        if order.index(found.answer) > order.index(worst.answer) or worst.answer == found.answer == "fits":
            worst = found
    return worst


def fits(header: Header, wish: Wish, free: Room, margin: int = MARGIN) -> bool:
    """Say whether a wish fits with the margin; what can't be told counts as fitting."""
    return verdict(estimate(header, wish), free, margin).answer in {"fits", "unknown"}


def largest_context(header: Header, wish: Wish, free: Room, margin: int = MARGIN) -> int | None:
    """Return the most tokens a slot that fit, at most the model's own; None when not even 256 do."""
    most = (header.context or 131_072) // CELL
    if header.context and header.context < CELL:
        return header.context if fits(header, replace(wish, context=header.context), free, margin) else None
    found = largest(1, most, lambda count: fits(header, replace(wish, context=count * CELL), free, margin))
    if found == most and header.context:
        return header.context
    return None if found is None else found * CELL


def largest_slots(header: Header, wish: Wish, free: Room, margin: int = MARGIN) -> int | None:
    """Return the most slots, of those wished for, that fit; None when not even one does."""
    return largest(1, wish.slots, lambda count: fits(header, replace(wish, slots=count), free, margin))


def largest_gpu_layers(header: Header, wish: Wish, free: Room, margin: int = MARGIN) -> int | None:
    """Return the most layers on the cards (the output layer counts) that fit there; None when none does.

    Whether the rest fits into the system's memory is another question: `verdict` has the answer.
    """
    cards = Room(free.device, None)
    return largest(
        1,
        (header.layers or 0) + 1,
        lambda count: fits(header, replace(wish, gpu_layers=count), cards, margin),
    )


def largest(least: int, most: int, good: Callable[[int], bool]) -> int | None:
    """Return the largest number for which `good` holds, given that it holds for all below that one."""
    if not good(least):
        return None
    while least < most:
        middle = (least + most + 1) // 2
        if good(middle):
            least = middle
        else:
            most = middle - 1
    return least


def _weights(header: Header, first: int, offloaded: bool) -> tuple[int, int]:
    """Return the bytes of the weights on the host and on the cards; `first` is the first layer there."""
    host = device = 0
    names = set()
    for tensor in header.tensors:
        names.add(tensor.name)
        number = fit_layers.block(tensor.name)
        if number is None:
            # the embedding is only looked up, and stays on the host; all else outside goes with the output
            there = offloaded and not tensor.name.startswith(("token_embd.", "per_layer_token_embd."))
        else:
            there = number >= first
        if there:
            device += tensor.bytes
        else:
            host += tensor.bytes
    if offloaded and "output.weight" not in names:  # the embedding is the output too: a copy goes along
        device += sum(tensor.bytes for tensor in header.tensors if tensor.name == "token_embd.weight")
    return host, device
