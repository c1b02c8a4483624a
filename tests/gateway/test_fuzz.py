"""Bytes that nobody would send: each is answered, refused or dropped, and the next client is served."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gateway.scripted import (
    DONE,
    SSE_HEAD,
    Call,
    Setup,
    answer,
    behind_gateway,
    chunk,
    connected,
    event,
    get,
)

REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b'Content-Length: 17\r\n\r\n{"model":"gemma"}'
)
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'11\r\n{"model":"gemma"}\r\n0\r\n\r\n'
)
STREAM = SSE_HEAD + chunk(event("one")) + chunk(event("two")) + chunk(DONE) + b"0\r\n\r\n"
JSON = answer(b'{"choices": []}')
GRAINS = [
    b"\r\n",
    b"\n",
    b"\x00",
    b": ",
    b"Content-Length: 5\r\n",
    b"Content-Length: 0\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: identity\r\n",
    b"Connection: close\r\n",
    b"Connection: upgrade\r\nUpgrade: websocket\r\n",
    b"Expect: 100-continue\r\n",
    b"0\r\n\r\n",
    b"ffffffffffffffff\r\n",
    b"HTTP/1.0",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\xff\xfe",
]


@st.composite
def bent(draw: st.DrawFn, *bases: bytes) -> bytes:
    """Something like one of `bases`: cut, grown, doubled, or with a grain of sand in it."""
    data = draw(st.sampled_from(bases)) * draw(st.integers(1, 2))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        till = min(len(data), at + draw(st.integers(0, 12)))
        data = data[:at] + draw(st.sampled_from(GRAINS) | st.binary(max_size=8)) + data[till:]
    return data


class Running:
    """One gateway for all examples, on a loop that runs only while an example does."""

    def __init__(self) -> None:
        self.reply = JSON
        self.closing = True
        self.runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self.context = behind_gateway(self.script)
        self.setup: Setup = self.runner.run(self.context.__aenter__())

    async def script(self, call: Call) -> None:
        await call.send(self.reply)
        if self.closing:
            call.writer.close()

    def close(self) -> None:
        self.runner.run(self.context.__aexit__(None, None, None))
        self.runner.close()


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    one = Running()
    yield one
    one.close()


FUZZ = settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])


@FUZZ
@given(data=bent(REQUEST, CHUNKED), cut=st.integers(0, 300))
def test_any_bytes_of_a_client_are_survived_ugly(running: Running, data: bytes, cut: int) -> None:
    async def run() -> None:
        running.reply, running.closing = JSON, False
        setup = running.setup
        setup.engine.calls.clear()
        async with connected(setup.port) as client:
            client.write(data[:cut])
            await asyncio.sleep(0)
            client.write(data[cut:])
            client.writer.write_eof()
            got = await client.reader.read()
        assert got == b"" or got.startswith(b"HTTP/1.1 ")
        assert b"HTTP/1.1 500" not in got
        for call in setup.engine.calls:  # what is passed on is one whole request each, in our framing
            assert call.head.lower().count(b"content-length:") <= 1
            assert b"transfer-encoding" not in call.head.lower()
        assert (await get(setup.port, path="/health")).status == 200
        assert setup.gateway._held == 0

    running.runner.run(asyncio.wait_for(run(), 30))


@FUZZ
@given(data=bent(STREAM, JSON), cut=st.integers(0, 400), closing=st.booleans())
def test_any_bytes_of_an_engine_end_in_an_answer_or_an_error_ugly(
    running: Running, data: bytes, cut: int, closing: bool
) -> None:
    async def run() -> None:
        running.reply, running.closing = data[:cut] + data[cut:], True
        setup = running.setup
        async with connected(setup.port) as client:
            client.ask({"model": "gemma"}, headers="Connection: close\r\n")
            got = await client.reader.read()
        assert got == b"" or got.startswith(b"HTTP/1.1 ")
        assert b"HTTP/1.1 500" not in got
        if data in (STREAM, JSON):
            assert b"engine_died" not in got
            assert got.endswith(b"0\r\n\r\n" if data == STREAM else b'{"choices": []}')
        assert (await get(setup.port, path="/health")).status == 200
        assert setup.upstream.in_flight == 0

    running.runner.run(asyncio.wait_for(run(), 30))


@FUZZ
@given(keep=st.integers(0, len(STREAM) - 6))
def test_stream_that_is_cut_anywhere_is_never_taken_for_whole_bad(running: Running, keep: int) -> None:
    async def run() -> None:
        running.reply, running.closing = STREAM[:keep], True
        got = await get(running.setup.port, {"model": "gemma"})
        assert b"engine_died" in got.body
        if got.status == 200:
            events = got.body.split(b"\n\n")
            assert events[-1] == b""
            assert events[-2].startswith(b'data: {"error":')

    running.runner.run(asyncio.wait_for(run(), 30))
