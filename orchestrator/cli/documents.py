"""The shape of every document that ``--json`` prints; docs/reference/schemas is made from here.

Sizes are in bytes, times in seconds, rates in tokens a second. A field that is null is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A JSON object with exactly these fields."""


class Problem(Document, frozen=True):
    """One fault in a profile. `line` and `column` are 1-based, 0 when there is none."""

    where: str
    line: int
    column: int
    key: str
    message: str


class Fault(Document, frozen=True, omit_defaults=True):
    """Why a command failed; which of the optional fields are there depends on `type`."""

    type: str
    message: str
    exit_code: int
    advice: str | None
    problems: list[Problem] = []
    profile: str | None = None
    log_tail: list[str] = []
    code: int | None = None
    signal: int | None = None
    attempts: int | None = None
    survivors: list[int] = []
    status: int | None = None
    partial: str | None = None


class Error(Document, frozen=True):
    """What any command prints with ``--json`` when it fails."""

    error: Fault


class Checked(Document, frozen=True):
    """One profile's file: its name when it is right, else what is wrong."""

    path: str
    ok: bool
    name: str | None
    problems: list[Problem]


class Check(Document, frozen=True):
    """`check --json`."""

    ok: bool
    profiles: list[Checked]


class CardUse(Document, frozen=True):
    """A card of an engine: bytes in all, in use by anyone, and by the engine; null where nobody says."""

    id: str
    name: str
    memory_total: int | None
    memory_used: int | None
    memory_engine: int | None


class Running(Document, frozen=True):
    """One entry of the list that `ps --json` prints.

    `pid` is the owner's: `orchestrator up`, or a Python program. Of the latter only the record is known.
    `switching_to` is the engine that is being put in the place of this one, or null.
    """

    name: str
    profile: str | None
    backend: str | None
    state: str | None
    pid: int
    engine_pids: list[int]
    url: str | None
    uptime_s: float | None
    restarts: int | None
    memory: int | None
    gpus: list[CardUse]
    switching_to: str | None

    @classmethod
    def of(cls, status: Mapping[str, Any]) -> Running:
        """Take from a backend's status what is shown."""
        shown = {name: status.get(name) for name in cls.__struct_fields__}
        return msgspec.convert(
            {**shown, "gpus": shown["gpus"] or []}, cls
        )  # a stranger's backend may not say


class Usage(Document, frozen=True):
    """Tokens as the server counted them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


class Run(Document, frozen=True):
    """`run --json`. `load_s` is null when an engine that ran already has answered."""

    text: str
    finish_reason: str | None
    usage: Usage | None
    ttft_s: float | None
    decode_tok_s: float | None
    prefill_tok_s: float | None
    load_s: float | None
    model: str
    backend: str


class Binary(Document, frozen=True):
    """The engine's program and where it was found."""

    argv: list[str]
    source: str


class Model(Document, frozen=True):
    """The model's file and what it says of itself."""

    path: str
    id: str
    architecture: str | None
    name: str | None
    parameters: int | None
    quantisation: str | None
    file_size: int | None
    layers: int | None
    native_context: int | None
    vocabulary: int | None
    chat_template: bool | None


class Environment(Document, frozen=True):
    """How the engine's environment differs from ours; a trailing * removes every name that begins so."""

    set: dict[str, str]
    removed: list[str]


class Device(Document, frozen=True):
    """What computes."""

    kind: str
    gpus: list[dict[str, Any]]


class MemoryPart(Document, frozen=True):
    """Bytes in one place."""

    weights: int
    kv_cache: int
    compute: int
    overhead: int
    total: int


class Memory(Document, frozen=True):
    """An estimate of what it takes on the cards and in the system's memory, against what is free now.

    `verdict` is fits, tight, no or unknown; `advice` holds changes that would make it fit.
    """

    device: MemoryPart
    host: MemoryPart
    free_device: int | None
    free_host: int | None
    verdict: str
    source: str
    advice: list[str]
    notes: list[str]


class Plan(Document, frozen=True):
    """`plan --json`."""

    profile: dict[str, Any]
    backend: str
    binary: Binary
    model: Model
    argv: list[str]
    environment: Environment
    context: int
    context_source: str
    slots: int
    device: Device
    memory: Memory | None
    notes: list[str]


class Finding(Document, frozen=True):
    """One thing that `doctor` looked at: `level` is ok, info, warning or blocker; `command` mends it."""

    level: str
    subject: str
    message: str
    command: str | None


class Doctor(Document, frozen=True):
    """`doctor --json`; `ok` is false when something has to be mended first."""

    ok: bool
    findings: list[Finding]


class FoundModel(Document, frozen=True):
    """A model on disk, or what belongs to one.

    `kind` is model, mmproj, adapter, imatrix, control-vector, vocabulary, or broken when there is a `fault`.
    `engines` names what can serve it; a family's name, such as vllm, stands for every backend of it.
    """

    path: str
    format: str
    kind: str
    repository: str | None
    files: int
    size: int
    architecture: str | None
    name: str | None
    parameters: int | None
    quantisation: str | None
    bits_per_weight: float | None
    context: int | None
    chat_template: bool
    engines: list[str]
    mmproj: list[str]
    fault: str | None


class Trouble(Document, frozen=True):
    """A folder that could not be searched."""

    path: str
    reason: str


class Models(Document, frozen=True):
    """`models --json`."""

    places: list[str]
    models: list[FoundModel]
    troubles: list[Trouble]


class FoundEngine(Document, frozen=True):
    """An engine; with a `problem` it can't be used. `environment` is what `engines install` made."""

    name: str
    version: str | None
    devices: list[str]
    argv: list[str]
    source: str | None
    environment: str | None
    installable: bool
    problem: str | None
    advice: str | None


class Engines(Document, frozen=True):
    """`engines --json`; `folder` is where environments of engines are made."""

    folder: str
    engines: list[FoundEngine]


ALL: Mapping[str, Any] = {
    "error": Error,
    "check": Check,
    "ps": list[Running],
    "run": Run,
    "plan": Plan,
    "doctor": Doctor,
    "models": Models,
    "engines": Engines,
    "engines-install": FoundEngine,
}
"""File name in docs/reference/schemas -> the document's type."""
