"""The layers of a profile: what it extends, the file itself, ``--set`` and ``--backend``, in this order."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from orchestrator.errors import Problem
from orchestrator.home import expand_home
from orchestrator.yaml_scalars import FREE_TEXT, shown
from orchestrator.yaml_source import read_file, read_text
from orchestrator.yaml_tree import Mark, Node, merge


class Layers:
    """Reads layers and lays them over one another; `problems` collects what is wrong with any."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.problems: list[Problem] = []
        self.names: list[str] = []
        self.incomplete = False  # a profile that is extended could not be read

    def in_order(self) -> list[Problem]:
        """Return the problems as a reader meets them: the file, what it extends, then the options."""
        order = {name: index for index, name in enumerate(dict.fromkeys(self.names))}
        unique = dict.fromkeys(self.problems)  # an alias or a shared base may show a fault twice
        return sorted(
            unique, key=lambda fault: (order.get(fault.where, len(order)), fault.line, fault.column)
        )

    def read(self, path: Path, where: str) -> Node | None:
        """Read a file and all that it extends, laid over one another; None when it can't be read itself."""
        chain: list[Node] = []
        seen: dict[str, str] = {}
        named_by: Node | None = None
        while True:
            where_shown = shown(where, 200)
            self.names.append(where_shown)
            found: list[Problem] = []
            root = read_file(path, where_shown, self.environ, found)
            for problem in found:
                at_extends = named_by is not None and not problem.line
                self.problems.append(
                    named_by.mark.problem("extends", f"{where_shown}: {problem.message}")
                    if named_by is not None and at_extends
                    else problem
                )
            if root is not None and root.entries is None:
                self.problems.append(root.mark.problem("", "must be a mapping of keys to values"))
                root = None
            if root is None:
                self.incomplete = True
                break
            seen[os.path.realpath(path)] = where_shown
            chain.append(root)
            named_by = (root.entries or {}).get("extends")
            if named_by is None:
                break
            base = self.base_of(named_by)
            if base is None:
                self.incomplete = True
                break
            path = root.mark.folder / base
            where = base if Path(base).is_absolute() else os.path.normpath(Path(where).parent / base)
            if os.path.realpath(path) in seen:
                circle = " -> ".join([*seen.values(), shown(where, 200)])
                self.problems.append(named_by.mark.problem("extends", f"goes in a circle: {circle}"))
                self.incomplete = True
                break
        if not chain:
            return None
        merged = chain.pop()
        while chain:
            # a name belongs to its own file: two profiles of one name could not run side by side
            below = {
                key: node for key, node in (merged.entries or {}).items() if key not in ("extends", "name")
            }
            merged = merge(replace(merged, entries=below), chain.pop())
        return replace(merged, entries={k: v for k, v in (merged.entries or {}).items() if k != "extends"})

    def base_of(self, node: Node) -> str | None:
        """Return the path that an ``extends`` names."""
        first = node.readings[:1]
        if node.faulty:
            return None
        if not first or not isinstance(first[0], str) or first[0] is FREE_TEXT or not node.text:
            self.problems.append(node.mark.problem("extends", "must be the path of one profile"))
            return None
        return expand_home(node.text, self.environ)

    def override(self, root: Node | None, text: str) -> Node | None:
        """Lay one ``KEY=VALUE`` over `root`."""
        key, equals, value = text.partition("=")
        mark = Mark(f"--set {shown(text, 200)}", 0, 0, Path.cwd())
        self.names.append(mark.where)
        steps = key.strip().split(".")
        if not equals or not all(steps):
            self.problems.append(mark.problem("", "must be KEY=VALUE, KEY with dots between its parts"))
            return root
        if steps[0] == "extends":
            self.problems.append(mark.problem("extends", "can't be set here; name the other profile instead"))
            return root
        found: list[Problem] = []
        node = read_text(value, mark, self.environ, found, counted=False)
        for problem in found:
            inner = f".{problem.key}" if problem.key and not problem.key.startswith("[") else problem.key
            self.problems.append(mark.problem(".".join(steps) + inner, problem.message))
        if node is None:
            return root
        for step in reversed(steps):
            node = Node(mark, mark, entries={step: node})
        return None if root is None else merge(root, node)

    def put(self, root: Node | None, key: str, text: str, where: str) -> Node | None:
        """Lay a text that an option gave over `root`."""
        mark = Mark(shown(where, 200), 0, 0, Path.cwd())
        self.names.append(mark.where)
        node = Node(mark, mark, readings=(text,), text=text)
        return None if root is None else merge(root, Node(mark, mark, entries={key: node}))
