"""Folders in Hugging Face's form, made by the tests: a tiny model, and a tokenizer of bytes."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

SPECIAL = ("<s>", "</s>", "<unk>")


def config(**changed: Any) -> dict[str, Any]:
    """Return the configuration of a llama with two small layers."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 259,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        **changed,
    }


def tiny(
    folder: Path, *, template: str | None = None, special: tuple[str, ...] = SPECIAL, **changed: Any
) -> Path:
    """Write a model that vLLM loads with made-up weights: a token for each byte, BOS before every text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(vocab_size=len(special) + 256, **changed)))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(special)))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special[0],
        "eos_token": special[1],
        "model_max_length": 4096,
    }
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def weights(path: Path, tensors: dict[str, tuple[str, list[int], int]]) -> None:
    """Write a safetensors file, sparse behind its header: name -> type, shape, bytes."""
    header, at = {}, 0
    for name, (kind, shape, size) in tensors.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + at)


def byte_letters() -> list[str]:
    """Return the letter that byte-level BPE writes for each byte: itself where it can be seen."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


def _tokenizer(special: tuple[str, ...]) -> dict[str, Any]:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    begin = [{"SpecialToken": {"id": special[0], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": at, "content": text, **flags} for at, text in enumerate(special)],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": begin,
            "pair": [*begin, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {special[0]: {"id": special[0], "ids": [0], "tokens": [special[0]]}},
        },
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: at for at, text in enumerate([*special, *byte_letters()])},
            "merges": [],
        },
    }
