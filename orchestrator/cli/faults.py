"""The one place where an error becomes text, a JSON document and an exit code."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.errors import OrchestratorError, ProfileError

INTERRUPTED = 130
READER_GONE = 141  # as for any program that SIGPIPE ended


class UsageError(OrchestratorError):
    """The command line asks for something that can't be done."""

    exit_code = 2


def describe(error: BaseException) -> dict[str, Any]:
    """Return what is known about an error, as ``--json`` shows it below the key ``error``."""
    if not isinstance(error, OrchestratorError):
        return {
            "type": type(error).__name__,
            "message": f"orchestrator: internal fault: {type(error).__name__}: {error}",
            "advice": "ORCHESTRATOR_DEBUG=1 shows the traceback; please report it",
            "exit_code": 1,
        }
    found: dict[str, Any] = {
        "type": type(error).__name__,
        "message": error.message,
        "advice": error.advice,
        "exit_code": error.exit_code,
    }
    if isinstance(error, ProfileError):
        found["problems"] = [problem(fault) for fault in error.problems]
    for name in _TOLD:
        value = getattr(error, name, None)
        if value is not None and value != ():
            found[name] = list(value) if isinstance(value, tuple) else value
    return found


_TOLD = ("profile", "log_tail", "code", "signal", "attempts", "survivors", "status", "partial", "voids")


def problem(fault: Any) -> dict[str, Any]:
    """Return one fault of a profile as a mapping."""
    return {name: getattr(fault, name) for name in ("where", "line", "column", "key", "message")}


def render(error: Mapping[str, Any]) -> str:
    """Return the text of a described error: the message, the engine's last lines, the advice."""
    from orchestrator.cli.console import plain, printable

    lines = [plain(str(error["message"]))]
    lines += [f"    {printable(line)}" for line in error.get("log_tail", ())]
    if error.get("advice"):
        lines.append(plain(f"advice: {error['advice']}"))
    return "\n".join(lines)


def debugging() -> bool:
    """Say whether tracebacks are wanted."""
    return os.environ.get("ORCHESTRATOR_DEBUG", "") not in {"", "0"}


def together(errors: Sequence[ProfileError]) -> ProfileError:
    """Return one error with the faults of several profiles."""
    return ProfileError([fault for error in errors for fault in error.problems], advice=errors[0].advice)
