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

# of a backend's class; `profile` is of its instances
_ASKED = tuple(
    name
    for name in (*Backend.__annotations__, *vars(Backend))
    if not name.startswith("_") and name != "profile"
)


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
            module = point.value.partition(":")[0].strip()  # `point.module` raises where it is malformed
            groups.setdefault((module, family), set()).add(point.name)
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
        UnknownBackend: there is none, its package can't be imported, or what that has is no backend.

    """
    point = entry_point(name)
    try:
        loaded: type[Backend] = point.load()
    except Exception as error:  # the module of a stranger may raise anything
        raise UnknownBackend(
            f"backend: {name!r} ({point.value}) can't be imported: {error or type(error).__name__}",
            advice="reinstall the package that brings it",
        ) from error
    if lacking := [each for each in _ASKED if not hasattr(loaded, each)]:
        raise UnknownBackend(
            f"backend: {name!r} ({point.value}) is no backend: it lacks {', '.join(lacking)}",
            advice="update the package that brings it",
        )
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
