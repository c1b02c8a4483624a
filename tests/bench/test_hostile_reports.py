"""A report comes from a file that anybody may have written: it is shown, or refused, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from orchestrator.bench import from_json, text, to_json
from orchestrator.bench.against import against
from orchestrator.bench.differences import Area
from orchestrator.bench.frames import ReportError
from orchestrator.bench.history import History, Report
from orchestrator.bench.history_text import list_rows, markdown
from orchestrator.bench.html import page, svg
from orchestrator.bench.values import Comparison, Measurement, Workload
from orchestrator.cli import against as cli_against
from orchestrator.cli import report
from orchestrator.errors import Incomparable
from tests.bench import reports

BASES = {
    "bench": reports.measurement((Workload(name="ttft", metric="ttft_s"),), rounds=7),
    "compare": reports.comparison(pairs=6, load=Workload(name="decode")),
}
WRONG: tuple[Any, ...] = (
    None, [], {}, "", "\x1b[2J\n" + 5_000 * "m", 0, -1, 1e308, -1e308, 1e-320, 1e18, 2**63, 10**30, True,
    [[]], [-1],
)  # fmt: skip


def places(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the way to every value of a document; of a list, the first is as good as any."""
    if at:
        yield at
    if isinstance(value, dict):
        for name in value:
            yield from places(value[name], (*at, name))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*at, 0))


def with_wrong(document: Any, place: tuple[str | int, ...], wrong: Any) -> bytes:
    """Return a document in which one value is another."""
    changed = msgspec.json.decode(msgspec.json.encode(document))
    inside = changed
    for step in place[:-1]:
        inside = inside[step]
    inside[place[-1]] = wrong
    return json.dumps(changed).encode()


def use(found: Measurement | Comparison, base: Measurement | Comparison, kept: History) -> None:
    """Do everything with a report that can be done with one."""
    report.plain(found)
    text.markdown(found)
    page(found)
    kept.record(found)
    list_rows(kept.entries())
    kept.remove(kept.ids())
    for a, b in ((found, base), (base, found)):
        try:
            answer = against(Report(a, path="a"), Report(b, path="b"), allow=get_args(Area))
        except Incomparable:
            continue
        cli_against.plain(answer)
        markdown(answer)


@pytest.mark.parametrize("kind", BASES)
def test_whatever_a_report_holds_it_is_shown_or_refused_ugly(kind: str, tmp_path: Path) -> None:
    base = BASES[kind]
    document = msgspec.json.decode(to_json(base))
    kept = History(tmp_path / "history.sqlite")
    used = 0
    for place in places(document):
        for wrong in WRONG:
            try:
                found = from_json(with_wrong(document, place, wrong))
            except ReportError as error:
                assert error.exit_code == 2  # noqa: PT017 - it need not be raised
                continue
            try:
                use(found, base, kept)
            except Exception as error:
                pytest.fail(f"{place} = {wrong!r}: {error!r}")
            used += 1
    assert used > 300


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        (("decisions",), []),
        (("arms",), []),
        (("decisions", 0, "ratio"), 0),
        (("decisions", 0, "low"), -1),
        (("design", "margin"), 2),
        (("started_at",), 1e12),
        (("workload", "output_tokens"), []),
        (("rounds", 0, "metrics", "ttft_s"), 1e101),
        (("arms", 0, "slots"), -1),
    ],
)
def test_what_can_not_be_is_refused_bad(place: tuple[str | int, ...], wrong: Any) -> None:
    document = msgspec.json.decode(to_json(BASES["compare"]))
    with pytest.raises(ReportError, match="can't be read: Expected"):
        from_json(with_wrong(document, place, wrong))


@pytest.mark.parametrize("report_", list(reports.situations().values()), ids=list(reports.situations()))
def test_every_report_of_ours_is_read_good(report_: Measurement | Comparison | Incomparable) -> None:
    if not isinstance(report_, Incomparable):
        assert from_json(to_json(report_)) == report_


def test_a_name_of_any_length_fits_into_a_plot_ugly() -> None:
    name = "beginning" + 1_000_000 * "m" + "end"  # what took time for each pair of letters would never end
    assert svg.short(name) == "beginningmm…mmmmmmend"
    assert svg.short("漢" * 100) == "漢漢漢漢漢漢…漢漢漢漢漢漢"
    assert page(reports.comparison(pairs=6, names=(name, "b")))
