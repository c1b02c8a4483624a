"""``orchestrator plan``: everything that `up` would do, decided and shown, nothing started."""

from __future__ import annotations

import re
import shlex
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from orchestrator.cli import options

if TYPE_CHECKING:
    from orchestrator.backend import Command, Plan
    from orchestrator.cli import documents

PORT = 8080  # stands for the fresh port that each launch takes
FRESH_KEY = "(a fresh key for each launch)"
HIDDEN = "(hidden)"
SECRET = re.compile(r"key|token|secret|password|credential", re.IGNORECASE)
KV_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32}
KV_BYTES |= {"q4_1": 20 / 32, "q4_0": 18 / 32, "iq4_nl": 18 / 32}  # block sizes of ggml


def plan(
    profile: options.ProfileFile,
    backend: options.Backend = None,
    sets: options.Set = None,
    as_json: options.Json = False,
) -> None:
    """Show what would be started: program, arguments, environment, context, device. Starts nothing."""
    from orchestrator.cli import console, loading

    engine: Any = loading.make_backend(loading.load_all([profile], sets, backend)[0])
    decided = engine.plan()
    found = _document(decided, engine.command(decided, PORT), getattr(engine, "key_variable", None))
    if as_json:
        console.document(found)
    else:
        console.out(_text(found))


def _document(plan: Plan, command: Command, key_variable: str | None) -> documents.Plan:
    from orchestrator.cli import documents

    given = {name: _hidden(name, value) for name, value in command.env.items()}
    if key_variable:
        given[key_variable] = FRESH_KEY
    profile = plan.profile.model_dump(mode="json", exclude_none=True)
    profile["env"] = {name: _hidden(name, value) for name, value in profile.get("env", {}).items()}
    return documents.Plan(
        profile=profile,
        backend=plan.backend,
        binary=documents.Binary(argv=list(plan.binary.argv), source=plan.binary.source),
        model=_model(plan),
        argv=list(command.argv),
        environment=documents.Environment(set=given, removed=list(command.unset)),
        context=plan.context,
        context_source=plan.context_source,
        slots=plan.slots,
        device=documents.Device(
            kind=plan.device.kind,
            gpus=[{"id": gpu.id, "name": gpu.name, "memory": gpu.total} for gpu in plan.device.gpus],
        ),
        memory=_memory(plan),
        notes=list(plan.notes),
    )


def _model(plan: Plan) -> documents.Model:
    from orchestrator.cli import documents

    header: Any = plan.header or SimpleNamespace()  # without metadata every fact is None
    names = ("architecture", "name", "parameters", "quantisation", "file_size", "layers", "vocabulary")
    facts = {name: getattr(header, name, None) for name in names}
    return documents.Model(
        path=str(plan.model_path),
        id=plan.model_id,
        native_context=getattr(header, "context", None),
        chat_template=None if plan.header is None else plan.header.chat_template is not None,
        **facts,
    )


def _hidden(name: str, value: str) -> str:
    return HIDDEN if SECRET.search(name) else value


def _memory(plan: Plan) -> documents.Memory:
    """Estimate: the tensors' bytes, and cells x KV heads x (key + value length) x bytes for each layer."""
    from orchestrator.cli import documents

    header = plan.header
    if header is None:
        return documents.Memory(
            weights=None, kv_cache=None, total=None, source="the model says nothing of itself"
        )
    weights, kv_cache = header.tensor_bytes, None
    source = "weights: the tensors' bytes; KV cache: unknown for this architecture"
    lengths = (header.layers, header.kv_heads, header.key_length, header.value_length)
    if header.sliding_window:
        source = "weights: the tensors' bytes; KV cache: the file does not say which layers have the window"
    elif all(isinstance(length, int) for length in lengths):
        layers, heads, key, value = (int(length) for length in lengths)  # type: ignore[arg-type]
        cells = plan.context * plan.slots
        kv_cache = int(layers * cells * heads * (key + value) * KV_BYTES[plan.profile.kv_cache_type])
        source = "weights: the tensors' bytes; KV cache: layers x cells x KV heads x (key + value length)"
    total = None if kv_cache is None else weights + kv_cache
    return documents.Memory(weights=weights, kv_cache=kv_cache, total=total, source=source)


def _text(found: documents.Plan) -> str:
    from orchestrator.cli.console import size

    model, memory = found.model, found.memory
    facts = [
        model.architecture,
        model.name,
        f"{model.parameters / 1e6:.0f}M parameters" if model.parameters else None,
        model.quantisation,
        size(model.file_size) if model.file_size else None,
        f"{model.layers} layers" if model.layers else None,
        f"context {model.native_context}" if model.native_context else None,
        None if model.chat_template else "no chat template",
    ]
    rows = [
        ("profile", f"{found.profile['name']} ({found.profile.get('source', 'made in code')})"),
        ("backend", found.backend),
        ("binary", f"{shlex.join(found.binary.argv)} (from {found.binary.source})"),
        ("model", model.path),
        ("", ", ".join(fact for fact in facts if fact)),
        ("context", f"{found.context} tokens a slot: {found.context_source}"),
        ("slots", str(found.slots)),
        ("device", found.device.kind),
        *(("", f"{gpu['id']} {gpu['name']}, {size(gpu['memory'])}") for gpu in found.device.gpus),
        ("memory", f"weights {size(memory.weights)}, KV cache {size(memory.kv_cache)}"),
        ("", memory.source),
        *(("note", note) for note in found.notes),
        *(("set", f"{name}={_quoted(value)}") for name, value in found.environment.set.items()),
        *(("removed", name) for name in found.environment.removed),
    ]
    lines = [f"{label:9}{text}".rstrip() for label, text in rows]
    lines += ["command  (each launch takes a fresh port)", shlex.join(found.argv)]
    return "\n".join(lines)


def _quoted(value: str) -> str:
    return value if value in (FRESH_KEY, HIDDEN) else shlex.quote(value)
