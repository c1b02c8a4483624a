"""Typed look-ups in the key-values of a GGUF file, and llama.cpp's rules for what is not said.

A key of the wrong type is a broken file, named with its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from orchestrator.errors import NotAModel
from orchestrator.gguf_cursor import broken
from orchestrator.gguf_walk import Tensor, Walk, constants

Kind = Literal["model", "shard", "mmproj", "adapter", "imatrix", "control-vector", "vocabulary"]

# Byte-pair tokenizers that begin with BOS when the file doesn't say (llama.cpp, src/llama-vocab.cpp).
_BOS_BY_PRE = frozenset(
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
)
_BOS_BY_MODEL: Mapping[str, bool] = {"llama": True, "bert": True, "gpt2": False, "t5": False, "rwkv": False}


def fault(walked: Walk, key: str, reason: str) -> NotAModel:
    """Return the error for what is wrong with `key`, at its value's place or else at the header's end."""
    return broken(walked.path, walked.places.get(key, walked.end), f"{key} {reason}")


class Keys:
    """Typed look-ups in one file's key-values."""

    def __init__(self, walked: Walk) -> None:
        self.walked = walked
        self.values = walked.values
        self.architecture = self.string("general.architecture")

    def of(self, key: str) -> str:
        """Return the full name of the architecture's `key`."""
        return f"{self.architecture}.{key}"

    def wrong(self, key: str, should: str) -> NotAModel:
        """Return the error for a value of the wrong type or size."""
        return fault(self.walked, key, f"is {self.values[key]!r:.60}, should be {should}")

    def string(self, key: str) -> str | None:
        """Return text, None when it is missing."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "text")
        return value

    def integer(self, key: str, most: int = (1 << 32) - 1) -> int | None:
        """Return a number of 0 to `most`, None when it is missing."""
        value = self.values.get(key)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value <= most:
            raise self.wrong(key, f"a whole number of at most {most}")
        return value

    def by_layer(self, key: str, layers: int | None) -> int | tuple[int, ...] | None:
        """Return one number for all layers, or a tuple with one for each."""
        value = self.values.get(key)
        if not isinstance(value, tuple):
            return self.integer(key)
        if len(value) != layers or any(type(each) is not int or not 0 <= each < 1 << 32 for each in value):
            raise self.wrong(key, f"one whole number or {layers} of them")
        return value[0] if len(set(value)) == 1 else value

    def kind(self, walks: Sequence[Walk], shard: int) -> Kind:
        """Return what the file holds; old mmproj files and adapters are known by their other keys."""
        if shard:
            return "shard"
        declared = self.string("general.type")
        if declared == "adapter" or "adapter.type" in self.values:
            return "adapter"
        if declared == "mmproj" or self.architecture == "clip":
            return "mmproj"
        if declared == "imatrix" or "imatrix.chunk_count" in self.values:
            return "imatrix"
        if self.architecture == "controlvector":
            return "control-vector"
        if self.architecture is None:
            raise fault(self.walked, "general.architecture", "is missing")
        return "model" if any(each.tensors for each in walks) else "vocabulary"

    def quantisation(self, tensors: Sequence[Tensor]) -> tuple[str | None, str]:
        """Return a label and where it comes from: the declared one, else the type with most weights."""
        guessed = constants().LlamaFileType.GUESSED.value
        number = self.integer("general.file_type")
        if number is not None:
            try:
                label = constants().LlamaFileType(number & ~guessed).name
                return label.removeprefix("MOSTLY_").removeprefix("ALL_"), "general.file_type"
            except ValueError:
                pass  # a number that is newer than the package, or long gone
        weights = Counter[str]()
        for tensor in tensors:
            weights[tensor.type] += tensor.elements
        return (weights.most_common(1)[0][0] if weights else None), "tensors"

    def add_bos(self) -> tuple[bool | None, str]:
        """Return whether a text begins with BOS, and which rule says so."""
        key = "tokenizer.ggml.add_bos_token"
        declared = self.values.get(key)
        if declared is not None:
            return bool(declared), key
        if self.string("tokenizer.ggml.pre") in _BOS_BY_PRE:
            return True, "tokenizer"
        return _BOS_BY_MODEL.get(self.string("tokenizer.ggml.model") or ""), "tokenizer"

    def vocabulary(self, tensors: Sequence[Tensor]) -> int | None:
        """Return the number of tokens: those listed, else declared, else rows of the embedding."""
        listed = self.walked.lengths.get("tokenizer.ggml.tokens") or self.integer(self.of("vocab_size"))
        if listed:
            return listed
        rows = (each.shape[1] for each in tensors if each.name == "token_embd.weight" and len(each.shape) > 1)
        return next(rows, None)
