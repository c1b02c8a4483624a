"""What a launch leaves behind when its owner and its guardian are gone, and its end.

A process is recognised by a cookie in the environment that it inherited, by having been recorded with its
start time, or by its engine's session. Pids alone are never trusted, nor are session numbers: both are
reused, by strangers too. A container is recognised by its label.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.container_client import recorded
from orchestrator.errors import BackendError
from orchestrator.home import RunFolder, run_folders

PATIENCE = 5.0  # seconds for a swept tree to be gone
TRACKER_PATIENCE = 1.0  # seconds of these for Python's resource trackers, which give back shared memory
TRACKER = b"multiprocessing.resource_tracker"
TEMPORARY = "orchestrator-"  # with it begins the name of a launch's folder for temporary files


def read_proc(pid: int, name: str) -> bytes:
    """Return a file of ``/proc/PID``; raises OSError when there is no such process.

    Not by pathlib, which keeps each part of each path in the interpreter's table of names for a while: a look
    at every process would grow that table by megabytes, and take twice as long.
    """
    with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:  # noqa: PTH123
        return file.read()


def stat_fields(pid: int) -> list[bytes] | None:
    """Return the fields of ``/proc/PID/stat`` after the name; None for no process and for a zombie."""
    try:
        # the name may hold spaces and brackets: count from the last bracket
        fields = read_proc(pid, "stat").rpartition(b")")[2].split()
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
    # while it lives, the session's first process tells whose the session is
    first = start_time(session) if session else None
    sessions_owner = None if first is None else first == known.get(session)
    for name in os.listdir("/proc"):  # noqa: PTH208 - names are all that is needed
        if not name.isdigit() or (pid := int(name)) == os.getpid():
            continue
        fields = stat_fields(pid)
        if fields is None:
            continue
        belongs = known.get(pid) == int(fields[19])
        if not belongs:
            variables = _environment(pid)
            belongs = bool(wanted) and wanted in (variables or ())
            if not belongs and session and int(fields[3]) == session:
                # an environment that says otherwise is a stranger's; one wiped out says nothing
                belongs = variables == [] if sessions_owner is None else sessions_owner
        if belongs:
            found.append(pid)
    return found


def _environment(pid: int) -> list[bytes] | None:
    """Return the ``NAME=VALUE`` of a process, None when they may not be read."""
    try:
        return [word for word in read_proc(pid, "environ").split(b"\0") if b"=" in word]
    except OSError:
        return None


def end(session: int, cookie: str, known: Mapping[int, int], patience: float = PATIENCE) -> tuple[int, ...]:
    """Kill what is left of a launch and wait until it is gone; returns what resisted."""
    began = time.monotonic()
    deadline, trackers = began + patience, began + min(TRACKER_PATIENCE, patience)
    # one look is not enough: what forks while /proc is read can hide from it
    while left := strays(session, cookie, known) or strays(session, cookie, known):
        # they do their work when all others are dead, and end
        spared = set(filter(_is_tracker, left)) if time.monotonic() < trackers else set()
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped, none of them forks while others are killed
            for pid in set(left) - spared:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        if time.monotonic() > deadline:
            return tuple(left)
        time.sleep(0.02)
    return ()


def _is_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return TRACKER in read_proc(pid, "cmdline")
    return False


def remove_temporary(folder: str, cookie: str) -> None:
    """Remove the folder for a launch's temporary files once that has ended; another's is left alone."""
    launch = cookie.partition("=")[2][:16]
    if launch and Path(folder).name == f"{TEMPORARY}{launch}":
        shutil.rmtree(folder, ignore_errors=True)


def sweep(root: Path) -> dict[str, tuple[int, ...]]:
    """End what dead owners left under a state folder; returns name -> pids that resisted SIGKILL.

    A record's owner is dead when its lock can be had. A living owner's engines are never touched. The record
    of what resisted is kept, so that a later sweep tries again: of a container too, for which no pid stands.
    """
    resisted = {}
    for folder in run_folders(root):
        record = folder.read()
        try:
            if not (record or folder.temporary) or not folder.acquire():
                continue
        except BackendError:  # nobody's work of ours: who wants this folder is told
            continue
        left: tuple[int, ...] = ()
        container: tuple[str, ...] = ()
        try:
            if record and record.get("boot") == boot_id():
                left = _end_recorded(record)
            if record and (told := recorded(record.get("container"), os.environ)):
                client, launch = told  # containers outlive a boot
                container = client.end(launch, PATIENCE)
            if record and not left:
                remove_temporary(str(record.get("temporary")), str(record.get("cookie")))
        finally:
            clean = not (left or container)
            folder.release(remove=folder.temporary and clean, forget=clean)
        if not clean:
            resisted[folder.name] = left
    return resisted


def acquire(folder: RunFolder, patience: float = 3 * PATIENCE) -> bool:
    """Take a run folder, waiting for whoever sweeps it at this moment; False when a living owner has it."""
    deadline = time.monotonic() + patience
    while not folder.acquire():
        record = folder.read()
        if record is None:  # just swept, or just being started
            return folder.acquire()
        owner = record.get("owner")
        if (isinstance(owner, int) and start_time(owner) is not None) or time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _end_recorded(record: Mapping[str, Any]) -> tuple[int, ...]:
    """End what a record names; one that makes no sense names nothing."""
    try:
        session, cookie = int(record["session"]), str(record["cookie"])
        known = {int(pid): int(start) for pid, start in record["processes"].items() if start}
        guardian = int(record.get("guardian") or 0)
    except (KeyError, TypeError, ValueError, AttributeError):
        return ()
    # a living guardian knows its tree better than any record: it is killed last, should it not end by itself
    guarded = {guardian: known.pop(guardian)} if guardian in known else {}
    left = end(session, cookie, known)
    if guarded and start_time(guardian) == guarded[guardian]:
        _wait(guardian, PATIENCE)
        left += end(0, "", guarded)
        left += end(session, cookie, known)
    return left


def _wait(pid: int, seconds: float) -> None:
    """Wait for a process to end, whosever child it is."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        select.select([fd], [], [], seconds)
    finally:
        os.close(fd)
