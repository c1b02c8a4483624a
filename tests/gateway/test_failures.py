"""What clients see when an engine loads, dies, comes back or does not; each at its moment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading

import pytest

from orchestrator.backend import State
from orchestrator.gateway import Gateway, exchange
from tests.gateway.scripted import (
    DONE,
    SSE_HEAD,
    Call,
    Engine,
    FakeUpstream,
    answer,
    behind_gateway,
    chunk,
    connected,
    event,
    get,
    in_loop,
    listening,
    ok,
    until,
)

ASK = {"model": "gemma", "messages": []}


@in_loop
async def test_request_waits_while_the_engine_loads_good() -> None:
    async with behind_gateway(ok) as setup, connected(setup.port) as client:
        setup.upstream.become(State.STARTING)
        await asyncio.sleep(0)
        client.ask(ASK)
        await until(lambda: setup.gateway._dispatcher.routes["gemma"].waiting == 1)
        assert setup.engine.calls == []
        # the supervisor tells it from its own thread
        telling = threading.Thread(target=setup.upstream.become, args=(State.READY, setup.engine.endpoint))
        telling.start()
        assert (await client.answer()).status == 200
        telling.join()


@in_loop
async def test_wait_is_bounded_and_says_when_to_come_back_bad() -> None:
    async with behind_gateway(ok, wait_s=0.05) as setup:
        setup.upstream.become(State.STARTING)
        await asyncio.sleep(0)
        got = await get(setup.port, ASK)
        assert (got.status, got.error["code"]) == (503, "engine_loading")
        assert int(got.headers["retry-after"]) > 0
        assert setup.upstream.most == 0


@in_loop
async def test_failed_engine_is_explained_bad() -> None:
    async with behind_gateway(ok) as setup:
        setup.upstream.error, setup.upstream.advice = "llama-server: out of memory", "use fewer slots"
        setup.upstream.become(State.FAILED)
        await asyncio.sleep(0)
        got = await get(setup.port, ASK)
        assert (got.status, got.error["code"]) == (503, "engine_failed")
        assert "out of memory" in got.error["message"]
        assert got.error["advice"] == "use fewer slots"
        assert "retry-after" not in got.headers


@pytest.mark.parametrize("state", [State.STOPPED, State.STOPPING, State.STUCK])
def test_engine_that_will_not_come_is_no_reason_to_wait_bad(state: State) -> None:
    @in_loop
    async def run() -> None:
        async with behind_gateway(ok) as setup:
            setup.upstream.become(state)
            await asyncio.sleep(0)
            got = await get(setup.port, ASK)
            assert (got.status, got.error["code"]) == (503, f"engine_{state}")

    run()


@in_loop
async def test_waiting_request_is_told_when_the_engine_fails_bad() -> None:
    async with behind_gateway(ok) as setup, connected(setup.port) as client:
        setup.upstream.become(State.RESTARTING)
        await asyncio.sleep(0)
        client.ask(ASK)
        await until(lambda: setup.gateway._dispatcher.routes["gemma"].waiting == 1)
        setup.upstream.become(State.FAILED)
        assert (await client.answer()).error["code"] == "engine_failed"


@in_loop
async def test_death_before_any_byte_is_served_by_the_next_engine_good() -> None:
    second = Engine(ok)

    async def script(call: Call) -> None:
        await setup.engine.kill()

    async with behind_gateway(script) as setup, connected(setup.port) as client:
        client.ask(ASK, n=1)
        await until(lambda: len(setup.engine.calls) == 1 and setup.upstream.in_flight == 0)
        setup.upstream.become(State.RESTARTING)
        await second.start()
        setup.upstream.become(State.STARTING)
        setup.upstream.become(State.READY, second.endpoint)
        got = await client.answer()
        assert (got.status, json.loads(got.body)["n"]) == (200, 1)
        assert len(setup.engine.calls) == len(second.calls) == 1


@in_loop
async def test_request_that_kills_every_engine_is_sent_twice_at_most_ugly() -> None:
    async def script(call: Call) -> None:
        call.die()

    async with behind_gateway(script) as setup:
        got = await get(setup.port, ASK)
        assert (got.status, got.error["code"]) == (502, "engine_died")
        assert len(setup.engine.calls) == 2


@in_loop
async def test_death_of_a_used_connection_and_of_the_next_engine_counts_as_two_ugly() -> None:
    second = Engine(lambda call: asyncio.sleep(0, call.die()))

    async def script(call: Call) -> None:
        if len(setup.engine.calls) == 1:
            await ok(call)
        else:
            await setup.engine.kill()

    async with behind_gateway(script) as setup, connected(setup.port) as client:
        client.ask(ASK)
        await client.answer()
        client.ask(ASK)  # goes out on the connection that was used before
        await until(lambda: len(setup.engine.calls) == 2 and setup.upstream.in_flight == 0)
        await second.start()
        setup.upstream.become(State.READY, second.endpoint)
        assert (await client.answer()).status == 502
        assert len(second.calls) == 1


@in_loop
async def test_refused_connection_waits_for_the_news_good() -> None:
    """The engine is dead, and its supervisor has not noticed yet."""
    second = Engine(ok)
    async with behind_gateway(ok) as setup, connected(setup.port) as client:
        await setup.engine.kill()
        client.ask(ASK)
        await until(lambda: setup.gateway._dispatcher.routes["gemma"].waiting == 1)
        await second.start()
        setup.upstream.become(State.READY, second.endpoint)
        assert (await client.answer()).status == 200


@in_loop
async def test_kept_connection_that_the_engine_closes_gives_no_error_good() -> None:
    """llama-server closes its connection after every stream, a moment after the stream's end."""

    async def script(call: Call) -> None:
        await call.send(SSE_HEAD + chunk(event("x")) + chunk(DONE) + b"0\r\n\r\n")
        if (call.connection + len(setup.engine.calls)) % 2:
            call.writer.close()
        else:
            await call.reader.read(1)  # swallows a part of the next request, then closes without an answer
            call.writer.close()

    async with behind_gateway(script) as setup, connected(setup.port) as client:
        for _ in range(40):
            client.ask(ASK)
            assert (await client.answer()).status == 200


