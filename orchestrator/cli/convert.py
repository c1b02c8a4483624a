"""``orchestrator convert``: another form of a GGUF model: safetensors for vLLM, or unquantised."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from orchestrator.cli import completion, options


def convert(
    profile: options.ProfileFile,
    backend: Annotated[
        str,
        typer.Option(
            "--backend",
            metavar="NAME",
            help="The engine that shall read it.",
            autocompletion=completion.backends,
        ),
    ] = "vllm-cpu",
) -> None:
    """Make the form of a profile's model that another engine reads; it is kept and found from then on."""
    from orchestrator.cli import console, loading
    from orchestrator.cli.pull import got
    from orchestrator.discovery import find
    from orchestrator.errors import BackendError

    engine: Any = find(backend)
    if not hasattr(engine, "converted"):
        raise BackendError(
            f"convert: {backend} reads a profile's model as it is",
            advice=f"start it: orchestrator up {profile} --backend {backend}",
        )
    wish = loading.load_all([profile], None, backend)[0]
    console.out(str(got(lambda: engine.converted(wish, os.environ))))
