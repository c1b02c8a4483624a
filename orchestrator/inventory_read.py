"""One candidate -> `Entry`: what a person wants to know of a model before serving it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from orchestrator import gguf_header
from orchestrator.errors import ModelError
from orchestrator.gguf_known import Known
from orchestrator.inventory_files import Candidate

# What a form is served by; `vllm` stands for vllm-rocm, vllm-cuda and vllm-cpu.
_ENGINES: Final[Mapping[str, tuple[str, ...]]] = {"gguf": ("llama-server",), "safetensors": ("vllm",)}

_BITS: Final[Mapping[str, int]] = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16,
    "U16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8, "F4": 4,
}  # fmt: skip
_LARGEST_JSON: Final = 100 << 20  # bytes; the format's own limit for a safetensors header
# Tensors beside the packed weights of a quantised layer, which are no weights themselves.
_BESIDE: Final = (".qzeros", ".scales", ".g_idx", ".weight_scale", ".weight_scale_inv", ".input_scale",
                  ".weight_zero_point", ".weight_shape", ".absmax", ".quant_map")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """A model on disk, or something that belongs to one. Sizes are bytes.

    Attributes:
        path: the file, the first of its shards, or the folder.
        format: ``gguf`` or ``safetensors``.
        kind: ``model``, ``mmproj``, ``adapter``, ``imatrix``, ``control-vector``, ``vocabulary``, or
            ``broken`` when there is a fault.
        repository: ``owner/name`` on the hub of what came through the Hugging Face cache.
        files: number of files with weights.
        size: of those files together.
        architecture: such as ``llama``.
        name: given by its makers.
        parameters: number of weights.
        quantisation: label such as ``Q4_K_M``, ``bf16`` or ``awq``.
        bits_per_weight: true mean over the tensors.
        context: native context in tokens.
        width: of the residual stream, for a projector of the model it was made for.
        chat_template: whether it brings one.
        engines: what can serve it; ``vllm`` stands for every backend of that family.
        mmproj: projectors beside it.
        fault: why it can't be used, None when nothing is wrong.

    """

    path: str
    format: str
    kind: str
    repository: str | None = None
    files: int = 1
    size: int = 0
    architecture: str | None = None
    name: str | None = None
    parameters: int | None = None
    quantisation: str | None = None
    bits_per_weight: float | None = None
    context: int | None = None
    width: int | None = None
    chat_template: bool = False
    engines: tuple[str, ...] = ()
    mmproj: tuple[str, ...] = ()
    fault: str | None = None


def entry(candidate: Candidate, known: Known) -> Entry:
    """Read a candidate; whatever is wrong with it becomes its fault."""
    try:
        if candidate.fault:
            raise _Broken(candidate.fault)
        return _gguf(candidate, known) if candidate.format == "gguf" else _safetensors(candidate)
    except ModelError as error:
        fault = error.message.removeprefix(f"gguf: {candidate.path}: ")
    except _Broken as error:
        fault = str(error)
    except OSError as error:
        fault = (error.strerror or str(error)).lower()
    return Entry(
        str(candidate.path), candidate.format, "broken", candidate.repository,
        max(1, len(candidate.signs)), candidate.size, fault=fault,
    )  # fmt: skip


class _Broken(Exception):
    """A folder that is no whole model, in words."""


def _gguf(candidate: Candidate, known: Known) -> Entry:
    header = gguf_header.read(gguf_header.shards(candidate.path)[0], known)
    width = header.embedding
    if header.kind == "mmproj":
        projected = header.metadata.get("clip.vision.projection_dim")
        width = projected if type(projected) is int else None
    return Entry(
        path=str(header.path),
        format="gguf",
        kind=header.kind,
        repository=candidate.repository,
        files=len(header.paths),
        size=header.file_size,
        architecture=header.architecture,
        name=header.name,
        parameters=header.parameters or None,
        quantisation=header.quantisation,
        bits_per_weight=header.bits_per_weight,
        context=header.context,
        width=width,
        chat_template=header.chat_template is not None,
        engines=_ENGINES["gguf"] if header.kind == "model" else (),
    )


def _safetensors(candidate: Candidate) -> Entry:
    folder = candidate.path
    names = [name for name, _, _ in candidate.signs]
    weights = sorted(name for name in names if name.endswith(".safetensors"))
    if "model.safetensors.index.json" in names:
        wanted = _object(_json(folder / "model.safetensors.index.json").get("weight_map")).values()
        missing = sorted({str(name) for name in wanted} - set(weights))
        if missing:
            shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            raise _Broken(f"{len(missing)} of {len(set(wanted))} files missing: {shown}")
        weights = [name for name in weights if name in set(wanted)]
    adapter = "config.json" not in names
    config = _json(folder / ("adapter_config.json" if adapter else "config.json"))
    text = {
        **config,
        **_object(config.get("text_config")),
    }  # what is multimodal keeps the language part there
    quantised = _object(text.get("quantization_config") or text.get("compression_config"))
    packed = quantised.get("bits") or quantised.get("w_bit") or (4 if quantised.get("load_in_4bit") else 0)
    parameters, bits, kind = _count(folder, weights, packed if isinstance(packed, int) else 0)
    architectures = config.get("architectures")
    method = quantised.get("quant_method")
    return Entry(
        path=str(folder),
        format="safetensors",
        kind="adapter" if adapter else "model",
        repository=candidate.repository,
        files=len(weights),
        size=sum(size for name, size, _ in candidate.signs if name in weights),
        architecture=_text(text.get("model_type"))
        or (_text(architectures[0]) if isinstance(architectures, list) and architectures else None),
        name=candidate.repository or folder.name,
        parameters=parameters or None,
        quantisation=_text(method) or kind,
        bits_per_weight=bits / parameters if parameters else None,
        context=_whole(text.get("max_position_embeddings")) or _whole(text.get("n_positions")),
        width=_whole(text.get("hidden_size")),
        chat_template=_has_template(folder, names),
        engines=() if adapter else _ENGINES["safetensors"],
    )


def _count(folder: Path, weights: list[str], packed: int) -> tuple[int, int, str | None]:
    """Return the number of weights, their bits in all, and the type that holds most of them."""
    parameters = bits = 0
    kinds: dict[str, int] = {}
    for name in weights:
        for tensor, facts in _header(folder / name).items():
            kind, shape = facts.get("dtype"), facts.get("shape")
            if tensor == "__metadata__" or not isinstance(kind, str) or not isinstance(shape, list):
                continue
            elements = math.prod(shape)
            bits += elements * _BITS.get(kind, 8)
            kinds[kind] = kinds.get(kind, 0) + elements
            if tensor.endswith(_BESIDE):
                continue
            if packed and (tensor.endswith((".qweight", ".weight_packed")) or kind in {"I32", "U8"}):
                elements = elements * _BITS.get(kind, 8) // packed
            parameters += elements
    most = max(kinds, key=lambda kind: kinds[kind]).lower() if kinds else None
    return parameters, bits, most


def _header(path: Path) -> dict[str, dict[str, Any]]:
    """Return a safetensors file's header: a length, then as much JSON."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= _LARGEST_JSON:
            raise _Broken(f"{path.name} is not a safetensors file: its header is said to have {length} bytes")
        text = file.read(length)
        size = file.seek(0, 2)
    if len(text) < length:
        raise _Broken(f"{path.name} ends inside its header: the download is incomplete")
    found = {name: _object(facts) for name, facts in _parsed(text, path).items()}
    ends = [
        facts["data_offsets"][1] for facts in found.values() if isinstance(facts.get("data_offsets"), list)
    ]
    if ends and max(ends) + 8 + length > size:
        raise _Broken(
            f"{path.name} ends at byte {size}, its tensors need {max(ends) + 8 + length}: "
            "the download is incomplete"
        )
    return found


def _json(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return _parsed(file.read(_LARGEST_JSON), path)


def _parsed(text: bytes, path: Path) -> dict[str, Any]:
    try:
        return _object(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise _Broken(f"{path.name} is not JSON: {str(error).lower()}") from error


def _has_template(folder: Path, names: list[str]) -> bool:
    if "chat_template.jinja" in names or "chat_template.json" in names:
        return True
    return "tokenizer_config.json" in names and bool(
        _json(folder / "tokenizer_config.json").get("chat_template")
    )


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _whole(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None
