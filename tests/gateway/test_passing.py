"""What goes through: bodies, headers both ways, streams as they come, and the model's name."""

from __future__ import annotations

import asyncio
import json

from orchestrator.backend import State
from tests.gateway.scripted import (
    DONE,
    KEY,
    SSE_HEAD,
    Call,
    FakeUpstream,
    answer,
    behind_gateway,
    chunk,
    connected,
    event,
    get,
    in_loop,
    ok,
)


@in_loop
async def test_plain_request_is_answered_good() -> None:
    async with behind_gateway(ok) as setup:
        got = await get(setup.port, {"model": "gemma", "messages": [{"role": "user", "content": "é😀"}]})
        assert got.status == 200
        assert json.loads(got.body)["messages"][0]["content"] == "é😀"
        assert setup.upstream.most == 1
        assert setup.upstream.in_flight == 0


@in_loop
async def test_model_name_is_the_engines_and_all_else_is_verbatim_good() -> None:
    async with behind_gateway(ok) as setup:
        body = b'{"seed": 12345678901234567890123, "model":"gemma", "t": 1e400, "s":"\\u00e9"}'
        got = await get(setup.port, body)
        assert b'"model":"engine-model"' in got.body
        assert b"12345678901234567890123" in got.body
        assert b"1e400" in got.body
        assert b'"\\u00e9"' in got.body


@in_loop
async def test_body_is_untouched_when_the_name_is_right_good() -> None:
    async with behind_gateway(ok) as setup:
        body = b' { "model" : "engine-model" , "x" : [ 1 ] } '
        assert (await get(setup.port, body)).body == body


@in_loop
async def test_absent_model_means_the_only_engine_good() -> None:
    async with behind_gateway(ok) as setup:
        assert json.loads((await get(setup.port, {"a": 1})).body) == {"a": 1, "model": "engine-model"}
        assert (await get(setup.port, path="/v1/anything?x=1&y=%20")).status == 200
        assert setup.engine.calls[-1].head.startswith(b"GET /v1/anything?x=1&y=%20 HTTP/1.1\r\n")
        assert b"content-length" not in setup.engine.calls[-1].head.lower()


@in_loop
async def test_unknown_model_names_those_that_are_served_bad() -> None:
    async with behind_gateway(ok) as setup:
        setup.gateway.add("llama", FakeUpstream("llama"))
        got = await get(setup.port, {"model": "gpt-4"})
        assert got.status == 404
        assert got.error["code"] == "model_not_found"
        assert "gemma, llama" in got.error["message"]
        # the engine's own id is unambiguous only while there is one engine
        assert (await get(setup.port, {"model": "engine-model"})).status == 404
        assert (await get(setup.port, {})).error["code"] == "model_missing"
        assert (await get(setup.port, {"model": "gemma"})).status == 200


@in_loop
async def test_body_that_is_no_json_object_is_refused_bad() -> None:
    async with behind_gateway(ok) as setup:
        for body in (b"{", b"[]", b'"x"', b'{"model": 1}', b"\xff\xfe", b"[" * 100_000):
            got = await get(setup.port, body)
            assert (got.status, got.error["code"]) == (400, "invalid_json")
        assert setup.engine.calls == []


@in_loop
async def test_form_with_a_file_goes_to_the_only_engine_good() -> None:
    async with behind_gateway(ok) as setup:
        got = await get(setup.port, b"--x\r\n", headers="Content-Type: multipart/form-data; boundary=x\r\n")
        assert got.body == b"--x\r\n"


@in_loop
async def test_headers_that_belong_to_one_hop_stay_there_good() -> None:
    more = (
        b"Connection: keep-alive, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\nX-Kept: yes\r\n"
        b"Access-Control-Allow-Origin: *\r\nTrailer: x\r\nSet-Cookie: a=b\r\n"
    )

    async def script(call: Call) -> None:
        await call.send(answer(b"{}", more=more))

    async with behind_gateway(script) as setup:
        got = await get(
            setup.port,
            {"model": "gemma"},
            headers="Authorization: Bearer mine\r\nX-Api-Key: mine\r\nCookie: c=1\r\nConnection: x-own\r\n"
            "X-Own: 1\r\nTE: trailers\r\nX-Conversation-Id: 7\r\nX-Through: yes\r\n"
            "Content-Type: application/json\r\n",
        )
        head = setup.engine.calls[0].head.decode().lower()
        for name in ("mine", "cookie", "x-own", "te:", "x-conversation-id", "connection:"):
            assert name not in head
        assert "x-through: yes" in head
        assert "content-type: application/json" in head
        assert setup.engine.calls[0].header("Authorization") == f"Bearer {KEY}"
        assert setup.engine.calls[0].header("Host") == f"127.0.0.1:{setup.engine.port}"
        assert set(got.headers) == {"content-type", "content-length", "x-kept"}


@in_loop
async def test_the_engines_key_is_never_shown_good() -> None:
    async with behind_gateway(ok) as setup:
        for path in ("/v1/models", "/health", "/api/status", "/nothing", "/v1/models/gemma"):
            got = await get(setup.port, path=path)
            assert KEY.encode() not in got.body
            assert KEY not in str(got.headers)


