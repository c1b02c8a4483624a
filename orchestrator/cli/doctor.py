"""``orchestrator doctor``: what this machine has, what is wrong with it, and what to do."""

from __future__ import annotations

from orchestrator.cli import options


def doctor(as_json: options.Json = False) -> int:
    """Look at GPUs, drivers, permissions and engines, and say what to do about each."""
    from orchestrator.cli import console
    from orchestrator.doctor import examine

    console.out(str(examine()))
    return 0
