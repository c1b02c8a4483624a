"""From a GGUF file to a folder with safetensors: the same weights for engines that do not read GGUF.

This file is run by the Python of vLLM's environment, which has the libraries that it needs:

    python convert_gguf.py MODEL.gguf FOLDER

Weights are dequantised and kept as bfloat16. Only Gemma 3 is converted (`ARCHITECTURE`): its names, its
norms, which GGUF holds with one added, and its alternating windows are all special to it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ARCHITECTURE = "gemma3"
PATTERN = 6  # every sixth layer of Gemma 3 sees the whole context; GGUF does not carry this
LOCAL_ROPE = 10000.0  # of its windowed layers; GGUF carries that of the others only

PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
WHOLE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def renamed(name: str) -> str:
    """Return the name that transformers has for a tensor of a GGUF file.

    Raises:
        KeyError: it has none.

    """
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    return f"model.layers.{block[1]}.{PARTS[block[2]]}.weight" if block else WHOLE[name]


def convert(source: Path, target: Path) -> None:
    """Write config, weights and tokenizer into a new folder."""
    import gguf
    import torch
    from safetensors.torch import save_file

    reader = gguf.GGUFReader(str(source))

    def given(key: str) -> Any:
        found = reader.get_field(key)
        return found.contents() if found is not None else None

    architecture = given("general.architecture")
    if architecture != ARCHITECTURE:
        sys.exit(f"only {ARCHITECTURE} is converted, this is {architecture}")
    weights, done = {}, 0
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).float()
        if tensor.name.endswith("norm.weight"):
            values -= 1  # transformers adds it back: it multiplies by 1 + weight
        # GGUF names the lengths of a tensor from the fastest to the slowest
        shape = [int(length) for length in reversed(tensor.shape)]
        weights[renamed(tensor.name)] = values.reshape(shape).to(torch.bfloat16).contiguous()
        done += values.numel() * torch.bfloat16.itemsize
        sys.stdout.write(f"bytes {done}\n")  # for who waits, see `conversion`
        sys.stdout.flush()
    target.mkdir()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    _config(given, weights).save_pretrained(target)
    _tokenizer(source, target, given("tokenizer.chat_template"))


def _config(given: Any, weights: dict[str, Any]) -> Any:
    from transformers import Gemma3TextConfig

    def number(key: str) -> Any:
        return given(f"{ARCHITECTURE}.{key}")

    layers = int(number("block_count"))
    config = Gemma3TextConfig(
        vocab_size=weights["model.embed_tokens.weight"].shape[0],
        hidden_size=int(number("embedding_length")),
        intermediate_size=int(number("feed_forward_length")),
        num_hidden_layers=layers,
        num_attention_heads=int(number("attention.head_count")),
        num_key_value_heads=int(number("attention.head_count_kv")),
        head_dim=int(number("attention.key_length")),
        query_pre_attn_scalar=int(number("attention.key_length")),
        max_position_embeddings=int(number("context_length")),
        rms_norm_eps=float(number("attention.layer_norm_rms_epsilon")),
        sliding_window=int(number("attention.sliding_window")),
        layer_types=[
            "full_attention" if (layer + 1) % PATTERN == 0 else "sliding_attention" for layer in range(layers)
        ],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": float(number("rope.freq_base"))},
            "sliding_attention": {"rope_type": "default", "rope_theta": LOCAL_ROPE},
        },
        bos_token_id=int(given("tokenizer.ggml.bos_token_id")),
        eos_token_id=int(given("tokenizer.ggml.eos_token_id")),
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    config.architectures = ["Gemma3ForCausalLM"]
    return config


def _tokenizer(source: Path, target: Path, template: str | None) -> None:
    """Write the tokenizer, with the rule that a text begins with BOS: GGUF leaves it to the engine."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    if template:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(str(target))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
