"""One request on one connection that is already open: bytes and the moments at which they were read.

While a stream runs, nothing is done with a read but noting its time (`time.perf_counter_ns`, before anything
else) and finding where the body ends; the events are parsed when the round is over. So the client's own work
during a measurement is a few microseconds a read, and no stamp waits for another stream's parser. Plain
asyncio protocols, because no HTTP library gives both a connection opened ahead and a stamp at the read.
"""

from __future__ import annotations

import asyncio
import time
from typing import cast

MAX_HEAD = 64 * 1024


class Head:
    """The status and headers of a response, names in lower case."""

    def __init__(self, data: bytes) -> None:
        lines = data.decode("latin-1").split("\r\n")
        words = lines[0].split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
            raise ValueError(f"not HTTP: {lines[0][:100]!r}")
        self.status = int(words[1])
        pairs = (line.partition(":") for line in lines[1:] if line)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}


class Body:
    """Takes a body out of its framing (chunked, a length, or the connection's end), read by read.

    Attributes:
        done: whether the body has ended as its framing says.

    """

    def __init__(self, head: Head) -> None:
        self.done = False
        self._chunked = "chunked" in head.headers.get("transfer-encoding", "").lower()
        length = head.headers.get("content-length", "")
        self._left: int | None = int(length) if length.isdigit() and not self._chunked else None
        self._buffer = b""
        self._in_chunk = 0  # bytes still to come of the chunk, its final line break included
        self.done = self._left == 0

    @property
    def until_close(self) -> bool:
        """Whether only the end of the connection ends the body."""
        return not self._chunked and self._left is None

    def feed(self, data: bytes) -> bytes:
        """Return what a read adds to the body.

        Raises:
            ValueError: the framing is broken.

        """
        if self._chunked:
            return self._feed_chunked(data)
        if self._left is not None:
            data = data[: self._left]
            self._left -= len(data)
            self.done = self._left == 0
        return data

    def _feed_chunked(self, data: bytes) -> bytes:
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        found: list[bytes] = []
        at, size = 0, len(data)
        while at < size and not self.done:
            if self._in_chunk:
                take = min(self._in_chunk, size - at)
                inside = min(take, max(0, self._in_chunk - 2))
                if inside:
                    found.append(data[at : at + inside])
                self._in_chunk -= take
                at += take
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                self._buffer = data[at:]
                if len(self._buffer) > MAX_HEAD:
                    raise ValueError("a chunk's size line is too long")
                break
            length = int(data[at:end].partition(b";")[0], 16)  # ValueError: not a size
            at = end + 2
            if length:
                self._in_chunk = length + 2
            else:
                self.done = True
        return found[0] if len(found) == 1 else b"".join(found)


class Connection(asyncio.Protocol):
    """A connection and the one exchange on it.

    Attributes:
        reads: (perf_counter_ns, bytes of the body) of each read that held some.
        head: the response's head, once it came.
        sent_ns: when the request was handed to the kernel.
        end_ns: when the body ended; 0 before.
        error: what went wrong on the wire, in words.
        finished: set at the end, whatever it was.
        lost: whether the connection is gone.

    """

    def __init__(self) -> None:
        self.reads: list[tuple[int, bytes]] = []
        self.head: Head | None = None
        self.sent_ns = 0
        self.end_ns = 0
        self.idle_ns = 0
        self.error: str | None = None
        self.lost = False
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ahead: tuple[int, asyncio.Event] | None = None
        self._transport: asyncio.Transport | None = None
        self._body: Body | None = None
        self._first = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def send(self, request: bytes) -> None:
        """Send the request now."""
        assert self._transport is not None
        self.sent_ns = self.idle_ns = time.perf_counter_ns()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Note a read and its moment."""
        now = time.perf_counter_ns()
        if self.finished.done():
            return
        try:
            if self._body is None:
                self._first += data
                begin, blank, data = self._first.partition(b"\r\n\r\n")
                if not blank:
                    if len(self._first) > MAX_HEAD:
                        raise ValueError("the response's head is too long")
                    return
                self.head = Head(begin)
                self._body = Body(self.head)
            piece = self._body.feed(data)
        except ValueError as error:
            self._end(now, f"broken HTTP: {error}")
            return
        if piece:
            self.reads.append((now, piece))
            if not piece.startswith(b":"):  # a ping is no progress
                self.idle_ns = now
            if self.ahead is not None and len(self.reads) >= self.ahead[0]:
                self.ahead[1].set()
        if self._body.done:
            self._end(now, None)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the exchange, in order or not."""
        self.lost = True
        if self.finished.done():
            return
        orderly = exc is None and self._body is not None and self._body.until_close
        why = None if orderly else f"the connection broke: {exc or 'the server closed it'}"
        self._end(time.perf_counter_ns(), why)

    def give_up(self, why: str) -> None:
        """End the exchange from our side."""
        if not self.finished.done():
            self._end(time.perf_counter_ns(), why)

    def close(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def _end(self, now: int, error: str | None) -> None:
        self.end_ns, self.error = now, error
        if self.ahead is not None:
            self.ahead[1].set()
        self.finished.set_result(None)
        if self._transport is not None:
            (self._transport.close if error is None else self._transport.abort)()
