"""Folders -> candidates: GGUF files with their shards, and safetensors folders, each once.

A folder is entered once however many links lead to it, so loops end; a file that several names lead to is one
candidate. In the Hugging Face cache the names are links in ``snapshots/<commit>`` to contents in ``blobs``;
the commit that ``refs/main`` names is looked at before older ones.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

UNFINISHED = ".converting-"  # begins the names of folders in which models are being made
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>(?!00000)\d{5})\.gguf", re.IGNORECASE)
_HUB = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)")
_SMALL = ("config.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")
_INDEX = ("model.safetensors.index.json", "adapter_config.json")
Sign = tuple[str, int, int]  # name, size in bytes, time of change in ns


@dataclass(frozen=True, slots=True)
class Candidate:
    """Something that may be a model.

    Attributes:
        path: the file, the first shard there is, or the folder.
        format: ``gguf`` or ``safetensors``.
        repository: ``owner/name`` of what came through the Hugging Face cache.
        signs: the files that say what it is, as they are now.
        fault: why it can't even be opened.

    """

    path: Path
    format: str
    repository: str | None
    signs: tuple[Sign, ...]
    fault: str | None = None

    @property
    def size(self) -> int:
        """Bytes of its weights' files."""
        ending = f".{self.format}"
        return sum(size for name, size, _ in self.signs if name.lower().endswith(ending))


@dataclass(frozen=True, slots=True)
class Trouble:
    """A folder that could not be searched, and why."""

    path: str
    reason: str


def walk(roots: Iterable[Path], trouble: Callable[[Trouble], None]) -> Iterator[Candidate]:
    """Yield every candidate in and below `roots`, and report what could not be searched."""
    entered: set[tuple[int, int]] = set()
    taken: set[tuple[int, int]] = set()
    for root in roots:
        waiting = [root.absolute()]
        while waiting:
            folder = waiting.pop()
            try:
                state = folder.stat()
                if (state.st_dev, state.st_ino) in entered:
                    continue
                entered.add((state.st_dev, state.st_ino))
                with os.scandir(folder) as listing:
                    listed = sorted(listing, key=lambda each: each.name)
            except OSError as error:
                trouble(Trouble(str(folder), (error.strerror or str(error)).lower()))
                continue
            below, files = _sorted_out(listed)
            waiting += _order(folder, below)
            yield from _candidates(folder, files, taken)


def _sorted_out(listed: list[os.DirEntry[str]]) -> tuple[list[Path], dict[str, os.stat_result | OSError]]:
    """Return the folders to enter, and the files that matter with their state or why it can't be had."""
    below: list[Path] = []
    files: dict[str, os.stat_result | OSError] = {}
    for each in listed:
        lower = each.name.lower()
        wanted = lower.endswith((".gguf", ".safetensors")) or each.name in (*_SMALL, *_INDEX)
        try:
            if not wanted:
                if each.is_dir() and not each.name.startswith(UNFINISHED):
                    below.append(Path(each.path))
                continue
            state = each.stat()
            if stat.S_ISDIR(state.st_mode):
                below.append(Path(each.path))
            else:
                files[each.name] = state
        except OSError as error:
            if wanted:
                files[each.name] = error
    return below, files


def _order(folder: Path, below: list[Path]) -> list[Path]:
    """Return folders so that the last is entered first: by name, but the current commit before others."""
    current = ""
    if folder.name == "snapshots" and _HUB.fullmatch(folder.parent.name):
        with contextlib.suppress(OSError):  # without a main branch any order will do
            current = (folder.parent / "refs" / "main").read_text(encoding="ascii", errors="replace").strip()
    return sorted(
        sorted(below, key=lambda each: each.name, reverse=True), key=lambda each: each.name == current
    )


def _candidates(
    folder: Path, files: dict[str, os.stat_result | OSError], taken: set[tuple[int, int]]
) -> Iterator[Candidate]:
    repository = next(
        (f"{hub['owner']}/{hub['name']}" for part in folder.parts if (hub := _HUB.fullmatch(part))), None
    )
    groups: dict[str, list[str]] = {}
    tensors = []
    for name in files:
        if name.lower().endswith(".gguf"):
            shard = _SHARD.fullmatch(name)
            groups.setdefault(f"{shard['stem']}-of-{shard['count']}" if shard else name, []).append(name)
        elif name.endswith(".safetensors"):
            tensors.append(name)
    for names in groups.values():
        found = _one(folder, names[0], "gguf", repository, {name: files[name] for name in names}, taken)
        if found is not None:
            yield found
    described = any(name in files for name in ("config.json", "adapter_config.json"))
    if described and (tensors or _INDEX[0] in files):
        rest = {name: state for name, state in files.items() if not name.lower().endswith(".gguf")}
        found = _one(folder, "", "safetensors", repository, rest, taken)
        if found is not None:
            yield found


def _one(
    folder: Path,
    name: str,
    form: str,
    repository: str | None,
    files: dict[str, os.stat_result | OSError],
    taken: set[tuple[int, int]],
) -> Candidate | None:
    """Return a candidate, None when another name has led to it before."""
    signs, fault, new = [], None, False
    for each, state in files.items():
        if isinstance(state, OSError):
            target = folder / each
            fault = (state.strerror or str(state)).lower()
            if isinstance(state, FileNotFoundError) and target.is_symlink():
                fault = f"the link {each} leads to {os.readlink(target)}, which is not there"  # noqa: PTH115
            new = True
            continue
        signs.append((each, state.st_size, state.st_mtime_ns))
        if not stat.S_ISREG(state.st_mode):
            fault = f"{each} is not a regular file"
        if each.lower().endswith(f".{form}"):
            identity = (state.st_dev, state.st_ino)
            new |= identity not in taken
            taken.add(identity)
    if not new and any(each.lower().endswith(f".{form}") for each in files):
        return None
    return Candidate(folder / name if name else folder, form, repository, tuple(signs), fault)
