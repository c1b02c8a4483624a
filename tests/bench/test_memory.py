"""The memory of an engine in a report: the most that was seen of its cards, and nothing where nobody says."""

from __future__ import annotations

from orchestrator.bench.machine import peak_vram

GIB = 1 << 30


def cards(*held: int | None) -> list[dict[str, int | None]]:
    return [{"memory_engine": size, "memory_used": 9 * GIB} for size in held]


def test_the_most_of_all_rounds_good():
    peak = None
    for seen in (cards(2 * GIB, 3 * GIB), cards(4 * GIB, None), cards(GIB)):
        peak = peak_vram(peak, seen)
    assert peak == 5 * GIB


def test_no_card_and_no_answer_is_no_figure_good():
    assert peak_vram(None, []) is None
    assert peak_vram(None, cards(None)) is None
    assert peak_vram(GIB, cards(None)) == GIB
