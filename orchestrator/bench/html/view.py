"""What is drawn: the rounds of a report in groups, an arm each (compare) or a workload each (bench)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from orchestrator.bench.text import figure
from orchestrator.bench.values import METRICS, Arm, Comparison, Measurement, Round, Sample, Workload

WORDS = {
    # metric: in a sentence, in a plot
    "decode_tok_s": ("decode rate", "decode"),
    "ttft_s": ("time to first token", "TTFT"),
    "prefill_tok_s": ("prefill rate", "prefill"),
    "tpot_s": ("time per output token", "TPOT"),
    "chunk_gap_s": ("gap between chunks", "chunk gap"),
    "e2e_s": ("end-to-end time", "end to end"),
    "output_tok_s": ("output throughput", "throughput"),
    "requests_s": ("request rate", "requests"),
}


def words(metric: str) -> str:
    """Return a metric as a sentence says it."""
    return WORDS.get(metric, (metric, metric))[0]


def brief(metric: str) -> str:
    """Return a metric as a plot says it."""
    return WORDS.get(metric, (metric, metric))[1]


def unit(metric: str) -> str:
    """Return a metric's unit."""
    return METRICS[metric][0] if metric in METRICS else ""


def shows(metric: str, value: float | None) -> str:
    """Return a metric's figure."""
    return figure(value, unit(metric))


def size(count: float) -> str:
    """Return bytes as people read them."""
    for name, power in (("GiB", 30), ("MiB", 20)):
        if count >= 1 << power:
            return f"{count / (1 << power):.{2 if power == 30 else 0}f} {name}"
    return f"{count / 1024:.0f} KiB"


def clock(seconds: float) -> str:
    """Return a length of time as people read it."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"


def several(values: Iterable[object], most: int = 4) -> str:
    """Return the different ones among values, the first few of them."""
    found = list(dict.fromkeys(str(value) for value in values))
    rest = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + rest or "-"


@dataclass(frozen=True, slots=True)
class Group:
    """Rounds that are drawn together.

    Attributes:
        letter: what it is called where there is little room; empty when there is one arm.
        name: what it is called where there is more.
        style: its colour and shape.
        arm: whose rounds they are.
        workload: what was asked.
        metric: the one that decides, or the workload's own.
        rounds: void ones too, in the order in which they were run.

    """

    letter: str
    name: str
    style: int
    arm: Arm
    workload: Workload
    metric: str
    rounds: tuple[Round, ...]

    @property
    def label(self) -> str:
        """Its letter and its name."""
        return f"{self.letter} · {self.name}" if self.letter else self.name

    @property
    def valid(self) -> list[Round]:
        """The rounds that count."""
        return [each for each in self.rounds if not each.void]

    @property
    def samples(self) -> list[Sample]:
        """The requests of the rounds that count."""
        return [sample for each in self.valid for sample in each.samples if sample.error is None]

    def of_samples(self, metric: str) -> list[float]:
        """Return a metric of each request; of one that requests don't have, nothing."""
        found = (getattr(sample, metric, None) for sample in self.samples)
        return [value for value in found if value is not None]

    def of_rounds(self, metric: str) -> list[float]:
        """Return a metric of each round that counts."""
        return [each.metrics[metric] for each in self.valid if metric in each.metrics]


def letter(index: int) -> str:
    """Return what the arm with this number is called: A, B, ..., Z, A1, B1, ..."""
    return chr(ord("A") + index % 26) + (str(index // 26) if index >= 26 else "")


def letter_of(report: Comparison, name: str) -> str:
    """Return what the arm of this name is called."""
    return next((letter(index) for index, arm in enumerate(report.arms) if arm.name == name), "?")


def groups(report: Measurement | Comparison) -> list[Group]:
    """Return the groups of a report."""
    if isinstance(report, Measurement):
        return [
            Group("", part.workload.name, 0, report.arm, part.workload, part.workload.metric, part.rounds)
            for part in report.results
        ]
    return [
        Group(
            letter(index),
            arm.name,
            index,
            arm,
            report.workload,
            report.decisions[0].metric if report.decisions else report.workload.metric,
            tuple(each for each in report.rounds if each.arm == arm.name),
        )
        for index, arm in enumerate(report.arms)
    ]


def began(found: Sequence[Group]) -> float:
    """Return when the first round began, in seconds since the epoch."""
    return min((each.started_at for group in found for each in group.rounds), default=0.0)


def percent(share: float) -> str:
    """Return a share as people read it."""
    return f"{100 * share:.3g} %"
