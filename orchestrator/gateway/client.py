"""The side towards the client: one connection, its requests one after another, its limits."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

from orchestrator.gateway.llhttp import HttpVersion11, LineTooLong, StreamReader
from orchestrator.gateway.sending import Sender
from orchestrator.gateway.wire import (
    BODILESS,
    CONTINUE,
    LAST_CHUNK,
    MAX_LINE,
    Failure,
    Headers,
    RequestMessage,
    answer_head,
    request_parser,
)
from orchestrator.log import get_logger

if TYPE_CHECKING:
    from orchestrator.gateway.server import Gateway

log = get_logger("orchestrator.gateway")

MAX_PIPELINED = 128
_NOT_HTTP = Failure(400, "gateway: this is not a request in HTTP/1.1", code="malformed_request")
_HEAD_TOO_LARGE = Failure(
    431, f"gateway: the request's line or a header is longer than {MAX_LINE} bytes", code="head_too_large"
)


class Handler(Protocol):
    """Whoever answers a request that takes a while."""

    def client_gone(self) -> None:
        """Stop: there is nobody to answer."""

    def pause(self) -> None:
        """Write no more until `resume`: the client reads slowly."""

    def resume(self) -> None:
        """Write on."""

    def shut(self) -> None:
        """End the answer now, as well as it can be: the gateway stops."""


@dataclass(slots=True)
class Queued:
    """A request that waits for its turn on a connection.

    Attributes:
        message: its head.
        payload: where its body arrives.
        failure: why it will be refused in its turn, or None.
        parts: what has come of its body; counted as held.
        size: bytes in `parts`.
        last: nothing behind it was kept, so the connection ends with its answer.

    """

    message: RequestMessage
    payload: StreamReader
    failure: Failure | None
    parts: list[bytes] = field(default_factory=list)
    size: int = 0
    last: bool = False


class Client(asyncio.Protocol):
    """One client's connection.

    Attributes:
        paused: the client reads slower than we write.
        deadline: loop time at which `expire` is due, or 0; kept by the gateway's sweeper.

    """

    def __init__(self, gateway: Gateway) -> None:
        self.paused = False
        self.deadline = 0.0
        self._gateway = gateway
        self._loop = gateway.loop
        self._limits = gateway.limits
        self._parser = request_parser(gateway.loop)
        self._pending: deque[Queued] = deque()
        self._message: RequestMessage | None = None
        self._payload: StreamReader | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._handler: Handler | None = None
        self._chunked = False
        self._close = False
        self._unread = False
        self._unread_before = 0
        self._deaf = False
        self._full = False
        self._waits = False
        self._partial = False
        self._advancing = False

    # -- transport ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection, unless there are too many."""
        self._transport = cast(asyncio.Transport, transport)
        self._send = Sender(self._transport).send
        self.deadline = self._loop.time() + self._limits.read
        if not self._gateway.admit(self):
            self._deaf = True
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - gone is gone
        """Whatever was under way for this client ends."""
        self._deaf = True
        self._drop_pending()
        self.drop_body()
        handler, self._handler = self._handler, None
        self._gateway.forget(self)
        if handler is not None:
            handler.client_gone()

    def pause_writing(self) -> None:
        """Pass the client's slowness on to whoever writes."""
        self.paused = True
        self._await_reader()
        if self._handler is not None:
            self._handler.pause()

    def _await_reader(self) -> None:
        self._unread_before = self._transport.get_write_buffer_size()
        self.deadline = self._loop.time() + self._limits.write

    def resume_writing(self) -> None:
        """Write on, or begin what waited for it."""
        self.paused = False
        self.deadline = 0.0
        if self._handler is not None:
            self._handler.resume()
        elif self._message is None and not self._deaf:
            self.deadline = self._loop.time() + self._limits.idle
            self._next()

    def data_received(self, data: bytes) -> None:
        """Parse, and go on with whatever that completes."""
        if self._deaf or self._full:
            return  # read all the same: only a connection that is read tells that the client has left
        try:
            messages, _, _ = self._parser.feed_data(data)
        except LineTooLong:
            self._malformed(_HEAD_TOO_LARGE)
            return
        except Exception:  # aiohttp has several; each means that this is not HTTP
            self._malformed(_NOT_HTTP)
            return
        if self._pending:
            self._hold(self._pending[-1])
        for message, payload in messages:
            self._pending.append(Queued(message, payload, self._gateway.refusal(message)))
            self._hold(self._pending[-1])
        if messages:
            self._partial = False
        if self._message is None:
            if not self._pending and not self._partial:
                self._partial = True
                self.deadline = self._loop.time() + self._limits.read
            self._next()
        elif self._payload is not None:
            self._collect()
        self._bound()

    # -- requests -------------------------------------------------------------------------------

    def _hold(self, queued: Queued) -> None:
        """Take what has come of a body before its turn; of one that will be refused nothing is kept."""
        data = b""
        with contextlib.suppress(Exception):  # a broken body; that is told in its turn
            data = queued.payload.read_nowait()
        if data and queued.failure is None:
            queued.parts.append(data)
            queued.size += len(data)
            queued.failure = self._gateway.hold_body(len(data), queued.size)
        if queued.failure is not None:
            self._gateway.release_body(queued.size)
            queued.parts, queued.size = [], 0
            # its answer will close the connection, so nothing behind its head matters
            self._full = not queued.payload.is_eof()

    def _bound(self) -> None:
        """Take no more ahead than `MAX_PIPELINED` requests, or what came with them in one piece.

        A client that reads its answers slowly is slowed down; when it leaves, writing tells. While an answer
        is awaited only reading does, so that goes on, and the connection ends with the last one taken.
        """
        if self._deaf or self._full or len(self._pending) <= MAX_PIPELINED:
            self._read_on()
        elif not self.paused:
            if not self._pending[-1].payload.is_eof():  # the rest of its body will not be kept
                self._gateway.release_body(self._pending.pop().size)
            self._pending[-1].last = self._full = True
            self._read_on()
        elif not self._waits:
            self._waits = True
            self._transport.pause_reading()

    def _read_on(self) -> None:
        if self._waits:
            self._waits = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def _drop_pending(self) -> None:
        self._gateway.release_body(sum(queued.size for queued in self._pending))
        self._pending.clear()

    def _next(self) -> None:
        if self._advancing:
            return
        self._advancing = True
        try:
            while self._pending and self._message is None and not self.paused and not self._deaf:
                self._take(self._pending.popleft())
        finally:
            self._advancing = False
        self._bound()

    def _take(self, queued: Queued) -> None:
        message, payload = self._message, self._payload = queued.message, queued.payload
        self._parts, self._size = queued.parts, queued.size
        self._unread = queued.last
        self._close = queued.last or message.should_close or message.version < HttpVersion11
        self._chunked = message.version >= HttpVersion11
        if queued.failure is not None:
            self.fail(queued.failure)
            return
        expects = message.headers.get("Expect", "").lower() == "100-continue"
        if expects and self._chunked and not payload.is_eof():  # an older client knows of no such answer
            self._transport.write(CONTINUE)
        self._collect()

    def _collect(self) -> None:
        payload, message = self._payload, self._message
        assert payload is not None
        assert message is not None
        try:
            data = payload.read_nowait()
        except Exception:  # a broken body, in one of aiohttp's ways of saying so
            self._malformed(_NOT_HTTP)
            return
        if data:
            self._parts.append(data)
            self._size += len(data)
            failure = self._gateway.hold_body(len(data), self._size)
            if failure is not None:
                self.fail(failure)
                return
        if not payload.is_eof():
            self.deadline = self._loop.time() + self._limits.read
            return
        self._payload = None
        self.deadline = 0.0
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        handler = self._gateway.handle(self, message, body)
        if handler is not None:  # else it is answered, and the next request may have a handler by now
            self._handler = handler

    def drop_body(self) -> None:
        """Let go of the request's body; it will not be sent again."""
        self._gateway.release_body(self._size)
        self._parts, self._size = [], 0

    def _malformed(self, failure: Failure) -> None:
        if self._message is not None and self._payload is None:
            self._drop_pending()  # the request before it is still being answered
            self._deaf = self._close = True
            return
        self._close = self._unread = True
        self.fail(failure)

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a part of an answer that has to wait; a fault of ours in it is answered with 500."""

        def ended(task: asyncio.Task[None]) -> None:
            fault = None if task.cancelled() else task.exception()
            if fault is not None:
                log.error("gateway.fault", exc_info=fault)
                self.fail(Failure(500, "gateway: internal fault, see the log", "server_error", "internal"))

        task = self._loop.create_task(work)
        task.add_done_callback(ended)
        return task

    # -- answers --------------------------------------------------------------------------------

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer."""
        self._settle()
        head = answer_head(status, headers, length=len(body), chunked=False, close=self._close)
        if self._message is not None and self._message.method == "HEAD":
            body = b""
        self._send(head + body)
        self._finish()

    def fail(self, failure: Failure) -> None:
        """Send an error as the whole answer."""
        self.answer(failure.status, failure.all_headers(), failure.body())

    def begin(self, status: int, headers: Headers, length: int | None) -> None:
        """Send the head of an answer that comes in pieces; without a length its end is marked."""
        self._settle()
        if length is not None or status in BODILESS:
            self._chunked = False
        elif not self._chunked:
            self._close = True
        self._transport.write(
            answer_head(status, headers, length=length, chunked=self._chunked, close=self._close)
        )

    def write(self, data: bytes) -> None:
        """Send the next piece."""
        self._send(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def end(self) -> None:
        """Mark the end of an answer that came in pieces."""
        if self._chunked:
            self._transport.write(LAST_CHUNK)
        self._finish()

    def abort(self) -> None:
        """Break off, so that the client can't take what it has for the whole."""
        self._deaf = True
        self._transport.abort()

    def _settle(self) -> None:
        """Close after this answer if the request was not read to its end."""
        if self._payload is not None and not self._payload.is_eof():
            self._close = self._unread = True

    def _finish(self) -> None:
        self._handler = self._message = self._payload = None
        self.drop_body()
        if self._close or self._gateway.stopping:
            self._deaf = True
            self._drop_pending()
            self._await_reader()
            if self._unread:
                self.deadline = self._loop.time() + self._limits.linger
            if self._unread and self._transport.can_write_eof():
                self._transport.write_eof()
            else:
                self._transport.close()
            return
        if not self.paused:
            self.deadline = self._loop.time() + self._limits.idle
        self._next()

    # -- limits and the end -----------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a request is being read or answered."""
        return self._message is not None

    @property
    def idle(self) -> bool:
        """Whether nothing is under way, not even the head of a request."""
        return not (self.busy or self._partial or self._pending or self._deaf)

    def expire(self) -> None:
        """End what has taken too long: reading a request, an idle connection, or an answer unread."""
        self.deadline = 0.0
        reading = self._partial or self._payload is not None
        slowly = 0 < self._transport.get_write_buffer_size() < self._unread_before
        if slowly and (self.paused or self._deaf) and not self._unread:
            self._await_reader()
        elif reading and not self._deaf and not self.paused:
            self._close = self._unread = True
            self.fail(Failure(408, "gateway: the request took too long to arrive", code="request_timeout"))
        else:
            self.abort()

    def shut(self) -> None:
        """End now because the gateway stops."""
        if self._handler is not None:
            self._close = True
            self._handler.shut()
        elif not self._deaf:
            self._deaf = True
            self._transport.close()
