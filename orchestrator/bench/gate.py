"""What may count: the reasons for which a round is void, and for which two arms can't be compared at all.

A round is void when something went wrong in it that need not happen again; it is repeated. Arms are
incomparable when they answered different questions; no repetition mends that, so no figure is shown.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from orchestrator.bench.prompts import Ask
from orchestrator.bench.statistics import median
from orchestrator.bench.values import Arm, Client, Round, Sample, Workload

CACHE_SHARE = 0.01  # of a prompt that may come from a cache without mattering
CACHE_TOKENS = 8  # the same for short prompts: a nonce may share its first tokens with another

# Seconds of a round. The kernel counts processor time in ticks of 10 ms: in a shorter round, what others used
# is known to no better than 1 %, a third of the usual margin; and a turn of theirs on a core (milliseconds,
# many in a row until the scheduler moves the engine elsewhere) is not averaged out within it.
SHORT_S = 1.0
ONE_PIECE = 8  # tokens from which on an answer that came in one read was held back on its way
SPELLINGS = {"BFLOAT16": "BF16", "FLOAT16": "F16", "FLOAT32": "F32"}  # of safetensors, in GGUF's words

DISTURBED = re.compile(
    r"\bpreempt(?:ed|ing|ion)\b|\bcompiling\b|\brecompil\w+|\btorch\.compile takes|\bcapturing cuda graph"
    r"|\bthrottl(?:ed|ing)\b|\bcontext shift\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client must keep to.

    Attributes:
        cpu: share of one core; above it the client measures itself.
        lag_s: the 99th percentile of how late its loop woke up, in seconds.
        heed_others: withhold a difference that other programs' use of the processors could explain.

    """

    cpu: float = 0.8
    lag_s: float = 0.05
    heed_others: bool = True


def allowance(prompt_tokens: int) -> int:
    """Return how many tokens of a prompt may come from a cache."""
    return max(CACHE_TOKENS, int(CACHE_SHARE * prompt_tokens))


def sample_faults(samples: Sequence[Sample], asks: Sequence[Ask], workload: Workload) -> list[str]:
    """Return why a round's answers do not count."""
    found: Counter[str] = Counter()
    for sample, ask in zip(samples, asks, strict=True):
        if sample.error is not None:
            found[f"a request failed: {sample.error}"] += 1
            continue
        if sample.output_tokens != ask.output_tokens:
            found[
                f"{sample.output_tokens} output tokens instead of {ask.output_tokens} "
                f"(finish reason {sample.finish_reason})"
            ] += 1
        cached = sample.cached_tokens or 0
        if not workload.prefix_tokens and cached > allowance(sample.prompt_tokens or 0):
            found[f"{cached} of {sample.prompt_tokens} prompt tokens came from a cache"] += 1
        if sample.first_s is None:
            found["no output was seen, though tokens were counted"] += 1
        elif (sample.output_tokens or 0) >= ONE_PIECE and len(sample.chunks_s) == 1:
            found[f"all {sample.output_tokens} tokens came at once: something holds the stream back"] += 1
    return [reason if count == 1 else f"{reason} ({count} requests)" for reason, count in found.items()]


def log_faults(lines: Iterable[str]) -> list[str]:
    """Return the lines of an engine's log that void a round; at most three."""
    hits = [line.strip()[:160] for line in lines if DISTURBED.search(line)]
    return [f"the engine's log says: {line}" for line in hits[:3]]


def client_faults(client: Client, ceiling_events_s: float, limits: Limits) -> list[str]:
    """Return why the client was not fit to measure."""
    found = []
    if client.cpu > limits.cpu:
        found.append(f"the client was busy: {client.cpu:.0%} of a core")
    if client.lag_p99_s > limits.lag_s:
        found.append(f"the client was late: by {client.lag_p99_s * 1000:.0f} ms (99th percentile)")
    if ceiling_events_s and client.events_s > ceiling_events_s / 2:
        found.append(
            f"{client.events_s:.0f} events/s are over half of what the client can take "
            f"({ceiling_events_s:.0f})"
        )
    return found


