"""Results as pandas DataFrames and as JSON, and back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.bench.values import FORMAT, Comparison, Measurement, Round, Sample
from orchestrator.errors import OrchestratorError

LARGEST = 1e100
"""No figure is larger: what is made of such numbers (a power, a sum) would leave the range of floats."""

LARGEST_FILE = 256 << 20
"""Bytes of a report at most, some 150,000 requests of 128 tokens each: a device or a pipe may have no end."""
_PIECE = 1 << 20


class ReportError(OrchestratorError):
    """A document is no report of bench or compare, or not one that this program can read."""

    exit_code = 2


def read_at_most(path: Path, most: int) -> bytes | None:
    """Return what a file holds that a user has named; None when it is more than `most` bytes.

    Raises:
        OSError: it can't be read.

    """
    data = bytearray()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):  # and not all at once, for which room would be made beforehand
            data += piece
            if len(data) > most:
                return None
    return bytes(data)


def rounds_of(result: Measurement | Comparison) -> list[tuple[str, Round]]:
    """Return every round with its workload's name."""
    if isinstance(result, Comparison):
        return [(result.workload.name, each) for each in result.rounds]
    return [(part.workload.name, each) for part in result.results for each in part.rounds]


def to_frame(result: Measurement | Comparison) -> Any:
    """Return a DataFrame, one row a request, with the columns of `Sample` and those of its round.

    The figures of a request that failed are NaN or None. Void rounds are there too, see `void`.

    Raises:
        OrchestratorError: pandas is not installed.

    """
    try:
        import pandas  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError as error:
        raise OrchestratorError("bench: pandas is not installed", advice="pip install pandas") from error
    places = ["workload", "arm", "round", "pair", "position", "void"]
    names = [name for name in Sample.__struct_fields__ if name not in ("chunks_s", "engine")]
    rows = [
        [
            *(workload, each.arm, each.number, each.pair, each.position, bool(each.void)),
            *(getattr(sample, name) for name in names),
        ]
        for workload, each in rounds_of(result)
        for sample in each.samples
    ]
    return pandas.DataFrame(rows, columns=[*places, *names])


def to_json(result: Measurement | Comparison) -> bytes:
    """Return the JSON document."""
    return msgspec.json.encode(result)


def from_json(data: bytes) -> Measurement | Comparison:
    """Return the result in a JSON document.

    Raises:
        ReportError: it is none, of a version that this program does not know, or holds what can't be.

    """

    class _Head(msgspec.Struct):
        format: str = ""
        kind: str = ""
        version: str = ""

    written = ""
    try:
        head = msgspec.json.decode(data, type=_Head)
        kinds: dict[str, type[Measurement] | type[Comparison]] = {
            "bench": Measurement,
            "compare": Comparison,
        }
        if not head.format.startswith("orchestrator-bench/") or head.kind not in kinds:
            raise ReportError("report: not one of orchestrator bench or compare")
        if head.format != FORMAT:
            raise ReportError(
                f"report: it has the format {head.format}, this program reads {FORMAT}",
                advice="read it with the version of the orchestrator that wrote it",
            )
        written = head.version
        found = msgspec.json.decode(data, type=kinds[head.kind])
        if any(abs(number) > LARGEST for number in _figures(found)):
            raise msgspec.ValidationError(f"Expected figures of at most {LARGEST:g}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        advice = f"version {written} of the orchestrator wrote it" if written else None
        raise ReportError(f"report: it can't be read: {error}", advice=advice) from error
    return found


def _figures(value: object) -> Iterator[float]:
    """Yield every number with a fraction that a value holds, however deep."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _figures(getattr(value, name))
    elif isinstance(value, tuple):
        for each in value:
            yield from _figures(each)
    elif isinstance(value, dict):
        yield from _figures(tuple(value.values()))
