"""The backend contract, kept by llama-server's backend with the fake engine in the binary's place."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from backends.llama_server import LlamaServer
from tests.contract import BackendContract


class TestFakeEngine(BackendContract):
    patience = 60
    broken = (
        {"env": {"FAKE_ENGINE": json.dumps({"exit_after": 0, "exit_code": 1, "say": ["error: last words"]})}},
        "last words",
    )

    @pytest.fixture
    def make(self, engine: Callable[..., LlamaServer]) -> Callable[..., LlamaServer]:
        return engine
