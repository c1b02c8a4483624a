"""The declared wish: `Profile`, and `load`, which finds every fault in a file at once.

The way from text to value, each step in a module of its own:

    yaml_source     text -> tree of nodes that know their line and column
    profile_layers  extends, --set and --backend laid over one another
    profile_paths   files that are named: found, or missed
    profile_schema  what the keys are
    profile_faults  tree -> pydantic model, its complaints -> ours
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, Field

from orchestrator.errors import Problem, ProfileError, UnknownBackend
from orchestrator.profile_engines import (
    InstalledEngines,
    json_schema,
    reader,
    section_names,
    takes_memory_fraction,
)
from orchestrator.profile_faults import did_you_mean, validate
from orchestrator.profile_layers import Layers
from orchestrator.profile_paths import Paths
from orchestrator.profile_schema import (
    DEFAULT_MEMORY_FRACTION,
    NAME_PATTERN,
    Keys,
    ModelSpec,
    Restart,
    Sampling,
    Timeouts,
)
from orchestrator.yaml_scalars import shown
from orchestrator.yaml_tree import Node, dotted

__all__ = ["ModelSpec", "Profile", "Restart", "Timeouts", "json_schema", "load"]


class Profile(Keys):
    """What its author wants served, and how; all that `load` can verify without the engine is verified.

    Attributes:
        options: the engine sections that the profile holds, by name.
        directory: the folder of the profile's file, absolute; relative paths start here.
        source: the file, absolute, or None when the profile was made in code.

    """

    options: Mapping[str, Mapping[str, Any]] = Field(default={})
    directory: Path = Field(default_factory=Path.cwd)
    source: Path | None = Field(default=None)


# -- what is still to come --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _NotYet:
    """A key, or some of its values, that is refused until its machinery is there."""

    key: tuple[str, ...]
    refused: Callable[[Node], bool]
    instead: str


NOT_YET: Final = (
    _NotYet(
        ("idle_timeout",), lambda node: node.readings[-1:] not in [(0,), (0.0,)], "give 0, or leave it out"
    ),
)


# -- loading ----------------------------------------------------------------------------------------


def load(
    path: str | os.PathLike[str],
    *,
    overrides: Sequence[str] = (),
    backend: str | None = None,
    environ: Mapping[str, str] | None = None,
    engines: Mapping[str, type[BaseModel]] | None = None,
) -> Profile:
    """Read, check and return a profile.

    Args:
        path: the YAML file.
        overrides: ``KEY=VALUE`` each, KEY dotted, VALUE YAML; later ones win.
        backend: the engine to use instead of the profile's.
        environ: for ``${VAR}``, HOME and ROCM_MODEL_DIR; default: this process's.
        engines: backend name -> options model; default: the installed backends.

    Raises:
        ProfileError: with every fault there is, in the order of the file.

    """
    environ = os.environ if environ is None else environ
    engines = InstalledEngines() if engines is None else engines
    layers = Layers(environ)
    root = layers.read(Path(path), str(path))
    for override in overrides:
        root = layers.override(root, override)
    if backend is not None:
        root = layers.put(root, "backend", backend, f"--backend {backend}")
    if root is None:
        raise ProfileError(layers.in_order())
    if layers.incomplete:  # what is missing may stand there
        for key in ("model", "backend"):
            if key not in (root.entries or {}):
                root = root.with_entry((key,), Node(root.mark, root.mark, readings=("",), faulty=True))
    source = Path(os.path.abspath(path))  # noqa: PTH100  # symlinks are kept, as the user named them
    profile = _Check(root, source, environ, engines, layers.problems.append).profile()
    if layers.problems or profile is None:
        raise ProfileError(layers.in_order())
    return profile


class _Check:
    """One tree on its way to a profile; `tree` loses what has been dealt with."""

    def __init__(
        self,
        root: Node,
        source: Path,
        environ: Mapping[str, str],
        engines: Mapping[str, type[BaseModel]],
        report: Callable[[Problem], None],
    ) -> None:
        self.root = root
        self.source = source
        self.engines = engines
        self.report = report
        self.paths = Paths(source.parent, environ, report)
        self.options: dict[str, Mapping[str, Any]] = {}

    def profile(self) -> Profile | None:
        """Check everything; None when there were faults, all of them reported."""
        self.refuse_what_is_to_come()
        self.name()
        self.backend()
        self.ways()
        named = section_names(self.engines)
        sections = [self.section(key) for key in named if key in (self.root.entries or {})]
        sampling = self.sampling()
        self.root = self.paths.resolve(self.root)
        keys = validate(Keys, self.root, self.report, also_known=("extends", *named))
        if keys is None or sampling is None or not all(sections):
            return None
        fields = {name: getattr(keys, name) for name in keys.model_fields_set}  # to know what was asked for
        return Profile.model_validate(
            {
                **fields,
                "sampling": sampling.model_dump(exclude_unset=True),
                "options": self.options,
                "directory": self.source.parent,
                "source": self.source,
            }
        )

    def entry(self, key: str) -> Node | None:
        """Return the value of a key of the profile."""
        return (self.root.entries or {}).get(key)

    def change(self, node: Node | None, *steps: str) -> None:
        """Put another value in a key's place, or none."""
        self.root = self.root.with_entry(steps, node)

    def refuse(self, key: str, node: Node, message: str) -> None:
        """Report a value that is right in itself, and keep it from being reported again."""
        self.report(node.mark.problem(key, message))
        self.change(replace(node, faulty=True), key)

    def refuse_what_is_to_come(self) -> None:
        """Refuse the keys and values that do nothing yet, lest they be ignored in silence."""
        for to_come in NOT_YET:
            steps, node = self.root.at(to_come.key)
            if steps == to_come.key and not node.faulty and to_come.refused(node):
                self.report(node.mark.problem(dotted(steps), f"is not supported yet; {to_come.instead}"))
                self.change(replace(node, faulty=True), *to_come.key)

    def name(self) -> None:
        """Name the profile after its file unless it has a name."""
        if self.entry("name") is not None:
            return
        stem = self.source.stem
        named = Node(self.root.mark, self.root.mark, readings=(stem,), text=stem)
        self.change(named, "name")
        if not re.match(NAME_PATTERN, stem):
            self.refuse(
                "name", named, f"is missing, and the file's name {shown(stem)!r} can't be a profile's"
            )

    def backend(self) -> None:
        """Check that the backend is there, and what only some backends can do."""
        node = self.entry("backend")
        if node is None or node.faulty or not node.text or node.readings != (node.text,):
            return
        name = node.text
        if name not in self.engines:
            names = ", ".join(self.engines) or "none"
            hint = did_you_mean(name, self.engines) or f"; installed: {names}"
            self.refuse("backend", node, f"{shown(name)} is not an installed backend{hint}")
            return
        share = self.entry("memory_fraction")
        if share is not None and not share.faulty:
            given = share.readings[-1] if share.readings else None
            # asked last, as it imports the engine
            if (
                isinstance(given, float)
                and given != DEFAULT_MEMORY_FRACTION
                and not takes_memory_fraction(name)
            ):
                self.refuse("memory_fraction", share, f"is not supported yet by {shown(name)}; leave it out")

    def ways(self) -> None:
        """Refuse two ways at once in which the engine's program is named."""
        container = self.entry("container")
        if container is not None and self.entry("command") is not None:
            self.refuse("container", container, "must not stand beside command, which is the whole command")

    def section(self, key: str) -> bool:
        """Check an engine's section with that engine's own model; false when it can't be used."""
        node = self.entry(key)
        assert node is not None
        self.change(None, key)
        try:
            model = self.engines[reader(key, self.engines)]
        except UnknownBackend as error:
            self.report(node.key_mark.problem(key, f"can't be checked: {error.message}"))
            return False
        options = validate(model, node, self.report, prefix=(key,))
        if options is not None:
            self.options[key] = options.model_dump(exclude_unset=True, by_alias=True)
        return options is not None

    def sampling(self) -> Sampling | None:
        """Check the sampling options."""
        node = self.entry("sampling")
        self.change(None, "sampling")
        return Sampling() if node is None else validate(Sampling, node, self.report, prefix=("sampling",))
