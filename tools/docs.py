"""Write the reference pages that come from the code, or with ``--check`` say which are stale.

docs/reference/commands.md           the help of every command
docs/reference/profile.schema.json   the schema of a profile, for editors
docs/reference/schemas/*.json        the schema of what each command prints with --json
docs/reference/failures.md           the failures of engines that are known
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import typer
from typer.testing import CliRunner

from backends.containers import CONTAINER_FAILURES
from backends.failures import DEVICE_FAILURES, WRONG_PROCESSOR, Failure
from backends.failures_llama_server import LLAMA_SERVER_FAILURES
from backends.failures_vllm import VLLM_FAILURES
from orchestrator.bench import Comparison, Measurement
from orchestrator.bench.against import Against
from orchestrator.bench.history import Listing
from orchestrator.cli import documents
from orchestrator.cli.app import app
from orchestrator.profile import json_schema

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
SCHEMAS = REFERENCE / "schemas"

INTRODUCTION = """\
# Commands

<!-- made by `make docs` from the commands themselves -->

Results go to stdout, everything else to stderr. With `--json` a command prints one JSON document on stdout
and nothing else there; what it holds is in [schemas](schemas).

| exit code | means |
|---|---|
| 0 | done; `up` was asked to end, by Ctrl-C, SIGTERM or `down`, be it while it still loaded |
| 1 | a fault of ours; a check that failed: slower than `--fail-if-slower` allows |
| 2 | a mistake on the command line, in a profile, or about a model |
| 3 | an engine is missing, failed to start, or was given up |
| 4 | a request failed |
| 5 | two measurements can't be compared |
| 130 | interrupted (not `up`, see 0) |
"""


def commands() -> str:
    """Return the page of all commands: what each says when asked for help."""
    sections = [
        _help(" ".join(["orchestrator", *path]), path) for path in _paths(typer.main.get_command(app))
    ]
    return "\n".join([INTRODUCTION, *sections])


def _paths(command: Any, *path: str) -> Iterator[list[str]]:
    """Yield the words of a command, and those of every command below it."""
    yield list(path)
    for name, below in getattr(command, "commands", {}).items():
        yield from _paths(below, *path, name)


def _help(title: str, path: list[str]) -> str:
    shown = CliRunner().invoke(app, [*path, "--help"], prog_name="orchestrator", env={"COLUMNS": "80"})
    return f"## {title}\n\n```text\n{shown.output.strip()}\n```\n"


FAILURES = """\
# Failures that are known

<!-- made by `make docs` from backends/failures*.py and backends/containers.py -->

An engine's last log lines are searched for these. The first row that matches is shown; its advice is the
`advice` of the error, of `ps --json` and of the event. *At once* means that no restart is tried when the
engine ends like this before it is ready, *retried* that restarts are tried within the profile's `restart`
budget. A crash of an engine that was ready is always retried. How to read them:
[Read a failure](../how-to/read-a-failure.md).
"""


def failures() -> str:
    """Return the page of known failures."""
    shared = {failure.kind for failure in DEVICE_FAILURES}
    llama_server = [failure for failure in LLAMA_SERVER_FAILURES if failure.kind not in shared]
    vllm = [failure for failure in VLLM_FAILURES if failure.kind not in shared]
    return "\n".join(
        [
            FAILURES,
            _failures("llama-server", llama_server),
            _failures("vLLM", vllm),
            _failures("Containers, of any engine", CONTAINER_FAILURES),
            _failures("Drivers, cards and libraries, on either engine", DEVICE_FAILURES),
            _failures("By the signal SIGILL, on either engine", [WRONG_PROCESSOR]),
        ]
    )


def _failures(title: str, table: Iterable[Failure]) -> str:
    rows = [
        f"| {failure.kind} | {'at once' if failure.permanent else 'retried'} | {failure.advice} |"
        for failure in table
    ]
    return "\n".join([f"## {title}\n", "| kind | fails | what to do |", "|---|---|---|", *rows, ""])


def pages() -> Iterator[tuple[Path, str]]:
    """Yield every generated page with the text it should have."""
    yield REFERENCE / "commands.md", commands()
    yield REFERENCE / "failures.md", failures()
    yield REFERENCE / "profile.schema.json", _json(json_schema())
    reports = {
        "bench": Measurement,
        "compare": Comparison,
        "history": Listing,
        "history-compare": Against,
    }
    for name, shape in {**documents.ALL, **reports}.items():
        yield SCHEMAS / f"{name}.json", _json(msgspec.json.schema(shape))


def _json(document: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def main() -> int:
    """Write the pages, or compare them; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail when a page is stale")
    checking = parser.parse_args().check
    wanted = dict(pages())
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    extra = [path for path in SCHEMAS.glob("*.json") if path not in wanted]
    if checking:
        for path in stale + extra:
            print(f"docs: {path.relative_to(ROOT)} is stale; run make docs", file=sys.stderr)
        return 1 if stale or extra else 0
    for path in extra:
        path.unlink()
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path])
        print(f"docs: wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
