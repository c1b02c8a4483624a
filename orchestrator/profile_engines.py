"""The engine sections of a profile: which there are, what may stand in them, and the whole as JSON Schema."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from orchestrator import discovery
from orchestrator.errors import UnknownBackend
from orchestrator.profile_schema import Keys, Sampling


class InstalledEngines(Mapping[str, type[BaseModel]]):
    """Backend name -> its options model; a backend is imported when its options are asked for."""

    def __getitem__(self, name: str) -> type[BaseModel]:
        """Return the options model, or raise UnknownBackend."""
        return discovery.find(name).Options

    def __contains__(self, name: object) -> bool:
        """Say whether it is installed, without importing it."""
        return name in discovery.installed()

    def __iter__(self) -> Iterator[str]:
        """Yield the names of all installed backends."""
        return iter(discovery.installed())

    def __len__(self) -> int:
        """Return how many backends are installed."""
        return len(discovery.installed())


def reader(section: str, engines: Iterable[str]) -> str:
    """Return the engine that one of the `section_names` is for, or the first of the family that shares it."""
    return next(name for name in engines if section in {name, discovery.family(name)})


def section_names(engines: Iterable[str]) -> tuple[str, ...]:
    """Return the names that an engine section may have: the engines', then those of families."""
    names = tuple(engines)
    return tuple(dict.fromkeys((*names, *map(discovery.family, names))))


def takes_memory_fraction(name: str) -> bool:
    """Say whether an engine minds that key; of one that can't be asked it is believed."""
    try:
        return discovery.find(name).takes_memory_fraction
    except UnknownBackend:
        return True


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
    for name in section_names(engines):
        if name not in engines:
            properties[name] = {**properties[reader(name, engines)], "title": name}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "Profile",
        "description": "A model, the engine that serves it, and how.",
        # what an overlay leaves out comes from the profile that it extends
        "anyOf": [{"required": ["model", "backend"]}, {"required": ["extends"]}],
        "$defs": definitions,
    }
