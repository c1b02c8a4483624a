"""Reports made of numbers, with everything that a real one has: rounds, samples, memory, voids."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from orchestrator.bench import decide, statistics
from orchestrator.bench.measure import percentiles
from orchestrator.bench.samples import metrics
from orchestrator.bench.values import (
    METRICS,
    Arm,
    Client,
    Comparison,
    Design,
    Machine,
    Measurement,
    Memory,
    Round,
    Sample,
    ServerView,
    Workload,
    WorkloadResult,
)
from orchestrator.errors import Incomparable
from tests.bench.conftest import HEALTHY

MACHINE = Machine(
    cpu="a processor", cores=2, memory=24 << 30, kernel="6.1", gpus=("GPU-1 a card",), governor="performance",
    cpu_mhz=2400.0, load_average=0.1, python="3.11.2", packages={"msgspec": "0.23"}, clock={},
)  # fmt: skip
BEGAN = 1_750_000_000.0


def arm(name: str, **changes: Any) -> Arm:
    """Return an arm with all that may be known of one."""
    known = {
        "backend": "llama-server", "version": "b11434", "model": "gemma-3-270m", "quantisation": "Q4_K_M",
        "model_path": "/models/gemma.gguf", "model_hash": "0" * 64, "context": 512, "slots": 2,
        "device": "cpu",
        "argv": ("llama-server", "--model", "/models/gemma.gguf"), "environment": {"KEY": "(hidden)"},
        "removed": ("LLAMA_ARG_HOST",), "sampling": {"temperature": 0, "top_k": 1}, "load_s": (0.81, 0.79),
    }  # fmt: skip
    return Arm(name=name, **{**known, **changes})


def samples(load: Workload, rate: float, ttft: float, chance: random.Random) -> tuple[Sample, ...]:
    """Return a round's requests."""
    found = []
    for index in range(load.requests):
        tokens = load.output_tokens[index % len(load.output_tokens)]
        speed, first = rate * chance.gauss(1, 0.01), ttft * chance.gauss(1, 0.03)
        last = first + (tokens - 1) / speed
        found.append(
            Sample(
                index=index,
                intended_s=0.0,
                sent_s=0.0,
                first_s=first,
                last_s=last,
                end_s=last,
                prompt_tokens=load.prompt_tokens[0],
                output_tokens=tokens,
                cached_tokens=0,
                finish_reason="length",
                error=None,
                ttft_s=first,
                decode_tok_s=speed,
                prefill_tok_s=load.prompt_tokens[0] / first,
                tpot_s=1 / speed,
                e2e_s=last,
                chunks_s=(first, (first + last) / 2, last),
            )
        )
    return tuple(found)


def round_(
    name: str,
    load: Workload,
    number: int,
    pair: int,
    rate: float,
    chance: random.Random,
    *,
    void: tuple[str, ...] = (),
    vram: int | None = None,
    others: float | None = 0.004,
    lost: bool = False,
) -> Round:
    """Return a round of an arm; `lost`: nothing was answered in it."""
    found = () if lost else samples(load, rate, 4 / rate, chance)
    return Round(
        number=number, arm=name, pair=pair, position=number % 2, attempt=0, started_at=BEGAN + 3.5 * number,
        duration_s=0.0 if lost else 3.1, metrics=metrics(found), samples=found,
        client=Client(cpu=0.04, lag_p50_s=0.0001, lag_p99_s=0.002, lag_max_s=0.004, events_s=80),
        server=(ServerView(source="timings of each request", decode_tok_s=rate, disagreement=0.002),),
        memory=None if lost else Memory(rss=(610 << 20) + number * 1000, vram=vram), others=others, void=void,
    )  # fmt: skip


