"""Results as pandas DataFrames and as JSON, and back."""

from __future__ import annotations

from typing import Any

import msgspec

from orchestrator.bench.values import FORMAT, Comparison, Measurement, Round, Sample
from orchestrator.errors import OrchestratorError


def rounds_of(result: Measurement | Comparison) -> list[tuple[str, Round]]:
    """Return every round with its workload's name."""
    if isinstance(result, Comparison):
        return [(result.workload.name, each) for each in result.rounds]
    return [(part.workload.name, each) for part in result.results for each in part.rounds]


def to_frame(result: Measurement | Comparison) -> Any:
    """Return a DataFrame, one row a request, with the columns of `Sample` and those of its round.

    Raises:
        OrchestratorError: pandas is not installed.

    """
    try:
        import pandas  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError as error:
        raise OrchestratorError("bench: pandas is not installed", advice="pip install pandas") from error
    names = [name for name in Sample.__struct_fields__ if name not in ("chunks_s", "engine")]
    rows = [
        {
            "workload": workload,
            "arm": each.arm,
            "round": each.number,
            "pair": each.pair,
            "position": each.position,
            "void": bool(each.void),
            **{name: getattr(sample, name) for name in names},
        }
        for workload, each in rounds_of(result)
        for sample in each.samples
    ]
    return pandas.DataFrame(rows)


def to_json(result: Measurement | Comparison) -> bytes:
    """Return the JSON document."""
    return msgspec.json.encode(result)


def from_json(data: bytes) -> Measurement | Comparison:
    """Return the result in a JSON document.

    Raises:
        OrchestratorError: it is none, or of a version that this program does not know.

    """

    class _Head(msgspec.Struct):
        format: str = ""
        kind: str = ""

    try:
        head = msgspec.json.decode(data, type=_Head)
        kinds: dict[str, type[Measurement] | type[Comparison]] = {
            "bench": Measurement,
            "compare": Comparison,
        }
        if not head.format.startswith("orchestrator-bench/") or head.kind not in kinds:
            raise OrchestratorError("bench: not a report of orchestrator bench or compare")
        if head.format != FORMAT:
            raise OrchestratorError(
                f"bench: the report has the format {head.format}, this program reads {FORMAT}",
                advice="read it with the version of the orchestrator that wrote it",
            )
        return msgspec.json.decode(data, type=kinds[head.kind])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise OrchestratorError(f"bench: the report can't be read: {error}") from error
