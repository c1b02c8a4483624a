"""What a GGUF file says about its model: `read(path)` gives a `Header`, in milliseconds.

Owns the meaning of the keys (`gguf_walk` owns the bytes): names, sizes, attention shapes, tokenizer rules,
what kind of file it is, and which shards make one model. Where a key is missing, llama.cpp's own default
is taken, and where there is none the field is None.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.errors import NotAModel
from orchestrator.gguf_cursor import ByteOrder
from orchestrator.gguf_keys import Keys, Kind, fault
from orchestrator.gguf_known import Known
from orchestrator.gguf_walk import Tensor, Value, Walk, walk

__all__ = ["DEFAULT_CONTEXT", "Header", "Split", "Tensor", "effective_context", "read", "shards"]

DEFAULT_CONTEXT = 4096  # tokens

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>(?!00000)\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class Split:
    """A file's place among the shards of one model.

    Attributes:
        index: 0 for the first shard, which carries the metadata.
        count: number of shards.
        tensors: tensors in all shards together, None when the file doesn't say.

    """

    index: int
    count: int
    tensors: int | None


@dataclass(frozen=True, slots=True)
class Header:
    """A model's metadata. Sizes are in bytes, lengths in elements or tokens.

    Attributes:
        path: the file, the first shard of several.
        paths: every shard's file, in order; one for a model in one file.
        kind: what the file holds; only a ``model`` can be served.
        version: of the file format, 2 or 3.
        byte_order: little or big.
        alignment: of the tensors in the file.
        file_size: of all shards together.
        architecture: such as ``llama``; None in a later shard or an importance matrix.
        name: given by its makers.
        size_label: such as ``270M``, given by its makers.
        parameters: number of weights, counted from the tensors' shapes.
        quantisation: label such as ``Q4_K_M``; None without tensors to judge by.
        quantisation_source: ``general.file_type``, or ``tensors`` when that was missing or unknown and the
            label is the type that holds most of the weights.
        bits_per_weight: true mean over all tensors; None without tensors.
        tensor_bytes: data of all tensors.
        tensors: of all shards, in file order.
        context: native context.
        layers: number of blocks.
        embedding: width of the residual stream.
        feed_forward: hidden width, a tuple when layers differ.
        heads: query heads, a tuple when layers differ.
        kv_heads: key and value heads, a tuple when layers differ; `heads` when the file doesn't say.
        key_length: of one head; embedding / heads when the file doesn't say.
        value_length: of one head; likewise.
        sliding_window: tokens that a windowed layer sees; None when all layers see everything.
        rope_dimensions: elements of a head that are rotated; None when the file doesn't say.
        experts: number of experts, 0 for a dense model.
        experts_used: of them per token.
        vocabulary: number of tokens.
        tokenizer: its model, such as ``llama`` (SentencePiece) or ``gpt2`` (byte pairs).
        bos_id: beginning-of-sequence token, None when the file doesn't say.
        eos_id: end-of-sequence token, likewise.
        add_bos: whether a text begins with BOS; None when neither the file nor the tokenizer's model tells.
        add_bos_source: ``tokenizer.ggml.add_bos_token``, or ``tokenizer`` for llama.cpp's rule for its model.
        chat_template: Jinja text.
        split: this file's place among shards, None for a model in one file.
        metadata: every scalar, string of up to 1 MiB and numeric array of up to 1024 elements, as it stands.

    """

    path: Path
    paths: tuple[Path, ...]
    kind: Kind
    version: int
    byte_order: ByteOrder
    alignment: int
    file_size: int
    architecture: str | None
    name: str | None
    size_label: str | None
    parameters: int
    quantisation: str | None
    quantisation_source: str
    bits_per_weight: float | None
    tensor_bytes: int
    tensors: tuple[Tensor, ...] = field(repr=False)
    context: int | None
    layers: int | None
    embedding: int | None
    feed_forward: int | tuple[int, ...] | None
    heads: int | tuple[int, ...] | None
    kv_heads: int | tuple[int, ...] | None
    key_length: int | None
    value_length: int | None
    sliding_window: int | None
    rope_dimensions: int | None
    experts: int
    experts_used: int
    vocabulary: int | None
    tokenizer: str | None
    bos_id: int | None
    eos_id: int | None
    add_bos: bool | None
    add_bos_source: str
    chat_template: str | None = field(repr=False)
    split: Split | None
    metadata: Mapping[str, Value] = field(repr=False)

    def value(self, key: str) -> Value | None:
        """Return what the file says under the architecture's `key`, such as ``ssm.state_size``."""
        return self.metadata.get(f"{self.architecture}.{key}")

    @property
    def types(self) -> dict[str, tuple[int, int]]:
        """Return tensors and bytes by storage type, the one with most bytes first."""
        count, size = Counter[str](), Counter[str]()
        for tensor in self.tensors:
            count[tensor.type] += 1
            size[tensor.type] += tensor.bytes
        return {kind: (count[kind], total) for kind, total in size.most_common()}


