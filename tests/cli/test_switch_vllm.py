"""The real vLLM gives way to the real llama-server behind one address, while four clients stream."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.backends.vllm_real import vllm_environ
from tests.cli.conftest import Cli, Running, Start, wait_for_end

__all__ = ["vllm_environ"]  # a fixture

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("gemma_gguf", "nothing_left"),
]

PROFILE = str(Path(__file__).parent.parent.parent / "profiles" / "gemma.yaml")
CONTEXT, TOKENS = 64, 16


def ready(service: Running) -> str:
    """Wait for a start that takes minutes on a busy machine."""
    for _ in range(10):
        with contextlib.suppress(queue.Empty):
            return service.ready()
    raise AssertionError(service.err)


def stream(url: str, number: int) -> int:
    """Stream one answer to its end; returns how many tokens it has."""
    asked = {
        "model": "gemma",
        "prompt": f"The number {number} is",
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with httpx.stream("POST", f"{url}/completions", json=asked, timeout=300, trust_env=False) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", lines
    items = [json.loads(line) for line in lines[:-1]]
    assert not [item for item in items if "error" in item]
    (usage,) = [item["usage"] for item in items if item.get("usage")]
    return int(usage["completion_tokens"])


def test_no_request_is_lost_and_no_client_configured_anew_good(
    cli: Cli, start: Start, vllm_environ: dict[str, str], lasting_cache: Path
) -> None:
    environ = {
        "ORCHESTRATOR_ENGINES": vllm_environ["ORCHESTRATOR_ENGINES"],
        "XDG_CACHE_HOME": str(lasting_cache.parent.parent),
    }
    settings = ("--set", f"context={CONTEXT}", "--set", "vllm.eager=true")
    url = ready(start("up", PROFILE, "--port", "0", "--backend", "vllm-cpu", *settings, environ=environ))

    def run() -> dict[str, Any]:
        """Use what serves the profile now, to the end of its context."""
        done = cli("run", PROFILE, "Once", "--temperature", "0", "--json", environ=environ)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    first = run()
    assert (first["backend"], first["load_s"]) == ("vllm-cpu", None)
    assert first["usage"]["completion_tokens"] > 16, "what vLLM makes when it is told no number"
    (before,) = json.loads(cli("ps", "--json").stdout)
    over = threading.Event()
    begun = threading.Barrier(5)

    def client(number: int) -> list[int]:
        begun.wait(300)
        found = []
        while not over.is_set():
            found.append(stream(url, number))
        return found

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(client, number) for number in range(4)]
        begun.wait(300)
        try:
            done = cli("switch", "--backend", "llama-server", environ=environ)
            assert (done.returncode, done.stdout) == (0, "switched gemma llama-server\n"), done.stderr
            assert "answers ended" not in done.stderr
        finally:
            over.set()
        counts = [each.result(300) for each in clients]
    assert all(counts)
    assert {count for each in counts for count in each} == {TOKENS}
    wait_for_end(before["engine_pids"])
    (after,) = json.loads(cli("ps", "--json").stdout)
    assert (after["backend"], after["url"], after["state"]) == ("llama-server", url, "ready")
    second = run()
    assert (second["backend"], second["load_s"]) == ("llama-server", None)
    assert cli("down", "gemma").stdout == "stopped gemma\n"
    wait_for_end(after["engine_pids"])
