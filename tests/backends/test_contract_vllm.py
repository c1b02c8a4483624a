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

GONE = 10.0  # seconds after a kill in which everything has to be gone: promised, and no measure of speed


def belongings(processes: list[psutil.Process]) -> set[Path]:
    """Return the shared memory that processes have mapped, and their folder for temporary files."""
    found = {Path(processes[0].environ()["TMPDIR"])}
    for process in processes:
        mapped = {Path(region.path) for region in process.memory_maps()}
        found |= {path for path in mapped if path.parent == Path("/dev/shm") and path.exists()}
    assert len(found) >= 3, "a folder, and the queues between its parts"
    return found


def gone(processes: list[psutil.Process], what: set[Path], who: str) -> None:
    """Wait until nothing is left of processes and of what belonged to them."""
    killed = time.monotonic()
    _, left = psutil.wait_procs(processes, timeout=GONE)
    seconds = time.monotonic() - killed
    assert not left, f"{who}: still there after {seconds:.1f} s: {left}"
    sys.stderr.write(f"{who} was killed: all were gone after {seconds:.1f} s\n")
    while left_over := {path for path in what if path.exists()}:
        assert time.monotonic() - killed < GONE, f"{who}: left behind: {left_over}"
        time.sleep(0.02)


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
        what, restarts = belongings(before), backend.status()["restarts"]
        os.kill(server if victim == "the server" else core, signal.SIGKILL)
        gone(before, what, victim)
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
        what = belongings(engine)
        owner.kill()
    gone(engine, what, "the orchestrator")
