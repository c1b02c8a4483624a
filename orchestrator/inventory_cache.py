"""Remembers what was read, keyed by path, sizes and times of change; replaced as a whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import msgspec

from orchestrator.inventory_files import Candidate, Sign
from orchestrator.inventory_read import Entry

_FORMAT = 3  # raised whenever an entry would be read differently


class _Kept(msgspec.Struct, array_like=True, frozen=True):
    """An entry and the state of its files when it was read."""

    signs: tuple[Sign, ...]
    entry: Entry


class _File(msgspec.Struct, frozen=True):
    """The whole file."""

    format: int
    kept: dict[str, _Kept]


class Cache:
    """What `path` remembers; one that is missing or broken remembers nothing, None never does."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._old: dict[str, _Kept] = {}
        self._new: dict[str, _Kept] = {}
        if path is not None:
            with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeError):
                read = msgspec.json.decode(path.read_bytes(), type=_File)
                self._old = read.kept if read.format == _FORMAT else {}

    def get(self, candidate: Candidate) -> Entry | None:
        """Return the entry of a candidate that has not changed; None when it has to be read.

        What was broken is read again each time: permissions and missing neighbours change no sign.
        """
        kept = self._old.get(_key(candidate))
        if kept is None or kept.signs != candidate.signs or candidate.fault or kept.entry.fault:
            return None
        return replace(kept.entry, repository=candidate.repository)

    def put(self, candidate: Candidate, entry: Entry) -> None:
        """Remember an entry."""
        self._new[_key(candidate)] = _Kept(candidate.signs, entry)

    def save(self, roots: Iterable[Path]) -> None:
        """Write what is known now; of folders not among `roots` what was known before is kept.

        A cache that can't be written is no fault: the next scan is slower.
        """
        if self._path is None:
            return
        below = tuple(f"{root.absolute()}{os.sep}" for root in roots)
        kept = {name: each for name, each in self._old.items() if not f"{each.entry.path}/".startswith(below)}
        whole = {**kept, **self._new}
        if whole == self._old:
            return
        with contextlib.suppress(OSError, UnicodeError):  # a path need not be text
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor, temporary = tempfile.mkstemp(dir=self._path.parent, prefix=self._path.name)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(msgspec.json.encode(_File(_FORMAT, whole)))
                Path(temporary).replace(self._path)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise


def _key(candidate: Candidate) -> str:
    return f"{candidate.format}:{candidate.path}"
