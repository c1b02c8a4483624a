"""What `connect` takes a server for: each engine says for itself what it is known by."""

from __future__ import annotations

import pytest

from orchestrator import discovery
from orchestrator.errors import UnknownBackend
from orchestrator.source import OPENAI, probe
from tests.fakes.scripted import Scripted, reply


@pytest.fixture
def serve():
    servers = []

    def start(script):
        servers.append(Scripted(script))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def answers(**paths):
    def script(head, number):
        return [paths.get(head.split()[1].strip("/").replace("/", "_"), reply(404, {}))]

    return script


@pytest.mark.parametrize(("owner", "dialect"), [("vllm", "vllm"), ("else", "this server")])
def test_connect_to_what_has_a_version_too_is_decided_by_the_owner_of_its_model_good(serve, owner, dialect):
    server = serve(
        answers(
            v1_models=reply(200, {"data": [{"id": "q", "owned_by": owner}]}),
            version=reply(200, {"version": "1"}),
        )
    )
    assert probe(server.url).at.dialect.name == dialect


def test_connect_asks_an_engine_that_can_not_be_imported_nothing_bad(serve, monkeypatch):
    def find(name):
        raise UnknownBackend(f"backend: {name!r} can't be imported")

    monkeypatch.setattr(discovery, "find", find)
    server = serve(answers(v1_models=reply(200, {"data": [{"id": "a"}]})))
    assert probe(server.url).at.dialect is OPENAI
