"""A backend's engine without the orchestrator, to be measured beside it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

from backends.process import free_port
from orchestrator.backend import made_plan

EVERY = 0.01  # seconds between two looks


@contextlib.contextmanager
def bare_engine(backend: Any, ready: Callable[[str, str], bool], key: str | None = None) -> Iterator[float]:
    """Start the command that the backend would, give the seconds until it is ready, and end all of it.

    Args:
        backend: not started.
        ready: says whether the engine is, from its address and its model's id.
        key: the engine's API key; None for an engine without.

    """
    plan, port = made_plan(backend), free_port()
    command = backend.prepared(plan, port)
    keyed = {} if key is None else {backend.key_variable: key}
    began = time.perf_counter()
    server = subprocess.Popen(
        command.argv,
        env={**command.environ(os.environ), **keyed},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while not ready(f"http://127.0.0.1:{port}", plan.model_id):
            if server.poll() is not None:
                raise SystemExit(f"{command.argv[0]}: ended with {server.returncode} before it was ready")
            time.sleep(EVERY)
        yield time.perf_counter() - began
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait()
