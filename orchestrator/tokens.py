"""The nouns of a conversation with a model: what goes in, what comes out, and what it cost. No I/O.

`Token`, `Usage` and `Timings` are msgspec structs because one is made for each stream event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from orchestrator.errors import BackendError, RequestError

Kind = Literal["text", "reasoning", "tool_call"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat.

    Attributes:
        role: ``system``, ``user``, ``assistant`` or ``tool``.
        content: its text, or a list of content parts in the OpenAI form.
        tool_calls: the calls an assistant made, as `ToolCall.to_json` gives them.
        tool_call_id: which call a ``tool`` message answers.

    """

    role: str
    content: str | list[dict[str, Any]]
    tool_calls: tuple[dict[str, Any], ...] = ()
    tool_call_id: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the message as the chat endpoint takes it."""
        body: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            body["tool_calls"] = list(self.tool_calls)
        if self.tool_call_id is not None:
            body["tool_call_id"] = self.tool_call_id
        return body


class Alternative(msgspec.Struct, frozen=True, gc=False):
    """A token that might have been chosen.

    Attributes:
        text: the token's text; empty when the server gave only its id.
        id: its number in the vocabulary, when the server gave it.
        logprob: natural logarithm of its probability before any sampler.

    """

    text: str
    id: int | None
    logprob: float


class ToolPiece(msgspec.Struct, frozen=True, gc=False):
    """Which tool call a token belongs to.

    Attributes:
        index: the call's place among the calls of this answer.
        id: given by the server with the call's first piece.
        name: the function, likewise.

    """

    index: int
    id: str | None = None
    name: str | None = None


class Token(msgspec.Struct, frozen=True):
    """A piece of output as the server sent it, nearly always one token of the model.

    Attributes:
        text: what it adds: to the text, the reasoning, or a tool call's arguments.
        id: its number in the vocabulary. None when the server doesn't say: llama-server tells it only
            together with `logprobs`, vLLM always.
        logprob: natural logarithm of its probability before any sampler, when `logprobs` was asked for.
        index: its place in the output, from 0.
        at_ns: `time.perf_counter_ns` when the bytes were read, before they were parsed.
        kind: what `text` belongs to.
        top: the likeliest tokens at this place, as many as `logprobs` asked for, best first.
        tool: the tool call it belongs to, for kind ``tool_call``.

    """

    text: str
    id: int | None = None
    logprob: float | None = None
    index: int = 0
    at_ns: int = 0
    kind: Kind = "text"
    top: tuple[Alternative, ...] = ()
    tool: ToolPiece | None = None


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Counts as the server's tokeniser made them, never counted from chunks or words.

    Attributes:
        prompt_tokens: tokens of the prompt, those from the cache included.
        completion_tokens: tokens generated, an end token included.
        cached_tokens: prompt tokens that came from a cache; None when the server doesn't say.

    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


class Timings(msgspec.Struct, frozen=True, gc=False):
    """llama-server's own measurement of a request; times in milliseconds.

    Attributes:
        cache_n: prompt tokens that came from the cache.
        prompt_n: prompt tokens that were read.
        prompt_ms: the time for them.
        predicted_n: tokens generated.
        predicted_ms: the time from the first generated token to the last.

    """

    cache_n: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function the model wants called.

    Attributes:
        id: to be named in the ``tool`` message that answers it.
        name: the function.
        arguments: JSON text, exactly as the model wrote it.

    """

    id: str
    name: str
    arguments: str

    def to_json(self) -> dict[str, Any]:
        """Return the call as an assistant message carries it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Metrics:
    """What a call cost, seen from the client. Rates are None where they have no meaning.

    Attributes:
        prompt_tokens: from the server's usage; None when it sent none.
        completion_tokens: likewise.
        cached_tokens: likewise.
        ttft_s: from the request sent on an open connection to the first text, reasoning or tool call.
        prefill_tok_s: (prompt_tokens - cached_tokens) / ttft_s.
        decode_tok_s: (completion_tokens - 1) / (last output - first output).
        total_s: from the request sent to the end of the stream; None when it was not sent.
        memory: of the engine, as its backend reports it; None for a server that is not ours.
        timings: the engine's own figures, where it sends them.

    """

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    ttft_s: float | None = None
    prefill_tok_s: float | None = None
    decode_tok_s: float | None = None
    total_s: float | None = None
    memory: Any = None
    timings: Timings | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """One prompt's answer out of a batch.

    Attributes:
        text: the answer; with an error, what had arrived of it.
        finish_reason: ``stop``, ``length``, ...; None with an error.
        usage: the server's counts.
        metrics: what it cost.
        error: why there is no whole answer, else None.

    """

    text: str
    finish_reason: str | None = None
    usage: Usage | None = None
    metrics: Metrics = field(default_factory=Metrics)
    error: RequestError | BackendError | None = None


@dataclass(frozen=True, slots=True)
class Classification:
    """Which label continues a prompt best.

    Attributes:
        label: the likeliest label.
        probabilities: of every label, in the order given; they add up to 1.

    """

    label: str
    probabilities: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known of a model; None where nobody says.

    Attributes:
        name: given by its makers, else the id it is served under.
        architecture: such as ``gemma3``.
        layers: number of blocks.
        vocabulary: number of tokens.
        quantisation: such as ``Q4_K_M``.
        parameters: number of weights.
        context: tokens per request as served.
        native_context: tokens it was trained for.

    """

    name: str
    architecture: str | None = None
    layers: int | None = None
    vocabulary: int | None = None
    quantisation: str | None = None
    parameters: int | None = None
    context: int | None = None
    native_context: int | None = None
