"""The memory part of ``orchestrator plan``: llama.cpp's own figures where it can be asked, and the table."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.backend import Command, Plan
    from orchestrator.cli import documents
    from orchestrator.hardware.fit_advice import Budget

_WORDS = {
    "fits": "it fits",
    "tight": "it is tight: there is hardly room",
    "no": "it does not fit",
    "unknown": "what is free can't be told",
}


def exact(plan: Plan, command: Command) -> Budget | None:
    """Return the plan's budget with llama.cpp's own figures where it can be asked for them."""
    from orchestrator.gguf_header import Header
    from orchestrator.hardware import fit_tool
    from orchestrator.hardware.fit_advice import budget

    found = plan.memory
    if (
        found is None
        or found.wish is None
        or not isinstance(plan.header, Header)
        or found.estimate.source == fit_tool.NAME
    ):
        return found
    tool = fit_tool.beside(plan.binary.argv)
    environ = command.environ(os.environ)
    said = tool and fit_tool.ask(tool, plan.model_path, plan.header, found.wish, environ=environ)
    return budget(plan.header, found.wish, found.free, exact=said) if said else found


def rows(memory: documents.Memory | None, model: documents.Model) -> list[tuple[str, str]]:
    """Return the lines of the table, each with its label in the first column."""
    from orchestrator.cli.console import size, table

    if memory is None:
        known = model.chat_template is not None  # that alone is told of every model that could be read
        why = "since its files say too little" if known else "before the model is on this machine"
        return [("memory", f"can't be told {why}")]
    places = [("GPU", memory.device, memory.free_device), ("host", memory.host, memory.free_host)]
    cells = [
        [name, *map(size, (part.weights, part.kv_cache, part.compute, part.overhead, part.total, free))]
        for name, part, free in places
        if part.total
    ]
    headings = ["WHERE", "WEIGHTS", "KV CACHE", "COMPUTE", "OVERHEAD", "TOTAL", "FREE"]
    lines = [
        f"{_WORDS[memory.verdict]} (by {memory.source})",
        *table(cells, headings).splitlines(),
        *(f"would fit with {change}" for change in memory.advice),
        *memory.notes,
    ]
    return [("memory" if number == 0 else "", line) for number, line in enumerate(lines)]
