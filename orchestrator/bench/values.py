"""What is measured and concluded, as frozen values: the Python API returns them, ``--json`` holds them.

Times are in seconds, sizes in bytes, rates in tokens a second unless a name says otherwise. A moment within a
round counts from the round's start. A field that is null is not known. `FORMAT` names the version; readers
refuse another major version.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

FORMAT = "orchestrator-bench/1"

Answer = Literal["a_faster", "b_faster", "equivalent", "inconclusive"]

# What a reader may rely on: a report comes from a file that anybody may have written.
Moment = Annotated[float, Meta(ge=0, le=1e11)]  # seconds since the epoch, until the year 5138
Count = Annotated[int, Meta(ge=0)]
Ratio = Annotated[float, Meta(ge=1e-12, le=1e12)]
Lengths = Annotated[tuple[Count, ...], Meta(min_length=1)]

METRICS: dict[str, tuple[str, str, bool]] = {
    # name: unit, what it is, whether more is better
    "decode_tok_s": ("tok/s", "(output tokens - 1) / (last - first output), median of the requests", True),
    "ttft_s": ("s", "request sent to first output, median of the requests", False),
    "prefill_tok_s": ("tok/s", "prompt tokens not from a cache / TTFT, median of the requests", True),
    "tpot_s": ("s", "1 / decode_tok_s of a request, median of the requests", False),
    "chunk_gap_s": ("s", "median time between two reads with output; chunks are not tokens", False),
    "e2e_s": ("s", "the moment a request was due to its end, median of the requests", False),
    "output_tok_s": ("tok/s", "all output tokens / (first request sent to last output)", True),
    "requests_s": ("1/s", "all requests / (first request sent to last output)", True),
}
"""Every metric of a round: its unit, its definition, and whether more is better."""


NOTABLE = 0.02
"""From which on a reader is told of the difference that other programs may explain: 2 %."""


class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A JSON object with exactly these fields."""


class Workload(Value, frozen=True, kw_only=True):
    """What is asked of an engine in each round.

    Request i takes the i-th of `prompt_tokens` and of `output_tokens`, over and over. `rate` 0 is the closed
    loop: `concurrency` streams, each sending its next request when the last one has ended. With a rate it is
    the open loop: requests are sent at seeded Poisson moments, whatever has become of the earlier ones, and
    `concurrency` means nothing. The first `prefix_tokens` of all prompts are alike (to measure a prefix cache
    on purpose); all others differ from their first token on. `prompts` is a file of prompts, if there is one.
    """

    name: str
    prompt_tokens: Lengths = (64,)
    output_tokens: Lengths = (128,)
    concurrency: Count = 1
    requests: Count = 1
    rate: float = 0.0
    prefix_tokens: Count = 0
    prompts: str | None = None
    metric: str = "decode_tok_s"


class EngineFigures(Value, frozen=True, kw_only=True):
    """What llama-server says of one request."""

    decode_tok_s: float | None
    prefill_s: float
    cached_tokens: int


class Sample(Value, frozen=True, kw_only=True):
    """One request, seen from the client.

    `intended_s` is when it was due: the stream was free, or the open loop's moment had come. `first_s` and
    `last_s` are the reads of the first and the last output; `chunks_s` holds every read with output. `error`
    is null for a success, and only a success counts.
    """

    index: int
    intended_s: float
    sent_s: float
    first_s: float | None
    last_s: float | None
    end_s: float
    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    finish_reason: str | None
    error: str | None
    ttft_s: float | None
    decode_tok_s: float | None
    prefill_tok_s: float | None
    tpot_s: float | None
    e2e_s: float
    chunks_s: tuple[float, ...]
    engine: EngineFigures | None = None


class Client(Value, frozen=True, kw_only=True):
    """How busy the measuring process was: its share of one core, and how late its loop woke up."""

    cpu: float
    lag_p50_s: float
    lag_p99_s: float
    lag_max_s: float
    events_s: float


class ServerView(Value, frozen=True, kw_only=True):
    """The engine's own figures for a round; `source` says from where. `disagreement` is |ours / its - 1|."""

    source: str
    decode_tok_s: float | None = None
    ttft_s: float | None = None
    output_tokens: int | None = None
    disagreement: float | None = None


class Memory(Value, frozen=True, kw_only=True):
    """Peak of the engine's process tree: resident, and on its GPUs (null without one, or where nobody says).

    The kernel keeps the one; no driver keeps the other, so it is the most that was seen after a round.
    """

    rss: int
    vram: int | None = None


class Round(Value, frozen=True, kw_only=True):
    """One round of one arm. With `void` reasons it does not count; `metrics` are the round's statistics.

    `others` is the share of the machine's processors that other programs used meanwhile, null for an engine
    that is not ours. The kernel counts in 10 ms, so a short round's may be a little wrong, or below 0.
    """

    number: int
    arm: str
    pair: int
    position: int
    attempt: int
    started_at: Moment
    duration_s: float
    metrics: dict[str, float]
    samples: tuple[Sample, ...]
    client: Client
    server: tuple[ServerView, ...]
    memory: Memory | None
    others: float | None
    void: tuple[str, ...]