def comparison(
    rates: Sequence[float] = (75.0, 60.0),
    pairs: int = 8,
    *,
    names: Sequence[str] = ("llama-server", "vllm-cpu"),
    load: Workload | None = None,
    declared: Sequence[str] = ("decode_tok_s", "ttft_s"),
    voids: int = 1,
    noise: float = 0.01,
    vram: int | None = None,
    others: float | None = 0.004,
    all_void: bool = False,
    remote: bool = False,
    control: bool = False,
    **changes: Any,
) -> Comparison:
    """Return a comparison of arms with these decode rates."""
    chance = random.Random(7)
    load = load or Workload(name="decode", requests=2, concurrency=2)
    order = statistics.abba(len(rates), pairs)
    rounds: list[Round] = []
    for pair, turn in enumerate(order):
        for at, index in enumerate(turn):
            if voids and pair == 3 and at == 0:
                rounds += [
                    round_(names[index], load, len(rounds) + 1, pair, 1.0, chance, lost=True,
                           void=("a request failed: the engine closed the connection",))
                ]  # fmt: skip
            if voids and pair == 5 and at == 0:
                rounds.append(
                    round_(names[index], load, len(rounds) + 1, pair, rates[index] * 0.7, chance,
                           void=("the processor was throttled", "the client was late: by 61 ms"))
                )  # fmt: skip
            slower = 1 - 0.002 * len(rounds)  # a drift that both arms share
            rate = rates[index] * slower * chance.gauss(1, noise)
            void = ("the client was busy: 97% of a core",) if all_void else ()
            rounds.append(
                round_(names[index], load, len(rounds) + 1, pair, rate, chance, vram=vram, others=others,
                       void=void)
            )  # fmt: skip
    if remote:  # of a server that is not ours neither memory nor its own figures are known
        rounds = [msgspec.structs.replace(each, memory=None, server=()) for each in rounds]
    every = [decide.pairs_of(rounds, names[0], name, metric) for metric in declared for name in names[1:]]
    decisions = decide.decide(every, explainable=decide.explained_by(rounds))
    rest = [
        found
        for metric in METRICS
        if metric not in declared
        for name in names[1:]
        if (found := decide.pairs_of(rounds, names[0], name, metric)).values
    ]
    made = Comparison(
        version="0.1.0", started_at=BEGAN, seed=1, verdict=decisions[0].answer, workload=load,
        design=Design(
            metrics=tuple(declared), margin=0.03, confidence=0.95, pairs=pairs, order=tuple(order),
            stop_early=(), void_budget=pairs, residency="together", control=control,
        ),
        arms=tuple(arm(name) for name in names), decisions=decisions,
        others=tuple(decide.describe(each) for each in rest), rounds=tuple(rounds), machine=MACHINE,
        self_test=HEALTHY, notes=("the arms have different quantisations: Q4_K_M, bf16",),
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def measurement(
    loads: Sequence[Workload] | None = None, rounds: int = 6, *, all_void: bool = False, **changes: Any
) -> Measurement:
    """Return a measurement of one engine."""
    chance = random.Random(3)
    loads = loads if loads is not None else LOADS
    results, number = [], 0
    for load in loads:
        found = []
        for turn in range(rounds):
            number += 1
            void = ("the engine was restarted",) if all_void or (turn == 2 and load is loads[0]) else ()
            rate = 70 / load.concurrency**0.6 * (1 - 0.001 * number) * chance.gauss(1, 0.01)
            found.append(round_("gemma", load, number, turn, rate, chance, void=void))
        results.append(
            WorkloadResult(
                workload=load,
                summaries=decide.summarise(found),
                percentiles=percentiles(found),
                rounds=tuple(found),
            )
        )
    made = Measurement(
        version="0.1.0", started_at=BEGAN, seed=1, arm=arm("gemma"), results=tuple(results), machine=MACHINE,
        self_test=HEALTHY, notes=(),
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


LOADS = (
    Workload(name="decode"),
    Workload(name="ttft", output_tokens=(2,), requests=5, metric="ttft_s"),
    *(
        Workload(name=f"slots-{streams}", concurrency=streams, requests=streams, metric="output_tok_s")
        for streams in (1, 2, 4)
    ),
)

HOSTILE = '</style></title><script>alert(1)</script><img src=x onerror="alert(2)">\x1b[31m&amp;\u202e\'`|'


def hostile() -> Comparison:
    """Return a comparison in which everything that comes from outside means harm."""
    load = Workload(name=HOSTILE, requests=2, concurrency=2, prompts=HOSTILE)
    names = (HOSTILE, f"{HOSTILE}#2")
    told = {
        "url": HOSTILE, "backend": HOSTILE, "version": HOSTILE, "model": HOSTILE, "quantisation": HOSTILE,
        "device": HOSTILE, "model_path": HOSTILE, "model_hash": HOSTILE, "overrides": (HOSTILE,),
        "argv": (HOSTILE,), "environment": {HOSTILE: HOSTILE}, "removed": (HOSTILE,),
        "sampling": {HOSTILE: HOSTILE},
    }  # fmt: skip
    found = comparison(names=names, load=load, arms=tuple(arm(name, **told) for name in names))
    rounds = tuple(
        msgspec.structs.replace(
            each,
            void=(HOSTILE,) if each.void else (),
            samples=tuple(msgspec.structs.replace(sample, finish_reason=HOSTILE) for sample in each.samples),
            server=(ServerView(source=HOSTILE, disagreement=0.1),),
        )
        for each in found.rounds
    )
    machine = msgspec.structs.replace(
        MACHINE, cpu=HOSTILE, kernel=HOSTILE, gpus=(HOSTILE,), governor=HOSTILE, packages={HOSTILE: HOSTILE}
    )
    return msgspec.structs.replace(found, rounds=rounds, machine=machine, notes=(HOSTILE,), version=HOSTILE)


def three() -> Comparison:
    """Return a comparison of three arms on a GPU, with slots that vary and one name that is too long."""
    long = "slots=4,flash_attention=on at http://127.0.0.1:9001/v1"
    names = ("slots=1", "slots=2", long)
    arms = tuple(arm(name, slots=slots) for name, slots in zip(names, (1, 2, 4), strict=True))
    return comparison((75, 60, 58), names=names, declared=("output_tok_s",), vram=3 << 30, arms=arms)


def situations() -> dict[str, Measurement | Comparison | Incomparable]:
    """Return a report of every kind, by name."""
    mixed = Workload(name="mixed", concurrency=8, requests=64)
    open_loop = Workload(name="open", rate=2.0, requests=5, metric="ttft_s")
    return {
        "a faster": comparison((75, 60)),
        "b faster": comparison((20, 80)),
        "equivalent": comparison((70, 70.3), noise=0.004, voids=0),
        "inconclusive": comparison((70, 70.5), noise=0.08),
        "control": comparison((70, 70), noise=0.004, names=("gemma#1", "gemma#2"), control=True),
        "withheld": comparison((70, 60), others=0.31),
        "too few pairs": comparison(pairs=4, interrupted=True),
        "three arms": three(),
        "six arms": comparison((75, 60, 58, 70, 66, 80), names=[f"threads={count}" for count in range(1, 7)]),
        "far apart": comparison((0.02, 9000, 4), names=["slow", "fast", "between"], noise=0.3, pairs=20),
        "many requests": comparison(load=mixed),
        "no round counts": comparison(pairs=2, all_void=True, interrupted=True),
        "no round at all": comparison(pairs=0, interrupted=True),
        "not ours": comparison(others=None, remote=True),
        "hostile": hostile(),
        "bench": measurement(),
        "bench of one round": measurement(rounds=1),
        "bench, open loop": measurement((open_loop,)),
        "bench, none counts": measurement(all_void=True),
        "bench, nothing": measurement((), interrupted=True),
        "refused": Incomparable(
            ["a has 64 prompt tokens where b has 63 (2 requests)", HOSTILE],
            advice="both arms must serve the same model in the same way",
        ),
    }
