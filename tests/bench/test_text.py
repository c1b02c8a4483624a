"""Results in words."""

from __future__ import annotations

import msgspec
import pytest

from orchestrator.bench import decide, text
from orchestrator.bench.values import Arm, Comparison, Decision, Design, Machine, Workload
from tests.bench.conftest import HEALTHY, made_round

MACHINE = Machine(
    cpu="a processor", cores=2, memory=1 << 33, kernel="6.1", gpus=(), governor=None, cpu_mhz=None,
    load_average=0.1, python="3.11", packages={}, clock={},
)  # fmt: skip


def comparison(ratio: float, pairs: int = 8, **changes: object) -> Comparison:
    """Return a comparison of which a was `ratio` times as fast as b."""
    rounds = tuple(
        made_round(arm, pair, decode_tok_s=100 * speed * (1 + pair % 3 / 1000), ttft_s=0.0123)
        for pair in range(pairs)
        for arm, speed in (("one", ratio), ("two|three", 1.0))
    )
    decisions = decide.decide([decide.pairs_of(rounds, "one", "two|three", "decode_tok_s")])
    others = (decide.describe(decide.pairs_of(rounds, "one", "two|three", "ttft_s")),)
    found = Comparison(
        version="1",
        started_at=0.0,
        seed=1,
        verdict=decisions[0].answer,
        workload=Workload(name="decode"),
        design=Design(
            metrics=("decode_tok_s",), margin=0.03, confidence=0.95, pairs=pairs, order=((0, 1),),
            stop_early=(), void_budget=0, residency="together", control=False,
        ),
        arms=(Arm(name="one"), Arm(name="two|three")),
        decisions=decisions,
        others=others,
        rounds=(*rounds, made_round("two|three", 9, ("the client was late",))),
        machine=MACHINE,
        self_test=HEALTHY,
        notes=("mind this",),
    )  # fmt: skip
    return msgspec.structs.replace(found, **changes)


def said(found: Comparison) -> str:
    first: Decision = found.decisions[0]
    return text.sentence(first, found)


@pytest.mark.parametrize(
    ("ratio", "sentence"),
    [
        (2.0, "one is faster than two|three, 2.000 times"),
        (0.5, "two|three is faster than one, 2.000 times"),
        (1.01, "one and two|three are equivalent within 3%"),
    ],
)
def test_an_answer_is_a_sentence_with_its_interval_good(ratio: float, sentence: str) -> None:
    words = said(comparison(ratio))
    assert sentence in words
    assert "95 % interval" in words
    assert "8 pairs" in words


def test_too_few_pairs_say_how_many_more_good() -> None:
    assert "inconclusive" in said(comparison(2.0, pairs=4))
    assert "about 2 more pairs needed" in said(comparison(2.0, pairs=4))
    assert text.sensitivity(comparison(2.0, pairs=4)) is None
    assert "4 of 5" in (text.sensitivity(comparison(2.0)) or "")


def test_markdown_has_all_that_a_reviewer_asks_for_good() -> None:
    page = text.markdown(comparison(2.0))
    for expected in ("**decode_tok_s: one", "| 2.000 |", "a processor", "mind this", "the client was late"):
        assert expected in page
    assert "(not declared)" in page


def test_a_name_does_not_break_the_table_ugly() -> None:
    page = text.markdown(comparison(2.0, arms=(Arm(name="a"), Arm(name="two|three"))))
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in rows}) == 1


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (0.0123, "s", "12.3 ms"),
        (1.5, "s", "1.50 s"),
        (1234.5, "tok/s", "1234 tok/s"),
        (60.12, "tok/s", "60.1 tok/s"),
        (1.234, "1/s", "1.23 1/s"),
        (None, "s", "-"),
    ],
)
def test_figures_are_short_good(value: float | None, unit: str, shown: str) -> None:
    assert text.figure(value, unit) == shown
