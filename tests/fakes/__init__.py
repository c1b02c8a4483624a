"""The fake engine as the tests see it: `Fake` runs one, `as_binary` makes it pass for a llama-server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

ENGINE = Path(__file__).with_name("engine.py")
COMMAND = (sys.executable, "-S", str(ENGINE))  # -S: it needs no packages, and starts sooner
KEY = "the-key-of-the-fake"
PATIENCE = 30.0  # seconds; a bound for hangs, never a measure


def free_port() -> int:
    """Return a port that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def as_binary(folder: Path, name: str = "llama-server") -> Path:
    """Write a program into `folder` that is the fake engine, and return its path."""
    path = folder / name
    path.write_text("#!/bin/sh\nexec " + " ".join(f"'{word}'" for word in COMMAND) + ' "$@"\n')
    path.chmod(0o755)
    return path


def until(condition: Any, what: str) -> Any:
    """Poll until `condition` returns something true, and return that."""
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"in vain: {what}")
        time.sleep(0.01)
    return found


class Fake:
    """A running fake engine; leaving its `with` ends it and every child it reported.

    Attributes:
        port: the port it was told to use.
        url: its address, without /v1.
        process: the child.
        log_path: where its stderr goes, unless `stderr` was given.

    """

    def __init__(
        self,
        folder: Path,
        *flags: str,
        port: int | None = None,
        key: str = KEY,
        alias: str = "fake",
        stderr: int | None = None,
        **knobs: Any,
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = folder / f"fake-{self.port}.log"
        argv = [
            *COMMAND,
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--alias",
            alias,
            "-m",
            str(folder),
        ]
        env = {**os.environ, "LLAMA_API_KEY": key, "FAKE_ENGINE": json.dumps(knobs)}
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen([*argv, *flags], env=env, stderr=stderr or log)
        self.client = httpx.Client(
            base_url=self.url, headers={"authorization": f"Bearer {key}"}, timeout=PATIENCE, trust_env=False
        )
        self.children: list[int] = []

    def __enter__(self) -> Fake:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE)
        self.client.close()
        for pid in self.children:
            try:
                child = psutil.Process(pid)
                if str(ENGINE) in child.cmdline():
                    child.kill()
            except psutil.Error:
                continue

    @property
    def log(self) -> str:
        """All that it logged so far."""
        return self.log_path.read_text(errors="replace")

    def get(self, path: str) -> httpx.Response | None:
        """Ask once; None while nothing listens."""
        try:
            return self.client.get(path)
        except httpx.TransportError:
            return None

    def ready(self) -> Fake:
        """Wait until /health is 200."""

        def well() -> bool:
            assert self.process.poll() is None, self.log
            answer = self.get("/health")
            return answer is not None and answer.status_code == 200

        until(well, "ready")
        self.stats()
        return self

    def stats(self) -> dict[str, Any]:
        """Ask what happened so far."""
        found: dict[str, Any] = self.client.get("/fake/stats").json()
        self.children = found["children"]
        return found

    def do(self, **orders: Any) -> dict[str, Any]:
        """Give orders: set, crash, exit, freeze, child, say."""
        answer = self.client.post("/fake/do", json=orders)
        assert answer.status_code == 200, answer.text
        self.stats() if "child" in orders else None
        done: dict[str, Any] = answer.json()
        return done

    def complete(self, *, chat: bool = False, **body: Any) -> httpx.Response:
        """Ask for a completion of eight tokens, unless `body` says otherwise."""
        path = "/v1/chat/completions" if chat else "/v1/completions"
        what = {"messages": [{"role": "user", "content": "hello"}]} if chat else {"prompt": "hello"}
        return self.client.post(path, json={"max_tokens": 8, **what, **body})

    def ended(self) -> int:
        """Wait for its end, and return the code as `Popen.returncode` gives it."""
        return self.process.wait(PATIENCE)
