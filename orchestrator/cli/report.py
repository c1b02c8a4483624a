"""A result on the terminal, printed again by ``history show``; and the files of ``--output DIR``."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.cli.faults import UsageError, describe
from orchestrator.errors import Incomparable, OrchestratorError

if TYPE_CHECKING:
    from orchestrator.bench import Comparison, Measurement

HTML, JSON, MARKDOWN = "report.html", "report.json", "report.md"


def plain(result: Measurement | Comparison) -> str:
    """Return a result as a person reads it: the table, the answers, the circumstances."""
    from orchestrator.bench import Comparison, text
    from orchestrator.cli import console

    if isinstance(result, Comparison):
        rounds, loads, arms = list(result.rounds), [result.workload], result.arms
        seen = text.sensitivity(result)
        lines = [
            f"A is {result.arms[0].name}",
            console.table(text.compare_rows(result), text.COMPARE_HEADINGS),
            "",
            *(text.sentence(each, result) for each in result.decisions),
            *([seen] if seen else []),
            "",
        ]
    else:
        rounds = [each for part in result.results for each in part.rounds]
        loads, arms = [part.workload for part in result.results], (result.arm,)
        lines = [console.table(text.bench_rows(result), text.BENCH_HEADINGS), ""]
    lines += [
        *map(text.describe, loads),
        *(text.arm_line(arm, rounds) for arm in arms),
        text.self_test_line(result.self_test),
        *(f"note: {note}" for note in result.notes),
        *text.void_lines(rounds),
    ]
    return "\n".join(lines)


@contextlib.contextmanager
def kept(folder: Path | None) -> Iterator[None]:
    """See that the folder can be written before anything is measured; a refusal is written there too.

    Of what ended half-way, the rounds that were measured are written.

    Raises:
        UsageError: it can't be written.

    """
    if folder is None:
        yield
        return
    if fault := _write(folder, {}):
        raise UsageError(fault)
    try:
        yield
    except OrchestratorError as ended:
        if ended.measured is not None:
            write(folder, ended.measured)
        elif isinstance(ended, Incomparable):
            write(folder, ended)
        raise


def write(folder: Path, result: Measurement | Comparison | Incomparable) -> int:
    """Write a result, or why there is none, as JSON, as Markdown and as a page: all three, or nothing.

    Returns:
        The exit code. That it can't be written is told and no more: what there is to print must not be lost.

    """
    import msgspec

    from orchestrator.bench import text, to_json
    from orchestrator.bench.html import page
    from orchestrator.cli import console

    if isinstance(result, Incomparable):
        document = msgspec.json.encode({"error": describe(result)})
    else:
        document = to_json(result)
    words = {MARKDOWN: text.markdown(result), HTML: page(result)}
    fault = _write(folder, {JSON: document, **{name: said.encode() for name, said in words.items()}})
    if fault is None:
        return 0
    console.err(console.plain(fault))
    return UsageError.exit_code


def _write(folder: Path, files: dict[str, bytes]) -> str | None:
    """Write all files, or none and return why."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".report-", dir=folder) as made:
            for name, data in files.items():
                (Path(made) / name).write_bytes(data)
            for name in files:
                (Path(made) / name).replace(folder / name)
    except OSError as error:
        return f"--output {folder}: can't be written: {error.strerror}"
    return None
