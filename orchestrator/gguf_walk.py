"""Walks the header of one GGUF file: bytes in, key-values and tensor entries out, no meaning attached.

Array bodies that nobody needs are stepped over: numbers by arithmetic, strings from length to length. The
layout is that of the GGUF specification (ggml's docs/gguf.md), versions 2 and 3, in both byte orders; the
strictness is llama.cpp's (no arrays of arrays, no name twice, at most four dimensions), and besides no
tensor may lie in another or beyond the file.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import NotAModel, UnsupportedModel
from orchestrator.gguf_cursor import ByteOrder, Cursor, printable
from orchestrator.gguf_known import Known

Value = bool | int | float | str | tuple[Any, ...]

_MOST_ENTRIES = 65_536  # keys, and tensors: far above any model, far below what would hurt
_MOST_KEPT = 64 << 20  # bytes of values in all; templates and per-layer values are far below
_LONGEST_TEXT = 1 << 20  # bytes; the longest chat templates have some ten thousand
_LONGEST_KEPT = 1024  # elements of a numeric array: per-layer values are kept, vocabularies are not

_CODES = {
    "UINT8": "B", "INT8": "b", "UINT16": "H", "INT16": "h", "UINT32": "I", "INT32": "i",
    "FLOAT32": "f", "BOOL": "?", "UINT64": "Q", "INT64": "q", "FLOAT64": "d",
}  # fmt: skip

# What people put in a model's place: the bytes it begins with, what it is, what to do.
_CONVERT = "convert it with llama.cpp's convert_hf_to_gguf.py, or download the model as GGUF"
_IMPOSTORS = (
    (b"version https://git-lfs", "a git-lfs pointer, not the file itself", "fetch it with git lfs pull"),
    (b"<", "a web page or XML", "download the file itself, not the page that shows it"),
    (b"PK\x03\x04", "a zip archive or PyTorch checkpoint", _CONVERT),
    (b"\x80\x02", "a Python pickle", _CONVERT),
    (b"lmgg", "a GGML file from before GGUF", "download the model again as GGUF"),
    (b"fmgg", "a GGML file from before GGUF", "download the model again as GGUF"),
    (b"tjgg", "a GGML file from before GGUF", "download the model again as GGUF"),
    (b"\0\0\0\0", "zeros, as of a download that only reserved its space", "download it again"),
)


@functools.cache
def constants() -> Any:
    """Return the gguf package's constants module, alone.

    Importing its package brings numpy, the readers and the writers (about 90 ms and 24 MB); the constants
    alone take about 15 ms and 3 MB, and only once a header is read.
    """
    package = importlib.util.find_spec("gguf")
    assert package is not None
    assert package.origin is not None
    place = Path(package.origin).with_name("constants.py")
    spec = importlib.util.spec_from_file_location("orchestrator._gguf_constants", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor as the header lists it.

    Attributes:
        name: its name, such as ``blk.0.attn_k.weight``.
        shape: elements in each dimension, the fastest-moving first, as ggml has it.
        type: ggml's name of its storage type, such as ``Q4_K``.
        elements: product of the shape.
        bytes: size of its data.
        offset: where its data begins, in bytes from the start of its file's tensor data.

    """

    name: str
    shape: tuple[int, ...]
    type: str
    elements: int
    bytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class Walk:
    """What one file's header says.

    Attributes:
        path: the file.
        size: its size in bytes.
        version: 2 or 3.
        byte_order: of all its numbers.
        alignment: of its tensors, in bytes.
        values: scalars, strings of up to 1 MiB, and numeric arrays of up to 1024 elements.
        lengths: number of elements of every array, kept or not.
        places: byte offset of every key's value.
        tensors: in file order.
        end: byte at which the header ends.

    """

    path: Path
    size: int
    version: int
    byte_order: ByteOrder
    alignment: int
    values: dict[str, Value]
    lengths: dict[str, int]
    places: dict[str, int]
    tensors: tuple[Tensor, ...]
    end: int


