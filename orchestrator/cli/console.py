"""Where words go: results to stdout, everything else to stderr; a reader that left is no fault."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


class ReaderGone(Exception):
    """Whoever read our stdout is gone."""


def out(text: str, end: str = "\n") -> None:
    """Write to stdout at once.

    Raises:
        ReaderGone: nobody reads it any longer.

    """
    with _reader():
        sys.stdout.write(text + end)
        sys.stdout.flush()


def raw(data: bytes) -> None:
    """Write bytes to stdout at once, as they are; see `out`."""
    with _reader():
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


@contextlib.contextmanager
def _reader() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        # the interpreter flushes stdout once more at its end, and must find a place for it
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        raise ReaderGone from None


def err(text: str, end: str = "\n") -> None:
    """Write to stderr at once, if anybody still reads it."""
    try:
        sys.stderr.write(text + end)
        sys.stderr.flush()
    except OSError:
        pass


def document(value: Any) -> None:
    """Write one JSON document to stdout."""
    import msgspec

    out(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def printable(text: str) -> str:
    """Return a line that an engine wrote without what would steer the terminal."""
    return "".join(character if character.isprintable() else " " for character in text).strip()


def size(count: float | None) -> str:
    """Return bytes as people read them."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def duration(seconds: float | None) -> str:
    """Return seconds as people read them."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.0f}s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"


def table(rows: list[list[str]], headings: list[str]) -> str:
    """Return rows in columns, numbers and names alike to the left, without trailing blanks."""
    widths = [max(len(row[column]) for row in [headings, *rows]) for column in range(len(headings))]
    return "\n".join(
        "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [headings, *rows]
    )
