"""The table of everything the fake engine can be told, and how it is told (flags, environment, launches).

A code (`exit_code`, `crash_code`) that is negative is a signal, as in `subprocess.Popen.returncode`.
A count of -1 means never. Everything can be changed while the engine runs: ``POST /fake/do {"set": {...}}``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

VOCABULARY = (" the", " capital", " of", " France", " is", " Paris", ",", " café", " 日本", " 🙂", ".\n")


def token_text(index: int) -> str:
    """The text of the `index`-th token of every answer."""
    return VOCABULARY[index % len(VOCABULARY)]


def word_ids(text: str) -> list[int]:
    """The fake tokenizer: one id a word, the same in every process."""
    return [5000 + sum(word.encode()) % 9000 for word in text.split()]


def token_id(index: int) -> int:
    """The id of the `index`-th token of every answer."""
    return 1000 + index % len(VOCABULARY)


@dataclass(frozen=True)
class Knobs:
    """What the fake engine does; the defaults are a healthy engine that loads at once."""

    # -- from launch to launch
    state: str = ""  # counter file: each launch adds one to it
    launches: list[dict[str, Any]] = field(
        default_factory=list
    )  # knobs of the 1st, 2nd, ... launch; then as they are
    port_taken: int = (
        0  # the first N launches (needs `state`; -1 = all) find "the port taken", as the real one says it
    )
    # -- start
    say: list[str] = field(default_factory=list)  # lines for the log, before anything else
    reject: list[str] = field(default_factory=list)  # flags that this "old binary" does not know
    list_devices: str = "  (none)"  # what --list-devices answers
    exit_after: float = -1.0  # seconds after `exit_from` at which it ends unasked
    exit_from: str = "start"  # start | ready
    exit_code: int = 0
    load_time: float = 0.0  # seconds
    load_lines: int = 4  # stages logged while loading, at equal intervals; 0 = silent
    load_work: str = "idle"  # idle | cpu | read: what it burns meanwhile
    load_refuse: bool = False  # connections refused while loading, instead of 503
    port_shift: int = 0  # serve on port + N, though another was asked for
    memory: int = 0  # resident ballast, bytes
    life: int = 900  # seconds after which it ends itself, so that no test leaves one behind
    # -- log
    log_rate: int = 0  # bytes a second of flood
    log_kind: str = "lines"  # lines | long (never a newline) | binary (invalid UTF-8)
    # -- processes and stop
    children: list[str] = field(
        default_factory=list
    )  # plain, session, double, stubborn, port, sockets; joined by +
    ignore_term: bool = False
    stop_time: float = 0.0  # seconds from TERM to the end
    stop_code: int = 0
    # -- requests
    health: str = "ok"  # ok | hang (accepts, never answers) | error (500)
    model_id: str = ""  # instead of --alias
    cached_tokens: int = 0  # of the prompt, as reported
    stuck: bool = False  # completions are accepted and nothing ever comes
    say_request: int = -1  # the K-th completion (from 1) makes it log `say_line` on arrival
    say_line: str = ""
    crash_request: int = -1  # the K-th completion (from 1) kills it on arrival
    crash_after: int = -1  # tokens of one answer after which it dies
    crash_code: int = -11
    hang_after: int = -1  # tokens of one answer after which nothing more comes
    # -- schedule: token i is due at start + ttft + prompt / prefill_rate + i / rate, however late others were
    ttft: float = 0.0  # seconds
    prefill_rate: float = 0.0  # uncached prompt tokens a second; 0 = at once
    rate: float = 0.0  # tokens a second; 0 = at once
    noise: float = 0.0  # standard deviation of the log of a request's speed
    jitter: float = 0.0  # standard deviation of each token's moment, in gaps
    drift: float = 0.0  # how much slower each further request is: 0.01 = 1 % of the first one's time
    seed: int = 0
    eos_after: int = 64  # tokens after which it ends by itself, unless ignore_eos
    # -- shape of a stream
    per_chunk: int = 1  # tokens in one event
    pings: int = 0  # comments before each event
    split: str = ""  # utf8: events cut inside a character; bytes: one byte a read
    end: str = "done"  # done | no_done | error (then [DONE]) | eof (bare, mid-stream)
    end_after: int = 0  # tokens before error or eof
    close_streams: bool = True  # the connection is closed after every stream, as by the real one

    def having(self, changes: Mapping[str, Any]) -> Knobs:
        """Return a copy with `changes`, whose names may use dashes.

        Raises:
            ValueError: there is no such knob, or the value is of another type.

        """
        known = {knob.name: getattr(_DEFAULTS, knob.name) for knob in fields(self)}
        clean: dict[str, Any] = {}
        for name, given in changes.items():
            key = name.replace("-", "_")
            if key not in known:
                raise ValueError(f"fake engine: no knob {name!r}")
            kind = type(known[key])
            value = float(given) if kind is float and type(given) is int else given
            if type(value) is not kind:
                raise ValueError(f"fake engine: {name}: {kind.__name__} is needed, got {value!r}")
            clean[key] = value
        return replace(self, **clean)

    def as_dict(self) -> dict[str, Any]:
        """Return all knobs."""
        return asdict(self)


_DEFAULTS = Knobs()
QUESTIONS = frozenset({"-h", "--help", "--usage", "--version", "--list-devices"})  # answered without serving


@dataclass(frozen=True)
class Options:
    """The real llama-server's flags that the fake minds; all others are accepted and ignored."""

    host: str = "127.0.0.1"
    port: int = 8080
    model: str = ""
    alias: str = ""
    context: int = 4096
    slots: int = 1
    metrics: bool = False
    jsonl: bool = False


