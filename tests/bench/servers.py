"""A scripted engine with a tokeniser, and every way in which an engine's stream can mislead a benchmark."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.fakes.scripted import END, HEAD, Scripted, chunked, event, reply


@dataclass(frozen=True)
class Habits:
    """How the engine behaves; the defaults are an honest one without figures of its own.

    Attributes:
        gap: seconds between tokens.
        ttft: seconds before the first.
        most: output tokens at most, whatever was asked for.
        extra_prompt: tokens that it puts before every prompt.
        cached: prompt tokens reported as cached; None is silence.
        shift: added to every token id of /tokenize.
        tokeniser: whether there is a /tokenize at all.
        per_chunk: tokens in a chunk.
        role_first: send a chunk with a role, at once, before everything else.
        pings: comments between chunks.
        ending: ``good``, ``error_then_done``, ``bare_error``, ``only_done``, ``eof``, ``no_usage``, ``stop``,
            ``no_done``.
        fail_at: which completion (from 1) fails with 500; 0 is none.
        fail_from: the same, with all that come after it.
        cumulative: report usage in every chunk.
        usage_with_choice: report usage beside the finish reason instead of in a chunk of its own.
        framing: how events are written: ``plain``, ``crlf``, ``cr``, ``no_space``, ``bom``, ``lines`` (data
            over two of them), ``bytes`` (each in a chunk of its own).
        word: the text of a token.
        held: send nothing until all is there.
        cold: seconds more before the first completion of all.
        remembers: a prompt whose first tokens were seen before has its first token at once.

    """

    gap: float = 0.002
    ttft: float = 0.01
    most: int = 10_000
    extra_prompt: int = 0
    cached: int | None = 0
    shift: int = 0
    tokeniser: bool = True
    per_chunk: int = 1
    role_first: bool = False
    pings: int = 0
    ending: str = "good"
    fail_at: int = 0
    fail_from: int = 0
    cumulative: bool = False
    usage_with_choice: bool = False
    framing: str = "plain"
    word: str = " word"
    held: bool = False
    cold: float = 0.0
    remembers: bool = False


def engine(habits: Habits | None = None, port: int = 0) -> Scripted:
    """Start one, at a free port by default; the caller closes it."""
    script = _Script(habits or Habits())
    script.server = Scripted(script, port)
    return script.server


class _Script:
    def __init__(self, habits: Habits) -> None:
        self.habits = habits
        self.completions = 0
        self.seen: set[tuple[int, ...]] = set()
        self.server: Any = None

    def __call__(self, head: str, _: int) -> Iterator[bytes]:
        path = head.split(" ")[1]
        if path == "/v1/models":
            return iter([reply(200, {"data": [{"id": "scripted"}]})])
        if path == "/tokenize" and self.habits.tokeniser:
            given = next(body for _, body in reversed(self.server.requests) if body and "content" in body)
            count = 120 if given["content"] else 0
            return iter([reply(200, {"tokens": [each + self.habits.shift for each in range(count)]})])
        if path == "/v1/completions":
            self.completions += 1
            asked = next(body for _, body in reversed(self.server.requests) if body and "prompt" in body)
            pieces = self.completion(self.wait(asked["prompt"]))
            return iter([b"".join(pieces)]) if self.habits.held else pieces
        return iter([reply(404, {"error": "no such path"})])

    def wait(self, prompt: Any) -> float:
        """Return the seconds until the first token."""
        habits, beginning = self.habits, tuple(prompt[:2])
        if habits.remembers and beginning in self.seen:
            return 0.0
        self.seen.add(beginning)
        return habits.ttft + (habits.cold if self.completions == 1 else 0.0)

    def framed(self, events: bytes) -> bytes:
        """Return events in the engine's way of writing them, letters as they are."""
        for letter in RAW:
            events = events.replace(json.dumps(letter)[1:-1].encode(), letter.encode())
        match self.habits.framing:
            case "crlf":
                events = events.replace(b"\n", b"\r\n")
            case "cr":
                events = events.replace(b"\n", b"\r")
            case "no_space":
                events = events.replace(b"data: ", b"data:")
            case "lines":
                events = events.replace(b'"choices": ', b'"choices":\ndata: ')
            case "bytes":
                return chunked(events, 1)
        return chunked(events)

    def completion(self, ttft: float) -> Iterator[bytes]:
        habits = self.habits
        if self.completions == habits.fail_at or 0 < habits.fail_from <= self.completions:
            yield reply(500, {"error": {"message": "told to fail"}})
            return
        count, prompt = min(OUTPUT, habits.most), PROMPT + habits.extra_prompt
        yield HEAD
        if habits.framing == "bom":
            yield chunked(b"\xef\xbb\xbf")
        if habits.role_first:
            yield self.framed(event(choices=[{"index": 0, "delta": {"role": "assistant", "content": None}}]))
        time.sleep(ttft)
        if habits.ending == "only_done":
            yield chunked(b"data: [DONE]\n\n") + END
            return
        due, sent = time.monotonic(), 0
        while sent < count:
            now = min(habits.per_chunk, count - sent)
            sent += now
            usage = self.usage(prompt, sent) if habits.cumulative else {}
            choice = {"index": 0, "text": habits.word * now, "finish_reason": None}
            yield self.framed(b":\n\n" * habits.pings + event(choices=[choice], **usage))
            due += habits.gap * now
            time.sleep(max(0.0, due - time.monotonic()))
            if habits.ending == "eof" and sent >= count // 2:
                return
        yield self.framed(b"".join(self.end(prompt, count))) + END

    def end(self, prompt: int, count: int) -> Iterator[bytes]:
        if self.habits.ending == "error_then_done":
            yield b'data: {"error": {"message": "told to fail", "code": 500}}\n\n'
            yield b"data: [DONE]\n\n"
            return
        if self.habits.ending == "bare_error":
            yield b'error: {"message": "told to fail", "code": 500}\n\n'
            return
        usage = self.usage(prompt, count) if self.habits.ending != "no_usage" else {}
        beside = usage if self.habits.usage_with_choice else {}
        finish = "stop" if self.habits.ending == "stop" else "length"
        yield event(choices=[{"index": 0, "text": "", "finish_reason": finish}], **beside)
        if usage and not beside:
            yield event(choices=[], **usage)
        if self.habits.ending != "no_done":
            yield b"data: [DONE]\n\n"

    def usage(self, prompt: int, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": count}
        if self.habits.cached is not None:
            found["prompt_tokens_details"] = {"cached_tokens": self.habits.cached}
        return {"usage": found}


RAW = "é\u0085\u2028"  # ends of lines for many a parser
PROMPT = 32  # tokens that the tests ask with
OUTPUT = 24  # tokens that the tests ask for
