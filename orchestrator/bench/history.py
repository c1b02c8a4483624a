"""What was measured before: every report of bench and compare, whole, in one SQLite file of the state folder.

The report's JSON is the truth; the columns beside it are taken from it, to find a run without reading all.

    run   one report: when, what kind, its headline, the JSON
    arm   the engines of a report: one of a bench, two or more of a compare
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from orchestrator.bench.frames import LARGEST_FILE, from_json, read_at_most, to_json
from orchestrator.bench.history_file import HistoryError, HistoryFile
from orchestrator.bench.values import Answer, Arm, Comparison, Measurement, Value
from orchestrator.home import home

FILE = "history.sqlite"


class NoSuchRun(HistoryError):
    """The history has no run of that name."""

    exit_code = 2


class EntryArm(Value, frozen=True, kw_only=True):
    """One engine of a run."""

    name: str
    profile: str | None
    backend: str | None
    version: str | None
    model: str | None
    model_path: str | None
    quantisation: str | None


class Entry(Value, frozen=True, kw_only=True):
    """One run as a list shows it.

    `metric` is the first workload's own, or the first that was declared. Of a bench, `value` is its centre in
    that metric's unit; of a compare, `ratio` is the first arm's speed over the second's, and `verdict` the
    answer. What does not apply is null.
    """

    id: int
    kind: Literal["bench", "compare"]
    version: str
    started_at: float
    interrupted: bool
    workloads: tuple[str, ...]
    metric: str | None
    value: float | None
    ratio: float | None
    verdict: Answer | None
    arms: tuple[EntryArm, ...]


class Listing(Value, frozen=True, kw_only=True):
    """What ``orchestrator history --json`` prints: runs, the newest first, and the file that holds them."""

    path: str
    runs: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """A report and where it came from.

    Attributes:
        result: what it says.
        id: its number in the history, None for a file.
        path: its file, None for a run of the history.

    """

    result: Measurement | Comparison
    id: int | None = None
    path: str | None = None


class History:
    """The runs that were recorded; nothing is opened or made before it is needed.

    Every method raises HistoryError when the file is damaged, of a newer version, or out of reach.

    Attributes:
        path: the file; default: the one in the state folder.

    """

    def __init__(self, path: Path | None = None) -> None:
        self._file = HistoryFile(home() / FILE if path is None else path)
        self.path = self._file.path

    def record(self, result: Measurement | Comparison) -> tuple[int, bool]:
        """Keep a report; return its id, and whether it is new. What is there already is not kept twice."""
        report = to_json(result)
        digest = hashlib.sha256(report).hexdigest()
        row = {**_headline(result), "digest": digest, "report": report.decode()}
        with self._file.transaction(write=True) as found:
            assert found is not None
            known = found.execute("SELECT id FROM run WHERE digest = ?", (digest,)).fetchone()
            if known is not None:
                return int(known[0]), False
            _insert(found, "run", row)
            number = int(found.execute("SELECT last_insert_rowid()").fetchone()[0])
            for position, arm in enumerate(_arms(result)):
                facts = {name: getattr(arm, name) for name in EntryArm.__struct_fields__}
                _insert(found, "arm", {"run": number, "position": position, **facts})
        return number, True

    def entries(
        self,
        *,
        profile: str = "",
        model: str = "",
        backend: str = "",
        kind: str = "",
        since: float | None = None,
        limit: int | None = None,
    ) -> tuple[Entry, ...]:
        """Return runs, the newest first.

        Args:
            profile: only with an arm whose name or file contains it, upper and lower case alike.
            model: and whose model, its file or its quantisation contains it.
            backend: and whose engine contains it.
            kind: only ``bench`` or ``compare``.
            since: only what was started at this moment or later, seconds since the epoch.
            limit: so many at most.

        """
        query = f"""
            SELECT {_COLUMNS} FROM run
            WHERE (:kind = '' OR kind = :kind) AND started_at >= :since AND EXISTS (
                SELECT 1 FROM arm WHERE arm.run = run.id
                AND instr(lower({_PROFILE}), lower(:profile))
                AND instr(lower({_MODEL}), lower(:model))
                AND instr(lower(coalesce(arm.backend, '')), lower(:backend))
            )
            ORDER BY started_at DESC, id DESC LIMIT :limit
        """  # noqa: S608 - names of ours; what the user wants is bound
        wanted = {
            "profile": profile,
            "model": model,
            "backend": backend,
            "kind": kind,
            "since": float("-inf") if since is None else since,
            "limit": -1 if limit is None else limit,
        }
        with self._file.transaction(write=False) as found:
            return tuple(_entry(found, row) for row in found.execute(query, wanted)) if found else ()

    def ids(self) -> list[int]:
        """Return the ids of all runs, the newest first."""
        with self._file.transaction(write=False) as found:
            rows = found.execute("SELECT id FROM run ORDER BY started_at DESC, id DESC") if found else ()
            return [int(row["id"]) for row in rows]

    def resolve(self, name: str, *, kind: str = "", profile: str = "") -> int:
        """Return the id that a name means: a number, ``latest``, or ``latest~2`` for two before that.

        Args:
            name: what it is called.
            kind: ``latest`` counts only these; see `entries`.
            profile: and only those that have exactly this name.

        Raises:
            NoSuchRun: there is none.

        """
        found = re.fullmatch(r"latest(?:~(\d{1,9}))?|(\d{1,18})", name)
        if found is None:
            raise NoSuchRun(f"history: {name}: neither an id, nor latest, nor latest~N", advice=_ADVICE)
        back, number = found.groups()
        if number is not None:
            if int(number) not in self.ids():
                raise NoSuchRun(f"history: there is no run {int(number)}", advice=_ADVICE)
            return int(number)
        runs = [
            each
            for each in self.entries(kind=kind)
            if not profile or profile in [arm.name for arm in each.arms]
        ]
        if len(runs) <= int(back or 0):
            of = f" of {profile}" if profile else ""
            raise NoSuchRun(f"history: {name}: there are {len(runs)} runs{of} so far", advice=_ADVICE)
        return runs[int(back or 0)].id

    def report(self, number: int) -> bytes:
        """Return the JSON document of a run.

        Raises:
            NoSuchRun: there is none with this id.

        """
        query = "SELECT CAST(report AS BLOB) AS report FROM run WHERE id = ?"
        with self._file.transaction(write=False) as found:
            row = found.execute(query, (number,)).fetchone() if found else None
        if row is None:
            raise NoSuchRun(f"history: there is no run {number}", advice=_ADVICE)
        return bytes(row["report"])

    def open(self, name: str, *, kind: str = "", profile: str = "") -> Report:
        """Return a run by its name (see `resolve`), or the report in a file.

        Raises:
            NoSuchRun: there is neither.
            ReportError: it is no report, or one that this program can't read.

        """
        if re.fullmatch(r"latest(~\d+)?|\d+", name):
            number = self.resolve(name, kind=kind, profile=profile)
            return Report(from_json(self.report(number)), id=number)
        return Report(from_json(read(name)), path=name)

    def remove(self, numbers: Sequence[int]) -> None:
        """Forget runs: all of these, or none when one of them is not there.

        Raises:
            NoSuchRun: one is not there.

        """
        with self._file.transaction(write=True) as found:
            assert found is not None
            for number in dict.fromkeys(numbers):
                if not found.execute("DELETE FROM run WHERE id = ?", (number,)).rowcount:
                    raise NoSuchRun(f"history: there is no run {number}", advice=_ADVICE)


_COLUMNS = ", ".join(name for name in Entry.__struct_fields__ if name != "arms")


def _joined(*names: str) -> str:
    """Return columns as one text to search; SQLite has concat_ws since 3.44 only."""
    return " || ' ' || ".join(f"coalesce(arm.{name}, '')" for name in names)


_PROFILE, _MODEL = _joined("name", "profile"), _joined("model", "model_path", "quantisation")

_ADVICE = "orchestrator history lists what there is"


def read(path: str) -> bytes:
    """Return what a report's file holds.

    Raises:
        NoSuchRun: it can't be read, or is too large for a report.

    """
    try:
        data = read_at_most(Path(path).expanduser(), LARGEST_FILE)
    except (OSError, RuntimeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise NoSuchRun(
            f"history: {path}: neither a run nor a readable file: {why}", advice=_ADVICE
        ) from error
    if data is None:
        raise NoSuchRun(
            f"history: {path}: more than {LARGEST_FILE >> 20} MiB, which no report has", advice=_ADVICE
        )
    return data


def _arms(result: Measurement | Comparison) -> tuple[Arm, ...]:
    return result.arms if isinstance(result, Comparison) else (result.arm,)


def _headline(result: Measurement | Comparison) -> dict[str, str | float | None]:
    """Return the columns of `run` that are taken from a report."""
    shared: dict[str, str | float | None] = {
        "kind": result.kind,
        "version": result.version,
        "started_at": result.started_at,
        "interrupted": result.interrupted,
    }
    if isinstance(result, Comparison):
        first = result.decisions[0] if result.decisions else None
        return {
            **shared,
            "workloads": _names([result.workload.name]),
            "metric": first.metric if first else None,
            "ratio": first.ratio if first else None,
            "verdict": result.verdict,
        }
    centres = [
        (each.metric, each.value)
        for part in result.results
        for each in part.summaries
        if each.metric == part.workload.metric
    ]
    metric, value = centres[0] if centres else (None, None)
    names = _names([part.workload.name for part in result.results])
    return {**shared, "workloads": names, "metric": metric, "value": value}


def _names(names: list[str]) -> str:
    return msgspec.json.encode(names).decode()


def _insert(found: sqlite3.Connection, table: str, row: dict[str, str | float | None]) -> None:
    names, places = ", ".join(row), ", ".join(f":{name}" for name in row)
    found.execute(f"INSERT INTO {table} ({names}) VALUES ({places})", row)  # noqa: S608 - names of ours


def _entry(found: sqlite3.Connection, row: sqlite3.Row) -> Entry:
    arms = found.execute("SELECT * FROM arm WHERE run = ? ORDER BY position", (row["id"],))
    names = EntryArm.__struct_fields__
    fields = {name: row[name] for name in Entry.__struct_fields__ if name not in ("arms", "workloads")}
    return msgspec.convert(
        {
            **fields,
            "interrupted": bool(row["interrupted"]),
            "workloads": msgspec.json.decode(row["workloads"]),
            "arms": [{name: arm[name] for name in names} for arm in arms],
        },
        Entry,
    )