_FLAGS = {
    "--host": "host",
    "--port": "port",
    "-m": "model",
    "--model": "model",
    "-a": "alias",
    "--alias": "alias",
    "-c": "context",
    "--ctx-size": "context",
    "-np": "slots",
    "--parallel": "slots",
    "--metrics": "metrics",
    "--log-jsonl": "jsonl",
}


def value_of(text: str) -> Any:
    """Read a flag's value: JSON where it is JSON, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def parse(argv: list[str], environ: Mapping[str, str]) -> tuple[Options, Knobs, int]:
    """Read flags and environment; returns the options, the knobs of this launch and its number, from 1.

    Raises:
        ValueError: a flag that is rejected, a knob that does not exist.

    """
    options: dict[str, Any] = {}
    changes: dict[str, Any] = json.loads(environ.get("FAKE_ENGINE") or "{}")
    given, index = [], 0
    while index < len(argv):
        flag, _, inline = (
            argv[index].partition("=") if argv[index].startswith("--fake-") else (argv[index], "", "")
        )
        following = argv[index + 1] if index + 1 < len(argv) else None
        index += 1
        given.append(flag)
        value: Any = True
        if inline:
            value = value_of(inline)
        elif following is not None and (not following.startswith("-") or following[1:2].isdigit()):
            value = value_of(following) if flag.startswith("--fake-") else following
            index += 1
        if flag.startswith("--fake-"):
            changes[flag.removeprefix("--fake-")] = value
        elif flag in _FLAGS:
            name = _FLAGS[flag]
            options[name] = int(value) if name in {"port", "context", "slots"} else value
    knobs = Knobs().having(changes)
    launch = _count(knobs.state) if knobs.state and not QUESTIONS & set(argv) else 1
    if launch <= len(knobs.launches):
        knobs = knobs.having(knobs.launches[launch - 1])
    for flag in given:
        if flag in knobs.reject:
            raise ValueError(f"error: invalid argument: {flag}")
    if options.get("slots", 1) < 1:
        options["slots"] = 4  # as the real one's "auto"
    return Options(**options), knobs, launch


def _count(path: str) -> int:
    """Add this launch to the counter file: one byte each, so that two at once can't lose one."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, b".")
    finally:
        os.close(descriptor)
    return Path(path).stat().st_size
