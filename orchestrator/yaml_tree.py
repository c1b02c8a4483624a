"""A value from YAML that knows where it stands: `Mark`, `Node`, and laying one tree over another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from orchestrator.errors import Problem
from orchestrator.yaml_scalars import Scalar, shown

Steps: TypeAlias = tuple[str | int, ...]
"""The keys and indices that lead to a node."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A place.

    Attributes:
        where: file name as the user gave it, or ``--set KEY=VALUE``.
        line: 1-based, 0 when there is none.
        column: 1-based, 0 when there is none.
        folder: where relative paths start.

    """

    where: str
    line: int
    column: int
    folder: Path

    def problem(self, key: str, message: str) -> Problem:
        """Return a fault at this place."""
        return Problem(self.where, self.line, self.column, shown(key), message)


@dataclass(frozen=True, slots=True)
class Node:
    """A value and its place.

    Attributes:
        mark: where the value stands.
        key_mark: where its key stands; the same as `mark` for an item of a list.
        entries: the value of a mapping.
        items: the value of a list.
        readings: what a scalar may mean, most likely first.
        text: a scalar as written, variables filled in.
        faulty: already reported; whatever follows from it is not.

    """

    mark: Mark
    key_mark: Mark
    entries: Mapping[str, Node] | None = None
    items: tuple[Node, ...] | None = None
    readings: tuple[Scalar, ...] = ()
    text: str = ""
    faulty: bool = False

    def walk(self, path: Steps = ()) -> Iterator[tuple[Steps, Node]]:
        """Yield this node and all below it, each with its path."""
        yield path, self
        for key, entry in (self.entries or {}).items():
            yield from entry.walk((*path, key))
        for index, item in enumerate(self.items or ()):
            yield from item.walk((*path, index))

    def at(self, path: Steps) -> tuple[Steps, Node]:
        """Return the deepest node on `path`, and the path to it."""
        node: Node = self
        for depth, part in enumerate(path):
            if node.entries is not None and isinstance(part, str) and part in node.entries:
                node = node.entries[part]
            elif node.items is not None and isinstance(part, int) and part < len(node.items):
                node = node.items[part]
            else:
                return path[:depth], node
        return path, node

    def with_entry(self, steps: tuple[str, ...], node: Node | None) -> Node:
        """Return this tree with another value at `steps`, which lead through mappings; None removes it."""
        key, *below = steps
        entries = dict(self.entries or {})
        if below:
            node = entries[key].with_entry(tuple(below), node)
        if node is None:
            entries.pop(key, None)
        else:
            entries[key] = node
        return replace(self, entries=entries)


def dotted(path: Steps) -> str:
    """Write a path as people do: ``args[1]``, ``timeouts.start``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def merge(base: Node, overlay: Node) -> Node:
    """Lay one node over another: mappings are merged key by key, anything else is replaced."""
    if base.entries is None or overlay.entries is None:
        return overlay
    entries = dict(base.entries)
    for key, node in overlay.entries.items():
        entries[key] = merge(entries[key], node) if key in entries else node
    return replace(overlay, entries=entries)
