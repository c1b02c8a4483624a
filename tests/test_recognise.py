"""What `connect` takes a server for: each engine says for itself what it is known by."""

from __future__ import annotations

import pytest

from orchestrator import discovery
from orchestrator.errors import UnknownBackend, Unreachable
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


def test_an_engine_that_stumbles_over_a_server_spoils_none_of_another_kind_ugly(serve, monkeypatch):
    class Stranger:
        dialect = OPENAI

        @staticmethod
        def recognise(ask, served):
            return served["nowhere"]

    find, installed = discovery.find, discovery.installed
    monkeypatch.setattr(discovery, "find", lambda name: Stranger if name == "a-stranger" else find(name))
    monkeypatch.setattr(discovery, "installed", lambda: ["a-stranger", *installed()])
    server = serve(
        answers(
            v1_models=reply(200, {"data": [{"id": "q", "owned_by": "vllm"}]}),
            version=reply(200, {"version": "1"}),
        )
    )
    assert probe(server.url).at.dialect.name == "vllm"


def test_an_answer_that_can_not_be_decoded_is_told_bad(serve):
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\n"
    server = serve(lambda *_: [head + b"plain"])
    with pytest.raises(Unreachable, match="connect: http://127"):
        probe(server.url)
