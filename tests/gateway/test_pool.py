"""The kept connections to an engine: when one is used again, and when it must not be."""

from __future__ import annotations

import asyncio

from orchestrator.backend import State
from tests.gateway.scripted import (
    SSE_HEAD,
    Call,
    Engine,
    answer,
    behind_gateway,
    chunk,
    connected,
    get,
    in_loop,
    ok,
    until,
)

ASK = {"model": "gemma"}


@in_loop
async def test_connection_whose_client_was_slow_is_read_again_good() -> None:
    async def script(call: Call) -> None:
        if b"large" in call.body:
            await call.send(SSE_HEAD + chunk(b"data: " + b"x" * 150_000 + b"\n\n") + b"0\r\n\r\n")
        else:
            await ok(call)

    async with behind_gateway(script) as setup, connected(setup.port, limit=1024) as slow:
        slow.writer.transport.pause_reading()
        for _ in range(40):  # more than the kernel's buffers take
            slow.ask(ASK, large=1)
        await until(lambda: any(client.paused for client in setup.gateway._clients))
        await until(lambda: setup.upstream.in_flight == 0)
        assert (await get(setup.port, ASK)).status == 200
        assert setup.engine.connections == 1


@in_loop
async def test_bytes_that_nobody_asked_for_end_the_connection_ugly() -> None:
    async def script(call: Call) -> None:
        await call.send(answer(b'{"right": 1}'))
        await asyncio.sleep(0.02)
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Le")

    async with behind_gateway(script) as setup:
        for _ in range(3):
            assert (await get(setup.port, ASK)).body == b'{"right": 1}'
            await until(lambda: not setup.gateway._dispatcher.routes["gemma"].pool._idle)
        assert setup.engine.connections == 3


@in_loop
async def test_connection_that_the_engine_wants_closed_is_not_kept_good() -> None:
    async def script(call: Call) -> None:
        await call.send(answer(b"{}", more=b"Connection: close\r\n"))

    async with behind_gateway(script) as setup:
        for _ in range(2):
            assert (await get(setup.port, ASK)).status == 200
        assert setup.engine.connections == 2


@in_loop
async def test_connection_that_ends_while_idle_is_forgotten_good() -> None:
    async def script(call: Call) -> None:
        await ok(call)
        await asyncio.sleep(0.02)
        call.writer.close()

    async with behind_gateway(script) as setup:
        await get(setup.port, ASK)
        pool = setup.gateway._dispatcher.routes["gemma"].pool
        assert len(pool._idle) == 1
        await until(lambda: pool._idle == [])


@in_loop
async def test_connections_to_the_engine_before_are_closed_good() -> None:
    closed = asyncio.Event()

    async def script(call: Call) -> None:
        await ok(call)
        await call.gone()
        closed.set()

    second = Engine(ok)
    async with behind_gateway(script) as setup:
        await get(setup.port, ASK)
        await second.start()
        setup.upstream.become(State.READY, second.endpoint)
        await closed.wait()
        assert (await get(setup.port, ASK)).status == 200
        assert len(second.calls) == 1


@in_loop
async def test_stranger_on_a_dead_engines_port_gets_nothing_bad() -> None:
    """Nobody told of the death, but the upstream knows; the request has the key in it."""
    stranger = Engine(ok)
    async with behind_gateway(ok) as setup, connected(setup.port) as client:
        await setup.engine.kill()
        setup.upstream.state, setup.upstream.current = State.RESTARTING, None
        route = setup.gateway._dispatcher.routes["gemma"]
        client.ask(ASK)
        await until(lambda: route.waiting == 1 and route.pool is None)
        await stranger.start(setup.engine.port)
        second = Engine(ok)
        await second.start()
        await asyncio.sleep(0.3)
        setup.upstream.become(State.READY, second.endpoint)
        assert (await client.answer()).status == 200
        assert stranger.calls == []


@in_loop
async def test_news_that_is_none_wakes_nobody_good() -> None:
    async with behind_gateway(ok) as setup:
        route = setup.gateway._dispatcher.routes["gemma"]
        waiting = asyncio.create_task(route.changed(60))
        await asyncio.sleep(0)
        route.refresh()
        await asyncio.sleep(0.01)
        assert not waiting.done()
        setup.upstream.become(State.STOPPED)
        await waiting
