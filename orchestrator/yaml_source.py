"""YAML text to a tree that remembers where everything stands; finds every fault it can on the way.

The tree (`orchestrator.yaml_tree`) is built from PyYAML's events, which never construct
objects; the meaning of a scalar is `orchestrator.yaml_scalars`' matter. Size, depth and number of nodes
are bounded, so that no file can take more than a moment.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import yaml

from orchestrator.errors import Problem
from orchestrator.yaml_scalars import (
    ScalarError,
    check_text,
    expand,
    filled_readings,
    readings,
    shown,
)
from orchestrator.yaml_tree import Mark, Node, Steps, dotted

MAX_BYTES: Final = 256 * 1024
MAX_DEPTH: Final = 32
MAX_NODES: Final = 10_000


def _beside(path: Path) -> str:
    """Return ``; did you mean X?`` when a file of a similar name lies where none of this name does."""
    names: list[str] = []
    with contextlib.suppress(OSError, ValueError):
        names = [name for name in os.listdir(path.parent) if name.endswith((".yaml", ".yml"))]  # noqa: PTH208
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.8)
    return f"; did you mean {shown(close[0])}?" if close else ""


def read_file(path: Path, where: str, environ: Mapping[str, str], problems: list[Problem]) -> Node | None:
    """Read a YAML file; None when it could not be read as a whole, and `problems` says why."""
    whole = Mark(where, 0, 0, path.parent)
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder; name a file in it" if stat.S_ISDIR(mode) else "not a regular file"
            problems.append(whole.problem("", f"is {kind}"))
            return None
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        problems.append(whole.problem("", f"no such file{_beside(path)}"))
        return None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        problems.append(whole.problem("", f"can't be read: {reason.lower()}"))
        return None
    if len(data) > MAX_BYTES:
        problems.append(whole.problem("", f"is larger than {MAX_BYTES // 1024} KiB; is it a profile?"))
        return None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8-sig")
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        place = replace(whole, line=line, column=column)
        problems.append(place.problem("", f"is not UTF-8 (byte 0x{data[error.start]:02x}); save it as UTF-8"))
        return None
    return read_text(text, whole, environ, problems)


def read_text(
    text: str, whole: Mark, environ: Mapping[str, str], problems: list[Problem], *, counted: bool = True
) -> Node | None:
    """Read YAML text; None when it is not YAML or empty, and `problems` says why.

    `whole` names the text; all faults are placed there as a whole unless lines are `counted`.
    """
    reader = _Reader(whole, environ, problems, counted)
    try:
        reader.open(text)
        return reader.document()
    except _UnreadableError as fault:
        problems.append(fault.mark.problem("", str(fault)))
    except yaml.MarkedYAMLError as error:
        mark = reader.mark(error.problem_mark) if error.problem_mark else whole
        problems.append(mark.problem("", _syntax(error, text)))
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        mark = reader.place(before.count("\n"), len(before) - before.rfind("\n") - 1)
        problems.append(mark.problem("", f"holds the control character U+{ord(text[error.position]):04X}"))
    except (ValueError, OverflowError):  # PyYAML on "\U00110000"
        mark = reader.mark(reader.loader.get_mark())
        problems.append(mark.problem("", "not YAML: an escape that stands for no character"))
    return None


def _syntax(error: yaml.MarkedYAMLError, text: str) -> str:
    problem = str(error.problem)
    if "got '{'" in problem and error.problem_mark and text[: error.problem_mark.index].endswith("$"):
        return "not YAML: between brackets or braces ${VAR} must stand in quotes"
    if "'\\t'" in problem:
        return "not YAML: a tab where only spaces can be"
    if "mapping values are not allowed" in problem:
        return "not YAML: a colon where none can be; check the indentation, or put the text in quotes"
    if "cannot start any token" in problem:
        return f"not YAML: {problem}; put the text in quotes"
    if error.context:
        problem += f", {error.context}"
        if error.context_mark is not None:
            problem += f" that began on line {error.context_mark.line + 1}"
    return f"not YAML: {shown(problem, 160)}"


class _UnreadableError(Exception):
    """The rest of the text can't be made sense of."""

    def __init__(self, message: str, mark: Mark) -> None:
        super().__init__(message)
        self.mark = mark


