"""`measure`: one engine, one or several workloads, figures with intervals and no verdict."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from orchestrator.bench import gate, machine, workload
from orchestrator.bench.arms import Spec, own_name
from orchestrator.bench.decide import summarise
from orchestrator.bench.selftest import self_test
from orchestrator.bench.server_view import DISAGREEMENT
from orchestrator.bench.session import Progress, Session, material, run
from orchestrator.bench.statistics import median, percentile
from orchestrator.bench.target import Target
from orchestrator.bench.text import void_lines
from orchestrator.bench.values import Measurement, Percentiles, Round, SelfTest, Workload, WorkloadResult
from orchestrator.errors import Incomparable, OrchestratorError

ROUNDS = 6  # the fewest for which a 95 % interval exists
BUDGET = 4  # void rounds of one workload that are repeated
VOIDED = "mend what voids the rounds; where that is other programs, measure on a quiet machine"


def measure(
    subject: str,
    workloads: Sequence[Workload] | Sequence[str] = workload.SOURCE,
    *,
    changes: Mapping[str, Any] | None = None,
    streams: Sequence[int] = (),
    rounds: int = ROUNDS,
    backend: str | None = None,
    overrides: Sequence[str] = (),
    key: str | None = None,
    seed: int = 1,
    limits: gate.Limits | None = None,
    progress: Progress | None = None,
) -> Measurement:
    """Measure one engine; started and stopped if it is ours.

    Ctrl-C, SIGTERM or SIGHUP end it early, and what was measured until then is returned.

    Args:
        subject: a profile's path, or the URL of a server that runs.
        workloads: presets by name, or workloads.
        changes: of the workloads' fields; those that are None are left as they are.
        streams: requests at once; each number is a workload of its own. None: each workload's own.
        rounds: of each workload; at least 6 for an interval.
        backend: another engine than the profile names.
        overrides: ``KEY=VALUE`` each, over what the profile says.
        key: of a server that is not ours.
        seed: of prompts and of Poisson moments.
        limits: what the client must keep to.
        progress: hears how far it is.

    Raises:
        WorkloadError: a workload can't be run like this.
        ProfileError, BackendError, RequestError: of the engine.
        Incomparable: the engine does not answer as asked, so that figures would mean nothing.

    What was measured before one of these is its `measured`, a Measurement that says why it ended.

    """
    spec = Spec("", subject, backend, tuple(overrides), key)

    def shape(target: Target) -> list[Workload]:
        return workload.shaped(list(workloads), target.slots, target.context, changes or {}, streams)

    return run(_measure(spec, shape, rounds, seed, progress, limits))


@contextlib.asynccontextmanager
async def started(target: Target) -> AsyncIterator[Target]:
    """Start a target, and stop it whatever happens; both without blocking Ctrl-C."""
    try:
        await asyncio.to_thread(target.start)
        yield target
    finally:
        await asyncio.shield(asyncio.to_thread(target.stop))


async def _measure(
    spec: Spec,
    shape: Callable[[Target], list[Workload]],
    count: int,
    seed: int,
    progress: Progress | None,
    limits: gate.Limits | None,
) -> Measurement:
    target = Target(Spec(own_name(spec.subject), spec.subject, spec.backend, spec.overrides, spec.key))
    began, where, tested = time.time(), machine.describe(), await self_test()
    found: list[tuple[Workload, list[Round]]] = []
    session = Session(seed, tested, 0, progress, limits, "bench")
    await target.make(session.tell)
    session.tell(f"starting {target.spec.name}")
    interrupted = complete = False
    fault: OrchestratorError | None = None
    try:
        async with started(target):
            wanted = shape(target)
            arm = target.describe()
            session.total = count * len(wanted)
            try:
                for each in wanted:
                    found.append((each, []))
                    await _rounds(session, target, each, count, found[-1][1])
                complete = True
            except asyncio.CancelledError:
                interrupted = True
    except OrchestratorError as error:
        if not any(rounds for _, rounds in found):
            raise
        fault = error
    refused = faults_of(fault) if fault is not None and not (complete or interrupted) else ()
    measured = Measurement(
        version=machine.installed("inference-orchestrator") or "unknown",
        started_at=began,
        seed=seed,
        arm=arm,
        results=tuple(_result(*each) for each in found),
        machine=where,
        self_test=tested,
        notes=tuple(_notes(target, tested, found, interrupted, refused)),
        interrupted=interrupted or bool(refused),
        refused=refused,
    )
    if fault is not None:
        fault.measured = measured
        raise fault
    return measured


def faults_of(fault: OrchestratorError) -> tuple[str, ...]:
    """Return why a measurement ended early, a reason each."""
    return fault.reasons if isinstance(fault, Incomparable) else (fault.message,)


def _result(load: Workload, rounds: Sequence[Round]) -> WorkloadResult:
    return WorkloadResult(
        workload=load, summaries=summarise(rounds), percentiles=percentiles(rounds), rounds=tuple(rounds)
    )


def _notes(
    target: Target,
    tested: SelfTest,
    found: Sequence[tuple[Workload, Sequence[Round]]],
    interrupted: bool,
    refused: Sequence[str],
) -> list[str]:
    """Return what a reader should know."""
    notes = list(tested.reasons) + common_notes([target], [each for _, rounds in found for each in rounds])
    notes += [note for load, rounds in found if load.prefix_tokens for note in gate.cache_notes(rounds)]
    notes += [f"interrupted in {found[-1][0].name}"] if interrupted else []
    notes += [f"refused in {found[-1][0].name}: the figures are of the rounds until then"] if refused else []
    return notes


async def _rounds(session: Session, target: Target, each: Workload, count: int, found: list[Round]) -> None:
    """Fill `found`, so that what is there at an interruption is not lost."""
    session.tell(f"{each.name}: warm-up")
    stuff = await asyncio.to_thread(material, [target], each)
    await session.warm_up(target, each, stuff, each.name)
    valid = attempt = 0
    while valid < count:
        session.tell(f"{each.name}: round {valid + 1} of {count}")
        at = time.monotonic()
        done = await session.round(target, each, stuff, f"{valid}/{attempt}", pair=valid, attempt=attempt)
        found.append(done)
        if done.void:
            attempt += 1
            if attempt > BUDGET:
                raise Incomparable(
                    [f"{each.name}: too many void rounds; the last one: {'; '.join(done.void)}"],
                    context=session.context,
                    voids=void_lines(found),
                    advice=VOIDED,
                )
            continue
        valid += 1
        session.done += 1
        session.tell(f"{each.name}: round {valid} of {count} done", at)


def percentiles(rounds: Sequence[Round]) -> tuple[Percentiles, ...]:
    """Return percentiles over all requests of the valid rounds."""
    good = [sample for each in rounds if not each.void for sample in each.samples]
    found = []
    for metric in ("ttft_s", "e2e_s", "decode_tok_s"):
        values = [value for sample in good if (value := getattr(sample, metric)) is not None]
        if values:
            n = len(values)
            found.append(
                Percentiles(
                    metric=metric,
                    requests=n,
                    p50=median(values),
                    p90=percentile(values, 0.9) if n >= 20 else None,
                    p99=percentile(values, 0.99) if n > 1000 else None,
                )
            )
    return tuple(found)


def common_notes(targets: Sequence[Target], rounds: Sequence[Round]) -> list[str]:
    """Return what a reader should know of any measurement."""
    notes = []
    for target in targets:
        name = target.spec.name
        if target.spec.is_url:
            notes.append(f"{name} is not ours: its log, memory and restarts were not watched")
        off: dict[str, list[float]] = {}
        for each in rounds:
            for view in each.server if each.arm == name and not each.void else ():
                if view.disagreement is not None:
                    off.setdefault(view.source, []).append(view.disagreement)
        notes += [
            f"{name}: our figures and its own ({source}) differ by {median(values):.1%}"
            for source, values in off.items()
            if median(values) > DISAGREEMENT
        ]
    return notes
