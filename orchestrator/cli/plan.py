"""``orchestrator plan``: everything that `up` would do, decided and shown, nothing started."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from orchestrator.cli import options

if TYPE_CHECKING:
    from orchestrator.backend import Command, Plan
    from orchestrator.cli import documents
    from orchestrator.hardware.fit import Part
    from orchestrator.hardware.fit_advice import Budget

PORT = 8080  # stands for the fresh port that each launch takes
FRESH_KEY = "(a fresh key for each launch)"
HIDDEN = "(hidden)"
SECRET = re.compile(r"key|token|secret|password|credential", re.IGNORECASE)


def plan(
    profile: options.ProfileFile,
    backend: options.Backend = None,
    sets: options.Set = None,
    as_json: options.Json = False,
) -> None:
    """Show what would be started: program, arguments, environment, context, device. Starts nothing."""
    from orchestrator.cli import console, loading, memory

    engine = loading.make_backend(loading.load_all([profile], sets, backend)[0])
    decided = engine.plan()
    command = engine.prepared(decided, PORT)
    decided = replace(decided, memory=memory.exact(decided, command))
    found = _document(decided, command, engine.key_variable)
    if as_json:
        console.document(found)
    else:
        console.out(_text(found))


def _document(plan: Plan, command: Command, key_variable: str) -> documents.Plan:
    from orchestrator.cli import documents

    given = {name: _hidden(name, value) for name, value in command.env.items()}
    given[key_variable] = FRESH_KEY
    profile = plan.profile.model_dump(mode="json", exclude_none=True)
    profile["env"] = {name: _hidden(name, value) for name, value in profile.get("env", {}).items()}
    return documents.Plan(
        profile=profile,
        backend=plan.backend,
        binary=documents.Binary(argv=list(plan.binary.argv), source=plan.binary.source),
        model=_model(plan),
        argv=list(command.argv),
        environment=documents.Environment(
            set=given, removed=[name for name in command.unset if name not in given]
        ),
        context=plan.context,
        context_source=plan.context_source,
        slots=plan.slots,
        device=documents.Device(
            kind=plan.device.kind,
            gpus=[{"id": gpu.id, "name": gpu.name, "memory": gpu.total} for gpu in plan.device.gpus],
        ),
        memory=_memory(plan.memory),
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


def _memory(budget: Budget | None) -> documents.Memory | None:
    from orchestrator.cli import documents

    if budget is None:
        return None

    def part(found: Part) -> documents.MemoryPart:
        return documents.MemoryPart(
            weights=found.weights,
            kv_cache=found.kv,
            compute=found.compute,
            overhead=found.overhead,
            total=found.total,
        )

    return documents.Memory(
        device=part(budget.estimate.device),
        host=part(budget.estimate.host),
        free_device=budget.free.device,
        free_host=budget.free.host,
        verdict=budget.verdict.answer,
        source=budget.estimate.source,
        advice=list(budget.advice),
        notes=list(budget.estimate.notes),
    )


def _text(found: documents.Plan) -> str:
    from orchestrator.cli import memory
    from orchestrator.cli.console import printable, size

    model = found.model
    facts = [
        model.architecture,
        model.name,
        f"{model.parameters / 1e6:.0f}M parameters" if model.parameters else None,
        model.quantisation,
        size(model.file_size) if model.file_size else None,
        f"{model.layers} layers" if model.layers else None,
        f"context {model.native_context}" if model.native_context else None,
        "no chat template of its own" if model.chat_template is False else None,
    ]
    rows = [
        ("profile", f"{found.profile['name']} ({found.profile.get('source', 'made in code')})"),
        ("backend", found.backend),
        ("binary", f"{' '.join(map(_quoted, found.binary.argv))} (from {found.binary.source})"),
        ("model", model.path),
        ("", ", ".join(fact for fact in facts if fact)),
        ("context", f"{found.context} tokens a slot: {found.context_source}"),
        ("slots", str(found.slots)),
        ("device", found.device.kind),
        *(("", f"{gpu['id']} {gpu['name']}, {size(gpu['memory'])}") for gpu in found.device.gpus),
        *memory.rows(found.memory, model),
        *(("note", note) for note in found.notes),
        *(("set", f"{name}={_quoted(value)}") for name, value in found.environment.set.items()),
        *(("removed", name) for name in found.environment.removed),
    ]
    lines = [f"{label:9}{printable(text)}".rstrip() for label, text in rows]
    lines += [
        f"command  (each launch takes a fresh port in the place of {PORT})",
        " ".join(map(_quoted, found.argv)),
    ]
    return "\n".join(lines)


def _quoted(value: str) -> str:
    """Return a word as a shell takes it; what would steer the terminal as bash spells it, in ``$'...'``."""
    if value in (FRESH_KEY, HIDDEN):
        return value
    if value.isprintable():
        return shlex.quote(value)
    spelled = (each if each.isprintable() and each not in "'\\" else _escape(each) for each in value)
    return f"$'{''.join(spelled)}'"


def _escape(character: str) -> str:
    raw = os.fsencode(character)  # a name need not be text
    return "".join(f"\\x{byte:02x}" for byte in raw)
