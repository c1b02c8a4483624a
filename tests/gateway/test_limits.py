"""What one client may take: sizes, times, depth; and HTTP that is none."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any

import pytest

from orchestrator.gateway import Limits
from orchestrator.gateway.client import MAX_PIPELINED
from tests.gateway.scripted import (
    SSE_HEAD,
    Call,
    Setup,
    behind_gateway,
    chunk,
    connected,
    get,
    in_loop,
    ok,
    until,
)

SMALL = Limits(body=1000)


@in_loop
async def test_body_at_the_limit_passes_good() -> None:
    async with behind_gateway(ok, limits=SMALL) as setup:
        body = json.dumps({"model": "engine-model", "x": ""}).encode()
        body = body[:-2] + b"y" * (1000 - len(body)) + body[-2:]
        assert (await get(setup.port, body)).body == body


@in_loop
async def test_body_over_the_limit_is_refused_before_it_is_read_bad() -> None:
    async with behind_gateway(ok, limits=SMALL) as setup, connected(setup.port) as client:
        client.write(b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1001\r\n\r\n")
        got = await client.answer()
        assert (got.status, got.error["code"]) == (413, "request_too_large")
        assert got.headers["connection"] == "close"
        assert await client.reader.read() == b""


@in_loop
async def test_client_that_sends_all_of_it_can_read_the_refusal_bad() -> None:
    async with behind_gateway(ok, limits=SMALL) as setup, connected(setup.port) as client:
        client.ask(b"x" * 5_000_000)
        assert (await client.answer()).status == 413


@in_loop
async def test_chunked_body_is_counted_as_it_comes_bad() -> None:
    async with behind_gateway(ok, limits=SMALL) as setup, connected(setup.port) as client:
        client.write(b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        client.write(chunk(b"x" * 600) + chunk(b"x" * 600))
        assert (await client.answer()).status == 413
        assert setup.gateway._held == 0


@in_loop
async def test_all_bodies_together_are_bounded_bad() -> None:
    async with behind_gateway(ok, limits=Limits(bodies=1500)) as setup:
        async with connected(setup.port) as first, connected(setup.port) as second:
            for client in (first, second):
                client.write(b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1001\r\n\r\n")
                client.write(b"x" * 1000)
                await until(lambda: setup.gateway._held >= 1000)
            assert (await second.answer()).error["code"] == "overloaded"
        await until(lambda: setup.gateway._held == 0)
        assert (await get(setup.port, {"model": "gemma"})).status == 200


@in_loop
async def test_chunked_request_reaches_the_engine_with_its_length_good() -> None:
    async with behind_gateway(ok) as setup, connected(setup.port) as client:
        client.write(b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        for byte in b'{"model":"gemma"}':
            client.write(chunk(bytes([byte])))
            await asyncio.sleep(0)
        client.write(b"0\r\n\r\n")
        assert (await client.answer()).status == 200
        assert setup.engine.calls[0].header("Transfer-Encoding") is None
        assert setup.engine.calls[0].body == b'{"model":"engine-model"}'


@in_loop
async def test_client_that_asks_first_is_told_to_go_on_good() -> None:
    async with behind_gateway(ok) as setup, connected(setup.port) as client:
        client.write(
            b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
        )
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.write(b"{}")
        assert (await client.answer()).status == 200
        assert setup.engine.calls[0].header("Expect") is None


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # no Host
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n folded: x\r\n\r\n",
        b"GET / HTTP/1.1\nHost: localhost\n\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
        b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}x\r\n",
        b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: +2\r\n\r\n{}",
        b"GET /v1/x HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"GET /v1/x HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n",
    ],
)
def test_what_is_not_http_is_refused_and_never_passed_on_ugly(raw: bytes) -> None:
    @in_loop
    async def run() -> None:
        async with behind_gateway(ok) as setup, connected(setup.port) as client:
            client.write(raw)
            got = await client.answer()
            assert got.status == 400
            assert got.headers["connection"] == "close"
            assert got.error["message"]
            assert await client.reader.read() == b""
            assert setup.engine.calls == []

    run()


@in_loop
async def test_nonsense_behind_a_good_request_does_not_harm_its_answer_ugly() -> None:
    read = asyncio.Event()

    async def script(call: Call) -> None:
        await read.wait()
        await ok(call)

    async with behind_gateway(script) as setup, connected(setup.port) as client:
        client.ask({"model": "gemma"})
        await until(lambda: len(setup.engine.calls) == 1)
        client.write(b"\x00\x01nonsense\r\n\r\n")
        await asyncio.sleep(0.05)
        read.set()
        assert (await client.answer()).status == 200
        assert await client.reader.read() == b""


@in_loop
async def test_upgrades_and_tunnels_are_refused_bad() -> None:
    async with behind_gateway(ok) as setup:
        upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\n"
        assert (await get(setup.port, path="/v1/realtime", headers=upgrade)).status == 501
        async with connected(setup.port) as client:
            client.write(b"CONNECT example.org:443 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await client.answer()).status == 405
        assert setup.engine.calls == []


@in_loop
async def test_offer_of_http_2_is_ignored_good() -> None:
    """Java's client offers it with every first request."""
    offer = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
    async with behind_gateway(ok) as setup:
        assert (await get(setup.port, {"model": "gemma"}, headers=offer)).status == 200
        assert b"h2c" not in setup.engine.calls[0].head
        assert b"HTTP2" not in setup.engine.calls[0].head


