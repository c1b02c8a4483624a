"""The JSON that servers send: stream chunks and error objects. No I/O.

The structs name only what is used; msgspec skips the rest of a chunk without making objects of it.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import msgspec

from orchestrator.errors import BadStatus
from orchestrator.tokens import Alternative, Kind, Timings, ToolPiece


class _Entry(msgspec.Struct, gc=False):
    token: str = ""
    id: int | None = None
    logprob: float | None = None
    top_logprobs: list[_Entry] = []


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Entry] | None = None  # chat; llama-server's completions too
    tokens: list[str] | None = None  # completions in the old OpenAI form
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct, gc=False):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning: str | None = None  # vLLM
    reasoning_content: str | None = None  # llama-server, older vLLM
    tool_calls: list[_ToolCall] | None = None


class Choice(msgspec.Struct, gc=False):
    """One of a chunk's choices; we only ever ask for one."""

    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None  # vLLM with return_token_ids


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Progress(msgspec.Struct, gc=False):
    total: int = 0
    processed: int = 0


class Chunk(msgspec.Struct, gc=False):
    """One event's JSON, of either endpoint and any engine."""

    choices: list[Choice] | None = None
    usage: _Usage | None = None
    timings: Timings | None = None
    error: Any = None
    prompt_progress: _Progress | None = None  # llama-server with return_progress


decode_chunk = msgspec.json.Decoder(Chunk).decode

# -- what a chunk adds to the output ----------------------------------------------------------------


class Mark(NamedTuple):
    """What a chunk says of one token beside its text.

    Attributes:
        text: the token's own text, empty when only its id was given.
        id: its number in the vocabulary.
        logprob: its log probability.
        top: alternatives, best first.

    """

    text: str
    id: int | None
    logprob: float | None
    top: tuple[Alternative, ...]


def pieces(choice: Choice) -> list[tuple[Kind, str, ToolPiece | None]]:
    """Return the output in a choice: text, reasoning and parts of tool calls."""
    found: list[tuple[Kind, str, ToolPiece | None]] = []
    if choice.text:
        found.append(("text", choice.text, None))
    if (delta := choice.delta) is not None:
        if thought := delta.reasoning or delta.reasoning_content:
            found.append(("reasoning", thought, None))
        if delta.content:
            found.append(("text", delta.content, None))
        for call in delta.tool_calls or ():
            function = call.function or _Function()
            tool = ToolPiece(call.index, call.id, function.name)
            found.append(("tool_call", function.arguments or "", tool))
    return found


def marks(choice: Choice) -> list[Mark]:
    """Return what a choice says of each of its tokens; empty when it names none."""
    entries = _entries(choice.logprobs) if choice.logprobs is not None else []
    found: list[Mark] = []
    for entry, token_id in itertools.zip_longest(entries, choice.token_ids or ()):
        if entry is None:
            found.append(Mark("", token_id, None, ()))
            continue
        text, named = _name(entry)
        top = [
            Alternative(*_name(other), other.logprob)
            for other in entry.top_logprobs
            if other.logprob is not None
        ]
        top.sort(key=lambda other: -other.logprob)
        found.append(Mark(text, named if token_id is None else token_id, entry.logprob, tuple(top)))
    return found


def _entries(logprobs: _Logprobs) -> list[_Entry]:
    """Bring the old OpenAI form of completions (parallel lists) into that of chats."""
    if logprobs.content is not None:
        return logprobs.content
    columns = (logprobs.tokens or (), logprobs.token_logprobs or (), logprobs.top_logprobs or ())
    return [
        _Entry(token or "", None, logprob, [_Entry(text, None, value) for text, value in (top or {}).items()])
        for token, logprob, top in itertools.zip_longest(*columns)
    ]


def _name(entry: _Entry) -> tuple[str, int | None]:
    """Read vLLM's ``token_id:N``, which stands in a text's place with return_tokens_as_token_ids."""
    head, _, number = entry.token.partition("token_id:")
    if entry.id is None and not head and number.isdigit():
        return "", int(number)
    return entry.token, entry.id


# -- errors -----------------------------------------------------------------------------------------


def json_or_text(data: bytes) -> Any:
    """Return what a server sent as an error: JSON when it is that, else its text."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return data.decode("utf-8", "replace").strip()


def error_message(body: Any) -> str:
    """Return the sentence in an engine's error object: error.message, message, detail, or all of it."""
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and body.get(key):
            return error_message(body[key])
    return str(body)[:500] if body else "no reason given"


def bad_status(status: int, body: Any) -> BadStatus:
    """Return the error for a status and a body, with advice where there is a common cause."""
    said = error_message(body)
    advice = None
    if status == 400 and "context" in said.lower():
        advice = "shorten the prompt or max_tokens, or raise `context` in the profile"
    elif status in (401, 403):
        advice = "give the server's API key"
    elif status == 404:
        advice = "check the URL and the model's id"
    elif status == 429:
        advice = "the server is at its limit; try again later or send fewer requests at once"
    elif status == 503:
        advice = "the server is loading or overloaded; try again later"
    return BadStatus(f"request: HTTP {status}: {said}", status=status, body=body, advice=advice)
