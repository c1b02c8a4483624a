"""A result on the terminal: what ``bench`` and ``compare`` print, and ``history show`` prints again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.bench import Comparison, Measurement


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
