"""What a launch leaves behind when its owner and its guardian are gone, and its end.

A process is recognised by its engine's session, by a cookie in the environment that it inherited, or by
having been recorded with its start time. Pids alone are never trusted: they are reused.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from orchestrator.home import run_folders

PATIENCE = 5.0  # seconds for a swept tree to be gone


def stat_fields(pid: int) -> list[bytes] | None:
    """Return the fields of ``/proc/PID/stat`` after the name; None for no process and for a zombie."""
    try:
        # the name may hold spaces and brackets: count from the last bracket
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if not fields or fields[0] in (b"Z", b"X") else fields


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None when there is no such process."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields else None


def boot_id() -> str:
    """Return what names this boot of the machine: start times mean nothing after the next one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def strays(session: int, cookie: str, known: Mapping[int, int]) -> list[int]:
    """Return the living processes of a launch, ours excepted.

    Args:
        session: the engine's session id; setsid leaves it, so it is not enough.
        cookie: ``NAME=VALUE`` in the environment that descendants inherit; a program that rewrites its
            title may overwrite it, so it is not enough either.
        known: pid -> start time of processes seen in the tree earlier.

    """
    found = []
    wanted = cookie.encode()
    for name in os.listdir("/proc"):  # noqa: PTH208 - names are all that is needed
        if not name.isdigit() or (pid := int(name)) == os.getpid():
            continue
        fields = stat_fields(pid)
        if fields is None:
            continue
        belongs = (session and int(fields[3]) == session) or known.get(pid) == int(fields[19])
        if not belongs and wanted:
            with contextlib.suppress(OSError):
                belongs = wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if belongs:
            found.append(pid)
    return found


def end(session: int, cookie: str, known: Mapping[int, int], patience: float = PATIENCE) -> tuple[int, ...]:
    """Kill what is left of a launch and wait until it is gone; returns what resisted."""
    deadline = time.monotonic() + patience
    while left := strays(session, cookie, known):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return tuple(left)
        time.sleep(0.02)
    return ()


def sweep(root: Path) -> dict[str, tuple[int, ...]]:
    """End what dead owners left under a state folder; returns name -> pids that resisted SIGKILL.

    A record's owner is dead when its lock can be had. A living owner's engines are never touched.
    """
    resisted = {}
    for folder in run_folders(root):
        record = folder.read()
        if not (record or folder.temporary) or not folder.acquire():
            continue
        if record and record.get("boot") == boot_id():
            known = {int(pid): int(start) for pid, start in record.get("processes", {}).items() if start}
            left = end(int(record.get("session", 0)), str(record.get("cookie", "")), known)
            if left:
                resisted[folder.name] = left
        folder.release(remove=folder.temporary)
    return resisted
