"""The side towards the engine: one connection carrying one answer at a time, and the pool of them."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Protocol, cast
from urllib.parse import urlsplit

from orchestrator.backend import Endpoint
from orchestrator.gateway.llhttp import StreamReader
from orchestrator.gateway.sending import Sender
from orchestrator.gateway.wire import ResponseMessage, response_parser

MAX_IDLE = 256
CONNECT_S = 10.0


class Owner(Protocol):
    """Whoever waits for an answer on a link."""

    def on_head(self, message: ResponseMessage) -> None:
        """Take the answer's head."""

    def on_data(self, data: bytes) -> None:
        """Take the next bytes of its body, without the framing."""

    def on_end(self) -> None:
        """Take note that the answer is complete; the link is no longer the owner's."""

    def on_lost(self) -> None:
        """Take note that the answer will never be complete; the link is gone."""


class Link(asyncio.Protocol):
    """One connection to an engine.

    Attributes:
        reused: it has carried an answer before, so the engine may be closing it just now.
        received: at least one byte has come since the last request.

    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.reused = False
        self.received = False
        self._parser = response_parser(pool.loop)
        self._owner: Owner | None = None
        self._payload: StreamReader | None = None
        self._last = False
        self._paused = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)
        self._send = Sender(self._transport).send

    @property
    def open(self) -> bool:
        """Whether a request can be sent, as far as this side knows."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, owner: Owner, data: bytes) -> None:
        """Send a request; `owner` gets the answer."""
        assert self._transport is not None
        self._owner, self.received = owner, False
        self._send(data)

    def pause(self) -> None:
        """Stop reading: the client is slower than the engine."""
        if not self._paused and self.open:
            assert self._transport is not None
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._paused and self.open:
            assert self._transport is not None
            self._paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close at once and tell nobody; the engine sees that its client has gone."""
        self._owner = None
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Hand on what came, without its framing."""
        self.received = True
        if self._owner is None:
            self.abort()  # nobody asked for anything
            return
        try:
            messages, _, _ = self._parser.feed_data(data)
        except Exception:  # whatever it is, this is not an answer
            self._lost()
            return
        for message, payload in messages:
            if 100 <= message.code < 200 and message.code != 101:
                continue
            if self._owner is None or self._payload is not None or message.code == 101:
                self._lost()  # an answer that nobody asked for
                return
            self._payload, self._last = payload, message.should_close
            self._owner.on_head(message)
        self._forward()

    def _forward(self) -> None:
        payload = self._payload
        if payload is None:
            return
        data = payload.read_nowait()
        if data and self._owner is not None:
            self._owner.on_data(data)
        if payload.is_eof():
            self.resume()
            owner, self._owner, self._payload = self._owner, None, None
            self.reused = True
            if self._last or owner is None:
                self.abort()
            else:
                self.pool.give(self)
            if owner is not None:
                owner.on_end()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the owner: the end of a body that lasts until the end, or the loss of an answer."""
        self.pool.forget(self)
        self._transport = None
        if exc is None and self._payload is not None:
            with contextlib.suppress(Exception):  # the body lacks its end
                self._parser.feed_eof()
                self._forward()
        self._lost()

    def _lost(self) -> None:
        owner, self._payload = self._owner, None
        self.abort()
        if owner is not None:
            owner.on_lost()


class Pool:
    """The connections to one endpoint, the most recently used first.

    Attributes:
        cut: the engine was replaced, and is stopped although it still answers.

    """

    def __init__(self, endpoint: Endpoint, loop: asyncio.AbstractEventLoop) -> None:
        self.endpoint = endpoint
        self.cut = False
        self.loop = loop
        parts = urlsplit(endpoint.url)
        self._host, self._ssl = parts.hostname or "127.0.0.1", parts.scheme == "https"
        self._port = parts.port or (443 if self._ssl else 80)
        self.authority = parts.netloc.rpartition("@")[2].encode()
        self.prefix = parts.path.rstrip("/")
        self._idle: list[Link] = []
        self._closed = False

    def take(self) -> Link | None:
        """Return an idle connection, or None."""
        while self._idle:
            link = self._idle.pop()
            if link.open:
                return link
        return None

    async def connect(self) -> Link:
        """Open a connection.

        Raises:
            OSError: the engine can't be reached (TimeoutError included).

        """
        async with asyncio.timeout(CONNECT_S):
            _, link = await self.loop.create_connection(
                lambda: Link(self),
                self._host,
                self._port,
                ssl=ssl.create_default_context() if self._ssl else None,
            )
        return link

    def give(self, link: Link) -> None:
        """Take a connection back for the next request."""
        if self._closed or len(self._idle) >= MAX_IDLE:
            link.abort()
        else:
            self._idle.append(link)

    def forget(self, link: Link) -> None:
        """Drop a connection that has ended."""
        if link in self._idle:
            self._idle.remove(link)

    def close(self) -> None:
        """Close what is idle now, and the rest as it comes back."""
        self._closed = True
        while self._idle:
            self._idle.pop().abort()