def walk(path: Path, known: Known | None = None) -> Walk:
    """Read the header of the GGUF file at `path`.

    Raises:
        NotAModel: it is missing, unreadable, something else, or broken; `offset` says where.
        UnsupportedModel: its version or one of its tensor types is not known.

    """
    try:
        # non-blocking, so that a pipe in a model's place can't hang us
        with open(path, "rb", buffering=0, opener=_opener) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise NotAModel(f"gguf: {path}: not a regular file", path=path)
            head = file.read(64)
            if not head.startswith(b"GGUF"):
                raise _something_else(path, head)
            return _Walker(Cursor(path, file, known)).run()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise NotAModel(f"gguf: {path}: {reason}", path=path) from error


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _something_else(path: Path, head: bytes) -> NotAModel:
    what, advice = f"it begins with {head[:4]!r}", "name a .gguf file"
    if not head:
        what, advice = "it is empty", "download it again"
    elif head[8:10] == b'{"':
        what, advice = "a safetensors file", _CONVERT
    for start, impostor, remedy in _IMPOSTORS:
        if head.startswith(start):
            what, advice = impostor, remedy
    return NotAModel(f"gguf: {path}: byte 0: not a GGUF file: {what}", path=path, offset=0, advice=advice)


class _Walker:
    """The way through one file, and what was met on it."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.room = _MOST_KEPT
        self.values: dict[str, Value] = {}
        self.lengths: dict[str, int] = {}
        self.places: dict[str, int] = {}

    def run(self) -> Walk:
        cursor = self.cursor
        version, byte_order = self.version()
        cursor.set_byte_order(byte_order)
        # The smallest tensor entry: a name's length, no dimensions, a type, an offset. The smallest
        # key-value: a name's length, a type, one byte.
        tensor_count = self.count(24, "tensors")
        keys = self.count(13, "key-values")
        for number in range(1, keys + 1):
            self.key_value(f"key {number} of {keys}")
        alignment = self.alignment()
        tensors = self.tensors(tensor_count, alignment)
        return Walk(
            cursor.path, cursor.size, version, byte_order, alignment,
            self.values, self.lengths, self.places, tensors, cursor.at,
        )  # fmt: skip

    def unsupported(self, reason: str, offset: int, advice: str) -> UnsupportedModel:
        path = self.cursor.path
        message = f"gguf: {path}: byte {offset}: {printable(reason)}"
        return UnsupportedModel(message, path=path, offset=offset, advice=advice)

    def version(self) -> tuple[int, ByteOrder]:
        self.cursor.skip(4, "the magic")
        version = self.cursor.u32("the version")
        byte_order: ByteOrder = "little"
        if version and not version & 0xFFFF:
            # A small number with its bytes the other way round: the file was written for big-endian.
            version, byte_order = int.from_bytes(version.to_bytes(4, "little"), "big"), "big"
        if not 0 < version <= 0xFFFF:
            raise self.cursor.fault(f"there is no GGUF version {version}", 4)
        if version not in {2, 3}:
            advice = "download or convert the model again" if version == 1 else "update this program"
            raise self.unsupported(f"GGUF version {version} is not supported, 2 and 3 are", 4, advice)
        return version, byte_order

    def count(self, smallest: int, what: str) -> int:
        start = self.cursor.at
        count = self.cursor.u64(f"the number of {what}")
        if count > min(_MOST_ENTRIES, self.cursor.left // smallest):
            raise self.cursor.fault(f"{count} {what} are announced, more than the file can hold", start)
        return count

    @functools.cached_property
    def scalars(self) -> dict[int, tuple[str, struct.Struct]]:
        """The scalar types by number: struct's letter, and one value of it."""
        kinds, prefix = constants().GGUFValueType, self.cursor.prefix
        return {kinds[name].value: (code, struct.Struct(prefix + code)) for name, code in _CODES.items()}

    @functools.cached_property
    def entries(self) -> list[struct.Struct]:
        """What follows a tensor's name, by its dimensions: their lengths, the type, the offset."""
        return [struct.Struct(f"{self.cursor.prefix}{dimensions}QIQ") for dimensions in range(5)]

    def key_value(self, which: str) -> None:
        cursor, kinds = self.cursor, constants().GGUFValueType
        start = cursor.at
        key = cursor.name(which)
        if not key or key in self.places:
            raise cursor.fault(f"key {key!r} appears twice" if key else f"{which} is empty", start)
        kind = cursor.u32(f"the type of {key}")
        self.places[key] = cursor.at
        if kind == kinds.ARRAY:
            self.array(key)
        elif kind == kinds.STRING:
            length = cursor.u64(key)
            if length > _LONGEST_TEXT:
                cursor.skip(length, key)
            else:
                self.make_room(length, key)
                self.values[key] = cursor.text(length, key)
        elif kind in self.scalars:
            (self.values[key],) = cursor.numbers(self.scalars[kind][1], key)
        else:
            raise cursor.fault(f"{key} has the unknown type {kind}", cursor.at - 4)

    def array(self, key: str) -> None:
        cursor, kinds = self.cursor, constants().GGUFValueType
        start = cursor.at
        kind = cursor.u32(f"the element type of {key}")
        count = cursor.u64(f"the length of {key}")
        self.lengths[key] = count
        if kind == kinds.STRING:
            cursor.skip_strings(count, key)
        elif kind in self.scalars:
            code, form = self.scalars[kind]
            if count > _LONGEST_KEPT:
                cursor.skip(count * form.size, key)
            else:
                self.make_room(count * form.size, key)
                self.values[key] = cursor.numbers(struct.Struct(f"{cursor.prefix}{count}{code}"), key)
        else:
            what = "an array of arrays" if kind == kinds.ARRAY else f"an array of the unknown type {kind}"
            raise cursor.fault(f"{key} is {what}", start)

    def make_room(self, size: int, key: str) -> None:
        """Count bytes that are kept; a file of lies must not fill the memory."""
        self.room -= size
        if self.room < 0:
            raise self.cursor.fault(f"up to {key} the values take more than {_MOST_KEPT} bytes")

    def alignment(self) -> int:
        key = constants().Keys.General.ALIGNMENT
        value = self.values.get(key, constants().GGUF_DEFAULT_ALIGNMENT)
        if type(value) is not int or value < 1 or value & (value - 1):
            raise self.cursor.fault(f"{key} is {value!r:.60}, not a power of two", self.places[key])
        return value

    def tensors(self, count: int, alignment: int) -> tuple[Tensor, ...]:
        types, sizes = constants().GGMLQuantizationType, constants().GGML_QUANT_SIZES
        layouts = {kind.value: (kind.name, *sizes[kind]) for kind in types if kind in sizes}
        found: dict[str, Tensor] = {}
        places: dict[str, int] = {}
        for number in range(1, count + 1):
            start = self.cursor.at
            tensor = self.tensor(f"tensor {number} of {count}", layouts)
            if tensor.name in found:
                raise self.cursor.fault(f"tensor {tensor.name} appears twice", start)
            places[tensor.name] = place = self.cursor.at - 8
            if tensor.offset % alignment:
                reason = f"tensor {tensor.name} begins at {tensor.offset}, not a multiple of {alignment}"
                raise self.cursor.fault(reason, place)
            found[tensor.name] = tensor
        self.check_data(list(found.values()), places, -(-self.cursor.at // alignment) * alignment)
        return tuple(found.values())

    def tensor(self, which: str, layouts: dict[int, tuple[str, int, int]]) -> Tensor:
        cursor = self.cursor
        name = cursor.name(f"the name of {which}")
        dimensions = cursor.u32(f"the dimensions of tensor {name}")
        if dimensions > 4:
            raise cursor.fault(f"tensor {name} has {dimensions} dimensions, 4 are allowed", cursor.at - 4)
        start = cursor.at
        *lengths, kind, offset = cursor.numbers(self.entries[dimensions], f"the entry of tensor {name}")
        shape = tuple(lengths)
        if kind not in layouts:
            raise self.unsupported(
                f"tensor {name} has the type {kind}, which the gguf package does not know",
                start + 8 * dimensions,
                "update the gguf package; a format that llama.cpp has dropped must be quantised anew",
            )
        type_name, block, block_bytes = layouts[kind]
        elements = math.prod(shape)
        if elements >= 1 << 63:
            raise cursor.fault(f"tensor {name} has the impossible shape {list(shape)}", start)
        if shape and shape[0] % block:
            reason = f"tensor {name} has rows of {shape[0]}, not a multiple of {type_name}'s {block}"
            raise cursor.fault(reason, start)
        return Tensor(name, shape, type_name, elements, elements // block * block_bytes, offset)

    def check_data(self, tensors: list[Tensor], places: dict[str, int], start: int) -> None:
        """Hold the tensors' data against each other and against the file's end."""
        end = 0
        for tensor in sorted(tensors, key=lambda each: (each.offset, each.bytes)):
            if tensor.offset < end:
                raise self.cursor.fault(f"tensor {tensor.name} lies inside another", places[tensor.name])
            end = tensor.offset + tensor.bytes
        size, path = self.cursor.size, self.cursor.path
        if end and start + end > size:
            raise NotAModel(
                f"gguf: {path}: file ends at byte {size}, tensors need {start + end}",
                path=path,
                offset=size,
                advice="the download is incomplete: resume it or download the file again",
            )