@in_loop
async def test_many_kept_connections_that_are_all_closing_give_no_error_good() -> None:
    arrived = asyncio.Event()

    async def script(call: Call) -> None:
        if len(setup.engine.calls) == 5:
            arrived.set()
        if len(setup.engine.calls) <= 5:
            await arrived.wait()
            await ok(call)
            await call.reader.read(1)
        else:
            await ok(call)
        call.writer.close()

    async with behind_gateway(script) as setup:
        answers = await asyncio.gather(*[get(setup.port, ASK) for _ in range(5)])
        assert [got.status for got in answers] == [200] * 5
        assert (await get(setup.port, ASK)).status == 200
        assert setup.engine.connections == 6


@in_loop
async def test_dying_socket_that_still_accepts_is_given_time_to_be_noticed_good() -> None:
    second = Engine(ok)

    async def script(call: Call) -> None:
        call.die()

    async with behind_gateway(script) as setup, connected(setup.port) as client:
        client.ask(ASK)
        await until(lambda: len(setup.engine.calls) == 1 and setup.upstream.in_flight == 0)
        await asyncio.sleep(0.02)
        setup.upstream.become(State.RESTARTING)
        await second.start()
        setup.upstream.become(State.READY, second.endpoint)
        assert (await client.answer()).status == 200
        assert len(setup.engine.calls) == 1


@in_loop
async def test_death_within_a_stream_is_an_error_in_the_stream_bad() -> None:
    async def script(call: Call) -> None:
        await call.send(SSE_HEAD + chunk(event("one")) + chunk(b'data: {"choices": [{"del'))
        await read.wait()
        call.die()

    read = asyncio.Event()
    async with behind_gateway(script) as setup, connected(setup.port) as client:
        client.ask(ASK)
        await client.head()
        assert await client.piece() == event("one")
        read.set()
        last = await client.piece()
        assert last.startswith(b"data: {")
        assert last.endswith(b"\n\n")
        assert json.loads(last[6:])["error"]["code"] == "engine_died"
        assert await client.piece() == b""
        assert len(setup.engine.calls) == 1
        # the connection is good for the next request
        client.ask(path="/health")
        assert (await client.answer()).status == 200


@in_loop
async def test_death_within_an_event_too_large_to_be_held_is_an_event_of_its_own_ugly() -> None:
    async def script(call: Call) -> None:
        await call.send(SSE_HEAD + chunk(b"data: " + b"x" * (exchange.MAX_EVENT + 10)))
        await read.wait()
        call.die()

    read = asyncio.Event()
    async with behind_gateway(script) as setup, connected(setup.port) as client:
        client.ask(ASK)
        await client.head()
        got = await client.piece()
        read.set()
        while piece := await client.piece():
            got += piece
        events = got.split(b"\n\n")
        assert [event[:12] for event in events] == [b"data: xxxxxx", b'data: {"erro', b""]


