"""The files that a profile names: which form of a model is meant, and where each file is.

A relative path is looked for beside the file in which it stands (for ``--set``: in the current folder),
then in the profile's folder, then in ``ROCM_MODEL_DIR``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from orchestrator import model_hub, templates
from orchestrator.errors import ModelError, Problem
from orchestrator.home import expand_home
from orchestrator.yaml_scalars import FREE_TEXT, shown
from orchestrator.yaml_tree import Mark, Node

TEMPLATE_SUFFIXES: Final = (".jinja", ".jinja2", ".j2", ".txt", ".tmpl")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PACKAGE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


def _is_text(node: Node | None) -> bool:
    first = node.readings[:1] if node is not None and not node.faulty else ()
    return bool(first) and isinstance(first[0], str) and first[0] is not FREE_TEXT and first[0] != ""


class Paths:
    """Finds files, and puts absolute paths in the place of what was written."""

    def __init__(
        self, directory: Path, environ: Mapping[str, str], report: Callable[[Problem], None]
    ) -> None:
        self.directory = directory
        self.environ = environ
        self.report = report

    def resolve(self, root: Node) -> Node:
        """Return the profile's tree with every path found, or reported as missing."""
        entries = dict(root.entries or {})
        if "model" in entries and not entries["model"].faulty:
            entries["model"] = self.model(entries["model"])
        template = entries.get("chat_template")
        if template is not None and _is_text(template):
            entries["chat_template"] = self.template(template)
        for key in ("command", "stop_command", "args"):
            if key in entries:
                entries[key] = self.words(entries[key])
        if "container" in entries and "args" in (entries["container"].entries or {}):
            args = (entries["container"].entries or {})["args"]
            entries["container"] = entries["container"].with_entry(("args",), self.words(args))
        return replace(root, entries=entries)

    def words(self, node: Node) -> Node:
        """Return a list of arguments as a shell would pass it on."""
        return node if node.items is None else replace(node, items=tuple(map(self.home, node.items)))

    def model(self, node: Node) -> Node:
        """Return the model as a mapping of the forms that are named, their paths found."""
        if node.entries is None:
            return self.short_model(node)
        forms = dict(node.entries)
        for key, find in (("gguf", self.file), ("mmproj", self.file), ("hf", self.folder)):
            if _is_text(forms.get(key)):
                on_hub = model_hub.is_reference(forms[key].text)
                forms[key] = (self.hub if on_hub else find)(forms[key], f"model.{key}")
        if _is_text(forms.get("package")):
            forms["package"] = self.package(forms["package"], "model.package", forms["package"].text)
        if "lora" in forms and forms["lora"].items is not None:
            adapters = enumerate(forms["lora"].items)
            found = [self.adapter(a, f"model.lora[{i}]") if _is_text(a) else a for i, a in adapters]
            forms["lora"] = replace(forms["lora"], items=tuple(found))
        return replace(node, entries=forms)

    def short_model(self, node: Node) -> Node:
        """Return the mapping for which ``model: TEXT`` is short."""
        if node.items is not None or not _is_text(node):
            what = "must be a path, package:NAME, hf:OWNER/REPO, or a mapping of gguf, hf, mmproj, lora"
            self.report(node.mark.problem("model", what))
            return replace(node, faulty=True)
        prefix, colon, rest = node.text.partition(":")
        found = self.find(node.text, node.mark)
        if colon and prefix == "package":
            form, node = "package", self.package(node, "model", rest)
        elif model_hub.is_reference(node.text):
            form, node = "hf", self.hub(node, "model")
        elif node.text.lower().endswith(".gguf") or (found is not None and found.is_file()):
            form, node = "gguf", self.file(node, "model")
        else:
            form, node = "hf", self.folder(node, "model")
        return replace(node, entries={form: replace(node, entries=None)}, readings=())

    def package(self, node: Node, key: str, name: str) -> Node:
        """Check a package's name; whether it is installed is known to who assembles the model."""
        if not _PACKAGE_NAME.fullmatch(name):
            return self.fault(node, key, f"{shown(name)!r} can't be a package's name")
        return replace(node, readings=(name,), text=name)

    def hub(self, node: Node, key: str) -> Node:
        """Check what names a model on the hub; whether it is there is known to who fetches it."""
        try:
            model_hub.Reference.parse(node.text)
        except ModelError:
            return self.fault(node, key, f"{shown(node.text, 200)} is not {model_hub.FORM}")
        return node

    def template(self, node: Node) -> Node:
        """Find a chat template; one of ours, or what is no path and no file, is the name of one."""
        if templates.shipped(node.text):
            return node
        if "/" in node.text or node.text.endswith(TEMPLATE_SUFFIXES) or self.find(node.text, node.mark):
            return self.file(node, "chat_template")
        return node

    def file(self, node: Node, key: str) -> Node:
        """Find a file that can be read."""
        found = self.find(node.text, node.mark)
        if found is None:
            return self.missing(node, key, "file")
        if not found.is_file():
            kind = "a folder, not a file" if found.is_dir() else "a pipe or device, not a file"
            return self.fault(node, key, f"{shown(node.text, 200)} is {kind}")
        return self.readable(node, key, found)

    def adapter(self, node: Node, key: str) -> Node:
        """Find an adapter: a GGUF file, or a folder with safetensors."""
        found = self.find(node.text, node.mark)
        return self.readable(node, key, found) if found and found.is_dir() else self.file(node, key)

    def folder(self, node: Node, key: str) -> Node:
        """Find a folder, or accept the name of a model on the hub."""
        found = self.find(node.text, node.mark)
        if found is None:
            return node if _HUB_NAME.fullmatch(node.text) else self.missing(node, key, "file or folder")
        if not found.is_dir():
            return self.fault(node, key, f"{shown(node.text, 200)} is a file, not a folder")
        return self.readable(node, key, found)

    def readable(self, node: Node, key: str, found: Path) -> Node:
        """Put the path that was found in the place of what was written."""
        if not os.access(found, os.R_OK):
            return self.fault(node, key, f"{shown(node.text, 200)} can't be read: permission denied")
        return replace(node, readings=(str(found),), text=str(found))

    def find(self, text: str, mark: Mark) -> Path | None:
        """Return the absolute path of what is there under that name, or None."""
        path = expand_home(text, self.environ)
        folders = [mark.folder, self.directory]
        if models := self.environ.get("ROCM_MODEL_DIR"):
            folders.append(Path(expand_home(models, self.environ)))
        for folder in folders:
            candidate = os.path.abspath(folder / path)  # noqa: PTH100  # resolve() would follow links
            if os.path.exists(candidate):  # noqa: PTH110  # Path.exists raises where access is denied
                return Path(candidate)
        return None

    def missing(self, node: Node, key: str, kind: str) -> Node:
        """Report that nothing is there."""
        text = expand_home(node.text, self.environ)
        unset = "" if self.environ.get("ROCM_MODEL_DIR") else ", which is not set"
        beside = (
            "" if Path(text).is_absolute() else f"; looked beside the profile and in ROCM_MODEL_DIR{unset}"
        )
        return self.fault(node, key, f"no such {kind}: {shown(text, 200)}{beside}")

    def fault(self, node: Node, key: str, message: str) -> Node:
        """Report a fault and mark the node."""
        self.report(node.mark.problem(key, message))
        return replace(node, faulty=True)

    def home(self, node: Node) -> Node:
        """Expand a leading ``~/`` as a shell would have done."""
        if not _is_text(node) or not node.text.startswith("~/"):
            return node
        text = expand_home(node.text, self.environ)
        return replace(node, readings=(text,), text=text)
