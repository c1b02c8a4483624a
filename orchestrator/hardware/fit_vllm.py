"""How much memory vLLM takes for a model, and how many tokens its cache gets: pure arithmetic.

vLLM is told how much it may have and shares that out: weights, what a step of computing needs, and the rest
is the cache. It cuts the cache into blocks that all layers share (vLLM's v1/core/kv_cache_utils.py and
v1/kv_cache_interface.py, read in 0.32): layers that see everything hold a request's whole context, layers
with a window only that window and what is being computed. How far it holds is in docs/reference/memory.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from orchestrator.hardware.fit import MIB, RUNTIME, Estimate, Part, largest
from orchestrator.hardware.fit_layers import PERIODS, Layer
from orchestrator.hf_model import HfModel

BLOCK: Final[Mapping[str, int]] = {"cpu": 128}  # tokens in a block, by device kind
_BLOCK: Final = 16
_MLA_BLOCK: Final = 16
STRIDE: Final = 128  # tokens by which `context: auto` goes
STEP: Final = 2048  # tokens computed in one step, vLLM's default for a server on cards below 70 GB
# Steps under way at once: on cards, while one is computed the next is prepared.
_BATCHES: Final[Mapping[str, int]] = {"cpu": 1}
_BATCHES_ON_CARDS: Final = 2
_STATES: Final = ("mamba", "linear_attention", "recurrent", "conv")

# Of its processes on the host (the API's, the engine's and the worker's), as vLLM 0.32 took on the CPU with
# 259 tokens; and what each token of the vocabulary takes there besides, with 262,144.
PROCESSES: Final = 1870 * MIB
TOKEN: Final = 5570
GRAPHS: Final = 512 * MIB  # what recorded CUDA or HIP graphs take on a card, not measured here


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmWish:
    """What vLLM is asked to do with a model.

    Attributes:
        context: tokens a request may have.
        slots: requests served at once.
        element: bytes of an element of the cache.
        widened: by how much the weights grow when they are loaded, 2 for 16-bit ones in float32.
        kind: device kind.
        cards: number of GPUs that share the model.
        tensor_parallel: how many of them share each layer.
        step: tokens computed in one step.
        graphs: whether steps are recorded.
        offloaded: bytes of weights that stay in system memory.

    """

    context: int
    slots: int = 1
    element: float = 2
    widened: float = 1
    kind: str = "cpu"
    cards: int = 1
    tensor_parallel: int = 1
    step: int = STEP
    graphs: bool = False
    offloaded: int = 0


@dataclass(frozen=True, slots=True)
class Blocks:
    """How vLLM cuts a model's cache.

    Attributes:
        size: bytes of a block, on all cards together.
        request: blocks that a request of the whole context takes.
        context: tokens of that request.

    """

    size: int
    request: int
    context: int

    def bytes_for(self, requests: int) -> int:
        """Return the bytes for so many requests of the whole context, and the block that is never used."""
        return (self.request * requests + 1) * self.size

    def tokens_in(self, size: int) -> int:
        """Return the tokens that vLLM says a cache of so many bytes has."""
        return int(size // self.size / self.request * self.context)


def layers(model: HfModel) -> tuple[Layer, ...] | None:
    """Return what each layer keeps, None where the configuration does not say; states are not counted."""
    config = model.text
    count, heads, key, value = model.layers, model.kv_heads, model.key_length, model.value_length
    if not (count and heads and key and value) or count > 4096:
        return None
    latent, rotary = config.get("kv_lora_rank"), config.get("qk_rope_head_dim")
    if type(latent) is int and type(rotary) is int:  # MLA: one vector of both for all heads
        wide = (latent + rotary, 0)
    else:
        wide = (heads * key, heads * value)
    shared = config.get("num_kv_shared_layers")
    keeping = count - shared if type(shared) is int and 0 <= shared < count else count
    windows = _windows(model, count)
    return tuple(
        Layer() if window is None or number >= keeping else Layer(*wide, window=window)
        for number, window in enumerate(windows)
    )


def _windows(model: HfModel, count: int) -> list[int | None]:
    """Return the window of each layer, 0 where it sees everything, None where it keeps a state instead."""
    config = model.text
    chunk = config.get("attention_chunk_size")
    window = model.sliding_window or (chunk if type(chunk) is int and chunk > 0 else 0)
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == count:
        return [
            None
            if str(kind).startswith(_STATES)
            else window
            if str(kind).startswith(("sliding", "chunked"))
            else 0
            for kind in kinds
        ]
    family = (model.family or "").removesuffix("_text").replace("_", "-")
    period, first = PERIODS.get(family, (0, False))
    given = config.get("sliding_window_pattern")
    period = given if type(given) is int and given > 0 else period
    if not period:  # Mistral's way: every layer has it
        return [window] * count
    whole = 0 if first else period - 1
    return [0 if number % period == whole else window for number in range(count)]


def blocks(model: HfModel, wish: VllmWish) -> Blocks | None:
    """Return how the cache is cut, None where the configuration does not say."""
    kept = [layer for layer in layers(model) or () if layer.key]
    if not kept:
        return None
    latent = not kept[0].value
    tokens = _MLA_BLOCK if latent else BLOCK.get(wish.kind, _BLOCK)
    # heads that are fewer than the cards are on each of them
    copies = wish.tensor_parallel if latent else max(1, wish.tensor_parallel // (model.kv_heads or 1))
    page = int(tokens * (kept[0].key + kept[0].value) * wish.element) * copies
    kinds = Counter(layer.window for layer in kept)
    least, most = min(kinds.values()), max(kinds.values())
    # layers of a kind are put together in groups of one size; the last of a kind may have room to spare
    group = most if most < 1.5 * least else least
    request = sum(math.ceil(number / group) * _held(window, tokens, wish) for window, number in kinds.items())
    return Blocks(page * group, request, wish.context)


def _held(window: int, tokens: int, wish: VllmWish) -> int:
    """Return the blocks that a request of the whole context takes in a layer."""
    if not window:
        return math.ceil(wish.context / tokens)
    flying = wish.step * _BATCHES.get(wish.kind, _BATCHES_ON_CARDS)
    kept = min(window - 1 + flying, wish.context)
    return math.ceil(kept / tokens) + 1  # it need not begin where a block does


def estimate(model: HfModel, wish: VllmWish, cache: int | None = None) -> Estimate | None:
    """Return what a wish takes with room for every slot's whole context, None where that can't be told.

    Args:
        model: what its folder says.
        wish: what is asked for.
        cache: bytes of the cache where they are given.

    """
    cut = blocks(model, wish)
    if cut is None or not model.tensor_bytes:
        return None
    notes = []
    if any(not layer.key for layer in layers(model) or ()):
        notes.append("states of recurrent layers are not counted")
    kv = cut.bytes_for(wish.slots) if cache is None else cache
    weights = max(0, int(model.tensor_bytes * wish.widened) - wish.offloaded)
    compute = _compute(model, wish)
    processes = PROCESSES + TOKEN * (model.vocabulary or 0)
    if wish.kind == "cpu":
        part = Part(weights, kv, compute, processes)
        return Estimate(Part(), part, 0, source="formula", notes=tuple(notes))
    overhead = (RUNTIME.get(wish.kind, 0) + (GRAPHS if wish.graphs else 0)) * wish.cards
    device = Part(weights, kv, compute * wish.cards, overhead)
    host = Part(wish.offloaded, 0, 0, processes)
    return Estimate(device, host, (model.layers or 0) + 1, source="formula", notes=tuple(notes))


def _compute(model: HfModel, wish: VllmWish) -> int:
    """Return the bytes of a step at its peak on one card: activations, or the logits of every slot.

    Activations in the type of the weights: five as wide as the model and three as a feed-forward layer (see
    `fit_compute`). Logits in f32, thrice: as computed, as sampled from, and their probabilities.
    """
    width, hidden = model.embedding or 0, model.feed_forward or 0
    element = 4 if wish.widened > 1 else 2
    activations = wish.step * element * (5 * width + 3 * hidden // wish.tensor_parallel)
    return max(activations, wish.slots * (model.vocabulary or 0) * 4 * 3)


def largest_context(most: int, wish: VllmWish, fits: Callable[[VllmWish], bool]) -> int | None:
    """Return the longest context, in steps of `STRIDE` or all of `most`, for which `fits(wish)` holds."""
    if fits(replace(wish, context=most)):
        return most
    found = largest(1, most // STRIDE, lambda count: fits(replace(wish, context=count * STRIDE)))
    return found and found * STRIDE
