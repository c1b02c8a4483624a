"""Public shapes of well-known models, written as GGUF files of metadata alone (the weights are a hole).

The numbers are those of each model's published configuration (config.json on its model card, or the paper),
the names and tensors those that llama.cpp's converter gives them. A file takes a few kilobytes on disk: its
tensor data is sparse, so that a 48-billion-parameter model costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gguf_files import F32, Q4_K, Q6_K, Q8_0, SIZES, Key, TensorEntry, gguf_bytes

Q4_K_M = 15  # llama.cpp's file type

NO_VOCABULARY: list[Key] = [("tokenizer.ggml.model", "str", "no_vocab")]
# A shape with exactly so many tokens gets a tokenizer that llama-server can serve: one token a byte.
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
BYTES: list[Key] = [
    ("tokenizer.ggml.model", "str", "llama"),
    ("tokenizer.ggml.tokens", "arr:str", PIECES),
    ("tokenizer.ggml.scores", "arr:f32", [0.0] * len(PIECES)),
    ("tokenizer.ggml.token_type", "arr:i32", [2, 3, 3, *[6] * 256, 1]),
    ("tokenizer.ggml.bos_token_id", "u32", 1),
    ("tokenizer.ggml.eos_token_id", "u32", 2),
]


@dataclass(frozen=True)
class Shape:
    """What a configuration says. Lengths are in elements, `window` and `context` in tokens."""

    arch: str
    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int | tuple[int, ...]
    vocabulary: int
    context: int
    head: int = 0
    tied: bool = False
    window: int = 0
    experts: int = 0
    used: int = 0
    expert_hidden: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    mixed: bool = False  # Q6_K where llama.cpp's Q4_K_M has it; all Q4_K otherwise

    @property
    def head_length(self) -> int:
        return self.head or self.width // self.heads

    def kv_heads_of(self, layer: int) -> int:
        return self.kv_heads[layer] if isinstance(self.kv_heads, tuple) else self.kv_heads


def _attention_layers(count: int, which: tuple[int, ...], kv_heads: int) -> tuple[int, ...]:
    return tuple(kv_heads if layer in which else 0 for layer in range(count))


SHAPES: dict[str, Shape] = {
    "llama-2-7b": Shape("llama", 32, 4096, 11008, 32, 32, 32000, 4096),
    "llama-3.1-8b": Shape("llama", 32, 4096, 14336, 32, 8, 128256, 131072),
    "llama-3.2-1b": Shape("llama", 16, 2048, 8192, 32, 8, 128256, 131072, tied=True),
    "mistral-7b-v0.3": Shape("llama", 32, 4096, 14336, 32, 8, 32768, 32768),
    "mixtral-8x7b": Shape("llama", 32, 4096, 14336, 32, 8, 32000, 32768, experts=8, used=2),
    "gemma-2-2b": Shape("gemma2", 26, 2304, 9216, 8, 4, 256000, 8192, 256, True, 4096),
    "gemma-2-9b": Shape("gemma2", 42, 3584, 14336, 16, 8, 256000, 8192, 256, True, 4096),
    "gemma-3-1b": Shape("gemma3", 26, 1152, 6912, 4, 1, 262144, 32768, 256, True, 512),
    "gemma-3-4b": Shape("gemma3", 34, 2560, 10240, 8, 4, 262208, 131072, 256, True, 1024),
    "gemma-3-12b": Shape("gemma3", 48, 3840, 15360, 16, 8, 262208, 131072, 256, True, 1024),
    "qwen2.5-0.5b": Shape("qwen2", 24, 896, 4864, 14, 2, 151936, 32768, tied=True),
    "qwen2.5-7b": Shape("qwen2", 28, 3584, 18944, 28, 4, 152064, 32768),
    "qwen3-0.6b": Shape("qwen3", 28, 1024, 3072, 16, 8, 151936, 40960, 128, True),
    "qwen3-8b": Shape("qwen3", 36, 4096, 12288, 32, 8, 151936, 40960, 128),
    "qwen3-30b-a3b": Shape(
        "qwen3moe", 48, 2048, 6144, 32, 4, 151936, 40960, 128, experts=128, used=8, expert_hidden=768
    ),
    "phi-3-mini-4k": Shape("phi3", 32, 3072, 8192, 32, 32, 32064, 4096, window=2047),
    "phi-4": Shape("phi3", 40, 5120, 17920, 40, 10, 100352, 16384),
    "gpt-oss-20b": Shape(
        "gpt-oss", 24, 2880, 2880, 64, 8, 201088, 131072, 64, False, 128, 32, 4, 2880
    ),
    "mamba-2.8b": Shape(
        "mamba", 64, 2560, 0, 0, 0, 50280, 2048, tied=True,
        extra={"conv": 4, "inner": 5120, "state": 16, "rank": 160},
    ),
    "mamba-130m": Shape(
        "mamba", 24, 768, 0, 0, 0, 50280, 2048, tied=True,
        extra={"conv": 4, "inner": 1536, "state": 16, "rank": 48},
    ),
    "lfm2-1.2b": Shape(
        "lfm2", 16, 2048, 8192, 32, _attention_layers(16, (2, 5, 8, 10, 12, 14), 8), 65536, 128000,
        tied=True, extra={"shortconv": 3},
    ),
    "granite-4.0-h-micro": Shape(
        "granitehybrid", 40, 2048, 8192, 32, _attention_layers(40, (5, 15, 25, 35), 8), 100352, 131072,
        tied=True, extra={"conv": 4, "inner": 4096, "state": 128, "rank": 64, "groups": 1},
    ),
    "deepseek-v2-lite": Shape(
        "deepseek2", 27, 2048, 10944, 16, 1, 102400, 163840, 576, experts=64, used=6, expert_hidden=1408,
        extra={"lora": 512, "rope": 64, "nope": 128, "value": 128, "dense": 1, "shared": 2},
    ),
}  # fmt: skip


def write(shape: Shape, path: Path) -> Path:
    """Write a model of that shape, its weights a hole in the file, and return its path."""
    tensors = list(_tensors(shape))
    header = gguf_bytes(_keys(path.stem, shape), tensors, data=False)
    size = sum(-(-_bytes(entry) // 32) * 32 for entry in tensors)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + size)
    return path


def _bytes(entry: TensorEntry) -> int:
    _, dimensions, kind = entry
    block, block_bytes = SIZES[kind]
    elements = 1
    for length in dimensions:
        elements *= length
    return elements // block * block_bytes


def _keys(name: str, shape: Shape) -> list[Key]:
    def of(key: str, value: Any, kind: str = "u32") -> Key:
        return (f"{shape.arch}.{key}", kind, value)

    more = shape.extra
    keys = [
        ("general.architecture", "str", shape.arch),
        ("general.name", "str", name),
        ("general.file_type", "u32", Q4_K_M),
        *(BYTES if shape.vocabulary == len(PIECES) else NO_VOCABULARY),
        of("vocab_size", shape.vocabulary),
        of("context_length", shape.context),
        of("block_count", shape.layers),
        of("embedding_length", shape.width),
        of("feed_forward_length", shape.hidden),
        of("attention.head_count", shape.heads),
        of("attention.layer_norm_rms_epsilon", 1e-6, "f32"),
    ]
    per_layer = isinstance(shape.kv_heads, tuple)
    keys.append(of("attention.head_count_kv", shape.kv_heads, "arr:i32" if per_layer else "u32"))
    if shape.heads:
        keys.append(of("rope.dimension_count", more.get("rope", shape.head_length)))
    if shape.head:
        keys.append(of("attention.key_length", shape.head))
        keys.append(of("attention.value_length", more.get("lora", shape.head)))
    if shape.window:
        keys.append(of("attention.sliding_window", shape.window))
    if shape.experts:
        keys += [of("expert_count", shape.experts), of("expert_used_count", shape.used)]
    if shape.expert_hidden:
        keys.append(of("expert_feed_forward_length", shape.expert_hidden))
    if shape.arch == "gemma2":
        keys += [of("attn_logit_softcapping", 50.0, "f32"), of("final_logit_softcapping", 30.0, "f32")]
    if shape.arch == "phi3":
        keys.append(of("rope.scaling.original_context_length", shape.context))
    if shape.arch == "gpt-oss":
        keys.append(of("rope.scaling.original_context_length", 4096))
    if "state" in more:
        keys += [
            of("ssm.conv_kernel", more["conv"]),
            of("ssm.inner_size", more["inner"]),
            of("ssm.state_size", more["state"]),
            of("ssm.time_step_rank", more["rank"]),
            of("ssm.group_count", more.get("groups", 0)),
        ]
    if "shortconv" in more:
        keys.append(of("shortconv.l_cache", more["shortconv"]))
    if "lora" in more:
        keys += [
            of("attention.kv_lora_rank", more["lora"]),
            of("attention.key_length_mla", more["nope"] + more["rope"]),
            of("attention.value_length_mla", more["value"]),
            of("leading_dense_block_count", more["dense"]),
            of("expert_shared_count", more["shared"]),
            of("expert_weights_scale", 1.0, "f32"),
        ]
    return keys


def _tensors(shape: Shape) -> Iterator[TensorEntry]:
    matrix = Q4_K if shape.width % 256 == 0 else Q8_0
    output = Q6_K if shape.mixed else matrix
    yield ("token_embd.weight", (shape.width, shape.vocabulary), output if shape.tied else matrix)
    yield ("token_embd_norm.weight" if shape.arch == "lfm2" else "output_norm.weight", (shape.width,), F32)
    if not shape.tied:
        yield ("output.weight", (shape.width, shape.vocabulary), output)
    for layer in range(shape.layers):
        for name, dimensions in _block(shape, layer):
            kind = F32 if len(dimensions) == 1 or name.startswith(F32_NAMES) else matrix
            if kind == Q4_K and dimensions[0] % 256:
                kind = Q8_0
            elif kind == Q4_K and shape.mixed and name.startswith(("attn_v", "ffn_down")):
                kind = Q6_K if _more_bits(layer, shape.layers) else Q4_K
            yield (f"blk.{layer}.{name}", dimensions, kind)


def _more_bits(layer: int, layers: int) -> bool:
    """Tell whether Q4_K_M gives a layer's attn_v and ffn_down more bits (llama.cpp, src/llama-quant.cpp)."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2


