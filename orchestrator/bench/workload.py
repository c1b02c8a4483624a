"""What is asked: workloads, the presets that make them for an engine, and what is wrong with one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from orchestrator.bench.values import METRICS, Workload
from orchestrator.errors import OrchestratorError


class WorkloadError(OrchestratorError):
    """A workload can't be run as asked."""

    exit_code = 2


SLOWEST, FASTEST = 0.001, 100_000.0  # of the open loop, requests a second: beyond lies infinity
SOURCE = ("decode", "ttft", "slots")
"""The three benchmarks that this project's predecessor had."""


def _powers(most: int) -> list[int]:
    return sorted({1 << bit for bit in range(most.bit_length()) if 1 << bit <= most} | {most})


def _decode(_slots: int, _context: int) -> list[Workload]:
    return [Workload(name="decode", metric="decode_tok_s")]


def _ttft(_slots: int, _context: int) -> list[Workload]:
    return [Workload(name="ttft", output_tokens=(2,), requests=5, metric="ttft_s")]


def _slots(slots: int, _context: int) -> list[Workload]:
    return [
        Workload(name=f"slots-{streams}", concurrency=streams, requests=streams, metric="output_tok_s")
        for streams in _powers(slots)
    ]


def _prefill(_slots: int, context: int) -> list[Workload]:
    return [
        Workload(
            name=f"prefill-{length}", prompt_tokens=(length,), output_tokens=(2,), metric="prefill_tok_s"
        )
        for length in (512, 2048, 8192, 32768)
        if length + 2 <= context
    ]


def _mixed(slots: int, context: int) -> list[Workload]:
    lengths = tuple(length for length in (64, 256, 1024, 128) if length + 128 <= context) or (16,)
    return [
        Workload(
            name="mixed",
            prompt_tokens=lengths,
            output_tokens=(32, 128, 64, 96),
            concurrency=slots,
            requests=max(4, 2 * slots),
            metric="output_tok_s",
        )
    ]


def _prefix(_slots: int, context: int) -> list[Workload]:
    shared = min(1024, context // 2)
    return [
        Workload(
            name="prefix",
            prompt_tokens=(shared + 32,),
            output_tokens=(2,),
            requests=4,
            prefix_tokens=shared,
            metric="ttft_s",
        )
    ]


PRESETS: dict[str, Callable[[int, int], list[Workload]]] = {
    "decode": _decode,
    "ttft": _ttft,
    "slots": _slots,
    "prefill": _prefill,
    "mixed": _mixed,
    "prefix": _prefix,
}


def presets(names: Sequence[str], slots: int | None, context: int | None) -> list[Workload]:
    """Return the workloads of presets for an engine with these slots and this context (tokens per slot).

    Raises:
        WorkloadError: a preset is unknown, or the context is too short for it.

    """
    found: list[Workload] = []
    for name in names:
        if name not in PRESETS:
            raise WorkloadError(
                f"workload: no preset named {name!r}", advice=f"there are: {', '.join(PRESETS)}"
            )
        made = PRESETS[name](slots or 4, context or 4096)
        if not made:
            raise WorkloadError(
                f"workload: {name}: the context of {context} tokens is too short",
                advice="raise `context` in the profile",
            )
        found += made
    return found


def changed(workload: Workload, **changes: Any) -> Workload:
    """Return a workload with the changes that are not None, checked.

    Raises:
        WorkloadError: the result makes no sense.

    """
    found = msgspec.structs.replace(
        workload, **{name: value for name, value in changes.items() if value is not None}
    )
    if changes.get("concurrency") is not None and changes.get("requests") is None:
        found = msgspec.structs.replace(found, requests=max(found.requests, found.concurrency))
    wrong = {
        "prompt_tokens must be at least 8": min(found.prompt_tokens) < 8 and found.prompts is None,
        "output_tokens must be at least 1": min(found.output_tokens) < 1,
        "concurrency must be at least 1": found.concurrency < 1,
        "requests must be at least 1": found.requests < 1,
        f"rate must be 0, or {SLOWEST:g} to {FASTEST:g} requests a second": found.rate != 0
        and not SLOWEST <= found.rate <= FASTEST,
        "prefix_tokens must leave 8 tokens of each prompt": found.prefix_tokens > 0
        and found.prefix_tokens > min(found.prompt_tokens) - 8,
        f"no metric named {found.metric!r}; there are: {', '.join(METRICS)}": found.metric not in METRICS,
    }
    problems = [problem for problem, is_so in wrong.items() if is_so]
    if problems:
        raise WorkloadError(f"workload: {found.name}: {'; '.join(problems)}")
    return found


def shaped(
    wanted: Sequence[Workload | str],
    slots: int | None,
    context: int | None,
    changes: Mapping[str, Any],
    streams: Sequence[int] = (),
) -> list[Workload]:
    """Return workloads, presets made for an engine, with the changes, one for each number of streams.

    Args:
        wanted: presets by name, or workloads.
        slots: of the engine.
        context: of the engine, tokens per slot.
        changes: of workloads' fields; those that are None are left as they are.
        streams: numbers of streams; none: each workload's own.

    Raises:
        WorkloadError: a preset is unknown, or the result makes no sense.

    """
    found = []
    for each in wanted:
        made = presets([each], slots, context) if isinstance(each, str) else [each]
        if each == "slots" and streams:
            made = [msgspec.structs.replace(made[0], name="slots")]
        for load in made:
            for count in streams or (None,):
                name = load.name if len(streams) < 2 and each != "slots" else f"{load.name}-{count}"
                found.append(
                    changed(load, **{**changes, "concurrency": count, "name": name if count else None})
                )
    return found
