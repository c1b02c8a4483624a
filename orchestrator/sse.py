"""Server-sent events: bytes in, events out, no I/O.

The framing rules are those of the HTML standard (event stream interpretation), on bytes: a line ends at CR,
LF or CRLF and nowhere else, so U+2028, U+2029 and U+0085 inside JSON stay what they are, and UTF-8 that is
split between two reads needs no care. Beyond the standard two things are done for the engines we meet: an
event's size is bounded, and a bare ``error:`` field (older llama-server) becomes an event named ``error``.
"""

from __future__ import annotations

import msgspec

from orchestrator.errors import ProtocolError

MAX_EVENT = 16 * 1024 * 1024
_BOM = b"\xef\xbb\xbf"


class Event(msgspec.Struct, frozen=True, gc=False):
    """One dispatched event.

    Attributes:
        data: the value of its ``data`` lines, joined with LF, as sent (UTF-8 unless the server errs).
        name: its ``event`` field; ``message`` when there was none.

    """

    data: bytes
    name: str = "message"


class Decoder:
    """Turns the reads of one response body into events.

    The common case, one whole ``data:`` event in a read, takes a short cut; the rest goes line by line.
    """

    __slots__ = ("_data", "_fresh", "_max", "_name", "_parts", "_size", "_skip_lf")

    def __init__(self, *, max_event: int = MAX_EVENT) -> None:
        self._max = max_event
        self._fresh = True  # nothing seen yet but, perhaps, a part of the byte order mark
        self._skip_lf = False  # the last read ended in CR; an LF right after it belongs to it
        self._parts: list[bytes] = []  # the line that has not ended yet
        self._data: list[bytes] = []  # the data lines of the event that has not ended yet
        self._name = ""
        self._size = 0  # bytes held in _parts and _data

    @property
    def pending(self) -> bool:
        """Whether an event has begun whose blank line has not come; at the end of a body it is lost."""
        return bool(self._data or self._parts)

    def feed(self, chunk: bytes) -> list[Event]:
        """Return the events that this read completes.

        Raises:
            ProtocolError: an event is larger than `max_event` bytes.

        """
        if (
            not self._size
            and not self._name
            and chunk.startswith(b"data:")
            and chunk.find(b"\n") == len(chunk) - 2
            and chunk.endswith(b"\n")
            and b"\r" not in chunk
            and len(chunk) <= self._max
        ):
            self._fresh = self._skip_lf = False
            return [Event(chunk[6:-2] if chunk.startswith(b"data: ") else chunk[5:-2])]
        return self._feed_lines(chunk)

    def _feed_lines(self, chunk: bytes) -> list[Event]:
        if self._skip_lf and chunk:
            self._skip_lf = False
            if chunk.startswith(b"\n"):
                chunk = chunk[1:]
        if chunk:
            self._skip_lf = chunk.endswith(b"\r")
        events: list[Event] = []
        # On bytes, splitlines() knows CR, LF and CRLF only; on str it would break lines inside JSON.
        for piece in chunk.splitlines(keepends=True):
            if not piece.endswith((b"\n", b"\r")):
                self._parts.append(piece)
                self._grow(len(piece))
                continue
            line = piece.rstrip(b"\r\n")
            if self._parts:
                self._size -= sum(map(len, self._parts))
                line = b"".join((*self._parts, line))
                self._parts.clear()
            if self._fresh:
                self._fresh = False
                line = line.removeprefix(_BOM)
            if line:
                self._field(line)
            else:
                self._dispatch(events)
        return events

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if value.startswith(b" "):
            value = value[1:]
        if name == b"data" or (name == b"error" and value):
            self._data.append(value)
            self._grow(len(value) + 1)
            if name == b"error":
                self._name = "error"
        elif name == b"event":
            self._name = value.decode("utf-8", "replace")
            self._grow(0)
        # Comments (an empty name), id, retry and unknown fields mean nothing to us.

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size > self._max:
            raise ProtocolError(f"stream: an event is larger than {self._max} bytes")

    def _dispatch(self, events: list[Event]) -> None:
        if self._data:
            events.append(Event(b"\n".join(self._data), self._name or "message"))
            self._data.clear()
        self._name = ""
        self._size = 0
