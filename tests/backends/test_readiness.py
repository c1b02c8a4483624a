"""Who answers on the port, and what an engine that no longer answers means."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from backends import process
from backends.llama_server import LlamaServer
from orchestrator.backend import State
from tests.backends.conftest import Recorder, launches

Make = Callable[..., LlamaServer]


class Impostor(BaseHTTPRequestHandler):
    """A server of somebody else's that has our model's name and asks for no key."""

    def answer(self) -> None:
        body = json.dumps({"data": [{"id": "fake"}], "choices": [{"text": "a"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = answer  # noqa: N815 - as http.server wants them

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def impostor() -> Iterator[int]:
    """Let a stranger listen; returns its port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Impostor) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join(30)


def test_a_stranger_with_our_models_name_on_our_port_is_not_ours_bad(
    engine: Make, impostor: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """prior failure 14: our engine serves elsewhere, as some do when their port is taken."""
    elsewhere = process.free_port()
    ports = [impostor]
    free_port = process.free_port
    monkeypatch.setattr(process, "free_port", lambda avoid=(): ports.pop() if ports else free_port(avoid))
    backend = engine({"launches": [{"port_shift": elsewhere - impostor}]})
    heard = Recorder(backend)
    endpoint = backend.start(timeout=60)
    assert endpoint.url != f"http://127.0.0.1:{impostor}"
    taken = heard.wait(lambda event: event.name == "port_taken")
    assert taken.fields["port"] == impostor
    assert "not ours" in taken.fields["reason"]
    assert launches(tmp_path) == 2


def test_a_ready_engine_that_no_longer_answers_is_restarted_ugly(engine: Make, tmp_path: Path) -> None:
    """Its process lives, nothing is asked of it, and its health hangs: the next request would as well."""
    backend = engine(timeouts={"start": 30, "stop": 2, "stall": 1})
    heard = Recorder(backend)
    endpoint = backend.start(timeout=60)
    httpx.post(endpoint.url + "/fake/do", json={"set": {"health": "hang"}}).raise_for_status()
    restarting = heard.wait(lambda event: event.state is State.RESTARTING)
    assert "hung: no answer from /health for 1 s" in restarting.fields["reason"]
    heard.wait_state(State.READY, 2)
    assert launches(tmp_path) == 2
