"""What runs, as far as the state folder, the control sockets and the records tell."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator import leftovers
from orchestrator.cli import control
from orchestrator.home import RunFolder, home, private, run_folders

SERVICE_LOG = "service.log"
LOG_LIFE = 7 * 86400  # seconds for which the log of a dead `up --detach` is kept


@dataclass(frozen=True, slots=True)
class Service:
    """One living `orchestrator up`.

    Attributes:
        folder: its folder, with the control socket.
        pid: its process.
        url: the gateway's address, with ``/v1``; None while it is about to listen.
        api_key_env: the variable that holds the gateway's key, or None.
        backends: what each of its engines says of itself; see `Backend.status`.

    """

    folder: RunFolder
    pid: int
    url: str | None
    api_key_env: str | None
    backends: tuple[dict[str, Any], ...]

    def ask(self, question: dict[str, Any], *, timeout: float | None) -> dict[str, Any]:
        """Ask on its control socket; see `control.ask`."""
        return control.ask(self.folder.path, question, timeout=timeout)


def service_folder(root: Path, pid: int) -> RunFolder:
    """Return the folder of the `orchestrator up` with a pid."""
    return RunFolder(private(root / "up") / str(pid))


def _service_folders(root: Path) -> Iterator[RunFolder]:
    with contextlib.suppress(OSError):
        for path in sorted((root / "up").iterdir()):
            yield RunFolder(path)


def is_claimed(root: Path, name: str) -> bool:
    """Say whether a living process has a name, in whichever run folder its engine is."""
    records = [folder.read() or {} for folder in _service_folders(root) if folder.held]
    return RunFolder(root / "run" / name).held or any(name in record.get("names", ()) for record in records)


def running(root: Path | None = None) -> list[Service]:
    """Return every living `orchestrator up` that answers."""
    found = []
    for folder in _service_folders(root or home()):
        if folder.held:
            # one that is just ending has closed its socket
            with contextlib.suppress(control.NotThere):
                said = control.ask(folder.path, {"do": "status"})
                found.append(
                    Service(folder, said["pid"], said["url"], said["api_key_env"], tuple(said["backends"]))
                )
    return found


def foreign(root: Path, known: set[int]) -> list[dict[str, Any]]:
    """Return what other programs run (`orchestrator.load`), from their records alone.

    Args:
        root: the state folder.
        known: pids whose engines are known already.

    """
    rows = []
    for folder in run_folders(root):
        record = folder.read()
        if record is None or not folder.held or record.get("owner") in known:
            continue
        pids = [
            int(pid)
            for pid, started in record.get("processes", {}).items()
            if started is not None and leftovers.start_time(int(pid)) == started
        ]
        rows.append(
            {
                "name": record.get("name", folder.name),
                "profile": record.get("profile"),
                "backend": record.get("backend"),
                "state": record.get("state"),
                "pid": record.get("owner"),
                "engine_pids": pids,
                "url": None,
                "uptime_s": None,
                "restarts": None,
                "memory": sum(map(_resident, pids)),
            }
        )
    return rows


def _resident(pid: int) -> int:
    fields = leftovers.stat_fields(pid)
    return int(fields[21]) * os.sysconf("SC_PAGE_SIZE") if fields else 0


def sweep(root: Path) -> list[str]:
    """Clean up after owners that died; returns what was found and done, one line each."""
    said = []
    for folder in _service_folders(root):
        # one whose process lives may be about to take its lock
        if not folder.name.isdecimal() or leftovers.start_time(int(folder.name)) is not None:
            continue
        record = folder.read()
        if not folder.acquire():
            continue
        log = folder.path / SERVICE_LOG
        folder.release(remove=not log.exists() or time.time() - log.stat().st_mtime > LOG_LIFE)
        if record:
            names = ", ".join(record["names"])
            said.append(f"{names}: its owner, pid {record['pid']}, died: cleaned up")
    for name, pids in leftovers.sweep(root).items():
        said.append(f"{name}: still there after SIGKILL: pid {', '.join(map(str, pids))}")
    return said


def wait_gone(pid: int, timeout: float) -> bool:
    """Wait until a process has ended; False when it has not in time."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], timeout)[0])
    finally:
        os.close(fd)