class Arm(Value, frozen=True, kw_only=True):
    """One side of a measurement: an engine, and everything about it that may matter.

    `profile` is its file, null for a server that ran already. `environment` holds what was set for it, values
    that may be secret hidden; `removed` names the inherited variables taken away. `model_hash` is the sha256
    of the model file; of one over 4 GiB, that of its size and its first and last 64 MiB, and then it begins
    with ``ends:``.
    """

    name: str
    profile: str | None = None
    url: str | None = None
    backend: str | None = None
    version: str | None = None
    model: str | None = None
    model_path: str | None = None
    model_hash: str | None = None
    quantisation: str | None = None
    context: Count | None = None
    slots: Count | None = None
    device: str | None = None
    overrides: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    removed: tuple[str, ...] = ()
    sampling: dict[str, Any] = {}
    load_s: tuple[float, ...] = ()


class Machine(Value, frozen=True, kw_only=True):
    """Where it was measured."""

    cpu: str
    cores: int
    memory: int
    kernel: str
    gpus: tuple[str, ...]
    governor: str | None
    cpu_mhz: float | None
    load_average: float
    python: str
    packages: dict[str, str]
    clock: dict[str, str]


class SelfTest(Value, frozen=True, kw_only=True):
    """What the client itself can do, against a server of known pace.

    `ceiling_events_s`: events a second that one core can take at `streams` streams, from the client's CPU
    time. `decode_error` and `ttft_error_s`: what it measured against what the server really did;
    `read_delay_s`: median time from the server's write to our stamp. `ok`: whether a verdict may be based on
    this client.
    """

    streams: int
    events: int
    ceiling_events_s: float
    us_per_event: float
    decode_error: float
    ttft_error_s: float
    read_delay_s: float
    ok: bool
    reasons: tuple[str, ...] = ()


class Summary(Value, frozen=True, kw_only=True):
    """One metric over the valid rounds: Hodges-Lehmann centre, its 95 % interval (null: too few rounds)."""

    metric: str
    unit: str
    value: float
    low: float | None
    high: float | None
    rounds: int


class Percentiles(Value, frozen=True, kw_only=True):
    """Of all requests together; p99 only above 1,000 requests, p90 above 20."""

    metric: str
    requests: int
    p50: float
    p90: float | None
    p99: float | None


class WorkloadResult(Value, frozen=True, kw_only=True):
    """One workload on one engine."""

    workload: Workload
    summaries: tuple[Summary, ...]
    percentiles: tuple[Percentiles, ...]
    rounds: tuple[Round, ...]


class Measurement(Value, frozen=True, kw_only=True):
    """What ``orchestrator bench`` found.

    `interrupted`: it ended before all its rounds were measured, because somebody asked for it, or for the
    reasons in `refused`.
    """

    kind: Literal["bench"] = "bench"
    format: str = FORMAT
    version: str
    started_at: Moment
    seed: int
    arm: Arm
    results: tuple[WorkloadResult, ...]
    machine: Machine
    self_test: SelfTest
    notes: tuple[str, ...]
    interrupted: bool = False
    refused: tuple[str, ...] = ()

    def to_frame(self) -> Any:
        """Return a pandas DataFrame, one row a request; see `frames.to_frame`."""
        from orchestrator.bench import frames

        return frames.to_frame(self)


class Decision(Value, frozen=True, kw_only=True):
    """What one metric says of two arms.

    `ratio` is a's speed over b's, above 1 when a is faster, whatever the metric's direction; `low` and `high`
    are its interval (null: unbounded, too few pairs) with the coverage `confidence`. `a` and `b` are medians
    of the rounds in the metric's own unit. `smallest_detectable` is the smallest advantage that would have
    been seen in 4 of 5 such comparisons: 0.02 is 2 %. `pairs_needed` is how many more would probably do,
    null when nobody can tell or none are. `explainable`: differences up to this (0.1 is 10 %) may be the work
    of other programs and are not claimed.
    """

    arm_a: str
    arm_b: str
    metric: Annotated[str, Meta(min_length=1)]
    unit: str
    primary: bool
    answer: Answer
    a: float | None
    b: float | None
    ratio: Ratio
    low: Ratio | None
    high: Ratio | None
    confidence: float
    pairs: Count
    ratios: tuple[Ratio, ...]
    p_difference: float
    p_equivalence: float
    smallest_detectable: float | None
    explainable: float
    pairs_needed: int | None


class Design(Value, frozen=True, kw_only=True):
    """What was declared before anything was measured."""

    metrics: tuple[str, ...]
    margin: Annotated[float, Meta(gt=0, lt=1)]
    confidence: float
    pairs: int
    order: tuple[tuple[int, ...], ...]
    stop_early: tuple[int, ...]
    void_budget: int
    residency: Literal["together", "alternate"]
    control: bool


class Comparison(Value, frozen=True, kw_only=True):
    """What ``orchestrator compare`` found.

    `verdict` is the answer of the first declared metric for the first two arms. `decisions` holds every
    declared metric for each arm against the first; `others` the metrics that were not declared, as figures
    without a claim. `interrupted`: it ended before all its rounds were measured, because somebody asked for
    it, or for the reasons in `refused`; with those, every answer is "inconclusive".
    """

    kind: Literal["compare"] = "compare"
    format: str = FORMAT
    version: str
    started_at: Moment
    seed: int
    verdict: Answer
    workload: Workload
    design: Design
    arms: Annotated[tuple[Arm, ...], Meta(min_length=2)]
    decisions: Annotated[tuple[Decision, ...], Meta(min_length=1)]
    others: tuple[Decision, ...]
    rounds: tuple[Round, ...]
    machine: Machine
    self_test: SelfTest
    notes: tuple[str, ...]
    interrupted: bool = False
    refused: tuple[str, ...] = ()

    def to_frame(self) -> Any:
        """Return a pandas DataFrame, one row a request; see `frames.to_frame`."""
        from orchestrator.bench import frames

        return frames.to_frame(self)
