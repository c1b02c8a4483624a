"""What every backend must do, whatever its engine: a suite to inherit.

A test class inherits `BackendContract` and provides the fixture `make`: a function that takes profile keys
(`slots`, `context`, ...) and returns a new backend that serves a small model; it stops them all in the end.
Requests are plain HTTP against the `Endpoint`, so that this tests backends and nothing else.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

import httpx
import psutil
import pytest

from orchestrator.backend import Backend, Endpoint, State
from orchestrator.errors import BackendError

Make = Callable[..., Backend]


class BackendContract:
    """Ready, stream, cancel, concurrency, context, key, stop, crash, log: the same for all engines.

    Attributes:
        patience: seconds for any one wait; a bound for hangs, never a measure.
        context: tokens per slot that the tests ask for.
        broken: profile keys with which the engine fails to start, and a word of its log that must be told.

    """

    patience: ClassVar[float] = 120
    context: ClassVar[int] = 256
    broken: ClassVar[tuple[dict[str, Any], str]]

    # -- helpers -----------------------------------------------------------------------------------

    def client(self, endpoint: Endpoint, *, key: bool = True) -> httpx.Client:
        headers = {"authorization": f"Bearer {endpoint.key}"} if key and endpoint.key else {}
        return httpx.Client(base_url=endpoint.url, headers=headers, timeout=self.patience, trust_env=False)

    def ask(self, endpoint: Endpoint, **body: Any) -> httpx.Response:
        what = {
            "model": endpoint.model,
            "prompt": "Once",
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
        }
        with self.client(endpoint) as client:
            return client.post("/v1/completions", json={**what, **body})

    def until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + self.patience
        while not condition():
            assert time.monotonic() < deadline, f"in vain: {what}"
            time.sleep(0.02)

    def processes(self, backend: Backend) -> list[psutil.Process]:
        status = backend.status()
        pids = {*(status["engine_pids"] or ()), *([status["pid"]] if status["pid"] else ())}
        return [psutil.Process(pid) for pid in pids if pid != os.getpid() and psutil.pid_exists(pid)]

    # -- the contract ------------------------------------------------------------------------------

    def test_ready_means_that_it_answers_good(self, make: Make) -> None:
        backend = make()
        assert backend.state is State.STOPPED
        endpoint = backend.start()
        assert backend.state is State.READY
        with self.client(endpoint) as client:
            ids = [model["id"] for model in client.get("/v1/models").json()["data"]]
        assert endpoint.model in ids
        assert self.ask(endpoint).json()["usage"]["completion_tokens"] == 8
        assert backend.endpoint(0) == backend.start() == endpoint  # both are harmless once it is ready

    def test_it_listens_on_loopback_only_good(self, make: Make) -> None:
        endpoint = make().start()
        assert endpoint.url.startswith("http://127.0.0.1:")
        port = int(endpoint.url.rpartition(":")[2])
        addresses = {
            connection.laddr.ip
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        }
        assert addresses == {"127.0.0.1"}

    def test_a_stream_ends_whole_good(self, make: Make) -> None:
        answer = self.ask(make().start(), stream=True, stream_options={"include_usage": True})
        data = [line[5:].strip() for line in answer.text.split("\n") if line.startswith("data:")]
        assert data[-1] == "[DONE]"
        items = [json.loads(item) for item in data[:-1]]
        usage = [item["usage"] for item in items if item.get("usage")]
        finish = [c["finish_reason"] for item in items for c in item["choices"] if c["finish_reason"]]
        assert usage[-1]["completion_tokens"] == 8
        assert finish == ["length"]

    def test_the_same_request_gives_the_same_answer_good(self, make: Make) -> None:
        endpoint = make().start()
        first, second = (self.ask(endpoint, seed=1).json()["choices"][0]["text"] for _ in range(2))
        assert first == second

    def test_a_client_that_leaves_frees_its_slot_ugly(self, make: Make) -> None:
        endpoint = make(slots=1, context=4 * self.context).start()
        body = {"model": endpoint.model, "prompt": "Once", "max_tokens": 3 * self.context, "stream": True}
        with (
            self.client(endpoint) as client,
            client.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as response,
        ):
            next(response.iter_raw())
        assert self.ask(endpoint, max_tokens=1).status_code == 200  # the only slot is free

    def test_as_many_are_served_at_once_as_there_are_slots_good(self, make: Make) -> None:
        endpoint = make(slots=2).start()
        answers: list[int] = []
        askers = [
            threading.Thread(
                target=lambda: answers.append(self.ask(endpoint).json()["usage"]["completion_tokens"])
            )
            for _ in range(5)
        ]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join(self.patience)
        assert answers == [8] * 5

    def test_the_context_is_each_slots_own_good(self, make: Make) -> None:
        endpoint = make(slots=2, context=self.context).start()
        almost = self.ask(endpoint, prompt=[3] * (self.context - 16), max_tokens=4)
        assert almost.status_code == 200, almost.text

    def test_a_prompt_beyond_the_context_is_refused_bad(self, make: Make) -> None:
        answer = self.ask(make(slots=2, context=self.context).start(), prompt=[3] * (self.context + 64))
        assert answer.status_code == 400
        assert "context" in answer.text

    def test_the_key_is_required_bad(self, make: Make) -> None:
        endpoint = make().start()
        assert endpoint.key
        assert endpoint.key not in repr(endpoint)
        with self.client(endpoint, key=False) as client:
            assert client.get("/v1/models").status_code == 401
            assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 401

    def test_the_key_is_on_no_command_line_good(self, make: Make) -> None:
        backend = make()
        key = backend.start().key
        assert key
        assert not [p for p in self.processes(backend) if key in " ".join(p.cmdline())]

    def test_a_stop_leaves_nothing_good(self, make: Make) -> None:
        backend = make()
        endpoint = backend.start()
        before = self.processes(backend)
        assert before
        backend.stop()
        assert backend.state is State.STOPPED
        assert not [p for p in before if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        with pytest.raises(httpx.TransportError), self.client(endpoint) as client:
            client.get("/health")
        backend.stop()  # harmless

    def test_it_starts_again_after_a_stop_good(self, make: Make) -> None:
        backend = make()
        backend.start()
        backend.stop()
        assert self.ask(backend.start()).status_code == 200

    def test_a_crash_restarts_it_ugly(self, make: Make) -> None:
        backend = make()
        backend.start()
        restarts = backend.status()["restarts"]
        for process in self.processes(backend):
            if process.pid in (backend.status()["engine_pids"] or ()):
                process.send_signal(signal.SIGKILL)
        self.until(lambda: backend.status()["restarts"] > restarts, "it restarts")
        assert self.ask(backend.endpoint(self.patience)).status_code == 200

    def test_an_early_exit_tells_the_log_bad(self, make: Make) -> None:
        keys, word = self.broken
        backend = make(**keys)
        with pytest.raises(BackendError) as raised:
            backend.start()
        assert word in "\n".join(raised.value.log_tail)
        assert backend.state is State.FAILED
