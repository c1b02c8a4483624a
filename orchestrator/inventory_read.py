"""One candidate -> `Entry`: what a person wants to know of a model before serving it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from orchestrator import gguf_header, hf_files, hf_model
from orchestrator.errors import ModelError
from orchestrator.gguf_known import Known
from orchestrator.inventory_files import Candidate


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
        engines: what can serve it; a family such as ``vllm`` stands for every backend of it. An inventory
            fills it in, as engines come and go.
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
        fault = _in_place(error.message, candidate.path)
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
    )


def _safetensors(candidate: Candidate) -> Entry:
    if not any(name == "config.json" for name, _, _ in candidate.signs):
        return _adapter(candidate)
    model = hf_model.read(candidate.path)
    return Entry(
        path=str(candidate.path),
        format="safetensors",
        kind="model",
        repository=candidate.repository,
        files=model.files,
        size=model.file_size,
        architecture=model.family or model.architecture,
        name=candidate.repository or candidate.path.name,
        parameters=model.parameters or None,
        quantisation=model.quantisation,
        bits_per_weight=model.bits_per_weight,
        context=model.context,
        width=model.embedding,
        chat_template=model.chat_template is not None,
    )


def _adapter(candidate: Candidate) -> Entry:
    hf_files.read_json(candidate.path / "adapter_config.json")
    held = hf_files.weights(candidate.path)
    return Entry(
        path=str(candidate.path),
        format="safetensors",
        kind="adapter",
        repository=candidate.repository,
        files=len(held.files),
        size=held.size,
        name=candidate.repository or candidate.path.name,
        parameters=held.parameters or None,
        quantisation=held.types.most_common(1)[0][0].lower() if held.types else None,
        bits_per_weight=held.tensor_bytes * 8 / held.parameters if held.parameters else None,
    )


def _in_place(message: str, path: Path) -> str:
    """Return a fault without the place, which stands beside it."""
    for start in (f"gguf: {path}: ", f"model: {path}: ", f"model: {path}/", "model: "):
        if message.startswith(start):
            return message.removeprefix(start)
    return message
