"""Which files of a repository are meant: pure functions over its list of files.

Publishers put many quantisations of one model into one repository, each a file or a set of shards, with what
belongs to the model (projectors, importance matrices) beside them. Names are all there is to tell them apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from orchestrator.errors import NotAModel, UnsupportedModel

# What is taken when nothing is asked for: llama.cpp's default, then 4 bits in other ways, then the next
# better ones; what is not in this list comes last, the largest first.
ORDER: Final = (
    *("Q4_K_M", "Q4_K_L", "Q4_K_XL", "Q4_K_S", "IQ4_NL", "IQ4_XS", "Q4_0", "Q4_1", "MXFP4"),
    *("Q5_K_M", "Q5_K_L", "Q5_K_XL", "Q5_K_S", "Q5_0", "Q5_1", "Q6_K", "Q6_K_L", "Q6_K_XL"),
    *("Q8_0", "Q8_K_XL", "BF16", "F16", "F32"),
)
PROJECTORS: Final = ("F16", "BF16", "Q8_0", "F32")

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")
_LABEL = re.compile(
    r"(?:^|(?<=[-._/]))((?:UD-)?(?:I?Q\d(?:_(?:\d|K|NL|XXS|XS|S|M|L|XL))*|TQ\d_\d|MXFP4(?:_MOE)?|NVFP4"
    r"|BF16|F16|F32|FP16|FP32))(?=$|[-._/])",
    re.IGNORECASE,
)
_WHOLE_NAMES = re.compile(r"[^/]+\.(?:json|jinja|model|tiktoken|txt|safetensors)")  # in the folder itself


@dataclass(frozen=True, slots=True)
class File:
    """A file of a repository.

    Attributes:
        path: within the repository.
        size: in bytes.
        digest: its SHA-256 when it is a large one, else git's SHA-1 of it, in hex; the name of its blob.

    """

    path: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a repository at one commit."""

    repo: str
    commit: str
    files: tuple[File, ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    """One model: a file, or all its shards."""

    name: str
    label: str
    files: tuple[File, ...]
    shards: int

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def label(path: str) -> str:
    """Return the quantisation that a GGUF file's name or folder tells, such as ``Q4_K_M``; else nothing."""
    found = _LABEL.findall(path.removesuffix(".gguf"))
    return found[-1].upper() if found else ""


def gguf(listing: Listing, wanted: str | None) -> tuple[File, ...]:
    """Return the model's file, or its shards in order.

    Args:
        listing: of the repository.
        wanted: a quantisation in any case, or the name of a file; None takes the first there is of `ORDER`.

    Raises:
        UnsupportedModel: there is none, or not this one; names those that there are.

    """
    choices = _choices(listing, lambda name: "mmproj" not in name and "imatrix" not in name)
    if not choices:
        raise UnsupportedModel(
            f"model: hf:{listing.repo} holds no GGUF model",
            advice="look for a repository whose name ends in -GGUF, or take a backend that reads safetensors",
        )
    return _one(listing.repo, choices, wanted, ORDER)


def projector(listing: Listing, wanted: str | None) -> tuple[File, ...]:
    """Return the projector's file; as `gguf`, in the order of `PROJECTORS`."""
    choices = _choices(listing, lambda name: "mmproj" in name)
    if not choices:
        raise UnsupportedModel(
            f"model.mmproj: hf:{listing.repo} holds no projector (mmproj)",
            advice="leave it out, or name a repository that holds one",
        )
    return _one(listing.repo, choices, wanted, PROJECTORS)


def snapshot(listing: Listing) -> tuple[File, ...]:
    """Return what a model as safetensors consists of, the weights last.

    Not the copies in folders below, nor the weights in another form (``consolidated``) where both are there.

    Raises:
        UnsupportedModel: there are no safetensors.

    """
    files = [file for file in listing.files if _WHOLE_NAMES.fullmatch(file.path)]
    weights = [file for file in files if file.path.endswith(".safetensors")]
    if not weights:
        raise UnsupportedModel(
            f"model: hf:{listing.repo} holds no safetensors",
            advice="look for the repository of the original model, or take a backend that reads GGUF",
        )
    usual = [file for file in weights if not file.path.startswith("consolidated")] or weights
    return (*(file for file in files if file not in weights), *usual)


def _choices(listing: Listing, belongs: Callable[[str], bool]) -> list[_Choice]:
    found: dict[str, tuple[int, list[File]]] = {}
    for file in sorted(listing.files, key=lambda each: each.path):
        if not file.path.lower().endswith(".gguf") or not belongs(file.path.lower()):
            continue
        stem = file.path[: -len(".gguf")]
        shard = _SHARD.fullmatch(stem)
        name, count = (shard["stem"], int(shard["count"])) if shard else (stem, 1)
        found.setdefault(f"{name}/{count}", (count, []))[1].append(file)
    return [
        _Choice(key.rpartition("/")[0], label(key.rpartition("/")[0]), tuple(files), count)
        for key, (count, files) in found.items()
    ]


def _one(repo: str, choices: Sequence[_Choice], wanted: str | None, order: Sequence[str]) -> tuple[File, ...]:
    found = _matching(choices, wanted) if wanted else _preferred(choices, order)
    if len(found) == 1:
        choice = found[0]
        if len(choice.files) != choice.shards:
            raise NotAModel(
                f"model: hf:{repo} holds {len(choice.files)} of the {choice.shards} shards of {choice.name}",
                advice="take another quantisation, or tell its publisher",
            )
        return choice.files
    if found:
        names = ", ".join(choice.files[0].path for choice in found)
        raise UnsupportedModel(
            f"model: hf:{repo}{f':{wanted}' if wanted else ''} may be any of {names}",
            advice=f"name the file: hf:{repo}:{found[0].files[0].path}",
        )
    there = ", ".join(_labels(choices))
    raise UnsupportedModel(f"model: hf:{repo} holds no {wanted}", advice=f"it holds {there}")


def _matching(choices: Iterable[_Choice], wanted: str) -> list[_Choice]:
    upper = wanted.upper()
    rules = (
        lambda choice: any(file.path == wanted for file in choice.files),
        lambda choice: choice.label == upper,
        lambda choice: choice.label.endswith(f"-{upper}"),  # of a publisher's own kind, such as UD-Q4_K_XL
    )
    each = list(choices)
    return next((found for rule in rules if (found := list(filter(rule, each)))), [])


def _preferred(choices: Iterable[_Choice], order: Sequence[str]) -> list[_Choice]:
    each = list(choices)
    for name in order:
        if found := _matching(each, name):
            return found
    largest = max(each, key=lambda choice: choice.size)
    return [choice for choice in each if choice.label == largest.label] if largest.label else [largest]


def _labels(choices: Iterable[_Choice]) -> list[str]:
    return list(dict.fromkeys(choice.label or choice.files[0].path for choice in choices))
