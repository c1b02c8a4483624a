"""``up --detach``: the same `up` in a session of its own, followed until it is ready."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

from orchestrator.cli import console, faults, logs_setup, progress

MESSAGE = 1 << 20  # bytes of the longest message


def detach(
    profiles: Sequence[str],
    sets: Sequence[str],
    backend: str | None,
    host: str,
    port: int,
    api_key_env: str | None,
) -> int:
    """Start a service in the background and wait until it is ready; returns the exit code."""
    argv = [sys.executable, "-m", "orchestrator", "up", f"--host={host}", f"--port={port}"]
    argv += [f"--set={change}" for change in sets]
    argv += [f"--backend={backend}"] if backend else []
    argv += [f"--api-key-env={api_key_env}"] if api_key_env else []
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    argv += [f"--report={theirs.fileno()}", "--", *profiles]
    shown = progress.choose()
    if isinstance(shown, progress.Lines):
        shown = progress.Relayed()
    logs_setup.configure(
        logs_setup.Level.WARNING if isinstance(shown, progress.Live) else logs_setup.Level.INFO
    )
    child = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=None,  # until it has its log: what keeps it from starting at all
        start_new_session=True,
        pass_fds=(theirs.fileno(),),
    )
    theirs.close()
    try:
        return _follow(child, ours, shown, len(profiles))
    except (KeyboardInterrupt, console.OutputLost) as fault:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait()
        except KeyboardInterrupt:
            child.send_signal(signal.SIGTERM)
            child.wait()
        if isinstance(fault, console.OutputLost):
            raise
        return faults.INTERRUPTED
    finally:
        shown.close()
        ours.close()


def _follow(child: subprocess.Popen[bytes], line: socket.socket, shown: progress.Progress, count: int) -> int:
    """Show what the child says until all are ready (0) or it ends (its code)."""
    ready = 0
    while message := line.recv(MESSAGE):
        words = json.loads(message)
        shown.hear(words)
        ready += words["say"] == "ready"
        if ready == count:
            return 0
    return child.wait() or 3
