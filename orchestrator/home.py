"""The state folder: where what runs is recorded, and how a later command knows whether it still does.

    $ORCHESTRATOR_HOME (default $XDG_STATE_HOME/orchestrator)     0700
      run/NAME/lock           locked by the process that owns the engine, for as long as it lives
      run/NAME/record.json    what was started, with start times: pids are reused, a pid with its start isn't
      run/NAME/engine.log     and .1, .2
      run/NAME~2/             as run/NAME, of the engine that a switch has put beside or after the first one
      history.sqlite          what bench and compare have measured; see bench/history_file.py
      chat_history            the lines typed into `orchestrator chat`
      up/PID/                 one `orchestrator up`: lock and record.json as above, control.sock, service.log

Whether an owner lives is never stored: the kernel drops its lock when it dies. What can be made again is
elsewhere, in `cache_folder`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import struct
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from orchestrator.errors import BackendError


def home(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the state folder, made private if it had to be made.

    Raises:
        BackendError: there is no home folder, or it can't be made.

    """
    named = environ.get("ORCHESTRATOR_HOME")
    state = environ.get("XDG_STATE_HOME") or "~/.local/state"
    try:
        path = Path(named).expanduser() if named else Path(state).expanduser() / "orchestrator"
    except RuntimeError as error:
        raise BackendError(
            f"state folder: {named or state}: {error}", advice="set ORCHESTRATOR_HOME to a folder of yours"
        ) from error
    # others of ours use it from other working directories
    return private(path.absolute())


def expand_home(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Put the home folder in the place of a leading ``~``; ``~user`` is left alone."""
    if text != "~" and not text.startswith("~/"):
        return text
    return (environ.get("HOME") or str(Path.home())) + text[1:]


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where what can be made again is kept: ``$XDG_CACHE_HOME/orchestrator``; nothing is made."""
    named = environ.get("XDG_CACHE_HOME", "")
    # by the XDG specification a relative path is none
    base = Path(named if named.startswith("/") else expand_home("~/.cache", environ))
    return base / "orchestrator"


def private(path: Path) -> Path:
    """Make a folder (and its parents) with mode 0700 and return it.

    One that was there is left as it is: it may be a folder that others share on purpose, and what is made
    in it is private all the same.

    Raises:
        BackendError: it can't be made.

    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BackendError(
            f"state folder: {path} can't be made: {_why(error)}",
            advice="set ORCHESTRATOR_HOME to a folder of yours",
        ) from error
    return path


# Open file description locks live and die with the descriptor as flock's do, and can be asked after.
_LOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid
_WRITE_LOCK = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


def _why(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


class RunFolder:
    """One running engine's folder, owned through a lock that dies with its process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.log = path / "engine.log"
        self._lock: int | None = None

    def acquire(self) -> bool:
        """Take ownership; False when a living process has it.

        Raises:
            BackendError: the folder or its lock can't be made.

        """
        private(self.path)
        try:
            fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BackendError(
                f"state folder: {self.path / 'lock'} can't be opened: {_why(error)}",
                advice=f"if nothing of yours runs from it, remove {self.path}",
            ) from error
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _WRITE_LOCK)
        except OSError:
            os.close(fd)
            return False
        # a folder that was removed between open and lock is nobody's: its lock means nothing
        with contextlib.suppress(OSError):
            if os.fstat(fd).st_ino == (self.path / "lock").stat().st_ino:
                self._lock = fd
                _owned.add(self)
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
    def title(self) -> str:
        """The name under which its engine is served, or was."""
        return self.name.partition("~")[0]

    @property
    def temporary(self) -> bool:
        """Say whether it belongs to one run of one program (NAME~PID-N) rather than to a name."""
        return "-" in self.name.partition("~")[2]

    def release(self, *, remove: bool = False, forget: bool = True) -> None:
        """Give ownership up and forget the record; the log stays unless the whole folder is to go."""
        if self._lock is not None:
            with contextlib.suppress(OSError):  # what can't be removed is swept later; the lock goes anyway
                if forget:
                    (self.path / "record.json").unlink(missing_ok=True)
                if remove:
                    shutil.rmtree(self.path, ignore_errors=True)
            fd, self._lock = self._lock, None  # in this order: a fork in between must not close it again
            os.close(fd)

    def disown(self) -> None:
        """In a fork of the owner: let go of the inherited descriptor, which would keep the lock alive."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write(self, record: Mapping[str, Any]) -> None:
        """Replace the record; a reader sees the old one or the new one, never a part.

        Raises:
            BackendError: the folder can't be written.

        """
        temporary = self.path / ".record"  # one name: what a killed owner left half-written is overwritten
        try:
            temporary.write_text(json.dumps(record, indent=1))
            temporary.replace(self.path / "record.json")
        except OSError as error:
            raise BackendError(
                f"state folder: {self.path} can't be written: {_why(error)}",
                advice="make room and see to it that it is yours, or set ORCHESTRATOR_HOME to another folder",
            ) from error

    def read(self) -> dict[str, Any] | None:
        """Return the record, None when there is none that makes sense."""
        try:
            record = json.loads((self.path / "record.json").read_text())
        except (OSError, ValueError, RecursionError):
            return None
        return record if isinstance(record, dict) else None


_owned: weakref.WeakSet[RunFolder] = weakref.WeakSet()


def _disown_all() -> None:
    for folder in _owned:
        folder.disown()


os.register_at_fork(after_in_child=_disown_all)


def run_folders(root: Path) -> Iterator[RunFolder]:
    """Yield the folder of everything that was ever run under a state folder."""
    with contextlib.suppress(OSError):
        for path in sorted((root / "run").iterdir()):
            if path.is_dir():
                yield RunFolder(path)
