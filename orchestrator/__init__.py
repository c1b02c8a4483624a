"""Run language models on your own machine: one profile, one API, one yardstick for every engine.

The public names are imported when they are first used, so that ``import orchestrator`` and the command line
stay light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.generation import AsyncGeneration, Generation
    from orchestrator.model import AsyncTextModel, TextModel
    from orchestrator.opening import aconnect, aload, connect, load
    from orchestrator.request import Options
    from orchestrator.tokens import (
        Alternative,
        Classification,
        Message,
        Metrics,
        ModelInfo,
        Result,
        Timings,
        Token,
        ToolCall,
        Usage,
    )

__all__ = [
    "Alternative",
    "AsyncGeneration",
    "AsyncTextModel",
    "Classification",
    "Generation",
    "Message",
    "Metrics",
    "ModelInfo",
    "Options",
    "Result",
    "TextModel",
    "Timings",
    "Token",
    "ToolCall",
    "Usage",
    "aconnect",
    "aload",
    "connect",
    "load",
]

_HOMES = {
    "AsyncGeneration": "generation",
    "AsyncTextModel": "model",
    "Generation": "generation",
    "Options": "request",
    "TextModel": "model",
    "aconnect": "opening",
    "aload": "opening",
    "connect": "opening",
    "load": "opening",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'tokens')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