F32_NAMES = ("ssm_conv1d", "ssm_a", "ssm_d", "ssm_norm", "shortconv.conv", "ffn_gate_inp")
Entry = tuple[str, tuple[int, ...]]


def _block(shape: Shape, layer: int) -> Iterator[Entry]:
    if shape.arch == "mamba":
        yield ("attn_norm.weight", (shape.width,))
        yield from _mamba(shape)
        return
    yield ("attn_norm.weight", (shape.width,))
    if shape.kv_heads_of(layer):
        yield from _mla(shape) if "lora" in shape.extra else _attention(shape, layer)
    elif "shortconv" in shape.extra:
        yield ("shortconv.conv.weight", (shape.extra["shortconv"], shape.width))
        yield ("shortconv.in_proj.weight", (shape.width, 3 * shape.width))
        yield ("shortconv.out_proj.weight", (shape.width, shape.width))
    else:
        yield from _mamba2(shape)
    yield from _feed_forward(shape, layer)


def _attention(shape: Shape, layer: int) -> Iterator[Entry]:
    width, query = shape.width, shape.heads * shape.head_length
    key = shape.kv_heads_of(layer) * shape.head_length
    biased = {"qwen2": ("q", "k", "v"), "gpt-oss": ("q", "k", "v", "output")}.get(shape.arch, ())
    parts = {"q": (width, query), "k": (width, key), "v": (width, key), "output": (query, width)}
    if shape.arch == "phi3":
        parts = {"qkv": (width, query + 2 * key), "output": (query, width)}
    for part, dimensions in parts.items():
        yield (f"attn_{part}.weight", dimensions)
        if part in biased:
            yield (f"attn_{part}.bias", dimensions[1:])
    if shape.arch in {"gemma3", "qwen3", "qwen3moe", "lfm2"}:
        yield ("attn_q_norm.weight", (shape.head_length,))
        yield ("attn_k_norm.weight", (shape.head_length,))
    if shape.arch == "gpt-oss":
        yield ("attn_sinks.weight", (shape.heads,))
    if shape.arch in {"gemma2", "gemma3", "gpt-oss"}:
        yield ("post_attention_norm.weight", (width,))
    if shape.arch in {"gemma2", "gemma3"}:
        yield ("post_ffw_norm.weight", (width,))


