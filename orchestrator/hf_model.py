"""What a folder in Hugging Face's form says about its model: `read(folder)` gives an `HfModel`.

Only JSON is read: ``config.json``, the tokenizer's settings, and the headers of the safetensors files.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from orchestrator.errors import NotAModel, UnsupportedModel

MAX_JSON = 64 << 20  # bytes; config files are small, headers of safetensors a few MB at most
_TYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F8_E4M3": "fp8", "F8_E5M2": "fp8"}


@dataclass(frozen=True, slots=True)
class HfModel:
    """A model's metadata, under the names that `gguf_header.Header` has for the same things.

    Sizes are in bytes, lengths in elements or tokens; None where the files do not say.

    Attributes:
        path: the folder.
        architecture: the class that computes it, such as ``Gemma3ForCausalLM``.
        name: given by its makers.
        parameters: number of weights; 0 without weight files.
        quantisation: method such as ``awq``, or the type of most of the weights.
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
        chat_template: Jinja text.
        fp8: whether its weights or what it computes with are 8-bit floats.
        config: ``config.json`` as it stands.

    """

    path: Path
    architecture: str | None
    name: str | None
    parameters: int
    quantisation: str | None
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
    chat_template: str | None
    fp8: bool
    config: Mapping[str, Any] = field(repr=False)

    def kv_bytes(self, tokens: int, element: float) -> int | None:
        """Return what the keys and values of so many tokens take; None when the files don't say.

        layers x tokens x KV heads x (key length + value length) x bytes of an element: what every layer
        takes that sees the whole context, so an upper bound for models with windows.
        """
        parts = (self.layers, self.kv_heads, self.key_length, self.value_length)
        if any(part is None for part in parts):
            return None
        layers, heads, key, value = (int(part or 0) for part in parts)
        return int(layers * tokens * heads * (key + value) * element)


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
    whole = _json(folder / "config.json")
    text = whole.get("text_config")  # of a model that sees, too
    config: Mapping[str, Any] = {**whole, **text} if isinstance(text, dict) else whole
    files = sorted(folder.glob("*.safetensors"))
    parameters, tensor_bytes, types = _weights(files)
    method, fp8 = _quantisation(whole, types)
    heads, hidden = _whole(config, "num_attention_heads"), _whole(config, "hidden_size")
    length = _whole(config, "head_dim") or (hidden // heads if hidden and heads else None)
    named = whole.get("architectures")
    return HfModel(
        path=folder,
        architecture=str(named[0]) if isinstance(named, list) and named else None,
        name=str(whole["_name_or_path"]) if whole.get("_name_or_path") else folder.name,
        parameters=parameters,
        quantisation=method,
        file_size=sum(file.stat().st_size for file in files),
        tensor_bytes=tensor_bytes,
        context=_whole(config, "max_position_embeddings"),
        layers=_whole(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=_whole(config, "num_key_value_heads") or heads,
        key_length=length,
        value_length=length,
        sliding_window=_whole(config, "sliding_window") if config.get("use_sliding_window", True) else None,
        vocabulary=_whole(config, "vocab_size"),
        chat_template=_template(folder),
        fp8=fp8,
        config=whole,
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_JSON:
            raise NotAModel(f"model: {path} is too large to be what its name says", path=path)
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise NotAModel(f"model: {path} can't be read: {error.strerror}", path=path) from error
    except (ValueError, RecursionError) as error:
        raise NotAModel(f"model: {path} is not JSON: {error}", path=path) from error
    if not isinstance(found, dict):
        raise NotAModel(f"model: {path} is not a JSON object", path=path)
    return found


def _whole(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _weights(files: list[Path]) -> tuple[int, int, Counter[str]]:
    """Return the number of weights, the bytes of all tensors, and how many weights each type holds."""
    types: Counter[str] = Counter()
    size = 0
    for path in files:
        for name, tensor in _tensors(path).items():
            if name == "__metadata__":
                continue
            try:
                count = prod(int(length) for length in tensor["shape"])
                begin, end = map(int, tensor["data_offsets"])
                types[str(tensor["dtype"])] += count
            except (TypeError, KeyError, ValueError) as error:
                raise NotAModel(f"model: {path}: tensor {name!r} is broken", path=path) from error
            size += end - begin
    return sum(types.values()), size, types


def _tensors(path: Path) -> dict[str, Any]:
    """Return the header of a safetensors file: eight bytes of length, little-endian, then JSON."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(MAX_JSON, size - 8):
                raise NotAModel(f"model: {path} is cut off or no safetensors file", path=path)
            found = json.loads(file.read(length))
    except (OSError, struct.error, ValueError, RecursionError) as error:
        raise NotAModel(f"model: {path} is no safetensors file: {error}", path=path) from error
    if not isinstance(found, dict):
        raise NotAModel(f"model: {path} is no safetensors file", path=path)
    return found


def _quantisation(config: Mapping[str, Any], types: Counter[str]) -> tuple[str | None, bool]:
    """Return the method's name and whether 8-bit floats are computed with."""
    given = config.get("quantization_config")
    common = _TYPES.get(types.most_common(1)[0][0]) if types else None
    if isinstance(given, dict):
        method = str(given.get("quant_method", "")).lower()
        fp8 = "fp8" in method or _float8(given)
        return method or common, fp8
    dtype = config.get("dtype") or config.get("torch_dtype")
    return common or (str(dtype) if dtype else None), common == "fp8"


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
        return own.read_text("utf-8", "replace")
    settings = folder / "tokenizer_config.json"
    given = _json(settings).get("chat_template") if settings.is_file() else None
    if isinstance(given, list):  # several by name
        given = next((each.get("template") for each in given if each.get("name") == "default"), None)
    return given if isinstance(given, str) else None