class _Reader:
    """Builds the tree of one text from its events."""

    def __init__(
        self, whole: Mark, environ: Mapping[str, str], problems: list[Problem], counted: bool
    ) -> None:
        self.whole = whole
        self.environ = environ
        self.problems = problems
        self.counted = counted
        self.anchors: dict[str, tuple[Node, int, int] | None] = {}  # with size and height; None while open
        self.nodes = 0

    def open(self, text: str) -> None:
        """Begin to read; PyYAML checks the characters here already."""
        self.loader = yaml.SafeLoader(text)
        self.events: Iterator[yaml.Event] = iter(self.loader.get_event, None)

    def place(self, line: int, column: int) -> Mark:
        """Return the place of 0-based figures."""
        return replace(self.whole, line=line + 1, column=column + 1) if self.counted else self.whole

    def mark(self, mark: Any) -> Mark:
        """Return PyYAML's mark, of which it has several classes, as ours."""
        return self.place(mark.line, mark.column)

    def document(self) -> Node | None:
        """Read the only document; None when there is nothing in it."""
        root: Node | None = None
        for event in self.events:
            if not isinstance(event, yaml.DocumentStartEvent):
                continue
            if root is not None:
                raise _UnreadableError("a second document; a file holds one", self.mark(event.start_mark))
            first = next(self.events)
            if isinstance(first, yaml.ScalarEvent) and first.implicit[0] and not first.value:
                break
            root = self.node(first, (), None)
        if root is None:
            self.problems.append(self.place(0, 0).problem("", "is empty"))
        return root

    def node(self, event: yaml.Event, path: Steps, key_mark: Mark | None) -> Node:
        """Build the node that begins with `event`."""
        mark = self.mark(event.start_mark)
        before = self.nodes
        self.count(1, len(path), mark)
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event, path, mark, key_mark or mark)
        assert isinstance(event, yaml.NodeEvent)
        if event.anchor:
            self.anchors[event.anchor] = None
        empty = Node(mark, key_mark or mark)
        faults = len(self.problems)
        if tag := getattr(event, "tag", None):
            tag = str(tag).replace("tag:yaml.org,2002:", "!!")
            self.fault(mark, path, f"the tag {shown(tag)} is not supported; profiles hold plain YAML")
        if isinstance(event, yaml.MappingStartEvent):
            node = replace(empty, entries=self.mapping(path))
        elif isinstance(event, yaml.SequenceStartEvent):
            items: list[Node] = []
            while not isinstance(following := next(self.events), yaml.SequenceEndEvent):
                items.append(self.node(following, (*path, len(items)), None))
            node = replace(empty, items=tuple(items))
        else:
            assert isinstance(event, yaml.ScalarEvent)
            node = self.scalar(event, path, empty)
            node = replace(node, faulty=len(self.problems) > faults)
        if event.anchor:
            height = max(len(below) for below, _ in node.walk())
            self.anchors[event.anchor] = (node, self.nodes - before, height)
        return node

    def count(self, nodes: int, depth: int, mark: Mark) -> None:
        """Keep size and depth within their bounds."""
        self.nodes += nodes
        if depth > MAX_DEPTH:
            raise _UnreadableError(f"is nested deeper than {MAX_DEPTH} levels", mark)
        if self.nodes > MAX_NODES:
            raise _UnreadableError(f"holds more than {MAX_NODES} values, aliases counted in full", mark)

    def alias(self, event: yaml.AliasEvent, path: Steps, mark: Mark, key_mark: Mark) -> Node:
        """Return the node that an alias stands for."""
        name = str(event.anchor)
        if name not in self.anchors:
            raise _UnreadableError(f"the alias *{shown(name)} has no anchor before it", mark)
        anchored = self.anchors[name]
        if anchored is None:
            raise _UnreadableError(f"the alias *{shown(name)} stands inside its own anchor", mark)
        node, size, height = anchored
        self.count(size, len(path) + height, mark)
        return replace(node, key_mark=key_mark)

    def mapping(self, path: Steps) -> dict[str, Node]:
        """Read a mapping up to its end; ``<<`` takes over what is not given beside it."""
        entries: dict[str, Node] = {}
        taken_over: list[Node] = []
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            mark = self.mark(event.start_mark)
            if not isinstance(event, yaml.ScalarEvent):
                raise _UnreadableError("a key must be text, not a list, a mapping or an alias", mark)
            key = str(event.value)
            node = self.node(next(self.events), (*path, key), mark)
            try:
                check_text(key)
            except ScalarError as error:
                self.fault(mark, path, f"a key {error}")
                continue
            if event.tag or not key:
                self.fault(mark, path, "a key must be plain text")
                continue
            if key == "<<" and event.implicit[0]:
                taken_over += self.merged(node, path)
            elif key in entries:
                first = f", first on line {entries[key].key_mark.line}" if self.counted else ""
                self.fault(mark, (*path, key), f"is given twice{first}")
            else:
                entries[key] = node
        for source in taken_over:
            entries |= {key: node for key, node in (source.entries or {}).items() if key not in entries}
        return entries

    def merged(self, node: Node, path: Steps) -> list[Node]:
        """Return the mappings that a merge key names."""
        sources = [node] if node.items is None else list(node.items)
        if any(source.entries is None for source in sources):
            self.fault(node.mark, (*path, "<<"), "must be a mapping, or a list of mappings")
        return [source for source in sources if source.entries is not None]

    def scalar(self, event: yaml.ScalarEvent, path: Steps, node: Node) -> Node:
        """Read a scalar, with its variables filled in."""
        written = str(event.value)
        try:
            text = expand(written, self.environ)
            check_text(text)
            if "${" in written:
                meant = filled_readings(text)
            else:
                meant = readings(text) if event.implicit[0] else (text,)
        except ScalarError as error:
            self.fault(node.mark, path, str(error))
            return replace(node, readings=("",))
        return replace(node, readings=meant, text=text)

    def fault(self, mark: Mark, path: Steps, message: str) -> None:
        """Note a fault and go on."""
        self.problems.append(mark.problem(dotted(path), message))
