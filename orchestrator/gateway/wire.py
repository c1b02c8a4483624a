"""HTTP as bytes: which headers pass, heads of requests and answers, errors in OpenAI's shape.

Parsing is llhttp's, through aiohttp's two parsers; nothing here reads HTTP, it only writes it.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec

from orchestrator.backend import Endpoint
from orchestrator.gateway.llhttp import (
    HttpRequestParser,
    HttpResponseParser,
    RawRequestMessage,
    RawResponseMessage,
)

RequestMessage = RawRequestMessage
ResponseMessage = RawResponseMessage
Headers = Iterable[tuple[bytes, bytes]]

MAX_LINE = 8 * 1024
MAX_HEADERS = 128
READ = 2**16
LAST_CHUNK = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_HOP_BY_HOP = {
    b"connection",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
    b"http2-settings",
}
# What belongs between the client and us: its credentials, its origin, and the framing we write anew.
# With X-Conversation-Id llama-server goes on generating for a client that has left.
_NOT_FOR_ENGINE = _HOP_BY_HOP | {
    b"authorization",
    b"content-length",
    b"cookie",
    b"expect",
    b"host",
    b"origin",
    b"x-api-key",
    b"x-conversation-id",
}
# Engines answer with CORS headers of their own; a page from elsewhere must not read our answers.
_NOT_FOR_CLIENT = _HOP_BY_HOP | {b"content-length", b"set-cookie"}
_CORS = b"access-control-"
BODILESS = {204, 304}
_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}


class _Unthrottled:
    """Stands where the parsers expect a protocol: bodies are taken out after every read, so none waits."""

    def pause_reading(self) -> None:
        """Do nothing; flow is controlled on the transports."""

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Do nothing; flow is controlled on the transports."""


_UNTHROTTLED: Any = _Unthrottled()
_STRICT: dict[str, Any] = {
    "max_line_size": MAX_LINE,
    "max_field_size": MAX_LINE,
    "max_headers": MAX_HEADERS,
    "auto_decompress": False,
}


def request_parser(loop: AbstractEventLoop) -> HttpRequestParser:
    """Return a strict parser of what a client sends."""
    return HttpRequestParser(_UNTHROTTLED, loop, READ, **_STRICT)


def response_parser(loop: AbstractEventLoop) -> HttpResponseParser:
    """Return a parser of what an engine answers; a body without a length lasts until the end."""
    return HttpResponseParser(_UNTHROTTLED, loop, READ, read_until_eof=True, **_STRICT)


def _passing(headers: Headers, dropped: set[bytes]) -> list[bytes]:
    """Return `headers` as lines, less those in `dropped` and those that Connection names."""
    lines = []
    named: set[bytes] = set()
    for name, value in headers:
        lower = name.lower()
        if lower == b"connection":
            named.update(token.strip().lower() for token in value.split(b","))
        if lower not in dropped and not lower.startswith(_CORS):
            lines.append((lower, name, value))
    return [b"%b: %b\r\n" % (name, value) for lower, name, value in lines if lower not in named]


def request_head(
    message: RequestMessage, target: str, authority: bytes, length: int, endpoint: Endpoint
) -> bytes:
    """Return the head of a request to an engine, with the engine's key and our framing."""
    lines = [
        b"%b %b HTTP/1.1\r\nHost: %b\r\n"
        % (message.method.encode(), target.encode("utf-8", "surrogateescape"), authority)
    ]
    lines += _passing(message.raw_headers, _NOT_FOR_ENGINE)
    if endpoint.key:
        lines.append(b"Authorization: Bearer %b\r\n" % endpoint.key.encode())
    if length or message.method not in {"GET", "DELETE"}:
        lines.append(b"Content-Length: %d\r\n" % length)
    lines.append(b"\r\n")
    return b"".join(lines)


def answer_head(status: int, headers: Headers, *, length: int | None, chunked: bool, close: bool) -> bytes:
    """Return the head of an answer to a client; neither a length nor chunked means until the end."""
    lines = [b"HTTP/1.1 %d %b\r\n" % (status, _PHRASES.get(status, b"Unknown"))]
    lines += _passing(headers, _NOT_FOR_CLIENT)
    if status not in BODILESS:
        if length is not None:
            lines.append(b"Content-Length: %d\r\n" % length)
        elif chunked:
            lines.append(b"Transfer-Encoding: chunked\r\n")
    if close:
        lines.append(b"Connection: close\r\n")
    lines.append(b"\r\n")
    return b"".join(lines)


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as OpenAI's clients expect it.

    Attributes:
        status: HTTP status.
        message: what is wrong, lower case, without a full stop.
        type: OpenAI's class of error.
        code: a fixed word for programs.
        advice: what to do about it, or None.
        retry_after: seconds after which another try makes sense, or None.
        headers: further headers of the answer.
        param: the request's parameter at fault, or None.

    """

    status: int
    message: str
    type: str = "invalid_request_error"
    code: str | None = None
    advice: str | None = None
    retry_after: int | None = None
    headers: Mapping[bytes, bytes] = field(default_factory=dict)
    param: str | None = None

    def body(self) -> bytes:
        """Return the JSON object, on one line."""
        message = f"{self.message}; {self.advice}" if self.advice else self.message
        error: dict[str, Any] = {
            "message": message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        if self.advice:
            error["advice"] = self.advice
        return msgspec.json.encode({"error": error})

    def event(self) -> bytes:
        """Return it as one server-sent event."""
        return b"data: %b\n\n" % self.body()

    def all_headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of the answer that carries it."""
        found = [(b"Content-Type", b"application/json"), *self.headers.items()]
        if self.retry_after is not None:
            found.append((b"Retry-After", b"%d" % self.retry_after))
        return found
