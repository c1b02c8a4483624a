"""What runs, as far as the state folder, the control sockets and the records tell."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from orchestrator import leftovers
from orchestrator.cli import control
from orchestrator.errors import BackendError
from orchestrator.home import RunFolder, home, private, run_folders

SERVICE_LOG = "service.log"
ENDING = 15.0  # seconds for a service to end once its engines are gone
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

    @property
    def port(self) -> int | None:
        """Where it listens."""
        return urlsplit(self.url).port if self.url is not None else None

    @property
    def names(self) -> list[str]:
        """The names of what it serves."""
        return [str(status["name"]) for status in self.backends]

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


@dataclass(frozen=True, slots=True)
class Silent:
    """One living `orchestrator up` that does not answer.

    Attributes:
        folder: its folder.
        pid: its process.
        names: what it serves or is about to.
        state: "preparing" before it takes questions, "ending" after it, "hangs" where it should answer.

    """

    folder: RunFolder
    pid: int
    names: tuple[str, ...]
    state: str


def starting(names: Sequence[str]) -> dict[str, Any]:
    """Return the record of a service that prepares: the names are wanted, but nobody's yet."""
    return {"starting": list(names), "pid": os.getpid(), "started": leftovers.start_time(os.getpid())}


def _names(record: dict[str, Any] | None, key: str = "names") -> tuple[str, ...]:
    """Return names in a record; none where it makes no sense."""
    found = (record or {}).get(key)
    return tuple(name for name in found if isinstance(name, str)) if isinstance(found, list) else ()


def is_claimed(root: Path, name: str) -> bool:
    """Say whether a living process has a name, in whichever run folder its engine is."""
    return RunFolder(root / "run" / name).held or name in served_names(root, preparing=False)


def served_names(root: Path, *, preparing: bool = True) -> set[str]:
    """Return the names that living services have written down, those too that they only prepare."""
    records = [folder.read() for folder in _service_folders(root) if folder.held]
    keys = ("names", "starting") if preparing else ("names",)
    return {name for record in records for key in keys for name in _names(record, key)}


def look(root: Path) -> tuple[list[Service], list[Silent]]:
    """Return every living `orchestrator up`: those that answer, and those that do not."""
    found, silent = [], []
    for folder in _service_folders(root):
        if not folder.name.isdecimal() or not folder.held:
            continue
        try:
            said = control.ask(folder.path, {"do": "status"})
        except control.NotThere:
            listens = (folder.path / control.NAME).exists()
            record = folder.read()
            if folder.held:
                early = _names(record, "starting")
                state = "hangs" if listens else "preparing" if early else "ending"
                silent.append(Silent(folder, int(folder.name), early or _names(record), state))
        else:
            found.append(
                Service(folder, said["pid"], said["url"], said["api_key_env"], tuple(said["backends"]))
            )
    return found, silent


def running(root: Path | None = None) -> list[Service]:
    """Return every living `orchestrator up` that answers."""
    return look(root or home())[0]


def call_off(service: Silent) -> bool:
    """End a service that prepares, as Ctrl-C does; False when it has not ended in time."""
    record = service.folder.read() or {}
    # where several pid namespaces share a state folder, the number may be a stranger's here
    if record.get("pid") == service.pid and record.get("started") == leftovers.start_time(service.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(service.pid, signal.SIGTERM)
    return wait_gone(service.pid, ENDING)


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
        processes = record.get("processes")
        pids = [
            int(pid)
            for pid, started in (processes if isinstance(processes, dict) else {}).items()
            if started is not None and pid.isdecimal() and leftovers.start_time(int(pid)) == started
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
        names = _names(folder.read())
        try:
            if not folder.acquire():
                continue
        except BackendError:  # not made by us
            continue
        log = folder.path / SERVICE_LOG
        folder.release(remove=not log.exists() or time.time() - log.stat().st_mtime > LOG_LIFE)
        if names:
            said.append(f"{', '.join(names)}: its owner, pid {folder.name}, died: cleaned up")
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
