"""Bodies sent ahead, before their turn on a connection: bounded and refused as any other, and let go of."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import pytest

from orchestrator.gateway import Limits
from orchestrator.gateway.client import MAX_PIPELINED
from tests.gateway.scripted import (
    Call,
    Client,
    Setup,
    behind_gateway,
    chunk,
    connected,
    get,
    in_loop,
    ok,
    until,
)

SMALL = Limits(body=1000, bodies=1500)
PIECE = b"x" * 65536
PUSHED = 400  # pieces; 25 MiB
KEPT = 4 * 2**20  # bytes; several reads of the event loop, and far less than what is pushed
LONG = b"Content-Length: %d\r\n" % (PUSHED * len(PIECE))
CHUNKED = b"Transfer-Encoding: chunked\r\n"
LOCAL = b"Host: localhost\r\n"


class Busy:
    """A connection whose first request is being answered until `read` is set."""

    def __init__(self) -> None:
        self.read = asyncio.Event()
        self.gone = asyncio.Event()

    async def script(self, call: Call) -> None:
        if json.loads(call.body).get("first"):
            gone = asyncio.create_task(call.gone())
            gone.add_done_callback(lambda _: self.gone.set())
            await self.read.wait()
            gone.cancel()
        await ok(call)


@contextlib.asynccontextmanager
async def under_way(limits: Limits) -> AsyncIterator[tuple[Setup, Client, Busy]]:
    busy = Busy()
    async with behind_gateway(busy.script, limits=limits) as setup, connected(setup.port) as client:
        client.ask({"model": "gemma", "first": True})
        await until(lambda: len(setup.engine.calls) == 1)
        yield setup, client, busy


async def push(client: Client, head: bytes) -> int:
    """Send a request with far too much of a body; returns the bytes that it has cost."""
    client.write(b"POST /v1/x HTTP/1.1\r\n" + head + b"\r\n")
    piece = chunk(PIECE) if CHUNKED in head else PIECE
    tracemalloc.start()
    try:
        for _ in range(PUSHED):
            client.write(piece)
            await client.writer.drain()
        await until(lambda: client.writer.transport.get_write_buffer_size() == 0)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("limits", "head", "status"),
    [
        (SMALL, LOCAL + LONG, 413),
        (SMALL, LOCAL + CHUNKED, 413),
        (Limits(body=2 * KEPT), LOCAL + CHUNKED, 413),  # let go of when it turns out too large
        (Limits(body=2**30, bodies=1500), LOCAL + LONG, 503),
        (Limits(body=2**30, bodies=1500), LOCAL + CHUNKED, 503),
        (Limits(), b"Host: evil.example\r\n" + LONG, 403),
        (Limits(), b"Host: evil.example\r\n" + CHUNKED, 403),
        (Limits(), LOCAL + b"Origin: http://evil.example\r\n" + CHUNKED, 403),
        (Limits(), LOCAL + b"Content-Encoding: gzip\r\n" + LONG, 415),
    ],
)
def test_body_sent_ahead_is_refused_in_its_turn_and_not_kept_bad(
    limits: Limits, head: bytes, status: int
) -> None:
    @in_loop
    async def run() -> None:
        async with under_way(limits) as (setup, client, busy):
            assert await push(client, head) < KEPT
            busy.read.set()
            assert (await client.answer()).status == 200
            got = await client.answer()
            assert (got.status, got.headers["connection"]) == (status, "close")
            assert await client.reader.read() == b""
            assert setup.gateway._held == 0
            assert len(setup.engine.calls) == 1
            assert (await get(setup.port, {"model": "gemma"})).status == 200

    run()


@pytest.mark.parametrize("framing", [LONG, CHUNKED])
def test_body_sent_to_a_gateway_that_waits_for_a_slow_reader_is_not_kept_bad(framing: bytes) -> None:
    @in_loop
    async def run() -> None:
        async with behind_gateway(ok, limits=SMALL) as setup, connected(setup.port) as client:
            (served,) = await clients_of(setup)
            served.pause_writing()  # the end of an answer waits to be read
            assert await push(client, LOCAL + framing) < KEPT
            served.resume_writing()
            assert (await client.answer()).status == 413
            assert setup.gateway._held == 0

    run()


@in_loop
async def test_body_sent_ahead_counts_until_it_is_answered_good() -> None:
    async with under_way(SMALL) as (setup, client, busy):
        before = setup.gateway._held
        body = json.dumps({"model": "engine-model", "x": "y" * 800}).encode()
        client.write(b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body))
        for byte in body[:600]:
            client.write(bytes([byte]))
            await asyncio.sleep(0)
        await until(lambda: setup.gateway._held == before + 600)
        busy.read.set()
        assert (await client.answer()).status == 200
        client.write(body[600:])  # the rest comes in its turn
        assert (await client.answer()).body == body
        assert setup.gateway._held == 0


@in_loop
async def test_bodies_sent_ahead_are_bounded_together_and_answered_in_order_bad() -> None:
    async with under_way(SMALL) as (setup, client, busy):
        before = setup.gateway._held
        for number in range(3):
            client.ask({"model": "gemma", "n": number, "x": "y" * 600})
        client.ask(path="/health")
        (served,) = await clients_of(setup)
        await until(lambda: len(served._pending) == 4)
        assert before < setup.gateway._held <= SMALL.bodies
        busy.read.set()
        answers = [await client.answer() for _ in range(5)]
        assert [got.status for got in answers] == [200, 200, 200, 503, 200]
        assert answers[3].error["code"] == "overloaded"
        assert setup.gateway._held == 0
        client.ask({"model": "gemma"})
        assert (await client.answer()).status == 200


@pytest.mark.parametrize("limits", [Limits(), SMALL])
def test_client_that_leaves_behind_a_body_sent_ahead_is_noticed_ugly(limits: Limits) -> None:
    @in_loop
    async def run() -> None:
        async with under_way(limits) as (setup, client, busy):
            client.write(b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(40):
                client.write(chunk(PIECE))
            await client.writer.drain()
            await client.close()
            await busy.gone.wait()
            await until(lambda: not setup.gateway._clients)
            assert setup.gateway._held == 0
            assert setup.upstream.in_flight == 0

    run()


@pytest.mark.parametrize("kept", [10, MAX_PIPELINED, MAX_PIPELINED + 1, 10_000])
def test_client_that_leaves_behind_requests_sent_ahead_is_noticed_ugly(kept: int) -> None:
    @in_loop
    async def run() -> None:
        async with under_way(Limits()) as (setup, client, busy):
            for _ in range(kept):
                client.ask({"model": "gemma", "x": "y" * 100})
            await client.writer.drain()
            await client.close()
            await busy.gone.wait()
            await until(lambda: not setup.gateway._clients)
            assert setup.gateway._held == 0
            assert setup.upstream.in_flight == 0
            assert len(setup.engine.calls) == 1

    run()


@pytest.mark.parametrize("cut", [0, 1, 50])
def test_request_that_is_one_too_many_is_not_answered_by_half_ugly(cut: int) -> None:
    @in_loop
    async def run() -> None:
        async with under_way(Limits()) as (setup, client, busy):
            for _ in range(MAX_PIPELINED):
                client.ask({"model": "gemma"})
            (served,) = await clients_of(setup)
            await until(lambda: len(served._pending) == MAX_PIPELINED)
            body = b'{"model": "gemma"}'.ljust(60)
            client.write(b"POST /v1/x HTTP/1.1\r\n" + LOCAL + b"Content-Length: 60\r\n\r\n" + body[:cut])
            await until(lambda: served._full)
            client.write(body[cut:])
            busy.read.set()
            answers = [await client.answer() for _ in range(1 + MAX_PIPELINED)]
            assert {got.status for got in answers} == {200}
            assert answers[-1].headers["connection"] == "close"
            assert await client.reader.read() == b""
            assert len(setup.engine.calls) == 1 + MAX_PIPELINED
            assert setup.gateway._held == 0

    run()


@in_loop
async def test_nonsense_behind_a_body_sent_ahead_lets_go_of_it_ugly() -> None:
    async with under_way(Limits()) as (setup, client, busy):
        before = setup.gateway._held
        client.ask({"model": "gemma", "x": "y" * 500})
        await until(lambda: setup.gateway._held > before)
        client.write(b"\x00\x01nonsense\r\n\r\n")
        await until(lambda: setup.gateway._held == before)
        busy.read.set()
        assert (await client.answer()).status == 200
        assert await client.reader.read() == b""


@in_loop
async def test_last_answer_of_a_connection_lets_go_of_what_was_sent_ahead_ugly() -> None:
    busy = Busy()
    async with behind_gateway(busy.script) as setup, connected(setup.port) as client:
        client.ask({"model": "gemma", "first": True})
        await until(lambda: len(setup.engine.calls) == 1)
        before = setup.gateway._held
        client.ask({"model": "gemma", "x": "y" * 500})
        await until(lambda: setup.gateway._held > before)
        setup.gateway.stopping = True
        busy.read.set()
        assert (await client.answer()).status == 200
        assert await client.reader.read() == b""
        assert setup.gateway._held == 0


async def clients_of(setup: Setup) -> list[Any]:
    await until(lambda: bool(setup.gateway._clients))
    return list(setup.gateway._clients)
