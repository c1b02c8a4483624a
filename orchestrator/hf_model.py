"""What a folder in Hugging Face's form says about its model: `read(folder)` gives an `HfModel`.

Only JSON is read: ``config.json``, the tokenizer's settings, and the headers of the safetensors files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.errors import NotAModel, UnsupportedModel
from orchestrator.hf_files import read_json, read_text, weights

_TYPES = {"F8_E4M3": "fp8", "F8_E5M2": "fp8", "BFLOAT16": "bf16", "FLOAT16": "f16", "FLOAT32": "f32"}


@dataclass(frozen=True, slots=True)
class HfModel:
    """A model's metadata, under the names that `gguf_header.Header` has for the same things.

    Sizes are in bytes, lengths in elements or tokens; None where the files do not say.

    Attributes:
        path: the folder.
        architecture: the class that computes it, such as ``Gemma3ForCausalLM``.
        family: transformers' name of its kind, such as ``gemma3_text``.
        name: given by its makers.
        parameters: number of weights; 0 without weight files.
        quantisation: method such as ``awq``, or the type of most of the weights, such as ``bf16``.
        files: number of files with weights.
        file_size: of all weight files.
        tensor_bytes: data of all tensors.
        context: native context.
        layers: number of blocks.
        heads: query heads.
        kv_heads: key and value heads.
        key_length: of one head.
        value_length: of one head.
        sliding_window: tokens that a windowed layer sees; None when all layers see everything.
        vocabulary: number of tokens.
        embedding: width of the residual stream.
        feed_forward: width inside a feed-forward layer.
        chat_template: Jinja text.
        fp8: whether its weights or what it computes with are 8-bit floats.
        config: ``config.json`` as it stands.

    """

    path: Path
    architecture: str | None
    family: str | None
    name: str | None
    parameters: int
    quantisation: str | None
    files: int
    file_size: int
    tensor_bytes: int
    context: int | None
    layers: int | None
    heads: int | None
    kv_heads: int | None
    key_length: int | None
    value_length: int | None
    sliding_window: int | None
    vocabulary: int | None
    embedding: int | None
    feed_forward: int | None
    chat_template: str | None
    fp8: bool
    config: Mapping[str, Any] = field(repr=False)

    @property
    def bits_per_weight(self) -> float | None:
        """True mean over the tensors."""
        return self.tensor_bytes * 8 / self.parameters if self.parameters else None

    @property
    def text(self) -> Mapping[str, Any]:
        """The configuration of the language part; what sees keeps it apart."""
        return _language(self.config)


def read(folder: Path) -> HfModel:
    """Read a model's folder.

    Raises:
        NotAModel: it has no ``config.json``, or a file of it is broken.
        UnsupportedModel: it is an adapter.

    """
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise UnsupportedModel(
                f"model: {folder} is an adapter (LoRA), not a model",
                path=folder,
                advice="name it under model.lora, and the model it was made for under model.hf",
            )
        raise NotAModel(
            f"model: {folder} has no config.json",
            path=folder,
            advice="name the folder that holds config.json and the safetensors files",
        )
    whole = read_json(folder / "config.json")
    config = _language(whole)
    held = weights(folder, _packed(config))
    method, fp8 = _quantisation(whole, held.types)
    heads, hidden = _whole(config, "num_attention_heads", "n_head"), _whole(config, "hidden_size", "n_embd")
    length = _whole(config, "head_dim") or (hidden // heads if hidden and heads else None)
    named, family = whole.get("architectures"), config.get("model_type")
    return HfModel(
        path=folder,
        architecture=str(named[0]) if isinstance(named, list) and named else None,
        family=family if isinstance(family, str) and family else None,
        name=str(whole["_name_or_path"]) if whole.get("_name_or_path") else folder.name,
        parameters=held.parameters,
        quantisation=method,
        files=len(held.files),
        file_size=held.size,
        tensor_bytes=held.tensor_bytes,
        context=_whole(config, "max_position_embeddings", "n_positions"),
        layers=_whole(config, "num_hidden_layers", "n_layer"),
        heads=heads,
        kv_heads=_whole(config, "num_key_value_heads") or heads,
        key_length=length,
        value_length=_whole(config, "v_head_dim") or length,
        sliding_window=_whole(config, "sliding_window") if config.get("use_sliding_window", True) else None,
        vocabulary=_whole(config, "vocab_size"),
        embedding=hidden,
        feed_forward=_whole(config, "intermediate_size"),
        chat_template=_template(folder),
        fp8=fp8,
        config=whole,
    )


def _language(config: Mapping[str, Any]) -> Mapping[str, Any]:
    own = config.get("text_config")
    return {**config, **own} if isinstance(own, dict) else config


def _whole(config: Mapping[str, Any], *keys: str) -> int | None:
    """Return the first of these values that is a length; newer names first."""
    found = (config.get(key) for key in keys)
    return next((value for value in found if type(value) is int and 0 < value < 1 << 63), None)


def _packed(config: Mapping[str, Any]) -> int:
    """Return the bits of a weight where several share an element of a tensor, 0 where none do."""
    given = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(given, dict):
        return 0
    bits = given.get("bits") or given.get("w_bit") or (4 if given.get("load_in_4bit") else 0)
    return bits if type(bits) is int and 0 < bits <= 16 else 0


def _quantisation(config: Mapping[str, Any], types: Counter[str]) -> tuple[str | None, bool]:
    """Return the method's name and whether 8-bit floats are computed with."""
    given = config.get("quantization_config")
    common = _type(types.most_common(1)[0][0]) if types else None
    if isinstance(given, dict):
        method = str(given.get("quant_method", "")).lower()
        fp8 = "fp8" in method or _float8(given)
        return method or common, fp8
    dtype = config.get("dtype") or config.get("torch_dtype")
    return common or (_type(str(dtype)) if dtype else None), common == "fp8"


def _type(name: str) -> str:
    """Return the label of a type, as safetensors or torch call it."""
    return _TYPES.get(name.upper(), name.lower())


def _float8(given: Mapping[str, Any]) -> bool:
    """Say whether a group of compressed-tensors holds 8-bit floats."""
    groups = given.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        for part in ("weights", "input_activations"):
            kind = group.get(part) if isinstance(group, dict) else None
            if isinstance(kind, dict) and kind.get("type") == "float" and kind.get("num_bits") == 8:
                return True
    return False


def _template(folder: Path) -> str | None:
    """Return the chat template: a file of its own in newer models, else a setting of the tokenizer."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        return read_text(own)
    for name in ("chat_template.json", "tokenizer_config.json"):
        settings = folder / name
        given = read_json(settings).get("chat_template") if settings.is_file() else None
        if isinstance(given, list):  # several by name
            named = {each.get("name"): each.get("template") for each in given if isinstance(each, dict)}
            given = named.get("default")
        if isinstance(given, str):
            return given
    return None