def _mla(shape: Shape) -> Iterator[Entry]:
    more, width, heads = shape.extra, shape.width, shape.heads
    yield ("attn_q.weight", (width, heads * (more["nope"] + more["rope"])))
    yield ("attn_kv_a_mqa.weight", (width, more["lora"] + more["rope"]))
    yield ("attn_kv_a_norm.weight", (more["lora"],))
    yield ("attn_k_b.weight", (more["nope"], more["lora"], heads))
    yield ("attn_v_b.weight", (more["lora"], more["value"], heads))
    yield ("attn_output.weight", (heads * more["value"], width))


def _feed_forward(shape: Shape, layer: int) -> Iterator[Entry]:
    width, hidden = shape.width, shape.hidden
    if shape.arch != "gpt-oss":
        yield ("ffn_norm.weight", (width,))
    if shape.experts and layer >= shape.extra.get("dense", 0):
        inner, count = shape.expert_hidden or hidden, shape.experts
        yield ("ffn_gate_inp.weight", (width, count))
        yield ("ffn_gate_exps.weight", (width, inner, count))
        yield ("ffn_up_exps.weight", (width, inner, count))
        yield ("ffn_down_exps.weight", (inner, width, count))
        if shape.arch == "gpt-oss":
            yield ("ffn_gate_inp.bias", (count,))
            yield ("ffn_gate_exps.bias", (inner, count))
            yield ("ffn_up_exps.bias", (inner, count))
            yield ("ffn_down_exps.bias", (width, count))
        if shared := shape.extra.get("shared"):
            yield ("ffn_gate_shexp.weight", (width, inner * shared))
            yield ("ffn_up_shexp.weight", (width, inner * shared))
            yield ("ffn_down_shexp.weight", (inner * shared, width))
        return
    if shape.arch == "phi3":
        yield ("ffn_up.weight", (width, 2 * hidden))
    else:
        yield ("ffn_gate.weight", (width, hidden))
        yield ("ffn_up.weight", (width, hidden))
    yield ("ffn_down.weight", (hidden, width))


