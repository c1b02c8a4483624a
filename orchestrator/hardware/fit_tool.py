"""Asks llama.cpp itself what a configuration takes: ``llama-fit-params``, which allocates nothing.

It stands beside llama-server in every build since autumn 2025, reads the model's header and vocabulary, and
answers in under a second with MiB for each device: model, context, compute. What it doesn't know (projectors,
how many logits llama-server keeps, what the runtime takes besides) is added from the formula.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from orchestrator.gguf_header import Header
from orchestrator.hardware.fit import MIB, Estimate, Part, Wish, estimate, layers_on_cards
from orchestrator.hardware.probe import Runner, run_program

NAME: Final = "llama-fit-params"
TIMEOUT: Final = 20.0  # seconds; a vocabulary of 262,144 tokens on a slow disk takes some 2 s
_LINE: Final = re.compile(r"^(\S+) (\d+) (\d+) (\d+) ?$", re.MULTILINE)  # device, model, context, compute


def beside(server: Sequence[str]) -> Path | None:
    """Return the tool that stands beside an engine's program, None without one."""
    if not server or "/" not in server[0]:
        return None
    tool = Path(server[0]).resolve().with_name(NAME)
    return tool if tool.is_file() else None


def command(tool: Path, model: Path, header: Header, wish: Wish) -> list[str]:
    """Return the argv that asks for a wish."""
    return [
        str(tool),
        *("--model", str(model)),
        *("--ctx-size", str(wish.context * wish.slots)),
        *("--parallel", str(wish.slots)),
        *("--n-gpu-layers", str(layers_on_cards(header, wish))),
        *("--ubatch-size", str(wish.ubatch)),
        *("--batch-size", str(max(2048, wish.ubatch))),
        *("--flash-attn", "on" if wish.flash_attention else "off"),
        *("--cache-type-k", wish.kv_type),
        *("--cache-type-v", wish.kv_type),
        *("--fit", "off"),
        *("--fit-print", "on"),
        "--no-repack",  # repacked weights would be left out of its figures
        "--offline",
    ]


def parse(answer: str) -> dict[str, Part] | None:
    """Return what the tool printed, by device (``Host`` is the system's memory); None if it said nothing."""
    found = {
        match[1]: Part(*(int(mib) * MIB for mib in match.groups()[1:])) for match in _LINE.finditer(answer)
    }
    return found or None


def ask(
    tool: Path,
    model: Path,
    header: Header,
    wish: Wish,
    *,
    environ: Mapping[str, str] | None = None,
    run: Runner | None = None,
) -> Estimate | None:
    """Return what llama.cpp says that a wish takes, None when the tool fails or doesn't know the model.

    `environ` is what the engine would get: its masks decide which cards the tool sees.
    """
    run = run or functools.partial(run_program, environ=environ)
    ran = run(command(tool, model, header, wish), TIMEOUT)
    said = parse(ran.out) if ran.code == 0 else None
    if said is None:
        return None
    formula = estimate(header, wish)
    cards = [part for name, part in said.items() if name != "Host"]
    extra = _corrections(header, wish, formula)
    host = replace(said.get("Host", Part()), overhead=formula.host.overhead)
    if formula.gpu_layers and not cards:
        return None  # it found no card where the engine shall have one
    if not cards:
        return replace(formula, host=_plus(host, extra), source=NAME, notes=())
    device = Part(
        sum(part.weights for part in cards), sum(part.kv for part in cards),
        sum(part.compute for part in cards), formula.device.overhead,
    )  # fmt: skip
    return replace(formula, device=_plus(device, extra), host=host, source=NAME, notes=())


def _corrections(header: Header, wish: Wish, formula: Estimate) -> Part:
    """Return by formula what the tool leaves out, projector and adapters, less the logits it counts too many.

    It reserves the logits of every token of a ubatch; `Wish.outputs` says how many llama-server does.
    """
    asked = estimate(header, replace(wish, mmproj=None, adapters=(), outputs=None))
    ours, its = (formula.device, asked.device) if formula.gpu_layers else (formula.host, asked.host)
    return Part(ours.weights - its.weights, 0, ours.compute - its.compute)


def _plus(one: Part, other: Part) -> Part:
    """Return the sum; the overhead is the first one's."""
    return replace(one, weights=one.weights + other.weights, compute=one.compute + other.compute)
