"""The gateway's own answers: models, health, status, events."""

from __future__ import annotations

import asyncio
import json
import threading

from orchestrator.backend import State
from orchestrator.gateway import api
from tests.gateway.scripted import FakeUpstream, behind_gateway, connected, get, in_loop, ok, until


@in_loop
async def test_models_are_the_profiles_with_their_states_good() -> None:
    async with behind_gateway(ok) as setup:
        setup.gateway.add("llama", FakeUpstream("llama", State.STARTING))
        listed = json.loads((await get(setup.port, path="/v1/models")).body)
        assert listed["object"] == "list"
        assert [(entry["id"], entry["state"]) for entry in listed["data"]] == [
            ("gemma", "ready"),
            ("llama", "starting"),
        ]
        one = json.loads((await get(setup.port, path="/v1/models/llama")).body)
        assert one["object"] == "model"
        assert (await get(setup.port, path="/v1/models/none")).status == 404


@in_loop
async def test_health_is_200_only_while_everything_is_served_good() -> None:
    async with behind_gateway(ok) as setup:
        assert (await get(setup.port, path="/health")).status == 200
        for state in State:
            setup.upstream.become(state, setup.engine.endpoint if state is State.READY else None)
            await asyncio.sleep(0)
            got = await get(setup.port, path="/health")
            assert got.status == (200 if state is State.READY else 503)
            assert json.loads(got.body)["profiles"] == {"gemma": state}
        setup.gateway.remove("gemma")
        assert (await get(setup.port, path="/health")).status == 503


@in_loop
async def test_status_is_what_the_engines_say_good() -> None:
    async with behind_gateway(ok) as setup:
        got = json.loads((await get(setup.port, path="/api/status")).body)
        assert got["gateway"]["url"] == f"http://127.0.0.1:{setup.port}/v1"
        assert [profile["name"] for profile in got["profiles"]] == ["gemma"]


@in_loop
async def test_head_is_the_answer_without_its_body_good() -> None:
    async with behind_gateway(ok) as setup, connected(setup.port) as client:
        for path in ("/v1/models", "/health", "/api/status", "/api/events"):
            client.ask(path=path, method="HEAD")
            assert (await client.head()).status == 200
        client.ask(path="/v1/chat/completions", method="HEAD")
        assert (await client.head()).status == 405


@in_loop
async def test_methods_and_paths_that_are_not_served_are_named_bad() -> None:
    async with behind_gateway(ok) as setup:
        got = await get(setup.port, b"{}", path="/v1/models")
        assert (got.status, got.headers["allow"]) == (405, "GET, HEAD, OPTIONS")
        assert (await get(setup.port, path="/v1/x", method="PROPFIND")).status == 405
        for path in ("/", "/slots", "/v1", "/metrics", "/api/none"):
            got = await get(setup.port, path=path)
            assert (got.status, got.error["code"]) == (404, "not_found")
        assert setup.engine.calls == []


@in_loop
async def test_events_come_as_they_happen_good() -> None:
    async with behind_gateway(ok) as setup, connected(setup.port) as client:
        client.ask(path="/api/events")
        assert (await client.head()).headers["content-type"] == "text/event-stream"
        read = b""
        while b"ready" not in read:  # where things stand, first
            read += await client.piece()
        crash = threading.Thread(target=setup.upstream.become, args=(State.RESTARTING,), kwargs={"code": 139})
        crash.start()
        told = (await client.piece()).decode().split("\n")
        assert told[0] == "event: state"
        told = json.loads(told[1].removeprefix("data: "))
        assert (told["profile"], told["state"], told["fields"]) == ("gemma", "restarting", {"code": 139})
        crash.join()


@in_loop
async def test_slow_listener_loses_events_and_is_told_how_many_ugly() -> None:
    async with behind_gateway(ok) as setup, connected(setup.port, limit=1024) as client:
        client.ask(path="/api/events")
        await client.head()
        client.writer.transport.pause_reading()
        (served,) = setup.gateway._clients
        while not served.paused:
            setup.upstream.tell("noise", text="x" * 100_000)
            await asyncio.sleep(0)
        for _ in range(api.MAX_QUEUED + 7):
            setup.upstream.tell("small")
        await asyncio.sleep(0.01)
        (feed,) = setup.gateway._dispatcher.feeds
        assert len(feed._queue) == api.MAX_QUEUED
        client.writer.transport.resume_reading()
        read = b""
        while b'{"count":' not in read:
            read = (read + await client.reader.read(2**16))[-200:]
        assert b'event: missed\ndata: {"count":7}\n\n' in read


@in_loop
async def test_listener_that_leaves_is_forgotten_good() -> None:
    async with behind_gateway(ok) as setup:
        async with connected(setup.port) as client:
            client.ask(path="/api/events")
            await client.head()
            assert len(setup.gateway._dispatcher.feeds) == 1
        await until(lambda: not setup.gateway._dispatcher.feeds)
