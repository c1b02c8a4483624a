"""Run language models on your own machine: one profile, one API, one yardstick for every engine.

The public names are imported when they are first used, so that ``import orchestrator`` and the command line
stay light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator import errors
    from orchestrator.errors import (
        BackendError,
        BadStatus,
        BinaryMissing,
        Crashed,
        DeviceMissing,
        DoesNotFit,
        EngineReplaced,
        ExitedEarly,
        GaveUp,
        Incomparable,
        ModelError,
        NotAModel,
        NotFetched,
        OrchestratorError,
        PortTaken,
        Problem,
        ProfileError,
        ProtocolError,
        RequestError,
        Stalled,
        StartCancelled,
        StartError,
        StartStalled,
        StartTimeout,
        StopFailed,
        StreamInterrupted,
        SwitchFailed,
        SwitchRefused,
        UnknownBackend,
        Unreachable,
        UnsupportedModel,
    )
    from orchestrator.generation import AsyncGeneration, Generation
    from orchestrator.model import AsyncTextModel, TextModel
    from orchestrator.opening import aconnect, aload, connect, load
    from orchestrator.request import Options
    from orchestrator.switching_parts import Switched
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
    "BackendError",
    "BadStatus",
    "BinaryMissing",
    "Classification",
    "Crashed",
    "DeviceMissing",
    "DoesNotFit",
    "EngineReplaced",
    "ExitedEarly",
    "GaveUp",
    "Generation",
    "Incomparable",
    "Message",
    "Metrics",
    "ModelError",
    "ModelInfo",
    "NotAModel",
    "NotFetched",
    "Options",
    "OrchestratorError",
    "PortTaken",
    "Problem",
    "ProfileError",
    "ProtocolError",
    "RequestError",
    "Result",
    "Stalled",
    "StartCancelled",
    "StartError",
    "StartStalled",
    "StartTimeout",
    "StopFailed",
    "StreamInterrupted",
    "SwitchFailed",
    "SwitchRefused",
    "Switched",
    "TextModel",
    "Timings",
    "Token",
    "ToolCall",
    "UnknownBackend",
    "Unreachable",
    "UnsupportedModel",
    "Usage",
    "aconnect",
    "aload",
    "connect",
    "errors",
    "load",
]

# the module of each public name; that of all others is `errors`
_HOMES = {
    **dict.fromkeys(
        (
            "Alternative",
            "Classification",
            "Message",
            "Metrics",
            "ModelInfo",
            "Result",
            "Timings",
            "Token",
            "ToolCall",
            "Usage",
        ),
        "tokens",
    ),
    "AsyncGeneration": "generation",
    "AsyncTextModel": "model",
    "Generation": "generation",
    "Options": "request",
    "Switched": "switching_parts",
    "TextModel": "model",
    "aconnect": "opening",
    "aload": "opening",
    "connect": "opening",
    "load": "opening",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "errors":
        return importlib.import_module(f"{__name__}.errors")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
