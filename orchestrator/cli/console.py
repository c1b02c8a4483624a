"""Where words go: results to stdout, everything else to stderr; a reader that left is no fault."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from orchestrator.errors import OrchestratorError


class ReaderGone(Exception):
    """Whoever read our stdout is gone."""


class OutputLost(OrchestratorError):
    """What stdout leads to takes nothing: a full disk, or nothing at all."""


def complete() -> None:
    """Put something in the place of every standard stream that was closed (``>&-``).

    Their numbers would go to the next files opened, and what is printed with them. Words to stderr are
    dropped then; to write to stdout is the fault that it is for a full disk.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if fd < 2 else os.O_WRONLY)  # takes the lowest number: this one
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for as long as the process lives
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a letter that the locale lacks is no fault


def out(text: str, end: str = "\n") -> None:
    """Write to stdout at once.

    Raises:
        ReaderGone: nobody reads it any longer.
        OutputLost: it can't be written.

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
    except OSError as error:
        gone_terminal = error.errno == errno.EIO and stat.S_ISCHR(os.fstat(sys.stdout.fileno()).st_mode)
        _discard(sys.stdout)
        if gone_terminal:  # what becomes of us then, SIGHUP says
            return
        if isinstance(error, BrokenPipeError):
            raise ReaderGone from None
        raise OutputLost(f"stdout: can't be written: {error.strerror}") from error


def _discard(stream: TextIO) -> None:
    """Send what a stream still holds nowhere: the interpreter flushes it once more at its end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def err(text: str, end: str = "\n") -> None:
    """Write to stderr at once, if anybody still reads it."""
    try:
        sys.stderr.write(text + end)
        sys.stderr.flush()
    except OSError:
        _discard(sys.stderr)


def settle() -> None:
    """Leave nothing to stderr, whoever wrote there, that would change the exit code at the last moment."""
    err("", end="")


def document(value: Any) -> None:
    """Write one JSON document to stdout."""
    import msgspec

    try:
        text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    except UnicodeEncodeError:  # a file's name need not be text; its bytes become escapes
        import json

        text = json.dumps(msgspec.to_builtins(value), indent=2)
    out(text)


def printable(text: str) -> str:
    """Return a line that an engine or a file holds without what would steer the terminal."""
    return "".join(character if character.isprintable() else " " for character in text).strip()


def plain(text: str) -> str:
    """Return lines of words without what would steer the terminal; they may have names of files in them."""
    return "".join(character if character.isprintable() or character == "\n" else " " for character in text)


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
    """Return rows in columns, numbers and names alike to the left, without trailing blanks.

    Nothing in a cell steers the terminal or breaks its line: names come out of files of any origin.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [headings, *rows]) for column in range(len(headings))]
    return "\n".join(
        "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [headings, *rows]
    )
