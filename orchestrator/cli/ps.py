"""``orchestrator ps``: what runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.cli import options

if TYPE_CHECKING:
    from orchestrator.cli import documents


def ps(as_json: options.Json = False) -> None:
    """Show what runs: in the foreground, in the background, and from Python programs."""
    from orchestrator.cli import console, documents, services
    from orchestrator.home import home

    root = home()
    for line in services.sweep(root):
        console.err(line)
    found, silent = services.look(root)
    for quiet in silent:
        what = {"hangs": "does not answer"}.get(quiet.state, f"is {quiet.state}")
        console.err(f"{', '.join(quiet.names) or 'a service'}: pid {quiet.pid} {what}")
    rows = [status for service in found for status in service.backends]
    rows += services.foreign(root, {service.pid for service in found})
    shown = [documents.Running.of(row) for row in rows]
    if as_json:
        console.document(shown)
        return
    if not shown:
        if not silent:
            console.err("nothing runs")
        return
    with_gpus = any(row.gpus for row in shown)
    headings = ["NAME", "BACKEND", "STATE", "PID", "URL", "UPTIME", "RESTARTS", "MEMORY"]
    headings += [*(["GPU MEMORY"] if with_gpus else []), "PROFILE"]
    console.out(
        console.table(
            [
                [
                    row.name,
                    f"{row.backend or '-'}{' > ' + row.switching_to if row.switching_to else ''}",
                    row.state or "-",
                    str(row.pid),
                    row.url or "-",
                    console.duration(row.uptime_s),
                    "-" if row.restarts is None else str(row.restarts),
                    console.size(row.memory),
                    *([_gpus(row)] if with_gpus else []),
                    row.profile or "-",
                ]
                for row in shown
            ],
            headings,
        )
    )


def _gpus(row: documents.Running) -> str:
    """Return what an engine holds of each card, and what all hold of how much."""
    from orchestrator.cli.console import size

    return ", ".join(
        f"{size(card.memory_engine)} ({size(card.memory_used)} of {size(card.memory_total)}, {card.name})"
        for card in row.gpus
    )
