"""What vLLM will take, decided before it starts: its share of each card, its cache, ``auto``, the budget.

A server that can't hold one request of the whole context does not start, and says so after minutes of
loading. One that can't hold every slot's whole context starts, and lets requests wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from backends.vllm_options import VllmOptions
from orchestrator.backend import Plan
from orchestrator.errors import Problem, ProfileError
from orchestrator.hardware import Machine, fit, fit_vllm
from orchestrator.hardware.fit import Room
from orchestrator.hardware.fit_advice import Budget
from orchestrator.hardware.fit_vllm import VllmWish
from orchestrator.hf_model import HfModel

GIB: Final = 1 << 30
LEAST: Final = 128  # tokens a slot where nothing fits: then the plan says so
SMALL: Final = 4.5  # bits a weight of what is called 4 bits, scales included
UNKNOWN: Final = 4 * GIB  # for the cache on the CPU, where the model doesn't say what it needs


def share(plan: Plan) -> float:
    """Return the share of each card's total that vLLM may take: a fraction of what is free now."""
    free = min((gpu.free / gpu.total for gpu in plan.device.gpus if gpu.total), default=1.0)
    return int(plan.profile.memory_fraction * free * 1000) / 1000


def cache_bytes(plan: Plan, options: VllmOptions) -> int | None:
    """Return the bytes for keys and values where they are given, or can be told: on the CPU.

    None where vLLM takes what its share of the cards leaves.
    """
    if options.kv_cache_gib is not None:
        return int(options.kv_cache_gib * GIB)
    if plan.device.kind != "cpu":
        return None
    model = plan.header if isinstance(plan.header, HfModel) else None
    cut = fit_vllm.blocks(model, wish(plan, options, model)) if model else None
    return cut.bytes_for(plan.slots) if cut else UNKNOWN


def wish(plan: Plan, options: VllmOptions, model: HfModel) -> VllmWish:
    """Return what vLLM is asked to do."""
    cards = max(1, len(plan.device.gpus))
    wide = options.dtype == "float32" and model.quantisation in {"bf16", "f16"}
    element = (
        4.0
        if options.dtype == "float32" or (options.dtype == "auto" and model.quantisation == "f32")
        else 2.0
    )
    return VllmWish(
        context=plan.context,
        slots=plan.slots,
        element=1.0 if plan.profile.kv_cache_type.startswith("fp8") else element,
        widened=2 if wide else 1,
        kind=plan.device.kind,
        cards=cards,
        tensor_parallel=options.tensor_parallel_size(len(plan.device.gpus)),
        step=options.batched_tokens or fit_vllm.STEP,
        graphs=not options.eager,
        offloaded=int((options.cpu_offload_gib or 0) * GIB) * cards,
    )


def settle(plan: Plan, options: VllmOptions, machine: Machine) -> Plan:
    """Return the plan with ``context: auto`` decided, and its budget where that can be told.

    Raises:
        ProfileError: `kv_cache_gib` is too small for a request of the whole context.

    """
    model = plan.header
    if not isinstance(model, HfModel) or options.nodes > 1:
        return plan
    question = _Question(model, options, _room(plan, machine))
    wanted = wish(plan, options, model)
    if plan.profile.context == "auto":
        context = fit_vllm.largest_context(plan.context, wanted, question.fits) or min(plan.context, LEAST)
        source = "auto: " + ("all that the model allows" if context == plan.context else "the most that fits")
        plan = replace(plan, context=context, context_source=source)
        wanted = replace(wanted, context=context)
    question.refuse_too_small_a_cache(plan, wanted)
    found = question.budget(wanted)
    if found is None:
        return plan
    notes = list(plan.notes)
    if found.verdict.answer in {"tight", "no"}:
        found = replace(found, advice=tuple(question.advice(wanted)))
        if found.advice:
            notes.append(f"memory: {found.verdict.answer}; what would fit: {'; or '.join(found.advice)}")
    return replace(plan, memory=found, notes=tuple(notes))


