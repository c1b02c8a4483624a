"""A wish against the memory that is free: the estimate, the verdict, and what would make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from orchestrator.gguf_header import Header
from orchestrator.hardware.fit import (
    MARGIN,
    Estimate,
    Room,
    Verdict,
    Wish,
    estimate,
    fits,
    largest_context,
    largest_gpu_layers,
    largest_slots,
    verdict,
)

# Mean bits per weight of an 8-billion-parameter Llama at these quantisations, largest first.
QUANTISATIONS: Final = (
    ("Q8_0", 8.5), ("Q6_K", 6.57), ("Q5_K_M", 5.7), ("Q4_K_M", 4.9), ("IQ4_XS", 4.46), ("Q3_K_M", 4.0),
    ("Q2_K", 3.2), ("IQ2_XXS", 2.4),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Budget:
    """What a plan takes and whether there is room for it.

    Attributes:
        wish: what was asked for, where llama.cpp's way of counting applies.
        estimate: what that takes.
        free: what is free.
        verdict: whether it fits.
        advice: changes that would make it fit, each enough by itself; none when it does.

    """

    wish: Wish | None
    estimate: Estimate
    free: Room
    verdict: Verdict
    advice: tuple[str, ...] = ()


def budget(
    header: Header, wish: Wish, free: Room, *, exact: Estimate | None = None, margin: int = MARGIN
) -> Budget:
    """Return the budget of a wish; `exact` is an estimate from elsewhere, the formula's by default."""
    estimated = exact or estimate(header, wish)
    found = verdict(estimated, free, margin)
    advice = tuple(_advice(header, wish, free, found, margin)) if found.answer in {"tight", "no"} else ()
    return Budget(wish, estimated, free, found, advice)


def _advice(header: Header, wish: Wish, free: Room, found: Verdict, margin: int) -> Iterator[str]:
    """Yield what would make a wish fit, the least loss first; together with others where none is enough."""

    def good(**changes: Any) -> bool:
        return fits(header, replace(wish, **changes), free, margin)

    single = False
    if wish.flash_attention and wish.kv_type not in {"q8_0", "q4_0"} and good(kv_type="q8_0"):
        single = True
        yield "kv_cache_type: q8_0"
    if (tokens := largest_context(header, wish, free, margin)) and tokens < wish.context:
        single = True
        yield f"context: {tokens}"
    if (slots := largest_slots(header, wish, free, margin)) and slots < wish.slots:
        single = True
        yield f"slots: {slots}"
    on_cards = None if wish.kind == "cpu" else largest_gpu_layers(header, wish, free, margin)
    if on_cards and good(gpu_layers=on_cards):
        single = True
        yield f"gpu_layers: {on_cards}, the other {(header.layers or 0) + 1 - on_cards} on the CPU"
    if bits := _bits(header, wish, free, found, margin):
        smaller = next(
            (f"{name} ({size} bits a weight)" for name, size in QUANTISATIONS if size <= bits), None
        )
        if smaller:
            single = True
            yield f"a smaller quantisation of the model, such as {smaller}"
    if not single:
        least = replace(wish, slots=1, kv_type="q8_0" if wish.flash_attention else wish.kv_type)
        if tokens := largest_context(header, least, free, margin):
            kept = min(tokens, wish.context)
            yield f"context: {kept}, slots: 1 and kv_cache_type: {least.kv_type} together"


def _bits(header: Header, wish: Wish, free: Room, found: Verdict, margin: int) -> float | None:
    """Return the bits a weight may have where the memory is short; None unless that is fewer than now."""
    room = free.device if found.where == "device" else free.host
    estimated = estimate(header, wish)
    part = estimated.device if found.where == "device" else estimated.host
    if not header.bits_per_weight or room is None or not part.weights:
        return None
    left = room - margin - (part.total - part.weights)
    bits = header.bits_per_weight * left / part.weights
    return bits if 0 < bits < header.bits_per_weight else None
