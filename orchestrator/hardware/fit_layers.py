"""What each layer of a model keeps between tokens: key-value cells, a recurrent state, or nothing.

The arithmetic is llama.cpp's (src/llama-hparams.cpp, llama-kv-cache*.cpp, llama-memory-recurrent.cpp).
What the file's tensors show is read from them, so that a new architecture needs no entry here; only the
pattern of sliding windows is often nowhere in the file and stands in `PERIODS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from orchestrator.gguf_header import Header

CELL: Final = 256  # llama.cpp rounds the context of a slot, and a window's cache, up to this many cells

ELEMENT: Final[Mapping[str, float]] = {
    "f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32,
    "q4_1": 20 / 32, "q4_0": 18 / 32, "iq4_nl": 18 / 32,
}  # fmt: skip
"""Bytes an element of the cache takes, by type: ggml's block size / its number of elements."""

# Architecture -> (period, first). Of `period` layers one sees everything: the first, or else the last.
# From each architecture's loader in llama.cpp (src/models); a file's own pattern overrides the period.
PERIODS: Final[Mapping[str, tuple[int, bool]]] = {
    "afmoe": (4, False), "cohere2": (4, False), "exaone-moe": (4, False), "exaone4": (4, False),
    "gemma2": (2, False), "gemma3": (6, False), "gemma3n": (5, False), "gpt-oss": (2, False),
    "laguna": (4, True), "llama4": (4, False), "olmo2": (4, False), "plamo3": (8, False),
    "smallthinker": (4, True),
}  # fmt: skip
_CHUNK: Final[Mapping[str, int]] = {"llama4": 8192}  # tokens: a window that the file doesn't carry

# Encoders read a text at once and keep nothing.
_NO_CACHE: Final = frozenset(
    ("bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3",
     "gemma-embedding", "t5encoder")
)  # fmt: skip

# Architectures with further caches of their own, which are not counted.
UNCOUNTED: Final = frozenset(("deepseek4", "minimax-m3"))

_RECURRENT: Final = (".ssm_", ".shortconv.", ".time_mix_")  # beginnings of a recurrent layer's tensor names


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer keeps.

    Attributes:
        key: elements of keys a cell holds, of all heads together.
        value: elements of values a cell holds; 0 where they are part of the keys (MLA).
        window: tokens that it sees, 0 for all.
        state: bytes of recurrent state a slot has, whatever its context.

    """

    key: int = 0
    value: int = 0
    window: int = 0
    state: int = 0


def layers(header: Header) -> tuple[Layer, ...]:
    """Return what each layer of the model keeps, first to last."""
    count = header.layers or 0
    if header.architecture in _NO_CACHE:
        return (Layer(),) * count
    recurrent = [False] * count
    with_keys = [False] * count
    for tensor in header.tensors:
        number = block(tensor.name)
        if number is not None and number < count:
            recurrent[number] |= any(part in tensor.name for part in _RECURRENT)
            with_keys[number] |= tensor.name.endswith((".attn_k.weight", ".attn_kv_a_mqa.weight"))
    windows = _windows(header, count)
    state = _state(header)
    # layers for predicting further tokens, and those that borrow an earlier layer's cache, keep nothing
    keeping = count - _whole(header, "nextn_predict_layers") - _whole(header, "attention.shared_kv_layers")
    return tuple(
        Layer(
            *_widths(header, number, bool(windows[number]))
            if number < keeping and (with_keys[number] or not recurrent[number])
            else (0, 0),
            window=windows[number],
            state=state if recurrent[number] else 0,
        )
        for number in range(count)
    )


def cells(layer: Layer, context: int, slots: int, ubatch: int) -> int:
    """Return the cells that a layer's cache has, of all slots together."""
    each = padded(context)
    if layer.window:
        each = min(each, padded(min(each, layer.window + ubatch)))
    return each * slots


def cache(layer: Layer, context: int, slots: int, ubatch: int, kv_type: str) -> int:
    """Return the bytes that a layer keeps: its cells, and every slot's recurrent state."""
    wide = (layer.key + layer.value) * ELEMENT[kv_type]
    return int(cells(layer, context, slots, ubatch) * wide) + layer.state * slots


def padded(count: int) -> int:
    """Return a number of cells rounded up as llama.cpp does."""
    return -(-count // CELL) * CELL


def block(name: str) -> int | None:
    """Return the number of the layer that a tensor belongs to, None for what is outside the layers."""
    if not name.startswith("blk."):
        return None
    number = name[4:].partition(".")[0]
    return int(number) if number.isdecimal() else None


def _widths(header: Header, number: int, windowed: bool) -> tuple[int, int]:
    """Return the elements of keys and of values that a cell of a layer holds."""
    heads = header.kv_heads[number] if isinstance(header.kv_heads, tuple) else header.kv_heads or 0
    key, value = header.key_length or 0, header.value_length or 0
    if windowed:
        key = _whole(header, "attention.key_length_swa") or key
        value = _whole(header, "attention.value_length_swa") or value
    if _whole(header, "attention.key_length_mla") and _whole(header, "attention.value_length_mla"):
        value = 0  # the latent vector of multi-head latent attention holds both
    key *= heads
    if header.architecture in {"deepseek32", "glm-dsa"}:
        key += _whole(header, "attention.indexer.key_length")  # a cache beside, one head wide
    return key, value * heads


def _windows(header: Header, count: int) -> list[int]:
    """Return the window of each layer, 0 where it sees everything."""
    window = header.sliding_window or _CHUNK.get(header.architecture or "", 0)
    period, first = PERIODS.get(header.architecture or "", (1, False))
    pattern = header.value("attention.sliding_window_pattern")
    if isinstance(pattern, tuple) and len(pattern) >= count:
        return [window if pattern[number] else 0 for number in range(count)]
    if type(pattern) is int:
        period = pattern
    if not window or period == 1:
        return [0] * count
    if period == 0:
        return [window] * count
    whole = 0 if first else period - 1
    return [0 if number % period == whole else window for number in range(count)]


def _state(header: Header) -> int:
    """Return the bytes of one recurrent layer's state of one slot; it is kept in f32."""
    width = header.embedding or 0
    if head := _whole(header, "wkv.head_size"):  # RWKV
        shifts = _whole(header, "token_shift_count") or 2
        return 4 * (shifts * width + width * head)
    if kernel := _whole(header, "shortconv.l_cache"):  # LFM2
        return 4 * width * (kernel - 1)
    inner, state = _whole(header, "ssm.inner_size"), _whole(header, "ssm.state_size")
    mixed = inner + 2 * _whole(header, "ssm.group_count") * state
    return 4 * (max(_whole(header, "ssm.conv_kernel") - 1, 0) * mixed + state * inner)


def _whole(header: Header, key: str) -> int:
    value = header.value(key)
    return value if type(value) is int and value >= 0 else 0
