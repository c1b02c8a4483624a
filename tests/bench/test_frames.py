"""Results as pandas DataFrames."""

from __future__ import annotations

import msgspec
import pytest

from orchestrator.bench.values import METRICS, Measurement
from tests.bench import reports


def test_a_frame_has_one_row_a_request_good() -> None:
    found = reports.measurement()
    frame = found.to_frame()
    rounds = [each for part in found.results for each in part.rounds]
    assert len(frame) == sum(len(each.samples) for each in rounds)
    assert {"workload", "arm", "round", "pair", "position", "void", "index", "ttft_s", "error"} <= set(
        frame.columns
    )
    part = found.results[0]
    name = part.workload.name
    first = next(each for each in part.rounds if not each.void)
    rows = frame[(frame.workload == name) & (frame["round"] == first.number)]
    assert rows.ttft_s.median() == pytest.approx(first.metrics["ttft_s"])
    assert set(METRICS) & set(frame.columns)


def test_a_comparison_has_the_rounds_of_all_arms_good() -> None:
    found = reports.comparison()
    frame = found.to_frame()
    assert set(frame.arm) == {arm.name for arm in found.arms}
    assert frame.void.dtype == bool


def test_a_frame_of_nothing_has_its_columns_ugly() -> None:
    found = reports.measurement()
    assert isinstance(found, Measurement)
    frame = msgspec.structs.replace(found, results=()).to_frame()
    assert len(frame) == 0
    assert "decode_tok_s" in frame.columns