@in_loop
async def test_events_arrive_before_the_next_is_made_good() -> None:
    read = asyncio.Event()

    async def script(call: Call) -> None:
        await call.send(SSE_HEAD + chunk(event("one")))
        await read.wait()
        await call.send(chunk(event("two")) + chunk(DONE) + b"0\r\n\r\n")

    async with behind_gateway(script) as setup, connected(setup.port) as client:
        client.ask({"model": "gemma", "stream": True})
        head = await client.head()
        assert head.headers["content-type"] == "text/event-stream"
        assert await client.piece() == event("one")
        read.set()
        rest = b""
        while piece := await client.piece():
            rest += piece
        assert rest == event("two") + DONE


@in_loop
async def test_other_streams_are_not_held_back_good() -> None:
    read = asyncio.Event()

    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Type: audio/wav\r\nContent-Length: 6\r\n\r\nabc")
        await read.wait()
        await call.send(b"def")

    async with behind_gateway(script) as setup, connected(setup.port) as client:
        client.ask({"model": "gemma"})
        assert (await client.head()).headers["content-length"] == "6"
        assert await client.reader.readexactly(3) == b"abc"
        read.set()
        assert await client.reader.readexactly(3) == b"def"


@in_loop
async def test_stream_is_whole_however_its_bytes_are_split_good() -> None:
    body = event("é") + b": ping\n\n" + event("😀") + b"data: a\r\n\r\n" + b"data: last"
    raw = (
        SSE_HEAD
        + chunk(body[:7])
        + chunk(body[7:30])
        + b"5;ext=1\r\n"
        + body[30:35]
        + b"\r\n"
        + chunk(body[35:])
    )
    raw += b"0\r\nX-Trailer: 1\r\n\r\n"

    for at in range(1, len(raw)):

        async def script(call: Call, at: int = at) -> None:
            await call.send(raw[:at])
            await asyncio.sleep(0)
            await call.send(raw[at:])

        async with behind_gateway(script) as setup:
            got = await get(setup.port, {"model": "gemma"})
            assert got.body == body


@in_loop
async def test_http_1_0_client_gets_the_bare_body_good() -> None:
    async def script(call: Call) -> None:
        await call.send(SSE_HEAD + chunk(event("one")) + chunk(DONE) + b"0\r\n\r\n")

    async with behind_gateway(script) as setup, connected(setup.port) as client:
        client.write(b"POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")
        got = await client.answer()
        assert "transfer-encoding" not in got.headers
        assert got.headers["connection"] == "close"
        assert got.body == event("one") + DONE


@in_loop
async def test_connections_are_reused_on_both_sides_good() -> None:
    async with behind_gateway(ok) as setup, connected(setup.port) as client:
        for number in range(5):
            client.ask({"model": "gemma", "n": number})
            assert json.loads((await client.answer()).body)["n"] == number
        assert setup.engine.connections == 1


@in_loop
async def test_pipelined_requests_are_answered_in_order_good() -> None:
    async with behind_gateway(ok) as setup, connected(setup.port) as client:
        for number in range(40):
            client.ask({"model": "gemma", "n": number})
            client.ask(path="/health")
        for number in range(40):
            assert json.loads((await client.answer()).body)["n"] == number
            assert (await client.answer()).status == 200


@in_loop
async def test_error_of_the_engine_is_passed_on_bad() -> None:
    async def script(call: Call) -> None:
        await call.send(answer(b'{"error":{"message":"too long"}}', status=b"400 Bad Request"))

    async with behind_gateway(script) as setup:
        got = await get(setup.port, {"model": "gemma"})
        assert (got.status, got.error["message"]) == (400, "too long")


@in_loop
async def test_answers_without_a_body_end_good() -> None:
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 204 No Content\r\n\r\n")

    async with behind_gateway(script) as setup, connected(setup.port) as client:
        for _ in range(2):
            client.ask(path="/v1/files/1", method="DELETE")
            assert (await client.answer()).status == 204


@in_loop
async def test_interim_answers_are_not_the_answer_ugly() -> None:
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + answer(b'{"a":1}'))

    async with behind_gateway(script) as setup:
        assert (await get(setup.port, {"model": "gemma"})).body == b'{"a":1}'


@in_loop
async def test_large_json_answer_passes_without_being_held_whole_ugly() -> None:
    body = b'{"x":"' + b"y" * (9 * 2**20) + b'"}'

    async def script(call: Call) -> None:
        await call.send(answer(body))

    async with behind_gateway(script) as setup:
        assert (await get(setup.port, {"model": "gemma"})).body == body


@in_loop
async def test_engine_that_is_not_loopback_http_one_has_a_prefix_good() -> None:
    async with behind_gateway(ok) as setup:
        import dataclasses

        other = dataclasses.replace(setup.engine.endpoint, url=setup.engine.endpoint.url + "/api", key=None)
        setup.upstream.become(State.READY, other)
        await asyncio.sleep(0)
        assert (await get(setup.port, {"model": "gemma"})).status == 200
        assert setup.engine.calls[-1].head.startswith(b"POST /api/v1/chat/completions ")
        assert setup.engine.calls[-1].header("Authorization") is None
