"""A result on the terminal, printed again by ``history show``; and the files of ``--output DIR``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.cli.faults import UsageError, describe
from orchestrator.errors import Incomparable

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

    Raises:
        UsageError: it can't be written.

    """
    if folder is not None:
        _write(folder, {})
    try:
        yield
    except Incomparable as refusal:
        if folder is not None:
            write(folder, refusal)
        raise


def write(folder: Path, result: Measurement | Comparison | Incomparable) -> None:
    """Write a result, or why there is none, as JSON, as Markdown and as a page.

    Raises:
        UsageError: the folder can't be written.

    """
    import msgspec

    from orchestrator.bench import text, to_json
    from orchestrator.bench.html import page

    if isinstance(result, Incomparable):
        document = msgspec.json.encode({"error": describe(result)})
    else:
        document = to_json(result)
    words = {MARKDOWN: text.markdown(result), HTML: page(result)}
    _write(folder, {JSON: document, **{name: said.encode() for name, said in words.items()}})


def _write(folder: Path, files: dict[str, bytes]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
    except OSError as error:
        raise UsageError(f"--output {folder}: can't be written: {error.strerror}") from error
