"""A small, strict HTTP/1.1 reader and writer over asyncio streams that notices a client leaving."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import Any

REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 500: "Internal Server Error"}
REASONS |= {501: "Not Implemented", 503: "Service Unavailable"}
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    500: "server_error",
}
KINDS |= {501: "not_supported_error", 503: "unavailable_error"}


class BadRequest(Exception):
    """Bytes that are not a request."""


class Gone(Exception):
    """The client has left."""


@dataclass(frozen=True)
class Request:
    """One request, whole."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Connection:
    """One client. A task reads ahead all the time, so that its leaving is seen while an answer is made."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.buffer = bytearray()
        self.news = asyncio.Event()
        self.gone = asyncio.Event()
        self.open = True
        self._pump = asyncio.create_task(self._read_ahead())

    async def _read_ahead(self) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await self.reader.read(65536):
                self.buffer += data
                self.news.set()
        self.gone.set()
        self.news.set()

    async def _more(self) -> None:
        if self.gone.is_set():
            raise Gone
        self.news.clear()
        await self.news.wait()

    async def _line(self) -> str:
        while (end := self.buffer.find(b"\r\n")) < 0:
            if len(self.buffer) > 65536:
                raise BadRequest("a line is too long")
            await self._more()
        line = self.buffer[:end].decode("latin-1")
        del self.buffer[: end + 2]
        return line

    async def _exactly(self, size: int) -> bytes:
        while len(self.buffer) < size:
            await self._more()
        data = bytes(self.buffer[:size])
        del self.buffer[:size]
        return data

    async def request(self) -> Request:
        """Wait for the next request.

        Raises:
            Gone: the client left instead.
            BadRequest: it is not HTTP/1.1.

        """
        first = (await self._line()).split(" ")
        if len(first) != 3 or not first[2].startswith("HTTP/1."):
            raise BadRequest("bad request line")
        headers: dict[str, str] = {}
        while line := await self._line():
            name, colon, value = line.partition(":")
            if not colon or name != name.strip() or not name:
                raise BadRequest("bad header")
            headers[name.lower()] = value.strip()
        body = b""
        if "chunked" in headers.get("transfer-encoding", ""):
            if "content-length" in headers:
                raise BadRequest("both a length and chunks")
            while size := int((await self._line()).partition(";")[0], 16):
                body += await self._exactly(size)
                await self._exactly(2)
            while await self._line():
                pass
        elif length := headers.get("content-length"):
            if not length.isdigit():
                raise BadRequest("bad length")
            body = await self._exactly(int(length))
        self.open = headers.get("connection", "").lower() != "close"
        return Request(first[0], first[1].partition("?")[0], headers, body)

    async def write(self, data: bytes) -> None:
        """Send bytes."""
        if self.gone.is_set() or self.writer.is_closing():
            raise Gone
        self.writer.write(data)
        try:
            await self.writer.drain()
        except ConnectionError as error:
            raise Gone from error

    async def answer(
        self, status: int, body: Any, content_type: str = "application/json; charset=utf-8"
    ) -> None:
        """Send one whole answer; errors close the connection, as the real one's do."""
        data = body.encode() if isinstance(body, str) else dumps(body)
        if status != 200:
            self.open = False
        head = (
            f"HTTP/1.1 {status} {REASONS[status]}\r\nServer: llama.cpp\r\nContent-Type: {content_type}\r\n"
            f"Content-Length: {len(data)}\r\n"
        )
        head += "Keep-Alive: timeout=5, max=100\r\n\r\n" if self.open else "Connection: close\r\n\r\n"
        await self.write(head.encode() + data)

    async def refuse(self, status: int, message: str, **extra: Any) -> None:
        """Send an error in the real one's form."""
        error = {"message": message, "type": KINDS[status], "code": status} | extra
        await self.answer(status, {"error": error})

    async def begin_stream(self) -> None:
        """Send the head of an event stream."""
        await self.write(
            b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nX-Accel-Buffering: no\r\n"
            b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
            b"Keep-Alive: timeout=5, max=100\r\n\r\n"
        )

    async def piece(self, data: bytes, split: str = "") -> None:
        """Send one part of a stream: whole, cut inside a character (utf8), or byte by byte (bytes)."""
        cut = next((i for i, byte in enumerate(data) if byte & 0xC0 == 0x80), 0) if split == "utf8" else 0
        parts = [data[i : i + 1] for i in range(len(data))] if split == "bytes" else [data[:cut], data[cut:]]
        for part in filter(None, parts):
            await self.write(b"%x\r\n%b\r\n" % (len(part), part))
            if split:
                await asyncio.sleep(0)  # each part leaves by itself

    async def close(self) -> None:
        """Close, and end the reading task."""
        self._pump.cancel()
        self.writer.close()
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await self.writer.wait_closed()


def dumps(value: Any) -> bytes:
    """JSON as the real one writes it: compact, text as UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
