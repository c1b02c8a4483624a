"""What no decent client does: refused or borne, told plainly, and nothing of it reaches the engine."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from tests.gateway.scripted import (
    SSE_HEAD,
    Call,
    behind_gateway,
    chunk,
    connected,
    event,
    get,
    in_loop,
    ok,
    until,
)

BODY = b'{"model": "gemma"}'
LOCAL = b"Host: localhost\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
WHOLE = chunk(BODY) + b"0\r\n"
POST = b"POST /v1/x HTTP/1.1\r\n" + LOCAL


@pytest.mark.parametrize(
    ("raw", "status", "code"),
    [
        # framing: coded bodies would reach the engine as they are, and without a word of it
        (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + WHOLE + b"\r\n", 501, "transfer_encoding"),
        (POST + b"Transfer-Encoding: identity, chunked\r\n\r\n" + WHOLE + b"\r\n", 501, "transfer_encoding"),
        (b"POST /v1/x HTTP/1.0\r\n" + LOCAL + CHUNKED + b"\r\n" + WHOLE + b"\r\n", 501, "transfer_encoding"),
        (POST + CHUNKED + CHUNKED + b"\r\n" + WHOLE + b"\r\n", 400, "malformed_request"),
        (POST + LENGTH + LENGTH + b"\r\n" + BODY, 400, "malformed_request"),
        (POST + b"Content-Length: 0x12\r\n\r\n" + BODY, 400, "malformed_request"),
        (POST + b"Content-Length: 18, 18\r\n\r\n" + BODY, 400, "malformed_request"),
        (POST + b"Content-Length: 1_8\r\n\r\n" + BODY, 400, "malformed_request"),
        (POST + b"Content-Length: %d\r\n\r\n" % 10**30, 400, "malformed_request"),
        (POST + CHUNKED + b"\r\n-5\r\n", 400, "malformed_request"),
        (POST + CHUNKED + b"\r\nffffffffffffffff0\r\n", 400, "malformed_request"),
        (POST + CHUNKED + b"\r\n" + WHOLE + b"Content-Length: 5\r\n\r\n", 400, "malformed_request"),
        (POST + CHUNKED + b"\r\n" + WHOLE + b"X: y\r\n" * 500 + b"\r\n", 400, "malformed_request"),
        # size
        (POST + b"X: " + b"y" * 70_000 + b"\r\n\r\n", 431, "head_too_large"),
        (b"GET /" + b"y" * 70_000 + b" HTTP/1.1\r\n" + LOCAL + b"\r\n", 431, "head_too_large"),
        # targets
        (b"GET http://evil.example/v1/models HTTP/1.1\r\n" + LOCAL + b"\r\n", 400, "bad_path"),
        (b"OPTIONS * HTTP/1.1\r\n" + LOCAL + b"\r\n", 400, "bad_path"),
        (b"GET /v1/%25252e%25252e/props HTTP/1.1\r\n" + LOCAL + b"\r\n", 400, "bad_path"),
        (b"GET /v1/%" + b"25" * 100 + b"2e./props HTTP/1.1\r\n" + LOCAL + b"\r\n", 400, "bad_path"),
        (b"GET /v1/x%0d%0aX:%20y HTTP/1.1\r\n" + LOCAL + b"\r\n", 400, "bad_path"),
        (b"GET /v1/x%2500 HTTP/1.1\r\n" + LOCAL + b"\r\n", 400, "bad_path"),
        (b"GET /v1/\xff\xfe HTTP/1.1\r\n" + LOCAL + b"\r\n", 400, "malformed_request"),
        (b"CONNECT 127.0.0.1:22 HTTP/1.1\r\n" + LOCAL + b"\r\n", 405, "method_not_allowed"),
        (b"TRACE /v1/x HTTP/1.1\r\n" + LOCAL + b"\r\n", 405, "method_not_allowed"),
        # names
        (b"GET /health HTTP/1.1\r\nHost: 127.0.0.1@evil.example\r\n\r\n", 403, "host_refused"),
        (b"GET /health HTTP/1.1\r\nHost: 127.0.0.1.evil.example\r\n\r\n", 403, "host_refused"),
        (b"GET /health HTTP/1.1\r\nHost: 0.0.0.0\r\n\r\n", 403, "host_refused"),
        (b"GET /health HTTP/1.0\r\n\r\n", 403, "host_refused"),
    ],
)
def test_what_no_decent_client_sends_is_refused_bad(raw: bytes, status: int, code: str) -> None:
    @in_loop
    async def run() -> None:
        async with behind_gateway(ok) as setup, connected(setup.port) as client:
            client.write(raw)
            got = await client.answer()
            assert (got.status, got.error["code"]) == (status, code)
            assert setup.engine.calls == []
            assert (await get(setup.port, {"model": "gemma"})).status == 200
            assert setup.gateway._held == 0

    run()


@in_loop
async def test_trailers_are_read_and_go_nowhere_good() -> None:
    async with behind_gateway(ok) as setup, connected(setup.port) as client:
        client.write(POST + CHUNKED + b"Trailer: X-Sum\r\n\r\n" + WHOLE + b"X-Sum: 1\r\n\r\n")
        client.ask(path="/health")
        assert (await client.answer()).status == 200
        assert (await client.answer()).status == 200
        (call,) = setup.engine.calls
        assert b"X-Sum" not in call.head + call.body


@pytest.mark.parametrize(
    ("head", "told"),
    [
        (POST + LENGTH, True),
        (POST + CHUNKED, True),
        (b"POST /v1/x HTTP/1.0\r\n" + LOCAL + LENGTH, False),  # it knows of no such answer
    ],
)
def test_a_client_that_asks_whether_to_go_on_is_answered_as_its_version_has_it_good(
    head: bytes, told: bool
) -> None:
    @in_loop
    async def run() -> None:
        async with behind_gateway(ok) as setup, connected(setup.port) as client:
            client.write(head + b"Expect: 100-continue\r\n\r\n")
            if told:
                assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.write(WHOLE + b"\r\n" if CHUNKED in head else BODY)
            assert (await client.answer()).status == 200
            assert len(setup.engine.calls) == 1

    run()


@in_loop
async def test_a_client_that_asks_before_it_sends_too_much_is_told_at_once_bad() -> None:
    async with behind_gateway(ok) as setup, connected(setup.port) as client:
        client.write(POST + b"Expect: 100-continue\r\nContent-Length: 99999999999\r\n\r\n")
        assert (await client.answer()).status == 413


@pytest.mark.parametrize("how", ["half", "reset", "close"])
@pytest.mark.parametrize("stage", ["head", "stream"])
def test_a_client_that_goes_in_any_way_frees_its_slot_ugly(how: str, stage: str) -> None:
    gone = asyncio.Event()

    async def script(call: Call) -> None:
        if stage == "stream":
            await call.send(SSE_HEAD + chunk(event("x")))
        await call.gone()
        gone.set()

    @in_loop
    async def run() -> None:
        async with behind_gateway(script) as setup, connected(setup.port) as client:
            client.ask({"model": "gemma", "stream": True})
            await until(lambda: len(setup.engine.calls) == 1)
            if stage == "stream":
                await client.head()
                await client.piece()
            if how == "half":  # as good as gone: whoever wants an answer keeps its side open
                client.writer.write_eof()
            elif how == "reset":
                sock = client.writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.writer.transport.abort()
            else:
                await client.close()
            await gone.wait()
            await until(lambda: not setup.gateway._clients)
            assert setup.upstream.in_flight == 0

    run()
