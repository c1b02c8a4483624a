"""The backend contract, kept by the real vLLM on the CPU, and what happens when parts of it are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from backends.vllm import VllmCpu
from tests.backends.vllm_real import DUMMY, vllm_environ, vllm_folder, vllm_of
from tests.contract import BackendContract

__all__ = ["vllm_environ", "vllm_folder", "vllm_of"]  # fixtures

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


class TestVllm(BackendContract):
    patience = 300
    broken = ({"args": (*DUMMY, "--no-such-flag")}, "unrecognized arguments: --no-such-flag")

    @pytest.fixture
    def make(self, vllm_of: Callable[..., VllmCpu]) -> Callable[..., VllmCpu]:
        return vllm_of

    @pytest.mark.parametrize("victim", ["the server", "the engine core"])
    def test_a_part_that_is_killed_takes_the_rest_along_and_it_restarts_ugly(
        self, make: Callable[..., VllmCpu], victim: str
    ) -> None:
        backend = make()
        backend.start()
        before = [psutil.Process(pid) for pid in backend.status()["engine_pids"]]
        server = before[0].pid
        core = next(process.pid for process in before if "EngineCore" in " ".join(process.cmdline()))
        restarts = backend.status()["restarts"]
        os.kill(server if victim == "the server" else core, signal.SIGKILL)
        killed = time.monotonic()
        _, left = psutil.wait_procs(before, timeout=60)
        assert not left, f"{victim}: still there after {time.monotonic() - killed:.0f} s"
        self.until(lambda: backend.status()["restarts"] > restarts, "it restarts")
        assert self.ask(backend.endpoint(self.patience)).status_code == 200


PROGRAM = """
import sys
from backends.vllm import VllmCpu
from orchestrator.profile import ModelSpec, Profile

backend = VllmCpu(
    Profile(
        name="tiny", model=ModelSpec(hf=sys.argv[1]), backend="vllm-cpu", context=256,
        args=("--load-format", "dummy"), timeouts={"start": 280},
        options={"vllm": {"eager": True, "dtype": "float32", "kv_cache_gib": 0.05}},
    )
)
backend.start()
print(*backend.status()["engine_pids"], flush=True)
sys.stdin.read()
"""


def test_nothing_is_left_of_it_when_the_orchestrator_is_killed_ugly(
    vllm_environ: dict[str, str], tmp_path: Path
) -> None:
    environ: dict[str, Any] = {**vllm_environ, "ORCHESTRATOR_HOME": str(tmp_path / "home")}
    from tests import hf_models

    folder = hf_models.tiny(tmp_path / "model")
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder)],
        env=environ,
        cwd=Path(__file__).parent.parent.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout
        engine = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
        assert len(engine) >= 3  # server, engine core, worker
        owner.kill()
    _, left = psutil.wait_procs(engine, timeout=60)
    assert not left