def read(path: Path, known: Known | None = None) -> Header:
    """Read the metadata of the model at `path`, and of its other shards when it is the first of several.

    A later shard is read for itself and has the kind ``shard``. `known` makes reading many files faster.

    Raises:
        NotAModel: it is missing, unreadable, something else, broken, or a shard is missing.
        UnsupportedModel: its version or one of its tensor types is not known.

    """
    first = walk(path, known)
    split = _split(first)
    walks: list[Walk] = [first]
    paths: tuple[Path, ...] = (path,)
    if split and split.index == 0 and split.count > 1:
        paths = shards(path)
        if len(paths) != split.count:
            raise fault(
                first,
                "split.count",
                f"is {split.count}, the file's name is not ...-00001-of-{split.count:05d}.gguf",
            )
        walks += [_later_shard(later, index, split.count) for index, later in enumerate(paths[1:], start=1)]
        found = sum(len(each.tensors) for each in walks)
        if split.tensors is not None and found != split.tensors:
            raise fault(first, "split.tensors.count", f"is {split.tensors}, the shards hold {found}")
    return _header(Keys(first), walks, paths, split)


def shards(path: Path) -> tuple[Path, ...]:
    """Return the files of the model that `path` is a shard of, first to last, by its name.

    A name that isn't a shard's gives `path` alone.

    Raises:
        NotAModel: one of them is missing.

    """
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    paths = tuple(
        path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)
    )
    # Ask for the whole list at once: the lowest missing number alone would send people back once a shard.
    missing = [each.name for each in paths if not each.is_file()]
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise NotAModel(
            f"gguf: {path}: {len(missing)} of {count} shards missing: {shown}",
            path=path,
            advice=f"download the missing files into {path.parent}",
        )
    return paths


def effective_context(native: int | None, cap: int | None) -> tuple[int, str]:
    """Return the context per slot in tokens, min(native, cap), and where it comes from in words."""
    if native is None and cap is None:
        return DEFAULT_CONTEXT, "default: neither the model nor the profile says"
    if cap is None or (native is not None and native < cap):
        assert native is not None
        return native, "the model's own limit"
    return cap, "the profile" if native is None else f"the profile, the model allows {native}"


def _split(walked: Walk) -> Split | None:
    keys = Keys(walked)
    count = keys.integer("split.count")
    if not count:
        return None
    index = keys.integer("split.no") or 0
    if index >= count:
        raise fault(walked, "split.no", f"is {index}, there are {count} shards")
    return Split(index, count, keys.integer("split.tensors.count"))


def _later_shard(path: Path, index: int, count: int) -> Walk:
    walked = walk(path)
    found = _split(walked)
    if found is None or (found.index, found.count) != (index, count):
        says = f"shard {found.index + 1} of {found.count}" if found else "no shard"
        raise fault(walked, "split.no", f"makes it {says}, should be {index + 1} of {count}")
    return walked


def _header(keys: Keys, walks: Sequence[Walk], paths: tuple[Path, ...], split: Split | None) -> Header:
    tensors = tuple(tensor for each in walks for tensor in each.tensors)
    parameters = sum(tensor.elements for tensor in tensors)
    tensor_bytes = sum(tensor.bytes for tensor in tensors)
    quantisation, quantisation_source = keys.quantisation(tensors)
    add_bos, add_bos_source = keys.add_bos()
    layers = keys.integer(keys.of("block_count"), most=65_535)
    embedding = keys.integer(keys.of("embedding_length"))
    heads = keys.by_layer(keys.of("attention.head_count"), layers)
    kv_heads = keys.by_layer(keys.of("attention.head_count_kv"), layers)
    first_heads = heads[0] if isinstance(heads, tuple) else heads
    head_length = embedding // first_heads if embedding and first_heads else None
    key_length = keys.integer(keys.of("attention.key_length"))
    value_length = keys.integer(keys.of("attention.value_length"))
    return Header(
        path=paths[0],
        paths=paths,
        kind=keys.kind(walks, split.index if split else 0),
        version=keys.walked.version,
        byte_order=keys.walked.byte_order,
        alignment=keys.walked.alignment,
        file_size=sum(each.size for each in walks),
        architecture=keys.architecture,
        name=keys.string("general.name"),
        size_label=keys.string("general.size_label"),
        parameters=parameters,
        quantisation=quantisation,
        quantisation_source=quantisation_source,
        bits_per_weight=tensor_bytes * 8 / parameters if parameters else None,
        tensor_bytes=tensor_bytes,
        tensors=tensors,
        context=keys.integer(keys.of("context_length")),
        layers=layers,
        embedding=embedding,
        feed_forward=keys.by_layer(keys.of("feed_forward_length"), layers),
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        key_length=head_length if key_length is None else key_length,
        value_length=head_length if value_length is None else value_length,
        sliding_window=keys.integer(keys.of("attention.sliding_window")) or None,
        rope_dimensions=keys.integer(keys.of("rope.dimension_count")),
        experts=keys.integer(keys.of("expert_count")) or 0,
        experts_used=keys.integer(keys.of("expert_used_count")) or 0,
        vocabulary=keys.vocabulary(tensors),
        tokenizer=keys.string("tokenizer.ggml.model"),
        bos_id=keys.integer("tokenizer.ggml.bos_token_id"),
        eos_id=keys.integer("tokenizer.ggml.eos_token_id"),
        add_bos=add_bos,
        add_bos_source=add_bos_source,
        chat_template=keys.string("tokenizer.chat_template"),
        split=split,
        metadata=keys.values,
    )
