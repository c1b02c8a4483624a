"""The file of the history: one SQLite database, private, brought up to date, and never thrown away.

There is a rollback journal and no write-ahead log: a run is written once in minutes, so nobody waits for
anybody, the history is one file that can be copied, and a home folder on a network file system will do.
Writers take the lock before they look (BEGIN IMMEDIATE), so two at once wait for each other; what a killed
one left is rolled back by whoever comes next. `STEPS` leads from any older schema to the present one.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec

from orchestrator.errors import OrchestratorError

APPLICATION = 0x6F726368  # "orch": how a history is told from another program's database
PATIENCE_S = 10.0  # for another writer

STEPS: tuple[tuple[str, ...], ...] = (
    (
        """
        CREATE TABLE run (
            id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never given twice, so that a noted id stays right
            digest TEXT NOT NULL UNIQUE,  -- sha256 of the report
            kind TEXT NOT NULL,
            version TEXT NOT NULL,
            started_at REAL NOT NULL,
            interrupted INTEGER NOT NULL,
            workloads TEXT NOT NULL,  -- a JSON array of names
            metric TEXT,
            value REAL,
            ratio REAL,
            verdict TEXT,
            report TEXT NOT NULL
        )
        """,
        "CREATE INDEX run_started ON run (started_at, id)",
        """
        CREATE TABLE arm (
            run INTEGER NOT NULL REFERENCES run ON DELETE CASCADE,
            position INTEGER NOT NULL,
            name TEXT NOT NULL,
            profile TEXT,
            backend TEXT,
            version TEXT,
            model TEXT,
            model_path TEXT,
            quantisation TEXT,
            PRIMARY KEY (run, position)
        ) WITHOUT ROWID
        """,
    ),
)
"""What makes schema n+1 out of schema n, one statement each; never changed once released, only added to."""


class HistoryError(OrchestratorError):
    """The history can't be read or written; it is never thrown away."""


class HistoryFile:
    """The database at a path; nothing is opened or made before it is needed.

    Attributes:
        path: the file.

    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @contextlib.contextmanager
    def transaction(self, *, write: bool) -> Iterator[sqlite3.Connection | None]:
        """Yield a connection within a transaction; None when there is nothing to read yet."""
        try:
            if write:  # SQLite would make it readable for others; what it puts beside it takes the same mode
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            elif not self.path.exists():
                yield None
                return
            with contextlib.closing(self._connect()) as found:
                found.execute("BEGIN IMMEDIATE" if write else "BEGIN")
                if self._version(found) < len(STEPS):  # or empty: its maker was killed early
                    self._migrate(found)
                yield found
                found.execute("COMMIT")  # else closing rolls back
        except msgspec.MsgspecError as error:
            raise self._fault(str(error), "") from error
        except sqlite3.Error as error:
            raise self._fault(str(error), getattr(error, "sqlite_errorname", None) or "") from error
        except OSError as error:
            raise self._fault(error.strerror or str(error), "SQLITE_CANTOPEN") from error

    def _migrate(self, found: sqlite3.Connection) -> None:
        """Bring the schema up to date, within a transaction that has seen no other writer since."""
        found.execute("ROLLBACK")
        found.execute("BEGIN IMMEDIATE")
        for step in STEPS[self._version(found) :]:
            for statement in step:
                found.execute(statement)
        found.execute(f"PRAGMA user_version = {len(STEPS)}")
        found.execute(f"PRAGMA application_id = {APPLICATION}")

    def _connect(self) -> sqlite3.Connection:
        found = sqlite3.connect(
            f"{self.path.as_uri()}?mode=rw", uri=True, timeout=PATIENCE_S, isolation_level=None
        )
        found.row_factory = sqlite3.Row
        found.execute("PRAGMA foreign_keys = ON")
        return found

    def _version(self, found: sqlite3.Connection) -> int:
        """Return the number of the file's schema; 0 for an empty file."""
        version = int(found.execute("PRAGMA user_version").fetchone()[0])
        application = int(found.execute("PRAGMA application_id").fetchone()[0])
        empty = not found.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if application != APPLICATION and not empty:
            raise HistoryError(
                f"history: {self.path} is the database of another program", advice="move it away"
            )
        if version > len(STEPS):
            raise HistoryError(
                f"history: {self.path} has schema {version}, this program knows {len(STEPS)} at most",
                advice="use the newer orchestrator that wrote it, or another ORCHESTRATOR_HOME",
            )
        return version

    def _fault(self, said: str, code: str) -> HistoryError:
        advice = next((advice for prefix, advice in _FAULTS if code.startswith(prefix)), _DAMAGED)
        return HistoryError(f"history: {self.path}: {said}", advice=advice.format(path=self.path))


_MINE = (
    "see to it that the file and its folder are yours to write, or set ORCHESTRATOR_HOME to another folder"
)
_DAMAGED = (
    "the file is damaged and was left as it is: `sqlite3 {path} .recover` may save what it holds; once it is "
    "moved away, the next run begins a new one"
)
_FAULTS = (
    ("SQLITE_BUSY", "another program has been writing to it for too long; try again"),
    ("SQLITE_READONLY", _MINE),
    ("SQLITE_CANTOPEN", _MINE),
    ("SQLITE_PERM", _MINE),
    ("SQLITE_FULL", "make room on the disk"),
    ("SQLITE_IOERR", "see whether the disk is full or at fault"),
)
