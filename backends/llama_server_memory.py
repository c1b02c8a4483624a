"""What llama-server will take, decided before it starts: ``auto`` values, the budget, and the exact figures.

The formula answers at once. Where it says that there is hardly room, or none, llama-fit-params beside the
program is asked before anybody is turned away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from orchestrator import gguf_header
from orchestrator.backend import Plan
from orchestrator.gguf_header import Header
from orchestrator.hardware import Machine, fit, fit_tool
from orchestrator.hardware.fit import Room, Wish
from orchestrator.hardware.fit_advice import budget

LEAST_CONTEXT = 4096  # tokens a slot that `context: auto` leaves room for when layers are chosen too


def settle(plan: Plan, machine: Machine, ubatch: int | None, environ: Mapping[str, str]) -> Plan:
    """Return the plan with its ``auto`` values decided, and its budget."""
    header = plan.header
    if not isinstance(header, Header):
        return plan
    free, profile = room(plan, machine), plan.profile
    wish = _wish(plan, ubatch)
    notes = list(plan.notes)
    if profile.gpu_layers == "auto" and plan.device.kind != "cpu":
        context = min(wish.context, LEAST_CONTEXT) if profile.context == "auto" else wish.context
        layers = fit.largest_gpu_layers(header, replace(wish, context=context), free) or 0
        wish = replace(wish, gpu_layers=layers)
        plan = replace(plan, gpu_layers=layers)
        notes.append(f"gpu_layers: auto puts {layers} of {(header.layers or 0) + 1} layers onto the GPU")
    if profile.context == "auto":
        context = fit.largest_context(header, wish, free) or min(wish.context, fit.CELL)
        source = "auto: " + ("all that the model allows" if context == wish.context else "the most that fits")
        wish = replace(wish, context=context)
        plan = replace(plan, context=context, context_source=source)
    found = budget(header, wish, free)
    if found.verdict.answer in {"tight", "no"} and (tool := fit_tool.beside(plan.binary.argv)):
        exact = fit_tool.ask(tool, plan.model_path, header, wish, environ=masked(plan, environ))
        found = budget(header, wish, free, exact=exact)
    if found.verdict.answer in {"tight", "no"} and found.advice:
        notes.append(f"memory: {found.verdict.answer}; what would fit: {'; or '.join(found.advice)}")
    return replace(plan, memory=found, notes=tuple(notes))


def room(plan: Plan, machine: Machine) -> Room:
    """Return what is free for the plan's device now."""
    cards = plan.device.gpus
    known = bool(cards) and all(gpu.total for gpu in cards)
    return Room(sum(gpu.free for gpu in cards) if known else None, machine.memory_available or None)


def masked(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which a program sees the plan's cards and no others."""
    kept = {name: value for name, value in environ.items() if name not in plan.device.unset}
    return {**kept, **plan.device.env}


def _wish(plan: Plan, ubatch: int | None) -> Wish:
    profile = plan.profile
    layers = profile.gpu_layers
    return Wish(
        context=plan.context,
        slots=plan.slots,
        kv_type=profile.kv_cache_type,
        gpu_layers=layers if isinstance(layers, int) else None,
        ubatch=ubatch or fit.UBATCH,
        outputs=plan.slots,
        kind=plan.device.kind,
        cards=max(1, len(plan.device.gpus)),
        flash_attention=profile.flash_attention != "off",
        mmproj=gguf_header.read(plan.mmproj_path) if plan.mmproj_path else None,
        adapters=tuple(gguf_header.read(path) for path in plan.lora_paths),
    )
