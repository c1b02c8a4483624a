"""The command line as a user has it: real processes of it, in front of the fake engine or the real one."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from tests import gguf_files

ENGINE = Path(__file__).parent.parent / "fakes" / "engine.py"
COMMAND = (sys.executable, "-m", "orchestrator")
PATIENCE = 60.0  # seconds for any one wait; a bound for hangs, never a measure


class Running:
    """A command that was started: its lines as they come, its end."""

    def __init__(self, *arguments: str, environ: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environ or {})},
        )
        self.out: list[str] = []
        self.err: list[str] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._read, args=(self.process.stdout, self.out, self._lines)),
            threading.Thread(target=self._read, args=(self.process.stderr, self.err, None)),
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, stream: Any, kept: list[str], lines: queue.SimpleQueue[str | None] | None) -> None:
        for line in stream:
            kept.append(line.rstrip("\n"))
            if lines is not None:
                lines.put(kept[-1])
        if lines is not None:
            lines.put(None)
        stream.close()

    def line(self) -> str:
        """Return the next line of stdout."""
        line = self._lines.get(timeout=PATIENCE)
        assert line is not None, f"ended with {self.wait()}: {self.err}"
        return line

    def ready(self) -> str:
        """Wait for the next `ready` line; returns its URL."""
        word, _, url = self.line().split()
        assert word == "ready"
        return url

    def wait(self) -> int:
        """Wait for the end; returns the exit code."""
        code = self.process.wait(PATIENCE)
        for thread in self._threads:
            thread.join(PATIENCE)
        return code

    def signal(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def end(self) -> None:
        """End it whatever it does, and what it left."""
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
            if self.process.poll() is None:
                self.process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(PATIENCE / 3)
        for thread in self._threads:
            thread.join(PATIENCE)


Done = subprocess.CompletedProcess[str]
Cli = Callable[..., Done]
Start = Callable[..., Running]
Write = Callable[..., str]


@pytest.fixture
def cli() -> Cli:
    """Run a command to its end."""

    def run(*arguments: str, stdin: str = "", environ: dict[str, str] | None = None) -> Done:
        return subprocess.run(
            [*COMMAND, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=PATIENCE * 2,
            check=False,
            env={**os.environ, **(environ or {})},
        )

    return run


@pytest.fixture
def start() -> Iterator[Start]:
    """Start commands; whatever still runs in the end is ended."""
    started: list[Running] = []

    def begin(*arguments: str, environ: dict[str, str] | None = None) -> Running:
        started.append(Running(*arguments, environ=environ))
        return started[-1]

    yield begin
    for running in started:
        running.end()


@pytest.fixture
def nothing_left(cli: Cli) -> Iterator[None]:
    """Take down what a test left in the background."""
    yield
    cli("down", "--now")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama model of some kilobytes."""
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    gguf_files.tiny_llama(path)
    return path


@pytest.fixture
def fake(tiny_model: Path, tmp_path: Path) -> Write:
    """Write a profile of the fake engine: ``fake("name", knobs={...}, slots=2)`` returns its path."""

    def write(stem: str = "fake", knobs: dict[str, Any] | None = None, **keys: Any) -> str:
        profile = {
            "model": str(tiny_model),
            "backend": "llama-server",
            "command": [sys.executable, str(ENGINE)],
            "device": "cpu",
            "context": 512,
            "env": {"FAKE_ENGINE": json.dumps(knobs or {})},
            "timeouts": {"start": 30, "stop": 5, "stall": 30},
            "restart": {"attempts": 2, "window": 300, "backoff": [0.05, 0.1]},
        }
        path = tmp_path / f"{stem}.yaml"
        path.write_text(yaml.safe_dump({**profile, **keys}))
        return str(path)

    return write


@pytest.fixture
def real(gemma_gguf: Path, llama_server_binary: Path, tmp_path: Path) -> str:
    """Write a profile of the real engine with the real model; returns its path."""
    path = tmp_path / "gemma.yaml"
    profile = {
        "model": str(gemma_gguf),
        "backend": "llama-server",
        "command": [str(llama_server_binary)],
        "device": "cpu",
        "context": 512,
        "slots": 2,
    }
    path.write_text(yaml.safe_dump(profile))
    return str(path)


CRASHES = {"crash_request": 2}  # knobs: the first completion is the probe's, the next kills the engine


def crash(url: str, name: str) -> None:
    """Send a completion to an engine with the knobs `CRASHES`; waits for a restart under way."""
    httpx.post(f"{url}/completions", json={"model": name, "prompt": "Hi"}, timeout=PATIENCE)


def wait_for_end(pids: list[int]) -> None:
    """Wait until none of these processes runs."""
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE], alive
