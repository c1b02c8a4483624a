"""The engine sections of a profile: which there are, what may stand in them, and the whole as JSON Schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic import BaseModel

from orchestrator import backend as backends
from orchestrator.errors import UnknownBackend
from orchestrator.profile_schema import Keys, Sampling

FAMILIES: Final = ("vllm",)
"""Sections that several backends share: ``vllm`` is read by ``vllm-rocm``, ``vllm-cuda`` and ``vllm-cpu``."""


class InstalledEngines(Mapping[str, type[BaseModel]]):
    """Backend name -> its options model; a backend is imported when its options are asked for."""

    def __getitem__(self, name: str) -> type[BaseModel]:
        """Return the options model, or raise UnknownBackend."""
        return backends.find(name).Options

    def __contains__(self, name: object) -> bool:
        """Say whether it is installed, without importing it."""
        return name in backends.installed()

    def __iter__(self) -> Iterator[str]:
        """Yield the names of all installed backends."""
        return iter(backends.installed())

    def __len__(self) -> int:
        """Return how many backends are installed."""
        return len(backends.installed())


def json_schema(engines: Mapping[str, type[BaseModel]] | None = None) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a profile's file, with the sections of `engines`.

    A backend that can't be imported has a section in which anything may stand.
    """
    engines = InstalledEngines() if engines is None else engines
    schema = Keys.model_json_schema()
    del schema["required"]  # it depends, see below
    definitions: dict[str, Any] = schema.pop("$defs", {})
    properties: dict[str, Any] = schema["properties"]

    def section(model: type[BaseModel], title: str) -> dict[str, Any]:
        own = model.model_json_schema(ref_template=f"#/$defs/{title}.{{model}}")
        definitions.update({f"{title}.{name}": value for name, value in own.pop("$defs", {}).items()})
        return {**own, "title": title}

    properties["sampling"] = section(Sampling, "sampling")
    properties["model"] = {
        "description": properties["model"]["description"],
        "title": "Model",
        "anyOf": [{"type": "string", "minLength": 1}, {"$ref": "#/$defs/ModelSpec"}],
    }
    properties["backend"]["enum"] = list(engines)
    properties["extends"] = {
        "title": "Extends",
        "type": "string",
        "description": "Another profile, over which this one is laid; relative to this file.",
    }
    for name in engines:
        try:
            properties[name] = section(engines[name], name)
        except UnknownBackend:
            properties[name] = {"title": name, "type": "object"}
    for family in FAMILIES:
        member = next((name for name in engines if name.startswith(f"{family}-")), None)
        if member is not None:
            properties[family] = {**properties[member], "title": family}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "Profile",
        "description": "A model, the engine that serves it, and how.",
        # what an overlay leaves out comes from the profile that it extends
        "anyOf": [{"required": ["model", "backend"]}, {"required": ["extends"]}],
        "$defs": definitions,
    }
