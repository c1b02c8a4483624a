"""``orchestrator run``: one answer, its text on stdout and nothing else there."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli import options

if TYPE_CHECKING:
    from orchestrator.cli import documents
    from orchestrator.cli.answering import Model
    from orchestrator.generation import Generation


def run(
    profile: options.ProfileFile,
    prompt: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="The text to continue; - or none reads stdin.")
    ] = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    repeat_penalty: options.RepeatPenalty = None,
    backend: options.Backend = None,
    sets: options.Set = None,
    as_json: options.Json = False,
) -> None:
    """Continue a text: the answer goes to stdout as it comes, figures to stderr.

    Uses the engine that `up` runs from the same profile, else starts one for the time of the call.
    """
    from orchestrator.cli import answering, console

    asked = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "stop": stop,
        "repeat_penalty": repeat_penalty,
    }
    text = _prompt(prompt)
    with (
        answering.model(profile, sets, backend) as model,
        model.text.generate(text, **asked) as answer,  # type: ignore[arg-type]  # checked by name there
    ):
        if as_json:
            answer.text()
            console.document(_document(model, answer))
            return
        show(answer)
        console.err(figures(answer, model.load_s))


def _prompt(given: str | None) -> str:
    from orchestrator.cli.faults import UsageError

    if given is not None and given != "-":
        try:
            given.encode()
        except UnicodeEncodeError as error:  # Python keeps bytes that are not text as halves of pairs
            raise UsageError("run: PROMPT is not UTF-8") from error
        return given
    if given is None and sys.stdin.isatty():
        raise UsageError("run: PROMPT is missing", advice="give it as an argument, or pipe it in")
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"run: stdin is not UTF-8: {error}") from error
    except OSError as error:
        raise UsageError(f"run: stdin can't be read: {error.strerror}") from error
    if not text and given is None:
        raise UsageError("run: PROMPT is missing, and stdin is empty", advice="give it as an argument")
    return text


def show(answer: Generation) -> None:
    """Write an answer to stdout as it comes, ended by one line break."""
    from orchestrator.cli import console

    last = "\n"
    try:
        for token in answer:
            if token.kind == "text" and token.text:
                console.out(token.text, end="")
                last = token.text[-1]
    finally:
        if last != "\n":
            console.out("")


def figures(answer: Generation, load_s: float | None) -> str:
    """Return what an answer has cost, on one line."""
    cost = answer.metrics
    parts = [f"load {load_s:.2f} s"] if load_s is not None else []
    if cost.prompt_tokens is not None:
        parts.append(f"{cost.prompt_tokens} prompt token{'' if cost.prompt_tokens == 1 else 's'}")
    parts += [f"prefill {cost.prefill_tok_s:.1f} tok/s"] if cost.prefill_tok_s else []
    parts += [f"first token {cost.ttft_s * 1e3:.0f} ms"] if cost.ttft_s is not None else []
    if cost.completion_tokens is not None:
        parts.append(f"{cost.completion_tokens} token{'' if cost.completion_tokens == 1 else 's'}")
    parts += [f"decode {cost.decode_tok_s:.1f} tok/s"] if cost.decode_tok_s else []
    parts += [f"finished by {answer.finish_reason}"]
    return ", ".join(parts)


def _document(model: Model, answer: Generation) -> documents.Run:
    from orchestrator.cli import documents

    cost: Any = answer.metrics
    usage = answer.usage
    return documents.Run(
        text=answer.partial,
        finish_reason=answer.finish_reason,
        usage=None
        if usage is None
        else documents.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
        ),
        ttft_s=cost.ttft_s,
        decode_tok_s=cost.decode_tok_s,
        prefill_tok_s=cost.prefill_tok_s,
        load_s=model.load_s,
        model=model.name,
        backend=model.backend,
    )
