"""A scripted engine, a fake upstream that tells of it, and a client that sees every byte."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import uvloop

from orchestrator.backend import Dialect, Endpoint, Event, State
from orchestrator.errors import BackendError
from orchestrator.gateway import Gateway

KEY = "sk-engine-secret"
SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_started: list[Engine] = []
DONE = b"data: [DONE]\n\n"


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test on a fresh event loop, as the command line would."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def bounded() -> None:
            try:
                await asyncio.wait_for(test(*args, **kwargs), 60)
            finally:
                # a loop with an open server does not close, so a failure would hang instead of being told
                while _started:
                    await _started.pop().kill()

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(bounded())

    return run


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


def answer(
    body: bytes, kind: bytes = b"application/json", status: bytes = b"200 OK", more: bytes = b""
) -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n%b" % (
        status,
        kind,
        len(body),
        more,
        body,
    )


@dataclass
class Call:
    """One request as the engine got it, and its way to answer."""

    head: bytes
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    connection: int

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def die(self) -> None:
        """End as a killed process does: no more bytes, no proper end."""
        self.writer.transport.abort()

    async def gone(self) -> None:
        """Wait until the other side has closed."""
        with contextlib.suppress(ConnectionError):
            await self.reader.read()

    def header(self, name: str) -> str | None:
        for line in self.head.decode().split("\r\n")[1:]:
            found, _, value = line.partition(":")
            if found.lower() == name.lower():
                return value.strip()
        return None


Script = Callable[[Call], Awaitable[None]]


class Engine:
    """An engine that does what its script says for each request."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.calls: list[Call] = []
        self.connections = 0
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, port: int = 0) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.port = int(self._server.sockets[0].getsockname()[1])
        _started.append(self)
        return self.port

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(f"http://127.0.0.1:{self.port}", KEY, "engine-model", Dialect("scripted", {}))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._open.add(writer)
        self.connections += 1
        number = self.connections
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                lower = head.lower()
                size = 0
                if b"content-length:" in lower:
                    size = int(lower.split(b"content-length:")[1].split(b"\r\n")[0])
                call = Call(head[:-4], await reader.readexactly(size), reader, writer, number)
                self.calls.append(call)
                await self.script(call)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._open.discard(writer)
            self._tasks.discard(task)
            writer.close()

    async def kill(self) -> None:
        """End at once, with every connection."""
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))


@dataclass(frozen=True)
class Name:
    name: str


@dataclass
class Counted:
    """One request in flight; unlike a generator's, its end is not made up for by the garbage collector."""

    upstream: FakeUpstream

    def __enter__(self) -> None:
        self.upstream.in_flight += 1
        self.upstream.most = max(self.upstream.most, self.upstream.in_flight)

    def __exit__(self, *_: object) -> None:
        self.upstream.in_flight -= 1


@dataclass
class FakeUpstream:
    """What a supervisor would say about an engine."""

    name: str = "gemma"
    state: State = State.STOPPED
    current: Endpoint | None = None
    in_flight: int = 0
    most: int = 0
    error: str | None = None
    advice: str | None = None
    callbacks: list[Callable[[Event], None]] = field(default_factory=list)

    @property
    def profile(self) -> Name:
        return Name(self.name)

    def endpoint(self, timeout: float | None = None) -> Endpoint:
        assert timeout == 0, "the event loop must not wait here"
        if self.current is None or self.state is not State.READY:
            raise BackendError("not ready")
        return self.current

    def request(self, endpoint: Endpoint) -> Counted:
        return Counted(self)

    def subscribe(self, callback: Callable[[Event], None]) -> Callable[[], None]:
        self.callbacks.append(callback)
        return lambda: self.callbacks.remove(callback)

    def status(self) -> dict[str, Any]:
        return {"name": self.name, "state": self.state, "error": self.error, "advice": self.advice}

    def become(self, state: State, endpoint: Endpoint | None = None, **fields: Any) -> None:
        self.state, self.current = state, endpoint
        self.tell("state", **fields)

    def tell(self, name: str, **fields: Any) -> None:
        for callback in list(self.callbacks):
            callback(Event(0.0, self.name, name, self.state, fields))


@dataclass
class Setup:
    engine: Engine
    upstream: FakeUpstream
    gateway: Gateway
    port: int


@contextlib.asynccontextmanager
async def listening(gateway: Gateway) -> AsyncIterator[Gateway]:
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.stop(0)


@contextlib.asynccontextmanager
async def behind_gateway(script: Script, **options: Any) -> AsyncIterator[Setup]:
    """Run a scripted engine behind a gateway; the profile is gemma."""
    engine = Engine(script)
    await engine.start()
    upstream = FakeUpstream(state=State.READY, current=engine.endpoint)
    try:
        async with listening(Gateway({"gemma": upstream}, port=0, **options)) as gateway:
            yield Setup(engine, upstream, gateway, gateway.port)
    finally:
        await engine.kill()


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found


class Client:
    """A connection to the gateway; reads answers as they come."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        self.reader, self.writer, self.port = reader, writer, port

    def write(self, data: bytes) -> None:
        self.writer.write(data)

    def ask(
        self,
        body: Any = None,
        path: str = "/v1/chat/completions",
        headers: str = "",
        method: str = "",
        **fields: Any,
    ) -> None:
        """Send a request; a dict as `body` becomes JSON."""
        if isinstance(body, dict):
            body = json.dumps(body | fields).encode()
        method = method or ("POST" if body is not None else "GET")
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n{headers}"
        if body is not None:
            head += f"Content-Length: {len(body)}\r\n"
        self.writer.write(head.encode() + b"\r\n" + (body or b""))

    async def head(self) -> Answer:
        """Read an answer's head."""
        raw = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = raw[:-4].split("\r\n")
        pairs = [line.split(": ", 1) for line in lines]
        return Answer(int(first.split(" ")[1]), {name.lower(): value for name, value in pairs}, b"")

    async def piece(self) -> bytes:
        """Read one chunk; b"" is the end."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        data = await self.reader.readexactly(size)
        assert await self.reader.readexactly(2) == b"\r\n"
        return data

    async def answer(self) -> Answer:
        """Read a whole answer."""
        got = await self.head()
        if "content-length" in got.headers:
            got.body = await self.reader.readexactly(int(got.headers["content-length"]))
        elif got.headers.get("transfer-encoding") == "chunked":
            while piece := await self.piece():
                got.body += piece
        elif got.status not in {204, 304}:
            got.body = await self.reader.read()
        return got

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


@contextlib.asynccontextmanager
async def connected(port: int, **options: Any) -> AsyncIterator[Client]:
    if "sock" not in options:
        options = {"host": "127.0.0.1", "port": port} | options
    reader, writer = await asyncio.open_connection(**options)
    client = Client(reader, writer, port)
    try:
        yield client
    finally:
        await client.close()


async def get(port: int, body: Any = None, **more: Any) -> Answer:
    """Ask once on a connection of its own."""
    async with connected(port) as client:
        client.ask(body, **more)
        return await client.answer()


async def ok(call: Call) -> None:
    """Answer with what was asked, so that a test sees what the engine got."""
    await call.send(answer(call.body or b"{}"))


async def until(true: Callable[[], bool]) -> None:
    """Let the loop run until something is so; the test's own time-out bounds it."""
    while not true():  # noqa: ASYNC110 - what is waited for has no event of its own
        await asyncio.sleep(0.005)
