"""How a start is followed: live rows on a terminal, structured lines elsewhere, JSON messages for a parent.

Every form takes the same words, so that `up --detach` shows what its child tells it as if it were its own:

    {"say": "event", "name": .., "event": .., "state": .., "fields": {..}}
    {"say": "ready", "name": .., "url": .., "outside": the URL for other machines or null}
    {"say": "error", "error": described error}
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from orchestrator.cli import faults
from orchestrator.cli.console import err, out, printable

if TYPE_CHECKING:
    from rich.progress import Progress as Rows
    from rich.progress import TaskID

    from orchestrator.backend import Event

Words = Mapping[str, Any]


class Progress(Protocol):
    """Whoever shows how far a start has come."""

    def hear(self, words: Words) -> None:
        """Take the next words."""

    def close(self) -> None:
        """Leave the screen as it should stay."""


def of_event(event: Event) -> dict[str, Any]:
    """Return the words for an event."""
    return {
        "say": "event",
        "name": event.profile,
        "event": event.name,
        "state": str(event.state),
        "fields": dict(event.fields),
    }


def remark(name: str, event: str, fields: Mapping[str, Any]) -> str | None:
    """Return what people have to be told of an event, in words."""
    if event != "context_reduced":
        return None
    return f"{name}: context: {fields['asked']} asked for, {fields['given']} given: {fields['why']}"


def _ready(words: Words) -> None:
    out(f"ready {words['name']} {words['url']}")
    if words["outside"] is not None:
        err(f"{words['name']}: other machines reach it at {words['outside']}")


def choose() -> Progress:
    """Return the form that fits this process's stderr."""
    return Live() if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else Lines()


class Lines:
    """For logs and pipes: what happened is logged where it happens, so only stages are added here."""

    def __init__(self) -> None:
        from orchestrator.log import get_logger

        self._log = get_logger("orchestrator.up")

    def hear(self, words: Words) -> None:
        """Take the next words."""
        if words["say"] == "ready":
            _ready(words)
        elif words["say"] == "error":
            err(faults.render(words["error"]))
        elif words["event"] == "stage":
            self._log.info(
                "stage", profile=words["name"], line=printable(str(words["fields"].get("line", "")))
            )

    def close(self) -> None:
        """Nothing is left on the screen."""


class Relayed(Lines):
    """For a parent without a terminal: what its child logs goes elsewhere, so events are lines here."""

    def hear(self, words: Words) -> None:
        """Take the next words."""
        if words["say"] == "event" and words["event"] != "stage":
            self._log.info(words["event"], profile=words["name"], state=words["state"], **words["fields"])
        else:
            super().hear(words)


class Live:
    """For people: one row an engine with its stage and the time elapsed, gone once it is ready."""

    def __init__(self) -> None:
        self._rows: Rows | None = None
        self._tasks: dict[str, TaskID] = {}

    def _row(self, name: str) -> TaskID:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.table import Column

        if self._rows is None:
            self._rows = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                TimeElapsedColumn(),
                TextColumn("{task.fields[stage]}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
                console=Console(stderr=True),
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
                expand=True,
            )
            self._rows.start()
        if name not in self._tasks:
            self._tasks[name] = self._rows.add_task(name, total=None, stage="")
        return self._tasks[name]

    def hear(self, words: Words) -> None:
        """Take the next words."""
        if words["say"] == "ready":
            self._without_rows(words["name"], lambda: _ready(words))
        elif words["say"] == "error":
            self._without_rows(None, lambda: err(faults.render(words["error"])))
        else:
            self._event(words["name"], words["event"], words["state"], words["fields"])

    def _event(self, name: str, event: str, state: str, fields: Mapping[str, Any]) -> None:
        if event == "state" and state in {"stopped", "failed", "stuck", "ready"}:
            self._without_rows(name, lambda: err(f"{name}: stopped") if state == "stopped" else None)
        elif said := remark(name, event, fields):
            self._without_rows(None, lambda: err(said))
        elif event == "stage":
            self._show(name, printable(str(fields.get("line", ""))))
        elif event == "state":
            reason = fields.get("reason")
            if reason:
                line = f"{name}: {state}: {printable(str(reason))}"
                self._without_rows(name, lambda: err(line))
            self._show(name, state)
        elif event == "port_taken":
            self._show(name, "its port was taken, trying another")

    def _show(self, name: str, stage: str) -> None:
        with _terminal():
            task = self._row(name)
            assert self._rows is not None
            self._rows.update(task, stage=stage)

    def _without_rows(self, done: str | None, act: Any) -> None:
        """Print while no rows are drawn, and draw those that are left again."""
        if self._rows is not None:
            if done in self._tasks:
                self._rows.remove_task(self._tasks.pop(done))
            with _terminal():
                self._rows.stop()
        act()
        if self._rows is not None and self._tasks:
            with _terminal():
                self._rows.start()
        else:
            self._rows, self._tasks = None, {}

    def close(self) -> None:
        """Take the rows off the screen."""
        if self._rows is not None:
            with _terminal():
                self._rows.stop()
            self._rows = None


def _terminal() -> contextlib.AbstractContextManager[None]:
    """Draw, or not when the terminal has hung up: what becomes of us then, SIGHUP says."""
    return contextlib.suppress(OSError)


class Pipe:
    """For a parent process: one JSON message each, dropped when it does not read, for as long as it lives."""

    def __init__(self, fd: int) -> None:
        self._line = socket.socket(fileno=fd)
        self._line.setblocking(False)
        self._line.set_inheritable(False)

    def hear(self, words: Words) -> None:
        """Pass the next words on."""
        with contextlib.suppress(OSError):
            self._line.send(json.dumps(words, default=str).encode())

    def close(self) -> None:
        """Let the parent see the end."""
        self._line.close()


class Both:
    """Tells two at once."""

    def __init__(self, first: Progress, second: Progress) -> None:
        self._parts = (first, second)

    def hear(self, words: Words) -> None:
        """Pass the next words on."""
        for part in self._parts:
            part.hear(words)

    def close(self) -> None:
        """Close both."""
        for part in self._parts:
            part.close()
