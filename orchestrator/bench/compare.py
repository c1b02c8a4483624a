"""`compare`: two or more arms, the same prompts, rounds in ABBA pairs, and an honest answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.bench import decide, gate
from orchestrator.bench.arms import specs
from orchestrator.bench.comparing import Comparing
from orchestrator.bench.declared import PAIRS, Declared, Residency
from orchestrator.bench.session import Progress, run
from orchestrator.bench.values import Comparison, Workload


def compare(
    *subjects: str,
    workload: Workload | str | None = None,
    changes: Mapping[str, Any] | None = None,
    metrics: Sequence[str] = (),
    margin: float = decide.MARGIN,
    pairs: int = PAIRS,
    backends: Sequence[str] = (),
    vary: Sequence[str] = (),
    overrides: Sequence[str] = (),
    control: bool = False,
    stop_early: bool = False,
    void_budget: int | None = None,
    residency: Residency = "auto",
    key: str | None = None,
    seed: int = 1,
    limits: gate.Limits | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compare arms; those of ours are started and stopped.

    Ctrl-C, SIGTERM or SIGHUP end it early, and the answer is for what was measured until then.

    Args:
        subjects: profiles' paths, or URLs of servers that run.
        workload: what is asked; default: ``slots`` when slots are varied, else ``decode``.
        changes: of the workload's fields; those that are None are left as they are.
        metrics: declared beforehand, the first one gives the verdict; default: the workload's own.
        margin: differences below it don't matter: 0.03 is 3 %.
        pairs: of rounds, at least 6.
        backends: engines, each of which runs each profile.
        vary: ``KEY=a,b`` each; every combination is an arm.
        overrides: ``KEY=VALUE`` each, for all arms.
        control: compare the first subject with itself.
        stop_early: look for an answer at up to three moments, declared here, instead of once.
        void_budget: pairs that may be repeated; default: as many as there are pairs.
        residency: whether engines stay resident together, or are launched in turns; auto: if they fit.
        key: of servers that are not ours.
        seed: of prompts and of Poisson moments.
        limits: what the client must keep to.
        progress: hears how far it is.

    Raises:
        Incomparable: the arms answer different questions, or too many rounds were void.
        WorkloadError: the workload or the design can't be used.
        ProfileError, BackendError, RequestError: of an engine.

    What was measured before one of these is its `measured`, a Comparison without an answer that says why.

    """
    declared = Declared(
        arms=specs(subjects, backends=backends, vary=vary, sets=overrides, control=control, key=key),
        workload=workload,
        changes=dict(changes or {}),
        metrics=tuple(metrics),
        margin=margin,
        pairs=pairs,
        budget=pairs if void_budget is None else void_budget,
        residency=residency,
        stop_early=stop_early,
        control=control,
        limits=limits,
    )
    return run(Comparing(declared).run(seed, progress))