@in_loop
async def test_compressed_request_is_refused_bad() -> None:
    async with behind_gateway(ok) as setup:
        assert (await get(setup.port, b"\x1f\x8b", headers="Content-Encoding: gzip\r\n")).status == 415


@in_loop
async def test_slow_reader_slows_the_engine_down_and_costs_no_memory_ugly() -> None:
    sent = [0]
    piece = chunk(b"data: " + b"x" * 60_000 + b"\n\n")

    async def script(call: Call) -> None:
        await call.send(SSE_HEAD)
        while True:
            await call.send(piece)
            sent[0] += len(piece)

    async with behind_gateway(script) as setup:
        narrow = socket.socket()
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32768)
        narrow.connect(("127.0.0.1", setup.port))
        narrow.setblocking(False)
        async with connected(setup.port, sock=narrow) as client:
            client.ask({"model": "gemma"})
            (served,) = await clients_of(setup)
            await until(lambda: served.paused)
            before = -1
            while before != sent[0]:  # what the kernel's buffers take, and then no more
                before = sent[0]
                await asyncio.sleep(0.1)
            assert served._transport.get_write_buffer_size() < 2 * 2**20
            # it reads on, and everything comes
            for _ in range(3 * sent[0] // 60_000):
                await client.reader.readuntil(b"\n\n")


@in_loop
async def test_reader_that_never_reads_is_dropped_bad() -> None:
    gone = asyncio.Event()

    async def script(call: Call) -> None:
        call.writer.write(SSE_HEAD + chunk(b"data: " + b"x" * 40_000_000 + b"\n\n"))
        await call.gone()
        gone.set()

    async with behind_gateway(script, limits=Limits(write=0.1)) as setup:
        _, writer = await asyncio.open_connection("127.0.0.1", setup.port, limit=1024)
        body = b'{"model": "gemma"}'
        writer.write(
            b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await gone.wait()
        writer.transport.abort()
        await until(lambda: not setup.gateway._clients)
        assert setup.upstream.in_flight == 0


@in_loop
async def test_request_that_never_ends_is_given_up_bad() -> None:
    async with behind_gateway(ok, limits=Limits(read=0.1)) as setup:
        for start in (b"GET /heal", b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"):
            async with connected(setup.port) as client:
                client.write(start)
                got = await client.answer()
                assert got.status == 408
                assert await client.reader.read() == b""


@in_loop
async def test_slow_body_that_moves_is_given_more_time_good() -> None:
    async with behind_gateway(ok) as setup, connected(setup.port) as client:
        client.write(b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n")
        (served,) = await clients_of(setup)
        await until(lambda: served.busy)
        before = served.deadline
        client.write(b"{")
        await until(lambda: served.deadline > before)
        client.write(b"}")
        assert (await client.answer()).status == 200


@in_loop
async def test_idle_connection_is_closed_good() -> None:
    async with behind_gateway(ok, limits=Limits(idle=0.1)) as setup, connected(setup.port) as client:
        client.ask(path="/health")
        assert (await client.answer()).status == 200
        assert await client.reader.read() == b""


@in_loop
async def test_waiting_for_an_answer_is_not_idling_good() -> None:
    read = asyncio.Event()

    async def script(call: Call) -> None:
        await read.wait()
        await ok(call)

    limits = Limits(idle=0.01, read=0.01, write=0.01)
    async with behind_gateway(script, limits=limits) as setup, connected(setup.port) as client:
        client.ask({"model": "gemma"})
        (served,) = await clients_of(setup)
        await until(lambda: len(setup.engine.calls) == 1)
        for _ in range(3):
            setup.gateway._sweep_once(setup.gateway.loop.time() + 3600)
        assert served.deadline == 0
        read.set()
        assert (await client.answer()).status == 200


@in_loop
async def test_connections_that_are_in_use_are_bounded_bad() -> None:
    read = asyncio.Event()

    async def script(call: Call) -> None:
        await read.wait()
        await ok(call)

    async with behind_gateway(script, limits=Limits(clients=2)) as setup:
        async with connected(setup.port) as one, connected(setup.port) as two:
            one.ask({"model": "gemma"})
            two.write(b"POST /v1/x HTTP/1.1\r\nHost: loc")  # a head that is still coming
            (first, second) = await clients_of(setup, 2)
            await until(lambda: len(setup.engine.calls) == 1 and not (first.idle or second.idle))
            async with connected(setup.port) as three:
                three.ask(path="/health")
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await three.answer()
            read.set()
            assert (await one.answer()).status == 200
        await until(lambda: not setup.gateway._clients)
        assert (await get(setup.port, path="/health")).status == 200


@in_loop
async def test_idle_connections_give_way_the_oldest_first_good() -> None:
    async with behind_gateway(ok, limits=Limits(clients=2)) as setup, connected(setup.port) as old:
        await clients_of(setup)
        async with connected(setup.port) as younger:
            younger.ask(path="/health")
            assert (await younger.answer()).status == 200
            async with connected(setup.port) as third:
                third.ask(path="/health")
                assert (await third.answer()).status == 200
                assert await old.reader.read() == b""
                younger.ask(path="/health")
                assert (await younger.answer()).status == 200


@in_loop
async def test_a_crowd_of_idle_connections_shuts_nobody_out_good() -> None:
    async with behind_gateway(ok) as setup, contextlib.AsyncExitStack() as stack:
        for _ in range(Limits().clients + 100):
            await stack.enter_async_context(connected(setup.port))
        assert (await get(setup.port, {"model": "gemma"})).status == 200
        assert len(setup.gateway._clients) <= Limits().clients


@in_loop
async def test_deep_pipeline_stops_the_reading_not_the_answers_ugly() -> None:
    async with behind_gateway(ok) as setup, connected(setup.port) as client:
        for _ in range(3000):
            client.ask(path="/health")
        for _ in range(3000):
            assert (await client.answer()).status == 200


@in_loop
async def test_pipeline_that_waits_for_a_slow_reader_is_answered_whole_good() -> None:
    async with behind_gateway(ok) as setup, connected(setup.port) as client:
        (served,) = await clients_of(setup)
        served.pause_writing()
        client.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50_000)
        await until(lambda: len(served._pending) > MAX_PIPELINED)
        await asyncio.sleep(0.2)
        assert len(served._pending) < 10_000
        served.resume_writing()
        for _ in range(50_000):
            assert (await client.answer()).status == 200


@in_loop
async def test_requests_sent_ahead_are_not_collected_without_end_ugly() -> None:
    read = asyncio.Event()

    async def script(call: Call) -> None:
        await read.wait()
        await ok(call)

    async with behind_gateway(script) as setup, connected(setup.port) as client:
        client.ask({"model": "gemma"})
        (served,) = await clients_of(setup)
        client.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50_000)
        await asyncio.sleep(0.2)
        assert 0 < len(served._pending) < 10_000
        taken = len(served._pending)
        read.set()
        answers = [await client.answer() for _ in range(1 + taken)]
        assert {got.status for got in answers} == {200}
        assert ["connection" in got.headers for got in answers] == [*[False] * taken, True]
        assert await client.reader.read() == b"", "the rest has to be asked for anew"


async def clients_of(setup: Setup, count: int = 1) -> list[Any]:
    await until(lambda: len(setup.gateway._clients) >= count)
    return list(setup.gateway._clients)