@in_loop
async def test_death_within_json_is_an_answer_with_an_error_bad() -> None:
    async def script(call: Call) -> None:
        await call.send(answer(b'{"choices": "long"}')[:-4])
        call.die()

    async with behind_gateway(script) as setup:
        got = await get(setup.port, ASK)
        assert (got.status, got.error["code"]) == (502, "engine_died")
        assert len(setup.engine.calls) == 1


@in_loop
async def test_death_within_other_bodies_breaks_the_connection_bad() -> None:
    async def script(call: Call) -> None:
        await call.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: audio/wav\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"
        )
        await read.wait()
        call.die()

    read = asyncio.Event()
    async with behind_gateway(script) as setup, connected(setup.port) as client:
        client.ask(ASK)
        await client.head()
        assert await client.piece() == b"abc"
        read.set()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await client.piece()


@pytest.mark.parametrize(("body", "whole"), [(event("x") + DONE, True), (event("x"), False)])
def test_stream_that_only_ends_with_its_connection_needs_its_done_ugly(body: bytes, whole: bool) -> None:
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + body)
        call.writer.close()

    @in_loop
    async def run() -> None:
        async with behind_gateway(script) as setup:
            got = await get(setup.port, ASK)
            assert got.body.startswith(body)
            assert (b"engine_died" in got.body) is not whole

    run()


JSON_HEAD = b"Content-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("head", "body", "status"),
    [
        # the end of the connection is the only end there is: the document itself tells
        (b"HTTP/1.0 200 OK\r\n" + JSON_HEAD, b'{"a": [1, 2]}', 200),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + JSON_HEAD, b'{"a": [1, 2]}\n', 200),
        (b"HTTP/1.1 200 OK\r\n" + JSON_HEAD, b"[" * 100_000 + b"]" * 100_000, 200),
        (b"HTTP/1.0 404 Not Found\r\n" + JSON_HEAD, b'{"a": [1, 2', 502),
        (b"HTTP/1.1 200 OK\r\n" + JSON_HEAD, b'{"a": "x', 502),
        (b"HTTP/1.1 200 OK\r\n" + JSON_HEAD, b"", 502),
        # a length that is not reached, and chunks without their last
        (b"HTTP/1.1 200 OK\r\nContent-Length: 14\r\n" + JSON_HEAD, b'{"a": [1, 2]}', 502),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n" + JSON_HEAD, chunk(b"{}"), 502),
    ],
)
def test_json_whose_end_is_missing_is_an_error_bad(head: bytes, body: bytes, status: int) -> None:
    async def script(call: Call) -> None:
        await call.send(head + b"\r\n" + body)
        call.writer.close()  # a proper end, as far as TCP can tell

    @in_loop
    async def run() -> None:
        async with behind_gateway(script) as setup:
            got = await get(setup.port, ASK)
            assert got.status == status
            if status == 502:
                assert got.error["code"] == "engine_died"
            else:
                assert got.body == body

    run()


@pytest.mark.parametrize("framing", [b"Content-Length: 30\r\n", b"Transfer-Encoding: chunked\r\n"])
@pytest.mark.parametrize("kind", [b"audio/wav", b"text/event-stream"])
def test_answer_whose_end_is_missing_is_never_taken_for_whole_bad(framing: bytes, kind: bytes) -> None:
    body = event("x")[:25]

    async def script(call: Call) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: " + kind + b"\r\n" + framing + b"\r\n"
        await call.send(head + (chunk(body) if b"chunked" in framing else body))
        call.writer.close()

    @in_loop
    async def run() -> None:
        async with behind_gateway(script) as setup, connected(setup.port) as client:
            client.ask(ASK)
            if kind == b"text/event-stream":
                assert b"engine_died" in (await client.answer()).body
            else:
                with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                    await client.answer()

    run()


