"""What is declared before a comparison begins, so that nobody chooses once the figures are seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from orchestrator.bench import decide, gate, statistics
from orchestrator.bench.arms import Spec
from orchestrator.bench.values import METRICS, Workload
from orchestrator.bench.workload import WorkloadError

PAIRS = 8
Residency = Literal["auto", "together", "alternate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """What is decided before anything is measured; see `compare` for the fields.

    Raises:
        WorkloadError: it makes no sense.

    """

    arms: Sequence[Spec]
    workload: Workload | str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()
    margin: float = decide.MARGIN
    pairs: int = PAIRS
    budget: int = PAIRS
    residency: Residency = "auto"
    stop_early: bool = False
    control: bool = False
    limits: gate.Limits | None = None

    def __post_init__(self) -> None:
        claims = max(1, len(self.metrics)) * (len(self.arms) - 1)
        fewest = statistics.fewest_pairs(claims, self.alpha)
        if self.looks[0] < fewest:
            looks = f" at the first of {len(self.looks)} looks" if self.stop_early else ""
            raise WorkloadError(
                f"compare: {self.looks[0]} pairs{looks} are too few for {claims} answer(s) at "
                f"{decide.CONFIDENCE:.0%}: {fewest} are needed"
            )
        if not 0 < self.margin < 1:
            raise WorkloadError(f"compare: a margin of {self.margin:g} makes no sense", advice="0.03 is 3 %")
        unknown = [name for name in self.metrics if name not in METRICS]
        if unknown:
            raise WorkloadError(
                f"compare: no metric named {unknown[0]!r}", advice=f"there are: {', '.join(METRICS)}"
            )

    @property
    def looks(self) -> tuple[int, ...]:
        """After how many pairs an answer is looked for."""
        return tuple(statistics.looks(self.pairs)) if self.stop_early else (self.pairs,)

    @property
    def alpha(self) -> float:
        """The chance of a wrong claim at each look."""
        return (1 - decide.CONFIDENCE) / len(self.looks)
