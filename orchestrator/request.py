"""Request bodies: our options in an engine's words. No I/O.

An option has one meaning whatever the engine. The engine's `Dialect` says how it spells it; an option that
its dialect lacks is refused by name, and the dialect's defaults go with every request so that the engine's
own samplers never decide.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

from orchestrator.backend import Endpoint
from orchestrator.errors import RequestError
from orchestrator.tokens import Message

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

Prompt: TypeAlias = str | Sequence[int]


class Options(TypedDict, total=False):
    """What may be asked of a generation. An absent option or None means the neutral default.

    max_tokens: output tokens at most, 1 or more; absent, until the model stops or its context is full.
    temperature: 0 takes the likeliest token always; 1, the default, leaves the model's distribution as it is.
    top_k, top_p, min_p: keep the k likeliest; the likeliest up to this sum; those above this share of the
        likeliest. Absent: all.
    seed: the same seed, the same choices (on one engine and one build).
    stop: texts that end the output; they are not part of it.
    repeat_penalty: above 1 makes tokens that occurred rarer.
    presence_penalty, frequency_penalty: subtracted once, or for each time a token occurred.
    logprobs: report each token's log probability, and that many alternatives.
    grammar: a GBNF grammar that the output must follow.
    json_schema: a JSON Schema that the output must follow.
    ignore_eos: go on after the model's end token.
    logit_bias: token id -> what is added to its logit.
    reasoning: whether a model that can think first should; chat only.
    tools: functions the model may call, in the OpenAI form; chat only.
    extra: fields sent as they are, over everything else: what one engine alone understands.
    """

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    repeat_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logprobs: int | None
    grammar: str | None
    json_schema: Mapping[str, Any] | None
    ignore_eos: bool | None
    logit_bias: Mapping[int, float] | None
    reasoning: bool | None
    tools: Sequence[Mapping[str, Any]] | None
    extra: Mapping[str, Any] | None


def check_names(options: Mapping[str, Any]) -> None:
    """Refuse options that nobody knows.

    Raises:
        RequestError: an option's name is unknown.

    """
    for name in options:
        if name not in Options.__annotations__:
            close = difflib.get_close_matches(name, Options.__annotations__, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise RequestError(f"request: unknown option {name!r}{hint}")


def completion_body(endpoint: Endpoint, prompt: Prompt, options: Options) -> dict[str, Any]:
    """Return the body for `COMPLETIONS`.

    Raises:
        RequestError: the engine or the endpoint lacks one of the options, or the prompt is neither a text nor
            a list of token ids.

    """
    if not isinstance(prompt, str) and (
        isinstance(prompt, bytes | bytearray)
        or not isinstance(prompt, Sequence)
        or not all(type(token) is int for token in prompt)
    ):
        # engines take a list of texts for several prompts at once, whose answers would come as one
        raise RequestError(
            "request: a prompt is one text, or a list of token ids", advice="batch_generate takes several"
        )
    return _body(
        endpoint, {"prompt": prompt if isinstance(prompt, str) else list(prompt)}, options, chat=False
    )


def chat_body(
    endpoint: Endpoint, messages: Sequence[Message | Mapping[str, Any]], options: Options
) -> dict[str, Any]:
    """Return the body for `CHAT`.

    Raises:
        RequestError: the engine lacks one of the options.

    """
    turns = [turn.to_json() if isinstance(turn, Message) else dict(turn) for turn in messages]
    return _body(endpoint, {"messages": turns}, options, chat=True)


@contextlib.contextmanager
def sendable(what: str) -> Iterator[None]:
    """Turn what Python says of values that JSON can't hold into our error.

    Raises:
        RequestError: one of them can't be sent.

    """
    try:
        yield
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{what}: a text holds half of a surrogate pair, which can't be sent: {error}",
            advice="it comes from bytes that are not UTF-8: decode them with errors='replace'",
        ) from error
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise RequestError(
            f"{what}: a value of a kind that can't be sent: {error}",
            advice="see `orchestrator.request.Options` for what each option takes",
        ) from error


def _body(endpoint: Endpoint, content: dict[str, Any], options: Options, *, chat: bool) -> dict[str, Any]:
    check_names(options)
    dialect = endpoint.dialect
    body: dict[str, Any] = {}
    for path, value in dialect.defaults.items():
        _put(body, path, copy.deepcopy(value))
    body |= {"model": endpoint.model, **content, "stream": True, "stream_options": {"include_usage": True}}
    for name, value in options.items():
        if value is None or name == "extra":
            continue
        if name not in dialect.fields:
            raise RequestError(
                f"request: {dialect.name} does not offer {name}",
                advice=f"it offers: {', '.join(sorted(dialect.fields))}",
            )
        if name in dialect.chat_only and not chat:
            raise RequestError(
                f"request: {name} is an option of chat with {dialect.name}, not of generate",
                advice="ask in a chat, or leave it out",
            )
        if name == "max_tokens" and isinstance(value, int) and value < 1:  # llama-server answers 0 with one
            raise RequestError(
                f"request: max_tokens must be at least 1, not {value}",
                advice="leave it out for an answer that ends by itself",
            )
        limit = dialect.limits.get(name)
        sent = value if limit is None or not isinstance(value, int) else min(value, limit)
        _put_option(body, name, dialect.fields[name], sent, chat=chat)
    return {**body, **(options.get("extra") or {})}


def _put_option(body: dict[str, Any], name: str, path: str, value: Any, *, chat: bool) -> None:
    if name == "logprobs":
        if value is False:
            return
        # One alternative at least: with 0 llama-server leaves out the chosen token's as well.
        value = max(1, int(value))
        if chat and path == "logprobs":  # OpenAI spells it in two fields here, in one for completions
            body["top_logprobs"] = value
            value = True
    elif name == "logit_bias":
        value = {str(token): bias for token, bias in value.items()}
    elif path == "response_format.json_schema.schema":
        _put(body, "response_format.type", "json_schema")
        _put(body, "response_format.json_schema.name", "answer")
    _put(body, path, list(value) if isinstance(value, tuple) else value)


def _put(body: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        body = body.setdefault(parent, {})
    body[last] = value