def arm_faults(
    a: str, b: str, first: Sequence[Sample], second: Sequence[Sample], *, shared: bool = False
) -> list[str]:
    """Return why the answers of two arms to the same prompts can't be compared.

    With a prefix that prompts share on purpose, what comes from a cache is what is compared.
    """
    found: Counter[str] = Counter()
    for one, other in zip(first, second, strict=True):
        if one.error is not None or other.error is not None:
            continue  # a failure has its own reason
        for name, what in (
            ("prompt_tokens", "prompt tokens"),
            ("output_tokens", "output tokens"),
            ("finish_reason", "as finish reason"),
        ):
            of_a, of_b = getattr(one, name), getattr(other, name)
            if of_a != of_b:
                found[f"{a} has {of_a} {what} where {b} has {of_b}"] += 1
        cached = (one.cached_tokens or 0, other.cached_tokens or 0)
        if not shared and abs(cached[0] - cached[1]) > allowance(one.prompt_tokens or 0):
            found[f"{a} took {cached[0]} prompt tokens from a cache where {b} took {cached[1]}"] += 1
    return [reason if count == 1 else f"{reason} ({count} requests)" for reason, count in found.items()]


def cache_notes(rounds: Sequence[Round]) -> list[str]:
    """Return what share of its prompts each arm took from its cache, where prompts share a prefix."""
    found = []
    for arm in dict.fromkeys(each.arm for each in rounds):
        mine = [sample for each in rounds if each.arm == arm and not each.void for sample in each.samples]
        asked = sum(each.prompt_tokens or 0 for each in mine)
        cached = sum(each.cached_tokens or 0 for each in mine)
        if asked:
            found.append(f"{arm} took {cached / asked:.0%} of its prompt tokens from its cache")
    return found


def short_rounds(rounds: Sequence[Round], load: Workload) -> str | None:
    """Return what to do when rounds are too short to be trusted on a machine that does other things too."""
    lasted = [each.duration_s for each in rounds if not each.void]
    if not lasted or (usual := median(lasted)) >= SHORT_S:
        return None
    times = math.ceil(1.5 * SHORT_S / max(usual, 1e-3))  # half as much again: a prompt is read only once
    more = f"--requests {load.requests * times}"
    # where only the first token is looked at, more of them tell nothing
    if len(load.output_tokens) == 1 and load.output_tokens[0] > 2:
        more = f"--output-tokens {load.output_tokens[0] * times} or {more}"
    return (
        f"rounds lasted {usual:.2g} s: below {SHORT_S:g} s, what other programs do for a moment may look "
        f"like a difference between the arms; ask for more in a round: {more}"
    )


def notes(arms: Sequence[Arm], samples: Sequence[Sequence[Sample]]) -> list[str]:
    """Return what a careful reader should know of the arms' differences."""
    found = []
    for name, what in (
        ("quantisation", "quantisations"),
        ("model_hash", "model files"),
        ("slots", "numbers of slots"),
        ("context", "contexts"),
        ("device", "devices"),
    ):
        values = {getattr(arm, name) for arm in arms} - {None}
        if name == "quantisation":
            values = {SPELLINGS.get(value.upper(), value.upper()) for value in values}
        if len(values) > 1:
            shown = "" if name == "model_hash" else f": {', '.join(sorted(map(str, values)))}"
            more = "; weights of another precision are another experiment" if name == "quantisation" else ""
            found.append(f"the arms have different {what}{shown}{more}")
    silent = [
        arm.name
        for arm, answers in zip(arms, samples, strict=True)
        if any(each.error is None and each.cached_tokens is None for each in answers)
    ]
    if silent:
        found.append(f"{', '.join(silent)} can't say whether prompts came from a cache; every prompt was new")
    return found
