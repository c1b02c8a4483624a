"""What belongs together in two runs, and what differs between them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import urlsplit

from orchestrator.bench.history import Report
from orchestrator.bench.values import Arm, Comparison, Round, Value, Workload
from orchestrator.errors import Incomparable

Area = Literal["machine", "engine", "model", "workload"]
AREAS: tuple[Area, ...] = get_args(Area)

SMALLEST = 1e-100  # of any metric, in its unit; below it there is nothing, and no logarithm to trust
_MEMORY = 0.05  # of the machine's: kernels keep a little more or less for themselves


class Difference(Value, frozen=True, kw_only=True):
    """What differs between the runs. With an `area` it forbids an answer unless that area is allowed."""

    area: Area | None
    what: str
    a: str | None
    b: str | None


def words(each: Difference) -> str:
    """Return a difference in words."""
    return f"{each.what}: {each.a if each.a is not None else '-'} and {each.b if each.b is not None else '-'}"


@dataclass(frozen=True, slots=True)
class Part:
    """One workload on one engine, in one run."""

    workload: Workload
    arm: Arm
    rounds: tuple[Round, ...]

    def values(self, metric: str) -> list[float]:
        """Return a metric of all rounds that count."""
        found = (each.metrics.get(metric, 0.0) for each in self.rounds if not each.void)
        return [value for value in found if value >= SMALLEST]


# -- what belongs together ----------------------------------------------------------------------------


def parts(report: Report) -> list[Part]:
    """Return what a report holds, a part for each workload on each engine."""
    result = report.result
    if isinstance(result, Comparison):
        return [
            Part(result.workload, arm, tuple(each for each in result.rounds if each.arm == arm.name))
            for arm in result.arms
        ]
    return [Part(part.workload, result.arm, part.rounds) for part in result.results]


def match(a: Report, b: Report, context: str) -> tuple[list[tuple[Part, Part]], list[str]]:
    """Return the parts that belong together, and notes on those that have no counterpart.

    Workloads belong together by their names, engines too, unless there is just one in each run.

    Raises:
        Incomparable: there are no two such parts.

    """
    ours, theirs = parts(a), parts(b)
    single = all(len({part.arm.name for part in each}) == 1 for each in (ours, theirs))

    def key(part: Part) -> tuple[str, str]:
        return part.workload.name, "" if single else part.arm.name

    def named(part: Part) -> str:
        return part.workload.name if single else f"{part.workload.name} on {part.arm.name}"

    others = {key(part): part for part in theirs}
    matched = [(part, others[key(part)]) for part in ours if key(part) in others]
    if not matched:
        measured = [", ".join(map(named, each)) or "nothing" for each in (ours, theirs)]
        raise Incomparable(
            [f"A measured {measured[0]}, and B {measured[1]}: not one workload is in both"],
            context=context,
            advice=_apart(ours, theirs),
        )
    mine = {key(part) for part in ours}
    alone = [f"{named(part)}: only in A" for part in ours if key(part) not in others]
    return matched, alone + [f"{named(part)}: only in B" for part in theirs if key(part) not in mine]


def _apart(a: Sequence[Part], b: Sequence[Part]) -> str:
    """Return what to do about two runs of which no parts belong together."""
    if {part.workload.name for part in a} & {part.workload.name for part in b}:
        return (
            "where a run has several engines, they are matched by name: choose runs that have one in common, "
            "or measure each engine by itself with `orchestrator bench`"
        )
    return (
        "choose two runs of the same workload, `orchestrator history` lists them; "
        "or measure it now: `orchestrator bench PROFILE --preset NAME`"
    )


# -- what differs -------------------------------------------------------------------------------------


def differences(a: Report, b: Report, matched: Sequence[tuple[Part, Part]]) -> Iterator[Difference]:
    """Yield what differs between two runs, and between the parts that belong together."""
    one, two = a.result.machine, b.result.machine
    for name, what in (("cpu", "processor"), ("cores", "cores"), ("gpus", "GPUs"), ("governor", "governor")):
        yield from _told("machine", what, getattr(one, name), getattr(two, name))
    if abs(one.memory - two.memory) > _MEMORY * max(one.memory, two.memory):
        sizes = [f"{where.memory / 2**30:.1f} GiB" for where in (one, two)]
        yield Difference(area="machine", what="memory", a=sizes[0], b=sizes[1])
    yield from _told(None, "kernel", one.kernel, two.kernel)
    yield from _told(None, "Python", one.python, two.python)
    yield from _told(None, "orchestrator", a.result.version, b.result.version)
    yield from _told(None, "seed", a.result.seed, b.result.seed)
    for package in sorted({*one.packages, *two.packages} - {"inference-orchestrator"}):
        # such an engine does not know its own version, but its package does
        folder = package.replace("-", "_")
        is_engine = any(folder in arm.argv[0] for pair in matched for part in pair if (arm := part.arm).argv)
        versions = one.packages.get(package), two.packages.get(package)
        yield from _told("engine" if is_engine else None, package, *versions)
    arms = {left.arm.name: (left.arm, right.arm) for left, right in matched}
    for name, (left, right) in arms.items():
        yield from _engines(f"{name}: " if len(arms) > 1 else "", left, right)
    loads = {left.workload.name: (left.workload, right.workload) for left, right in matched}
    for name, (mine, theirs) in loads.items():
        for field in Workload.__struct_fields__:
            yield from _told("workload", f"{name}: {field}", getattr(mine, field), getattr(theirs, field))


def _engines(of: str, a: Arm, b: Arm) -> Iterator[Difference]:
    yield from _told("engine", f"{of}engine", a.backend, b.backend)
    yield from _told("engine", f"{of}engine's version", a.version, b.version)
    if a.model_hash and b.model_hash:
        yield from _told("model", f"{of}model's hash", a.model_hash[:21], b.model_hash[:21])
    elif a.model_path and b.model_path:
        yield from _told("model", f"{of}model", Path(a.model_path).name, Path(b.model_path).name)
    else:
        yield from _told("model", f"{of}model", a.model, b.model)
    yield from _told("model", f"{of}quantisation", a.quantisation, b.quantisation)
    yield from _told("workload", f"{of}samplers", a.sampling, b.sampling)
    for name in ("context", "slots", "device"):
        yield from _told(None, f"{of}{name}", getattr(a, name), getattr(b, name))
    yield from _told(None, f"{of}--set", a.overrides, b.overrides)
    yield from _told(None, f"{of}arguments", *_only(_arguments(a), _arguments(b)))
    variables = ([f"{name}={value}" for name, value in arm.environment.items()] for arm in (a, b))
    yield from _told(None, f"{of}environment", *_only(*variables))


def _arguments(arm: Arm) -> list[str]:
    """Return an engine's arguments without what each launch has of its own."""
    port = str(urlsplit(arm.url or "").port)
    return [word for word in arm.argv if word != port]


def _only(a: list[str], b: list[str]) -> tuple[str, str]:
    return " ".join(word for word in a if word not in b), " ".join(word for word in b if word not in a)


def _told(area: Area | None, what: str, a: object, b: object) -> Iterator[Difference]:
    if a != b:
        yield Difference(area=area, what=what, a=_text(a), b=_text(b))


def _text(value: object) -> str | None:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{name}={each}" for name, each in sorted(value.items()))
    return None if value is None else str(value)
