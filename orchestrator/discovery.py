"""Which engines are installed, by name: the entry-point group ``orchestrator.backends``.

Ours are registered there in the same way as a stranger's. Only `find` imports one.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

from orchestrator.backend import Backend
from orchestrator.errors import UnknownBackend

ENTRY_POINT_GROUP = "orchestrator.backends"


@functools.cache
def _registered() -> Mapping[str, EntryPoint]:
    """Return the first entry point of each name; read once, as every package's metadata is looked at."""
    return {point.name: point for point in reversed(tuple(entry_points(group=ENTRY_POINT_GROUP)))}


@functools.cache
def installed() -> tuple[str, ...]:
    """Return the names of all installed backends, sorted."""
    return tuple(sorted(_registered()))


@functools.cache
def _families() -> Mapping[str, str]:
    """Return the family of every installed backend that has one, without importing any."""
    groups: dict[tuple[str, str], set[str]] = {}
    for point in _registered().values():
        family = point.name.rpartition("-")[0]
        if family:
            groups.setdefault((point.module, family), set()).add(point.name)
    return {name: family for (_, family), names in groups.items() if len(names) > 1 for name in names}


def family(name: str) -> str:
    """Return the name that a backend shares with others, which is a section of the profile too, or its own.

    Backends of one module are a family when their names have in common what stands before the last dash,
    as ``vllm-rocm``, ``vllm-cuda`` and ``vllm-cpu`` are ``vllm``.
    """
    return _families().get(name, name)


def find(name: str) -> type[Backend]:
    """Return the backend class registered under `name`.

    Raises:
        UnknownBackend: there is none, or its package can't be imported.

    """
    point = entry_point(name)
    try:
        loaded: type[Backend] = point.load()
    except (ImportError, AttributeError) as error:
        raise UnknownBackend(
            f"backend: {name!r} ({point.value}) can't be imported: {error}",
            advice="reinstall the package that brings it",
        ) from error
    return loaded


def entry_point(name: str) -> EntryPoint:
    """Return where a backend is registered, without importing it.

    Raises:
        UnknownBackend: it is not.

    """
    point = _registered().get(name)
    if point is None:
        close = difflib.get_close_matches(name, installed(), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UnknownBackend(
            f"backend: no backend named {name!r} is installed{hint}",
            advice=f"installed: {', '.join(installed()) or 'none'}",
        )
    return point
