"""The command line: one small module a command, and the only place that prints.

`main` is what ``orchestrator`` runs. Modules that cost time are imported by the command that needs them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code.

    Args:
        argv: arguments without the program's name; default: this process's.

    """
    from orchestrator.cli import console, faults

    console.complete()
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in arguments[: arguments.index("--") if "--" in arguments else None]
    try:
        return _run(arguments)
    except console.ReaderGone:
        return faults.READER_GONE
    except KeyboardInterrupt:
        return faults.INTERRUPTED
    except Exception as error:
        if faults.debugging():
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            console.err(str(error))
            return 2
        found = _usage_fault(error) or faults.describe(error)
        console.err(faults.render(found))
        if as_json:
            measured = getattr(error, "measured", None)  # what a fault must not take along
            console.document({"error": found} | ({} if measured is None else {"measured": measured}))
        return int(found["exit_code"])
    finally:
        console.settle()


def _run(arguments: list[str]) -> int:
    from orchestrator.cli import console
    from orchestrator.cli.app import app

    try:
        result = app(args=arguments, prog_name="orchestrator", standalone_mode=False)
        console.out("", end="")  # what typer printed by itself
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer's own way of leaving, with 1
            raise console.ReaderGone from None
        raise
    except OSError:
        console.out("", end="")  # if stdout is at fault, this says so
        raise
    return result if isinstance(result, int) else 0


def _usage_fault(error: Exception) -> dict[str, Any] | None:
    """Return what typer found wrong with the command line."""
    show = getattr(error, "format_message", None)
    if show is None:
        return None
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "orchestrator"
    return {
        "type": "UsageError",
        "message": f"{command}: {_lowered(str(show()))}",
        "advice": f"{command} --help",
        "exit_code": getattr(error, "exit_code", 2),
    }


_WORDS = {
    "Input should be greater than or equal to": "must be at least",
    "Input should be less than or equal to": "must be at most",
    "Input should be a valid": "must be a valid",
}


def _lowered(message: str) -> str:
    first = message.strip().rstrip(".")
    for theirs, ours in _WORDS.items():
        first = first.replace(theirs, ours)
    return first[:1].lower() + first[1:]