def _room(plan: Plan, machine: Machine) -> Room:
    """Return what vLLM may take now: its share of the cards, and the system's memory."""
    cards = plan.device.gpus
    known = bool(cards) and all(gpu.total for gpu in cards)
    # the same share of each, so the fullest card decides
    device = sum(int(share(plan) * gpu.total) for gpu in cards) if known else None
    return Room(device, machine.memory_available or None)


@dataclass(frozen=True)
class _Question:
    """Whether wishes fit: the model, how it is run, and what is free."""

    model: HfModel
    options: VllmOptions
    free: Room

    @property
    def given(self) -> int | None:
        """Bytes of the cache where the profile says them."""
        return None if self.options.kv_cache_gib is None else int(self.options.kv_cache_gib * GIB)

    def fits(self, wished: VllmWish) -> bool:
        """Say whether every slot's whole context fits at once; what can't be told counts as fitting."""
        cut = fit_vllm.blocks(self.model, wished)
        if cut and self.given is not None and cut.bytes_for(wished.slots) > self.given:
            return False
        found = self.budget(wished)
        return found is None or found.verdict.answer in {"fits", "unknown"}

    def budget(self, wished: VllmWish) -> Budget | None:
        """Return what a wish takes and whether there is room for it, None where that can't be told."""
        estimated = fit_vllm.estimate(self.model, wished, self.given)
        cut = fit_vllm.blocks(self.model, wished)
        if estimated is None or cut is None:
            return None
        # a card's share has its margin in `memory_fraction`
        verdict = fit.verdict(estimated, self.free, fit.MARGIN if wished.kind == "cpu" else 0)
        notes = list(estimated.notes)
        if wished.kind != "cpu" and self.given is None and self.free.device is not None:
            part = estimated.device
            left = self.free.device - (part.total - part.kv)
            if left >= cut.bytes_for(1):
                tokens = cut.tokens_in(left)
                notes.append(
                    f"the cache gets the rest of vLLM's share, {left / GIB:.1f} GiB: {tokens} tokens in all"
                )
                if verdict.answer == "no" and verdict.where == "device":
                    verdict = replace(verdict, answer="tight", short=0)
                    notes.append("not every slot's whole context fits at once: then requests wait")
            else:
                estimated = replace(estimated, device=replace(part, kv=cut.bytes_for(1)))
                notes.append("the cache is that of one request of the whole context")
        return Budget(None, replace(estimated, notes=tuple(notes)), self.free, verdict)

    def advice(self, wished: VllmWish) -> Iterator[str]:
        """Yield what would make a wish fit, each enough by itself, the least loss first."""
        if wished.graphs and self.fits(replace(wished, graphs=False)):
            yield "vllm: {eager: true}"
        tokens = fit_vllm.largest_context(wished.context, wished, self.fits)
        if tokens and tokens < wished.context:
            yield f"context: {tokens}"
        slots = next((n for n in range(wished.slots - 1, 0, -1) if self.fits(replace(wished, slots=n))), None)
        if slots:
            yield f"slots: {slots}"
        bits = self.model.bits_per_weight
        if bits and bits > SMALL and self.fits(replace(wished, widened=wished.widened * SMALL / bits)):
            yield "the model in 4 bits (AWQ or GPTQ)"
        if wished.kind != "cpu":
            for gib in range(1, 1 + (self.model.tensor_bytes // wished.cards) // GIB):
                if self.fits(replace(wished, offloaded=gib * GIB * wished.cards)):
                    yield f"vllm: {{cpu_offload_gib: {gib}}}"
                    break

    def refuse_too_small_a_cache(self, plan: Plan, wished: VllmWish) -> None:
        """Turn away a cache that can't hold one request of the whole context: vLLM would not start."""
        cut = fit_vllm.blocks(self.model, wished)
        if cut is None or self.given is None or self.given >= cut.bytes_for(1):
            return
        where = str(plan.profile.source or plan.profile.name)
        needed = cut.bytes_for(1) / GIB
        message = (
            f"a request of {wished.context} tokens takes {needed:.2f} GiB: "
            f"set at least {math.ceil(needed * 100) / 100:g}, or lower `context`"
        )
        raise ProfileError([Problem(where, 0, 0, "vllm.kv_cache_gib", message)])
