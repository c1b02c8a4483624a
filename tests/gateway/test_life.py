"""Starting and stopping: ports, draining, and what is cut off."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from orchestrator.backend import Event, State
from orchestrator.errors import PortTaken, StartError
from orchestrator.gateway import Gateway
from tests.gateway.scripted import (
    DONE,
    SSE_HEAD,
    Call,
    FakeUpstream,
    answer,
    behind_gateway,
    chunk,
    connected,
    event,
    in_loop,
    listening,
    ok,
    until,
)


@in_loop
async def test_port_zero_is_a_free_one_good() -> None:
    async with listening(Gateway({}, port=0)) as gateway:
        assert gateway.port > 0
        assert gateway.url == f"http://127.0.0.1:{gateway.port}/v1"


@in_loop
async def test_taken_port_is_said_so_bad() -> None:
    async with listening(Gateway({}, port=0)) as first:
        port = first.port
        with pytest.raises(PortTaken, match=rf"gateway: 127\.0\.0\.1:{port} is taken") as caught:
            await Gateway({}, port=port).start()
        assert "--port" in str(caught.value.advice)
    async with listening(Gateway({}, port=port)) as second:  # and it is free again at once
        assert second.port == port


@in_loop
async def test_engine_that_can_not_be_followed_leaves_no_open_port_ugly() -> None:
    class Broken(FakeUpstream):
        def subscribe(self, callback: Callable[[Event], None]) -> Callable[[], None]:
            raise RuntimeError("closed")

    good = FakeUpstream()
    gateway = Gateway({"good": good, "bad": Broken()}, port=0)
    with pytest.raises(RuntimeError, match="closed"):
        await gateway.start()
    assert good.callbacks == []
    async with listening(Gateway({}, port=gateway.port)) as second:
        assert second.port == gateway.port


@in_loop
async def test_address_that_is_not_ours_is_said_so_bad() -> None:
    with pytest.raises(StartError, match=r"gateway: 203\.0\.113\.7:"):
        await Gateway({}, host="203.0.113.7", port=0, api_key="k").start()


@in_loop
async def test_stop_lets_answers_end_good() -> None:
    read = asyncio.Event()

    async def script(call: Call) -> None:
        await call.send(SSE_HEAD + chunk(event("one")))
        await read.wait()
        await call.send(chunk(DONE) + b"0\r\n\r\n")

    async with (
        behind_gateway(script) as setup,
        connected(setup.port) as busy,
        connected(setup.port) as idle,
        connected(setup.port) as listener,
    ):
        busy.ask({"model": "gemma"})
        listener.ask(path="/api/events")
        await busy.head()
        await busy.piece()
        await listener.head()
        stopping = asyncio.create_task(setup.gateway.stop(30))
        assert await idle.reader.read() == b""
        assert (await listener.reader.read()).endswith(b"0\r\n\r\n")
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", setup.port)
        assert not stopping.done()
        read.set()
        assert await busy.piece() == DONE
        assert await busy.piece() == b""
        assert await busy.reader.read() == b""
        await stopping
        assert setup.upstream.callbacks == []


@in_loop
async def test_stop_ends_what_takes_longer_with_an_error_bad() -> None:
    async def script(call: Call) -> None:
        if b"stream" in call.body:
            await call.send(SSE_HEAD + chunk(event("one")))
        elif b"half" in call.body:
            await call.send(answer(b'{"choices": 1}')[:-2])
        await call.gone()

    async with (
        behind_gateway(script) as setup,
        connected(setup.port) as streaming,
        connected(setup.port) as half,
        connected(setup.port) as silent,
        connected(setup.port) as waiting,
    ):
        setup.gateway.add("late", FakeUpstream("late", State.STARTING))
        for client, word in ((streaming, "stream"), (half, "half"), (silent, "nothing")):
            client.ask({"model": "gemma", word: 1})
        waiting.ask({"model": "late"})
        await streaming.head()
        await streaming.piece()
        await until(lambda: len(setup.engine.calls) == 3)
        await until(lambda: setup.gateway._dispatcher.routes["late"].waiting == 1)
        await setup.gateway.stop(0.05)
        assert json.loads((await streaming.piece())[6:])["error"]["code"] == "stopping"
        assert await streaming.piece() == b""
        for client in (half, silent, waiting):
            got = await client.answer()
            assert (got.status, got.error["code"]) == (503, "stopping")
        assert setup.upstream.in_flight == 0


@in_loop
async def test_stop_without_clients_is_immediate_and_may_be_repeated_good() -> None:
    async with behind_gateway(ok) as setup:
        await setup.gateway.stop()
        await setup.gateway.stop()


@in_loop
async def test_events_after_the_stop_disturb_nobody_ugly() -> None:
    async with behind_gateway(ok) as setup:
        tell = setup.upstream.callbacks[0]
        await setup.gateway.stop(0)
        setup.upstream.callbacks.append(tell)
        setup.upstream.become(State.FAILED)
        await asyncio.sleep(0)
    setup.upstream.become(State.STOPPED)
