"""Who answers on the port, what it means when nobody does, and when exactly an engine is ready no more."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from backends import process
from backends.llama_server import LlamaServer
from orchestrator.backend import Command, Event, State
from orchestrator.errors import BackendError, StartError
from orchestrator.profile import Profile
from tests.backends.conftest import Recorder, alive, launches

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


def test_a_lost_engine_is_ready_no_more_before_anything_is_cleaned_up_ugly(engine: Make) -> None:
    """Whoever sees `ready` sends requests, and what a dead engine left behind takes its time."""
    backend = engine({"launches": [{"children": ["session+stubborn"]}]})
    heard = Recorder(backend)
    backend.start(timeout=60)
    leader, stubborn = backend.status()["engine_pids"]
    lived: list[list[int]] = []

    def hear(event: Event) -> None:
        if event.state is State.RESTARTING and event.name == "state":
            lived.append(alive([stubborn]))

    backend.subscribe(hear)
    os.kill(leader, signal.SIGKILL)
    heard.wait_state(State.READY, 2)
    assert lived == [[stubborn]]
    assert not alive([stubborn])


def test_a_fault_in_the_moment_of_a_stop_is_no_failure_ugly(fake_profile: Callable[..., Profile]) -> None:
    stops: list[threading.Thread] = []

    class Faulty(LlamaServer):
        def prepared(self, *_: object, **__: object) -> Command:
            stops.append(threading.Thread(target=self.stop))
            stops[0].start()
            with self.life.changed:
                assert self.life.changed.wait_for(lambda: self.state is State.STOPPING, 30)
            raise StartError("in this very moment")

    backend = Faulty(fake_profile())
    heard = Recorder(backend)
    with pytest.raises(BackendError):
        backend.start(timeout=60)
    stops[0].join(30)
    assert heard.states() == [State.STARTING, State.STOPPING, State.STOPPED]
