"""The files of a folder in Hugging Face's form: JSON, and the headers of safetensors.

A safetensors file begins with eight bytes of length, little-endian, and as much JSON: for each tensor its
type, its shape, and where its data is.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from orchestrator.errors import NotAModel

MAX_JSON: Final = 100 << 20  # bytes; the format's own limit for a header, and far above any configuration
_INDEX: Final = "model.safetensors.index.json"
_AGAIN: Final = "the download is incomplete: resume it or download it again"
# Tensors beside the packed weights of a quantised layer, which are no weights themselves.
_BESIDE: Final = (".qzeros", ".scales", ".g_idx", ".weight_scale", ".weight_scale_inv", ".input_scale",
                  ".weight_zero_point", ".weight_shape", ".absmax", ".quant_map")  # fmt: skip
_PACKED: Final = (".qweight", ".weight_packed")


@dataclass(frozen=True, slots=True)
class Weights:
    """What the weights' files of a folder hold.

    Attributes:
        files: those that belong to the model.
        size: of these files, in bytes.
        parameters: number of weights, packed ones counted singly.
        tensor_bytes: data of all tensors.
        types: safetensors' name of a type -> elements that are stored in it.

    """

    files: tuple[Path, ...] = ()
    size: int = 0
    parameters: int = 0
    tensor_bytes: int = 0
    types: Counter[str] = field(default_factory=Counter)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        NotAModel: it can't be read, or is something else.

    """
    return _parsed(_whole(path), path)


def read_text(path: Path) -> str:
    """Read a text, replacing what isn't UTF-8.

    Raises:
        NotAModel: it can't be read.

    """
    return _whole(path).decode("utf-8", "replace")


def weights(folder: Path, packed: int = 0) -> Weights:
    """Read the headers of a folder's safetensors files.

    Args:
        folder: where they are; where an index lists the shards, these have to be there.
        packed: bits of a quantised weight, where several share an element; 0 where none are packed.

    Raises:
        NotAModel: a shard is missing, or a file is broken or cut short.

    """
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")
    except OSError as error:
        raise NotAModel(f"model: {folder} can't be read: {_why(error)}", path=folder) from error
    index = folder / _INDEX
    if index.exists():
        listed = read_json(index).get("weight_map")
        wanted = {str(name) for name in listed.values()} if isinstance(listed, dict) else set()
        missing = sorted(wanted - {path.name for path in files})
        if missing:
            shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            raise NotAModel(
                f"model: {folder}: {len(missing)} of {len(wanted)} files missing: {shown}",
                path=folder,
                advice=_AGAIN,
            )
        files = [path for path in files if path.name in wanted]
    return _counted(files, packed)


def _counted(files: Iterable[Path], packed: int) -> Weights:
    parameters = total = size = 0
    types: Counter[str] = Counter()
    taken = []
    for path in files:
        tensors, file_size = header(path)
        size += file_size
        taken.append(path)
        for name, tensor in tensors.items():
            try:
                kind, elements = str(tensor["dtype"]), math.prod(_lengths(tensor["shape"]))
                begin, end = _lengths(tensor["data_offsets"])
            except (TypeError, KeyError, ValueError) as error:
                raise NotAModel(f"model: {path}: tensor {name[:200]!r} is broken", path=path) from error
            total += end - begin
            types[kind] += elements
            if name.endswith(_BESIDE):
                continue
            if packed and (name.endswith(_PACKED) or kind in {"I32", "U8"}):
                elements = (end - begin) * 8 // packed
            parameters += elements
    return Weights(tuple(taken), size, parameters, total, types)


def _lengths(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(each) is int and 0 <= each < 1 << 63 for each in value):
        raise ValueError("not a list of lengths")
    return value


def header(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Return a safetensors file's tensors by name, and its size in bytes.

    Raises:
        NotAModel: it is no such file, or ends before its tensors do.

    """
    start, size = _read(path, 0, 8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or not 2 <= length <= MAX_JSON:
        said = f"its header is said to have {length} bytes" if len(start) == 8 else "it is too short"
        raise NotAModel(f"model: {path} is not a safetensors file: {said}", path=path)
    if 8 + length > size:
        raise NotAModel(
            f"model: {path} ends inside its header: the download is incomplete", path=path, advice=_AGAIN
        )
    found = _parsed(_read(path, 8, length)[0], path)
    found.pop("__metadata__", None)
    ends = [
        each["data_offsets"][-1]
        for each in found.values()
        if isinstance(each, dict) and isinstance(each.get("data_offsets"), list) and each["data_offsets"]
    ]
    needed = 8 + length + max((end for end in ends if type(end) is int), default=0)
    if needed > size:
        raise NotAModel(
            f"model: {path} ends at byte {size}, its tensors need {needed}: the download is incomplete",
            path=path,
            advice=_AGAIN,
        )
    return found, size


def _whole(path: Path) -> bytes:
    text, size = _read(path, 0, MAX_JSON)
    if size > MAX_JSON:
        raise NotAModel(f"model: {path} is too large to be what its name says", path=path)
    return text


def _read(path: Path, at: int, count: int) -> tuple[bytes, int]:
    """Return some bytes of a file, and its size; a pipe in its place can't hang us."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            state = os.fstat(descriptor)
            if not stat.S_ISREG(state.st_mode):
                raise NotAModel(f"model: {path} is not a regular file", path=path)
            return os.pread(descriptor, min(count, state.st_size), at), state.st_size
        finally:
            os.close(descriptor)
    except OSError as error:
        raise NotAModel(f"model: {path} can't be read: {_why(error)}", path=path) from error


def _parsed(text: bytes, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotAModel(f"model: {path} is not JSON: {str(error).lower()}", path=path) from error
    if not isinstance(found, dict):
        raise NotAModel(f"model: {path} is not a JSON object", path=path)
    return found


def _why(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
