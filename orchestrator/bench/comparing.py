"""A comparison on its way: engines up, gate, pairs of rounds in ABBA order, the answer.

The order of things is the method of docs/explanation/measuring.md: declare, gate, measure in pairs, decide.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Sequence

from orchestrator.bench import decide, gate, machine, statistics, workload
from orchestrator.bench.declared import Declared
from orchestrator.bench.measure import VOIDED, common_notes, faults_of, started
from orchestrator.bench.prompts import Material
from orchestrator.bench.selftest import self_test
from orchestrator.bench.session import Progress, Session, material
from orchestrator.bench.target import Target, fit_together
from orchestrator.bench.text import void_lines
from orchestrator.bench.values import (
    METRICS,
    NOTABLE,
    Arm,
    Comparison,
    Decision,
    Design,
    Machine,
    Round,
    Sample,
    SelfTest,
    Workload,
)
from orchestrator.errors import Incomparable, OrchestratorError

LOOK = 0.25  # seconds between two looks at what resident rivals use of the processor
AT_REST = 0.1  # of a core: less, and they are idle
ELSEWHERE = "another round of its pair is void"  # a consequence: the reason is with the other one
PATIENCE = 5.0  # seconds; then the round begins, and what they use counts among the others


async def rest(rivals: Sequence[Target]) -> bool:
    """Wait until resident rivals are idle, and say whether they are.

    An engine may be busy for a while after its last answer: vLLM's workers spin for a second, in case there
    is more to do. Whoever is measured in that second is slower, and half of the time that is the same one.
    """
    used = await asyncio.to_thread(_used, rivals)
    if used is None:
        return True  # nobody can tell
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        before, at = used, time.monotonic()
        await asyncio.sleep(LOOK)
        used = await asyncio.to_thread(_used, rivals) or before
        if used - before < AT_REST * (time.monotonic() - at):
            return True
    return False


def _used(rivals: Sequence[Target]) -> float | None:
    known = [seconds for each in rivals if (seconds := each.cpu_s()) is not None]
    return sum(known) if known else None


class Comparing:
    """One comparison on its way; what was measured survives an interruption."""

    def __init__(self, declared: Declared) -> None:
        self.declared = declared
        self.targets = [Target(spec) for spec in declared.arms]
        self.looks, self.alpha = declared.looks, declared.alpha
        self.order = tuple(statistics.abba(len(declared.arms), declared.pairs))
        self.load: Workload | None = None
        self.rounds: list[Round] = []
        self.warm: dict[str, tuple[Sample, ...]] = {}
        self.material: Material | None = None
        self.stuff_of: dict[str, Material] = {}

    @property
    def names(self) -> list[str]:
        """The arms' names."""
        return [target.spec.name for target in self.targets]

    async def run(
        self, seed: int, progress: Progress | None = None, tested: SelfTest | None = None
    ) -> Comparison:
        """Measure and decide; `tested` spares the self-test.

        What was measured before a fault is that fault's `measured`.
        """
        began, where = time.time(), machine.describe()
        tested = tested or await self_test()
        if not tested.ok:
            raise Incomparable(
                tested.reasons, advice="measure on a quieter or faster machine; see bench --self-test"
            )
        interrupted = complete = False
        fault: OrchestratorError | None = None
        session = Session(
            seed, tested, self.declared.pairs * len(self.targets), progress, self.declared.limits
        )
        for target in self.targets:
            await target.make(session.tell)
        together = self._together()
        try:
            async with contextlib.AsyncExitStack() as stack:
                try:
                    await self._start(session, stack, together)
                    await self._measure(session, together)
                    complete = True
                except asyncio.CancelledError:
                    if len(self.warm) < len(self.targets):
                        raise  # nothing was measured, so nothing can be said
                    interrupted = True
        except OrchestratorError as error:
            if not self.rounds:
                raise
            fault = error
        self._void_incomplete()
        refused = faults_of(fault) if fault is not None and not (complete or interrupted) else ()
        found = self._conclude(seed, began, where, tested, together, interrupted, refused)
        if fault is not None:
            fault.measured = found
            raise fault
        return found

    # -- engines --------------------------------------------------------------------------------------
    def _together(self) -> bool:
        plans = [target.plan for target in self.targets if target.plan is not None]
        if self.declared.residency != "auto":
            return self.declared.residency == "together" or not plans
        return len(plans) < 2 or fit_together(plans)

    async def _start(self, session: Session, stack: contextlib.AsyncExitStack, together: bool) -> None:
        """Start and warm up all engines; those that are launched in turns are stopped again."""
        if not together:
            await self._prepare_in_turns(session)
            return
        for target in self.targets:
            session.tell(f"starting {target.spec.name}")
            await stack.enter_async_context(started(target))
        for target in self.targets:
            await self._warm(session, target)

    async def _prepare_in_turns(self, session: Session) -> None:
        """Learn what prompts are made of, once; every launch warms up by itself."""
        for target in self.targets:
            session.tell(f"starting {target.spec.name}")
            async with started(target):
                self.stuff_of[target.spec.name] = await asyncio.to_thread(material, [target], self._load())
                await self._warm(session, target)

    def _load(self) -> Workload:
        """Return the workload, made for the arms once they are known."""
        if self.load is not None:
            return self.load
        if isinstance(self.declared.workload, Workload):
            self.load = workload.changed(self.declared.workload, **self.declared.changes)
            return self.load
        slots = [target.slots for target in self.targets if target.slots]
        contexts = [target.context for target in self.targets if target.context]
        name = self.declared.workload or ("slots" if len(set(slots)) > 1 else "decode")
        made = workload.presets([name], max(slots, default=None), min(contexts, default=None))
        self.load = workload.changed(made[-1] if name == "slots" else made[0], **self.declared.changes)
        return self.load

    async def _warm(self, session: Session, target: Target) -> None:
        """Warm an engine up, and let the arms through the gate once all have answered."""
        load, name = self._load(), target.spec.name
        session.tell(f"{name}: warm-up")
        if self.material is None:
            running = [each for each in self.targets if each.endpoint is not None]
            self.material = await asyncio.to_thread(material, running, load)
        target.describe()
        first = name not in self.warm
        # in its turn an engine is launched anew, and has nothing of an earlier launch in its cache
        self.warm[name] = await session.warm_up(target, load, self.material, self._salt(target))
        if first and len(self.warm) == len(self.targets):
            self._gate()

    def _gate(self) -> None:
        """Refuse arms that answered different questions.

        Raises:
            Incomparable: they did.

        """
        base = self.names[0]
        reasons = [
            reason
            for other in self.names[1:]
            for reason in self._faults(base, other, self.warm[base], self.warm[other])
        ]
        known = [stuff.ids for stuff in self.stuff_of.values() if stuff.ids is not None]
        if any(ids != known[0] for ids in known):
            reasons.append("the arms turn the same text into different tokens: not the same model")
        if reasons:
            raise Incomparable(reasons, advice="both arms must serve the same model in the same way")

    def _faults(self, a: str, b: str, first: Sequence[Sample], second: Sequence[Sample]) -> list[str]:
        return gate.arm_faults(a, b, first, second, shared=self._load().prefix_tokens > 0)

    def _salt(self, target: Target) -> str:
        """Return what keeps the prompts of arms that are one and the same server apart."""
        urls = [each.endpoint.url if each.endpoint else None for each in self.targets]
        mine = target.endpoint.url if target.endpoint else None
        return target.spec.name if urls.count(mine) > 1 else ""

    # -- pairs ----------------------------------------------------------------------------------------
    async def _measure(self, session: Session, together: bool) -> None:
        pair = attempt = spent = 0
        while pair < self.declared.pairs:
            done = [
                await self._round(session, self.targets[index], pair, position, attempt, together)
                for position, index in enumerate(self.order[pair])
            ]
            reasons = self._pair_faults(done)
            if reasons:
                self.rounds[-len(done) :] = decide.voided(done, reasons)
                spent, attempt = spent + 1, attempt + 1
                session.done = pair * len(self.targets)
                if spent > self.declared.budget:
                    raise Incomparable(self._why_void(), voids=void_lines(self.rounds), advice=VOIDED)
                continue
            pair, attempt = pair + 1, 0
            if pair in self.looks[:-1] and self._is_answered():
                return

    async def _round(
        self, session: Session, target: Target, pair: int, position: int, attempt: int, together: bool
    ) -> Round:
        at = time.monotonic()
        session.tell(f"pair {pair + 1} of {self.declared.pairs}: {target.spec.name}")
        assert self.material is not None
        async with contextlib.AsyncExitStack() as stack:
            if together:
                await rest([each for each in self.targets if each is not target])
            else:
                await stack.enter_async_context(started(target))
                await self._warm(session, target)
            key = f"{pair}/{attempt}/{self._salt(target)}"
            done = await session.round(
                target, self._load(), self.material, key, pair=pair, position=position, attempt=attempt
            )
        self.rounds.append(done)
        session.done += 1
        session.tell(f"pair {pair + 1} of {self.declared.pairs}: {target.spec.name} done", at)
        return done

    def _pair_faults(self, done: Sequence[Round]) -> str:
        """Return why a pair does not count, empty when it does."""
        if any(each.void for each in done):
            return ELSEWHERE
        by_arm = {each.arm: each for each in done}
        base = by_arm[self.names[0]]
        faults = [
            fault
            for name in self.names[1:]
            for fault in self._faults(base.arm, name, base.samples, by_arm[name].samples)
        ]
        return "; ".join(faults)

    def _why_void(self) -> list[str]:
        every = [(each.arm, reason) for each in self.rounds for reason in each.void if reason != ELSEWHERE]
        counts = Counter(f"{arm}: {reason}" for arm, reason in every)
        shown = [f"{reason} (in {count} rounds)" for reason, count in counts.most_common(4)]
        return ["too many rounds were void", *shown]

    def _void_incomplete(self) -> None:
        """At an early end: a pair of which a round is missing does not count."""
        if not self.rounds:
            return
        last = self.rounds[-1]
        mine = [each for each in self.rounds if (each.pair, each.attempt) == (last.pair, last.attempt)]
        if len(mine) < len(self.targets):
            self.rounds[-len(mine) :] = decide.voided(mine, "interrupted before its pair was complete")

    # -- the answer -----------------------------------------------------------------------------------
    def _declared(self) -> tuple[str, ...]:
        return self.declared.metrics or (self._load().metric,)

    def _pairs_of(self, metric: str) -> list[decide.Pairs]:
        base = self.names[0]
        return [decide.pairs_of(self.rounds, base, other, metric) for other in self.names[1:]]

    def _decide(self) -> tuple[Decision, ...]:
        every = [pairs for metric in self._declared() for pairs in self._pairs_of(metric)]
        return decide.decide(every, self.declared.margin, self.alpha, self._explainable())

    def _explainable(self) -> float:
        limits = self.declared.limits
        return decide.explained_by(self.rounds) if limits is None or limits.heed_others else 0.0

    def _is_answered(self) -> bool:
        return all(each.answer != "inconclusive" for each in self._decide())

    def _conclude(
        self,
        seed: int,
        began: float,
        where: Machine,
        tested: SelfTest,
        together: bool,
        interrupted: bool,
        refused: tuple[str, ...],
    ) -> Comparison:
        decisions = self._decide()
        if refused:
            decisions = decide.withheld(decisions)
        others = [
            decide.describe(pairs, self.declared.margin, self.alpha)
            for metric in METRICS
            if metric not in self._declared()
            for pairs in self._pairs_of(metric)
            if pairs.values
        ]
        arms = [target.describe() for target in self.targets]
        return Comparison(
            version=machine.installed("inference-orchestrator") or "unknown",
            started_at=began,
            seed=seed,
            verdict=decisions[0].answer,
            workload=self._load(),
            design=Design(
                metrics=self._declared(),
                margin=self.declared.margin,
                confidence=1 - self.alpha,
                pairs=self.declared.pairs,
                order=self.order,
                stop_early=self.looks if len(self.looks) > 1 else (),
                void_budget=self.declared.budget,
                residency="together" if together else "alternate",
                control=self.declared.control,
            ),
            arms=tuple(arms),
            decisions=decisions,
            others=tuple(others),
            rounds=tuple(self.rounds),
            machine=where,
            self_test=tested,
            notes=tuple(self._notes(arms, decisions[0].pairs, interrupted, refused)),
            interrupted=interrupted or bool(refused),
            refused=refused,
        )

    def _notes(
        self, arms: Sequence[Arm], valid: int, interrupted: bool, refused: tuple[str, ...]
    ) -> list[str]:
        """Return what a reader should know; `valid` is the number of pairs that count."""
        notes = gate.notes(arms, [self.warm.get(name, ()) for name in self.names])
        notes += common_notes(self.targets, self.rounds)
        notes += gate.cache_notes(self.rounds) if self._load().prefix_tokens else []
        notes += [said] if (said := gate.short_rounds(self.rounds, self._load())) else []
        if valid % 2:
            notes.append("an odd number of pairs does not cancel an even drift")
        if interrupted:
            notes.append(
                f"interrupted after {valid} of {self.declared.pairs} pairs; the answer is for these alone"
            )
        if refused:
            notes.append(
                f"refused after {valid} of {self.declared.pairs} pairs: the figures are those of the pairs "
                "that count, and no answer is given"
            )
        explainable = self._explainable()
        if explainable > NOTABLE:
            share = 1 - 1 / (1 + explainable)
            notes.append(
                f"other programs used {share:.0%} of the processors: a difference of up to {explainable:.0%} "
                "may be their work and is not claimed"
            )
        return notes