def _mamba(shape: Shape) -> Iterator[Entry]:
    more, width, inner = shape.extra, shape.width, shape.extra["inner"]
    yield ("ssm_in.weight", (width, 2 * inner))
    yield ("ssm_conv1d.weight", (more["conv"], inner))
    yield ("ssm_conv1d.bias", (inner,))
    yield ("ssm_x.weight", (inner, more["rank"] + 2 * more["state"]))
    yield ("ssm_dt.weight", (more["rank"], inner))
    yield ("ssm_dt.bias", (inner,))
    yield ("ssm_a", (more["state"], inner))
    yield ("ssm_d", (inner,))
    yield ("ssm_out.weight", (inner, width))


def _mamba2(shape: Shape) -> Iterator[Entry]:
    more, width, inner, groups = shape.extra, shape.width, shape.extra["inner"], shape.extra["groups"]
    mixed = inner + 2 * groups * more["state"]
    yield ("ssm_in.weight", (width, inner + mixed + more["rank"]))
    yield ("ssm_conv1d.weight", (more["conv"], mixed))
    yield ("ssm_conv1d.bias", (mixed,))
    yield ("ssm_dt.bias", (more["rank"],))
    yield ("ssm_a", (1, more["rank"]))
    yield ("ssm_d", (1, more["rank"]))
    yield ("ssm_norm.weight", (inner // groups, groups))
    yield ("ssm_out.weight", (inner, width))
