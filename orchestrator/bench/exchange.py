"""One request: its bytes, made beforehand, and its exchange on a connection opened ahead.

Connections are opened outside the measured time: all streams' before the round, and a stream's next one while
the present one is still running (llama-server closes its connection after every stream).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from orchestrator.backend import Endpoint
from orchestrator.bench.http1 import Connection
from orchestrator.bench.prompts import Ask
from orchestrator.request import COMPLETIONS

CONNECT_TIMEOUT = 10.0
# The likeliest token always. top_k 1 says it again for llama-server: with 0 its samplers carry every token of
# the vocabulary to the end of the chain, 2 ms a token with Gemma's 262,144, though temperature 0 decides.
GREEDY = {"temperature": 0, "top_k": 1, "top_p": 1.0, "min_p": 0.0, "seed": 1}
NEUTRAL = {"presence_penalty": 0.0, "frequency_penalty": 0.0}


@dataclass(slots=True)
class Exchange:
    """One request under way: what was asked, and the raw stamps. Nanoseconds of `time.perf_counter_ns`."""

    index: int
    ask: Ask
    payload: bytes
    intended_ns: int = 0
    connection: Connection | None = None
    error: str | None = None


def body(endpoint: Endpoint, ask: Ask) -> dict[str, object]:
    """Return a request's body: greedy, every sampler explicit, exactly the tokens wanted.

    The engine's own spelling is taken where its dialect has one; the plain names are those that llama-server
    and vLLM share.
    """
    dialect = endpoint.dialect
    wanted: dict[str, object] = {**GREEDY, **NEUTRAL, "max_tokens": ask.output_tokens, "ignore_eos": True}
    return {
        **dialect.defaults,
        **{dialect.fields.get(name, name): value for name, value in wanted.items()},
        "model": endpoint.model,
        "prompt": ask.prompt,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def request_bytes(endpoint: Endpoint, ask: Ask) -> bytes:
    """Return the whole HTTP request, made before the round so that it costs nothing within."""
    parts = urlsplit(endpoint.url)
    data = msgspec.json.encode(body(endpoint, ask))
    head = [
        f"POST {parts.path}{COMPLETIONS} HTTP/1.1",
        f"Host: {parts.netloc}",
        "Content-Type: application/json",
        "Accept: text/event-stream",
        "Accept-Encoding: identity",
        f"Content-Length: {len(data)}",
        *([f"Authorization: Bearer {endpoint.key}"] if endpoint.key else []),
    ]
    return "\r\n".join([*head, "", ""]).encode("latin-1") + data


async def connect(endpoint: Endpoint) -> Connection:
    """Open a connection.

    Raises:
        OSError: nobody listens (TimeoutError: nobody answers).

    """
    parts = urlsplit(endpoint.url)
    secure = parts.scheme == "https"
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(CONNECT_TIMEOUT):
        _, connection = await loop.create_connection(
            Connection, parts.hostname or "", parts.port or (443 if secure else 80), ssl=secure or None
        )
    return connection


class Ahead:
    """A stream's next connection, opened while the present one is still running."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._task: asyncio.Task[Connection] | None = None

    def open(self) -> None:
        """Begin to open one."""
        self._task = asyncio.ensure_future(connect(self.endpoint))

    async def opened(self) -> None:
        """Wait until it is open, or can't be opened; `take` says which."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def take(self) -> Connection:
        """Return an open connection; a spare one that the server closed meanwhile is replaced."""
        if self._task is not None:
            task, self._task = self._task, None
            connection = await task
            if not connection.lost:
                return connection
        return await connect(self.endpoint)

    async def close(self) -> None:
        """Close the spare one."""
        if self._task is not None:
            self._task.cancel()
            for found in await asyncio.gather(self._task, return_exceptions=True):
                if isinstance(found, Connection):
                    found.close()


async def perform(exchange: Exchange, ahead: Ahead, deadline: float, stall: float, *, more: bool) -> None:
    """Make one request on an open connection and wait for its end."""
    try:
        connection = exchange.connection = await ahead.take()
    except OSError as error:
        exchange.error = f"no connection: {error or type(error).__name__}"
        return
    near_end = asyncio.Event()
    if more:
        connection.ahead = (max(1, exchange.ask.output_tokens * 3 // 4), near_end)
    connection.send(exchange.payload)
    opening = asyncio.ensure_future(_open_when(near_end, ahead)) if more else None
    try:
        while not connection.finished.done():
            now = time.perf_counter_ns()
            idle = (now - connection.idle_ns) / 1e9
            left = min(stall - idle, deadline - (now - connection.sent_ns) / 1e9)
            if left <= 0:
                connection.give_up(f"nothing came for {idle:.0f} s")
                break
            await asyncio.wait([connection.finished], timeout=left)
    finally:
        if not connection.finished.done():
            connection.give_up("called off")
        if opening is not None:
            await opening


async def _open_when(event: asyncio.Event, ahead: Ahead) -> None:
    await event.wait()
    ahead.open()
