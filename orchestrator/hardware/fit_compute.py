"""The compute buffer: what llama.cpp's graph holds at its peak, from the shapes alone.

The factors were found by varying one length at a time under llama-fit-params, until its figures were met over
23 models of 14 architectures (docs/explanation/memory-estimate.md). A dense model's are exact to the MiB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from orchestrator.gguf_header import Header
from orchestrator.hardware.fit_layers import Layer, cells, padded

_WIDTHS: Final = 5  # activations as wide as the model that are alive at the peak, the input among them
_HIDDEN: Final = 3  # as wide as a feed-forward layer, of all experts used: gate, up, and their product
_EXPERTS: Final = 2  # as wide as the model for each expert used: its answer, and the weighted one
_INNER: Final = {1: 5.0, 2: 6.5}  # as wide as a recurrent layer's inside, by generation of Mamba


@dataclass(frozen=True, slots=True)
class Batch:
    """What is computed at once; see `fit.Wish`."""

    context: int
    slots: int
    ubatch: int
    outputs: int | None
    flash_attention: bool


def buffer(header: Header, kept: tuple[Layer, ...], batch: Batch) -> tuple[int, int]:
    """Return the bytes of the compute buffer at its peak, and of its inputs alone."""
    tokens = min(batch.ubatch, padded(batch.context) * batch.slots)
    tokens = -(-tokens // batch.slots) * batch.slots
    attending = [layer for layer in kept if layer.key]
    depths = {bool(layer.window): cells(layer, batch.context, 1, batch.ubatch) for layer in attending}
    # one mask for the windowed layers, one for the others: f16 for flash attention, else f32
    masks = sum(depths.values()) * tokens * (2 if batch.flash_attention else 4)
    width = (header.embedding or 0) * tokens * 4
    outputs = tokens if batch.outputs is None else min(batch.outputs, tokens)
    peak = max(
        (header.vocabulary or 0) * outputs * 4,
        _feed_forward(header) * tokens * 4,
        _recurrent(header, kept) * tokens * 4,
        0
        if batch.flash_attention or not attending
        else 4 * tokens * _scores(header, attending, max(depths.values())),
    )
    return masks + _WIDTHS * width + peak, masks + width


def _feed_forward(header: Header) -> int:
    """Return the elements a token takes at the peak of a feed-forward layer."""
    dense = header.feed_forward if isinstance(header.feed_forward, int) else max(header.feed_forward or (0,))
    if not header.experts:
        return _HIDDEN * dense
    own = header.value("expert_feed_forward_length")
    hidden = own if type(own) is int and own else dense
    # what the residual and the shared experts add stays alive besides
    beside = 4 if header.value("expert_shared_count") else 1
    width = header.embedding or 0
    return max(_HIDDEN * header.experts_used * hidden, (_EXPERTS * header.experts_used + beside) * width)


def _recurrent(header: Header, kept: tuple[Layer, ...]) -> int:
    """Return the elements a token takes at the peak of a recurrent layer."""
    inner = header.value("ssm.inner_size")
    if type(inner) is not int or not any(layer.state for layer in kept):
        return 0
    return int(_INNER[2 if header.value("ssm.group_count") else 1] * inner)


def _scores(header: Header, attending: list[Layer], depth: int) -> int:
    """Return the elements a token takes where attention keeps the score of every cell."""
    heads = header.heads if isinstance(header.heads, int) else max(header.heads or (0,))
    queries = heads * (header.key_length or 0) * (2 if header.value("attention.key_length_mla") else 1)
    return depth * heads + queries + max(layer.key + layer.value for layer in attending)


def projector(header: Header) -> int:
    """Return the bytes that reading one image takes at most: scores of all patches, and activations."""

    def of(key: str) -> int:
        value = header.metadata.get(f"clip.vision.{key}")
        return value if type(value) is int else 0

    patch = of("patch_size")
    if not patch:
        return 0
    patches = (of("image_size") // patch) ** 2
    wide = patches * (of("embedding_length") * _WIDTHS + of("feed_forward_length"))
    return 4 * (patches * patches * of("attention.head_count") + wide)
