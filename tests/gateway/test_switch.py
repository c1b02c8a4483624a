"""Clients of the address while the engine behind it is changed, and who may ask for that."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from orchestrator.gateway import Gateway
from orchestrator.profile import Profile
from orchestrator.switching import Switchable
from tests.backends.conftest import fake_profile, tiny_model  # noqa: F401 - fixtures
from tests.gateway.scripted import Answer, FakeUpstream, connected, get, in_loop, listening, until
from tests.test_switching import make

ASK = {"model": "fake", "prompt": "one two", "max_tokens": 20, "ignore_eos": True}
JSON = "Content-Type: application/json\r\n"
Profiles = Callable[..., Profile]


@contextlib.asynccontextmanager
async def switchable(profile: Profile, **options: Any) -> AsyncIterator[tuple[Switchable, int]]:
    engine = Switchable(profile, make=make)
    try:
        async with listening(Gateway({"fake": engine}, port=0, **options)) as gateway:
            await asyncio.to_thread(engine.start)
            yield engine, gateway.port
    finally:
        await asyncio.to_thread(engine.stop, 0)


async def switch(port: int, body: Any = None, headers: str = JSON, **fields: Any) -> Answer:
    """Ask for a switch."""
    asked = {"backend": "other", **fields} if body is None else body
    return await get(port, asked, path="/api/switch", headers=headers)


@in_loop
async def test_eight_clients_lose_nothing_in_ten_switches_ugly(fake_profile: Profiles) -> None:  # noqa: F811
    over = asyncio.Event()
    served = [0] * 8

    async def client(port: int, number: int) -> None:
        async with connected(port) as connection:
            while not over.is_set():
                stream = number % 2 == 0
                connection.ask(ASK, path="/v1/completions", stream=stream)
                got = await connection.answer()
                assert got.status == 200, got.body
                assert not stream or got.body.endswith(b"data: [DONE]\n\n")
                assert b'"error"' not in got.body
                served[number] += 1

    async with switchable(fake_profile({"rate": 200.0}, slots=8)) as (_, port):
        clients = [asyncio.create_task(client(port, number)) for number in range(8)]
        for number in range(10):
            to = "llama-server" if number % 2 else "other"
            got = await switch(port, backend=to, beside=number % 4 < 2)
            assert got.status == 200, got.body
        over.set()
        await asyncio.gather(*clients)
    assert min(served) >= 5


@in_loop
async def test_an_answer_that_outlasts_the_drain_time_says_so_bad(fake_profile: Profiles) -> None:  # noqa: F811
    async with switchable(fake_profile({"rate": 50.0}, slots=8)) as (engine, port), connected(port) as client:
        client.ask(ASK, path="/v1/completions", stream=True, max_tokens=100_000)
        await client.head()
        seen = await client.piece()
        got = await switch(port, drain_s=0.2)
        assert b'"cut":1' in got.body
        while piece := await client.piece():
            seen += piece
        assert b'"code":"engine_switched"' in seen
        assert b"[DONE]" not in seen
        assert engine.status()["in_flight"] == 0


@in_loop
async def test_a_request_whose_answer_had_not_begun_is_answered_by_the_new_engine_good(
    fake_profile: Profiles,  # noqa: F811
) -> None:
    async with switchable(fake_profile(slots=8)) as (engine, port), httpx.AsyncClient() as direct:
        await direct.post(engine.endpoint(0).url + "/fake/do", json={"set": {"ttft": 60.0}})
        waiting = asyncio.create_task(get(port, ASK, path="/v1/completions"))
        await until(lambda: engine.status()["in_flight"] == 1)
        assert (await switch(port, drain_s=0)).status == 200
        assert (await waiting).status == 200


@in_loop
async def test_requests_wait_while_one_engine_follows_the_other_good(fake_profile: Profiles) -> None:  # noqa: F811
    async with switchable(fake_profile({"load_time": 0.3}, slots=8)) as (engine, port):
        asked = asyncio.create_task(switch(port, beside=False))
        await until(lambda: engine.status()["switching_to"] == "other")
        assert (await get(port, path="/health")).status == 503
        assert (await get(port, ASK, path="/v1/completions")).status == 200
        assert (await asked).status == 200
        assert (await get(port, path="/health")).status == 200


@in_loop
async def test_two_at_once_and_failures_are_told_apart_bad(fake_profile: Profiles) -> None:  # noqa: F811
    failing = {"launches": [{}, {"load_time": 1.0, "exit_after": 0.5, "exit_code": 3}]}
    async with switchable(fake_profile(failing, slots=8)) as (engine, port):
        first = asyncio.create_task(switch(port))
        await until(lambda: engine.status()["switching_to"] == "other")
        second = await switch(port)
        assert (second.status, second.error["code"]) == (409, "switch_refused")
        got = await first
        assert (got.status, got.error["code"]) == (502, "switch_failed")
        assert "exit code 3" in got.error["message"]
        assert (await get(port, ASK, path="/v1/completions")).status == 200


@in_loop
async def test_a_client_that_leaves_does_not_call_it_off_good(fake_profile: Profiles) -> None:  # noqa: F811
    async with switchable(fake_profile({"load_time": 0.3}, slots=8)) as (engine, port):
        async with connected(port) as client:
            client.ask({"backend": "other"}, path="/api/switch", headers=JSON)
            await until(lambda: engine.status()["switching_to"] == "other")
        await until(lambda: engine.status()["backend"] == "other")


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (b"{}", JSON, 400, "invalid_json"),
        (b"nonsense", JSON, 400, "invalid_json"),
        (b'{"backend": "b", "profile": "/tmp/p.yaml"}', JSON, 400, "invalid_json"),
        (b'{"backend": "b", "drain_s": -1}', JSON, 400, "invalid_value"),
        (b'{"backend": "b", "drain_s": 1e9}', JSON, 400, "invalid_value"),
        (b'{"backend": "b", "model": "nobody"}', JSON, 404, "model_not_found"),
        (b'{"backend": "b"}', "Content-Type: text/plain\r\n", 415, "content_type"),
        (b'{"backend": "b"}', "", 415, "content_type"),
        (b'{"backend": "b"}', JSON + "Origin: http://evil.example\r\n", 403, "origin_refused"),
        (b'{"backend": "b"}', JSON + "Sec-Fetch-Site: cross-site\r\n", 403, "origin_refused"),
        (b'{"backend": "b"}', JSON, 409, "switch_refused"),  # this upstream has no other engine
    ],
)
@in_loop
async def test_what_is_no_order_is_refused_bad(body: bytes, headers: str, status: int, code: str) -> None:
    async with listening(Gateway({"gemma": FakeUpstream()}, port=0)) as gateway:
        got = await switch(gateway.port, body, headers)
        assert (got.status, got.error["code"]) == (status, code)


@in_loop
async def test_the_key_is_asked_for_bad() -> None:
    async with listening(Gateway({"gemma": FakeUpstream()}, port=0, api_key="sesame")) as gateway:
        assert (await switch(gateway.port)).status == 401
        assert (await switch(gateway.port, headers=JSON + "X-Api-Key: sesame\r\n")).status == 409


@in_loop
async def test_only_post_switches_bad() -> None:
    async with listening(Gateway({"gemma": FakeUpstream()}, port=0)) as gateway:
        for method, status in (("GET", 405), ("HEAD", 405), ("PUT", 405), ("OPTIONS", 204)):
            async with connected(gateway.port) as client:
                client.ask(path="/api/switch", method=method)
                got = await client.head()
                assert (got.status, got.headers["allow"]) == (status, "POST, OPTIONS")
