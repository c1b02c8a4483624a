"""Which engines serve which form of a model: what their classes say, remembered from one scan to the next.

To import them takes longer than to look through a thousand models. What is remembered of an engine holds as
long as nothing changed in the files in which its class and the bases of that are written.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path

import msgspec

from orchestrator import discovery
from orchestrator.errors import UnknownBackend

_FORMAT = 1

Stamp = tuple[int, int]  # time of change in ns, size in bytes


class _Known(msgspec.Struct, array_like=True, frozen=True):
    """What an engine's class said, and the files that say it."""

    place: str
    formats: tuple[str, ...]
    files: dict[str, Stamp]


class _File(msgspec.Struct, frozen=True):
    """The whole file."""

    format: int
    engines: dict[str, _Known]


def serving(cache: Path | None = None) -> Mapping[str, tuple[str, ...]]:
    """Return format -> names of what serves it; a family's name stands for all of that family.

    Args:
        cache: a file that remembers what the classes said; None asks them. A broken one is ignored.

    """
    known: dict[str, _Known] = {}
    if cache is not None:
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeError):
            read = msgspec.json.decode(cache.read_bytes(), type=_File)
            known = read.engines if read.format == _FORMAT else {}
    now: dict[str, _Known] = {}
    found: dict[str, set[str]] = {}
    for name in discovery.installed():
        point = discovery.entry_point(name)
        told = known.get(name)
        if told is None or not _holds(told, point):
            told = _ask(point)
        if told.files:  # what can't be imported may be mended at any time
            now[name] = told
        for format_ in told.formats:
            found.setdefault(format_, set()).add(discovery.family(name))
    if cache is not None and now != known:
        _save(cache, now)
    return {format_: tuple(sorted(names)) for format_, names in found.items()}


def _ask(point: EntryPoint) -> _Known:
    try:
        engine = discovery.find(point.name)
    except UnknownBackend:
        return _Known(point.value, (), {})
    files: dict[str, Stamp] = {}
    for one in engine.__mro__:
        path = getattr(sys.modules.get(one.__module__), "__file__", None)
        if path is not None and (stamp := _stamp(path)) is not None:
            files[path] = stamp
    return _Known(point.value, engine.formats, files)


def _holds(told: _Known, point: EntryPoint) -> bool:
    """Say whether the engine is still the one that was asked; of its module only the package is imported."""
    if told.place != point.value:
        return False
    try:
        spec = importlib.util.find_spec(point.module)
    except Exception:  # the package of a stranger may raise anything
        return False
    return (
        spec is not None
        and spec.origin in told.files
        and all(_stamp(path) == stamp for path, stamp in told.files.items())
    )


def _stamp(path: str) -> Stamp | None:
    try:
        status = os.stat(path)  # noqa: PTH116  # a text, and nothing but asked
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _save(cache: Path, engines: dict[str, _Known]) -> None:
    """Write it as a whole; a cache that can't be written is no fault."""
    with contextlib.suppress(OSError, UnicodeError):  # a path need not be text
        cache.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, temporary = tempfile.mkstemp(dir=cache.parent, prefix=cache.name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(_File(_FORMAT, engines)))
            Path(temporary).replace(cache)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
