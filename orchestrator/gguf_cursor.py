"""A position in a file that may lie about itself: the bytes under `gguf_walk`.

Every length is bounded by the bytes that are left in the file before anything is read or allocated.
Reading goes through one window of 128 KiB, so memory stays in the size of what is kept, and a file that is
cut short while it is read can't fault the process as a memory map would.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import IO, Any, Literal

from orchestrator.errors import NotAModel
from orchestrator.gguf_known import Known

ByteOrder = Literal["little", "big"]

WINDOW = 1 << 17  # bytes
_MOST_STRINGS = 1 << 23  # of all arrays in a file; Gemma 3, with the largest vocabulary, has 0.8 million
_LONGEST_NAME = 65_535  # bytes; the specification's limit for keys


def printable(text: str) -> str:
    """Return `text` fit for one line of a message: a file's names may hold anything, at any length."""
    shown = "".join(each if each.isprintable() else "?" for each in text[:200])
    return shown if len(text) <= 200 else f"{shown}..."


def broken(path: Path, offset: int, reason: str) -> NotAModel:
    """Return the error for what is wrong at byte `offset` of the file at `path`."""
    return NotAModel(
        f"gguf: {path}: byte {offset}: {printable(reason)}",
        path=path,
        offset=offset,
        advice="the file is broken or was not downloaded whole: download it again",
    )


class Cursor:
    """Reads one file from `at` on; whatever reaches beyond the file is a `NotAModel`."""

    def __init__(self, path: Path, file: IO[bytes], known: Known | None = None) -> None:
        self.path = path
        self.known = known
        self.descriptor = file.fileno()
        self.size = os.fstat(self.descriptor).st_size
        self.at = 0
        self._strings = 0
        self._base = 0
        self._window = b""
        self.set_byte_order("little")

    def set_byte_order(self, order: ByteOrder) -> None:
        """Read numbers in `order` from here on."""
        self.prefix = "<" if order == "little" else ">"
        self._u32, self._u64 = struct.Struct(self.prefix + "I"), struct.Struct(self.prefix + "Q")

    def fault(self, reason: str, offset: int | None = None) -> NotAModel:
        """Return the error for what is wrong at `offset`, default here."""
        return broken(self.path, self.at if offset is None else offset, reason)

    @property
    def left(self) -> int:
        """Bytes between here and the end of the file."""
        return self.size - self.at

    def _bound(self, count: int, what: str) -> None:
        if count > self.left:
            raise self.fault(f"{what} needs {count} bytes, {self.left} are left in the file")

    def _need(self, count: int, what: str) -> int:
        """Return where in the window the next `count` bytes are, once they are there."""
        index = self.at - self._base
        if index < 0 or index + count > len(self._window):
            self._bound(count, what)
            self._window = os.pread(self.descriptor, max(count, WINDOW), self.at)
            self._base = self.at
            if len(self._window) < count:
                raise self.fault("the file became shorter while it was read")
            return 0
        return index

    def numbers(self, form: struct.Struct, what: str) -> tuple[Any, ...]:
        """Read what `form` describes."""
        index = self._need(form.size, what)
        self.at += form.size
        return form.unpack_from(self._window, index)

    def u32(self, what: str) -> int:
        """Read an unsigned number of 32 bits."""
        return int(self.numbers(self._u32, what)[0])

    def u64(self, what: str) -> int:
        """Read an unsigned number of 64 bits."""
        return int(self.numbers(self._u64, what)[0])

    def text(self, length: int, what: str) -> str:
        """Read `length` bytes of text, replacing what isn't UTF-8: a stray byte must not hide a model."""
        index = self._need(length, what)
        self.at += length
        return self._window[index : index + length].decode("utf-8", "replace")

    def name(self, what: str) -> str:
        """Read a length and as much text."""
        start = self.at
        length = self.u64(what)
        if length > _LONGEST_NAME:
            raise self.fault(f"{what} is said to be {length} bytes long, {_LONGEST_NAME} are allowed", start)
        return self.text(length, what)

    def skip(self, count: int, what: str) -> None:
        """Step over `count` bytes."""
        self._bound(count, what)
        self.at += count

    def skip_strings(self, count: int, what: str) -> None:
        """Step over `count` strings; a vocabulary has hundreds of thousands, so this is the hot loop."""
        if count > self.left // 8:
            raise self.fault(f"{what} announces {count} strings, more than the file can hold", self.at - 8)
        self._strings += count
        if self._strings > _MOST_STRINGS:
            raise self.fault(
                f"{what} announces {count} strings, {_MOST_STRINGS} are allowed in a file", self.at - 8
            )
        if (
            self.known
            and self.prefix == "<"
            and (length := self.known.length(self.descriptor, self.at, count))
        ):
            self.at += length
            return
        unpack = self._u64.unpack_from
        while count:
            index = previous = self._need(8, what)
            window, last = self._window, len(self._window) - 8
            for done in range(count):
                if index > last:
                    count -= done
                    break
                previous = index
                index += 8 + unpack(window, index)[0]
            else:
                count = 0
            if self._base + index > self.size:
                raise self.fault(f"a string of {what} reaches beyond the file", self._base + previous)
            self.at = self._base + index
