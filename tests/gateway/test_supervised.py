"""The gateway in front of a supervised engine that really dies and really comes back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from backends.llama_server import LlamaServer
from orchestrator.backend import State
from orchestrator.gateway import Gateway
from tests.backends.conftest import engine, fake_profile, tiny_model  # noqa: F401 - fixtures
from tests.gateway.scripted import connected, get, in_loop, listening, until

ASK = {"model": "fake", "prompt": "one two", "max_tokens": 20}


@contextlib.asynccontextmanager
async def serving(backend: LlamaServer) -> AsyncIterator[int]:
    async with listening(Gateway({"fake": backend}, port=0)) as gateway:
        await asyncio.to_thread(backend.start)
        await until(lambda: gateway._dispatcher.routes["fake"].pool is not None)
        yield gateway.port


Make = Callable[..., LlamaServer]


@in_loop
async def test_request_that_met_a_dying_engine_is_served_by_the_next_good(engine: Make) -> None:  # noqa: F811
    backend = engine({"launches": [{"crash_request": 2}]})  # the first request is the supervisor's own
    async with serving(backend) as port:
        got = await get(port, ASK, path="/v1/completions")
        assert got.status == 200
        assert backend.status()["restarts"] == 1


@in_loop
async def test_stream_that_met_a_dying_engine_says_so_bad(engine: Make) -> None:  # noqa: F811
    backend = engine({"launches": [{"crash_after": 5}]})
    async with serving(backend) as port:
        got = await get(port, ASK, path="/v1/completions", stream=True)
        assert got.status == 200
        assert b"engine_died" in got.body
        assert b"[DONE]" not in got.body
        # and whoever comes next waits for the restart
        got = await get(port, ASK, path="/v1/completions", stream=True)
        assert b"[DONE]" in got.body


@in_loop
async def test_every_request_is_answered_or_told_while_engines_die_ugly(engine: Make) -> None:  # noqa: F811
    backend = engine({"launches": [{"crash_request": 6}, {"crash_after": 9}, {"crash_request": 3}]}, slots=4)
    outcomes: list[str] = []

    async def client(port: int) -> None:
        async with connected(port) as connection:
            for _ in range(6):
                connection.ask(ASK, path="/v1/completions", stream=True)
                got = await connection.answer()
                died = b"engine_died" in got.body
                assert died or (got.status == 200 and got.body.endswith(b"data: [DONE]\n\n"))
                outcomes.append("told" if died else "answered")

    async with serving(backend) as port:
        await asyncio.gather(*[client(port) for _ in range(6)])
    assert len(outcomes) == 36
    assert outcomes.count("answered") >= 18
    assert backend.state is State.READY
    assert backend.status()["restarts"] == 3
    assert backend.status()["in_flight"] == 0