@pytest.mark.parametrize(
    "nonsense",
    [
        b"hello\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 70_000 + b"\r\n\r\n",
    ],
)
def test_engine_that_does_not_speak_http_is_no_answer_ugly(nonsense: bytes) -> None:
    async def script(call: Call) -> None:
        await call.send(nonsense)
        await call.gone()

    @in_loop
    async def run() -> None:
        async with behind_gateway(script) as setup, connected(setup.port) as client:
            client.ask(ASK)
            # where its head had passed already the answer breaks off
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                assert (await client.answer()).status == 502
            assert len(setup.engine.calls) == 1

    run()


@in_loop
async def test_client_that_leaves_takes_its_request_along_good() -> None:
    gone = asyncio.Event()

    async def script(call: Call) -> None:  # as during prefill: no byte yet
        await call.gone()
        gone.set()

    async with behind_gateway(script) as setup:
        async with connected(setup.port) as client:
            client.ask(ASK)
            await until(lambda: len(setup.engine.calls) == 1)
            assert setup.upstream.in_flight == 1
        await gone.wait()
        assert setup.upstream.in_flight == 0


@in_loop
async def test_client_that_leaves_within_a_stream_ends_it_good() -> None:
    gone = asyncio.Event()

    async def script(call: Call) -> None:
        await call.send(SSE_HEAD + chunk(event("one")))
        await call.gone()
        gone.set()

    async with behind_gateway(script) as setup:
        async with connected(setup.port) as client:
            client.ask(ASK)
            await client.head()
            await client.piece()
        await gone.wait()
        assert setup.upstream.in_flight == 0


@in_loop
async def test_client_that_leaves_while_waiting_is_forgotten_good() -> None:
    async with behind_gateway(ok) as setup:
        setup.upstream.become(State.STARTING)
        await asyncio.sleep(0)
        route = setup.gateway._dispatcher.routes["gemma"]
        async with connected(setup.port) as client:
            client.ask(ASK)
            await until(lambda: route.waiting == 1)
        await until(lambda: route.waiting == 0)
        setup.upstream.become(State.READY, setup.engine.endpoint)
        assert (await get(setup.port, ASK)).status == 200
        assert len(setup.engine.calls) == 1


@in_loop
async def test_too_many_waiting_are_refused_bad() -> None:
    async with behind_gateway(ok) as setup:
        setup.upstream.become(State.STARTING)
        await asyncio.sleep(0)
        setup.gateway._dispatcher.routes["gemma"].waiting = exchange.MAX_WAITING
        got = await get(setup.port, ASK)
        assert (got.status, got.error["code"]) == (503, "overloaded")
        assert "retry-after" in got.headers


@in_loop
async def test_switch_behind_the_name_loses_nothing_good() -> None:
    second, read = Engine(ok), asyncio.Event()
    await second.start()

    async def script(call: Call) -> None:
        await call.send(SSE_HEAD + chunk(event("one")))
        await read.wait()
        await call.send(chunk(DONE) + b"0\r\n\r\n")

    async with (
        behind_gateway(script) as setup,
        connected(setup.port) as streaming,
        connected(setup.port) as waiting,
    ):
        streaming.ask(ASK)
        await streaming.head()
        await streaming.piece()
        setup.upstream.become(State.STARTING)
        assert (await get(setup.port, path="/health")).status == 503
        waiting.ask(ASK)
        await until(lambda: setup.gateway._dispatcher.routes["gemma"].waiting == 1)
        setup.upstream.become(State.READY, second.endpoint)
        assert (await waiting.answer()).status == 200
        assert len(second.calls) == 1
        read.set()  # what was under way ends on the old one
        assert await streaming.piece() == DONE
        assert await streaming.piece() == b""
        assert setup.upstream.in_flight == 0


@in_loop
async def test_removed_engine_is_unknown_bad() -> None:
    async with behind_gateway(ok) as setup, connected(setup.port) as client:
        setup.gateway.add("other", FakeUpstream("other", State.STARTING))
        client.ask({"model": "other"})
        await until(lambda: setup.gateway._dispatcher.routes["other"].waiting == 1)
        setup.gateway.remove("other")
        assert (await client.answer()).status == 404
        assert (await get(setup.port, {"model": "other"})).status == 404


@in_loop
async def test_fault_of_ours_is_answered_and_logged_ugly() -> None:
    class Broken(FakeUpstream):
        def status(self) -> dict[str, object]:
            raise RuntimeError("boom")

    async with listening(Gateway({"gemma": Broken()}, port=0)) as gateway:
        got = await get(gateway.port, path="/api/status")
        assert (got.status, got.error["code"]) == (500, "internal")
        assert b"boom" not in got.body
