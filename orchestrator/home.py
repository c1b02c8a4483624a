"""The state folder: where what runs is recorded, and how a later command knows whether it still does.

    $ORCHESTRATOR_HOME (default $XDG_STATE_HOME/orchestrator)     0700
      run/NAME/lock           locked by the process that owns the engine, for as long as it lives
      run/NAME/record.json    what was started, with start times: pids are reused, a pid with its start isn't
      run/NAME/engine.log     and .1, .2
      run/NAME~2/             as run/NAME, of the engine that a switch has put beside or after the first one
      up/PID/                 one `orchestrator up`: lock and record.json as above, control.sock, service.log

Whether an owner lives is never stored: the kernel drops its lock when it dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from orchestrator.errors import BackendError


def home(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the state folder, made private if it had to be made."""
    named = environ.get("ORCHESTRATOR_HOME")
    state = environ.get("XDG_STATE_HOME") or "~/.local/state"
    path = Path(named).expanduser() if named else Path(state).expanduser() / "orchestrator"
    return private(path)


def private(path: Path) -> Path:
    """Make a folder (and its parents) with mode 0700 and return it.

    One that was there is left as it is: it may be a folder that others share on purpose, and what is made
    in it is private all the same.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BackendError(
            f"state folder: {path} can't be made: {error.strerror}",
            advice="set ORCHESTRATOR_HOME to a folder of yours",
        ) from error
    return path


# Open file description locks live and die with the descriptor as flock's do, and can be asked after.
_LOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid
_WRITE_LOCK = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


class RunFolder:
    """One running engine's folder, owned through a lock that dies with its process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.log = path / "engine.log"
        self._lock: int | None = None

    def acquire(self) -> bool:
        """Take ownership; False when a living process has it."""
        private(self.path)
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _WRITE_LOCK)
        except OSError:
            os.close(fd)
            return False
        # a folder that was removed between open and lock is nobody's: its lock means nothing
        with contextlib.suppress(OSError):
            if os.fstat(fd).st_ino == (self.path / "lock").stat().st_ino:
                self._lock = fd
                return True
        os.close(fd)
        return False

    @property
    def held(self) -> bool:
        """Say whether a living process owns it; looking takes no lock, so it disturbs nobody."""
        try:
            fd = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            kind: int = _LOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _WRITE_LOCK))[0]
            return kind != fcntl.F_UNLCK
        finally:
            os.close(fd)

    @property
    def temporary(self) -> bool:
        """Say whether it belongs to one run of one program (NAME~PID-N) rather than to a name."""
        return "-" in self.name.partition("~")[2]

    @property
    def owned(self) -> bool:
        """Say whether this object holds the lock."""
        return self._lock is not None

    def release(self, *, remove: bool = False, forget: bool = True) -> None:
        """Give ownership up and forget the record; the log stays unless the whole folder is to go."""
        if self._lock is not None:
            if forget:
                (self.path / "record.json").unlink(missing_ok=True)
            if remove:
                shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def write(self, record: Mapping[str, Any]) -> None:
        """Replace the record; a reader sees the old one or the new one, never a part."""
        temporary = self.path / ".record"  # one name: what a killed owner left half-written is overwritten
        temporary.write_text(json.dumps(record, indent=1))
        temporary.replace(self.path / "record.json")

    def read(self) -> dict[str, Any] | None:
        """Return the record, None when there is none."""
        try:
            record = json.loads((self.path / "record.json").read_text())
        except (OSError, ValueError):
            return None
        return record if isinstance(record, dict) else None


def run_folders(root: Path) -> Iterator[RunFolder]:
    """Yield the folder of everything that was ever run under a state folder."""
    with contextlib.suppress(OSError):
        for path in sorted((root / "run").iterdir()):
            if path.is_dir():
                yield RunFolder(path)
