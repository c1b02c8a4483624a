"""What comes back: stream chunks to tokens, usage, timings and an outcome. No I/O.

A `Stream` is fed the bytes of one response with the time at which they were read, by whoever reads them: the
sync and the async `TextModel`, and the benchmark. It succeeds only with a finish reason, a clean end and no
error; chunks are not tokens, so counts come from the server's usage, whose last value wins.
"""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from orchestrator.chunks import Choice, bad_status, decode_chunk, error_message, json_or_text, marks, pieces
from orchestrator.errors import ProtocolError, RequestError, StreamInterrupted
from orchestrator.sse import MAX_EVENT, Decoder
from orchestrator.tokens import Metrics, Timings, Token, ToolCall, Usage

_FAILED = ("abort", "error")  # finish reasons with which an engine says that it gave up


class Stream:
    """The state of one response's body.

    Attributes:
        usage: the server's counts, once they came.
        timings: llama-server's own figures, once they came.
        finish_reason: ``stop``, ``length``, ``tool_calls``, ... once it came.
        error: why the stream failed, once that is known.
        done: whether ``[DONE]`` has come.
        progressed: whether the last read held an event; comments, such as the pings of llama-server, show
            that the connection lives but are no progress.
        prompt_progress: (tokens read, tokens in all) of the prompt, where the server tells.
        first_ns: when the first text, reasoning or tool call was read; 0 before.
        last_ns: the same of the latest.
        chunks: reads that held output: their gaps are chunk gaps, not inter-token latency.
        warnings: oddities of a stream that succeeded nonetheless.

    """

    def __init__(self, *, max_event: int = MAX_EVENT) -> None:
        self.usage: Usage | None = None
        self.timings: Timings | None = None
        self.finish_reason: str | None = None
        self.error: RequestError | None = None
        self.done = False
        self.progressed = False
        self.prompt_progress: tuple[int, int] | None = None
        self.first_ns = 0
        self.last_ns = 0
        self.chunks = 0
        self.warnings: list[str] = []
        self._events = Decoder(max_event=max_event)
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, list[str]] = {}  # index -> id, name, arguments
        self._count = 0

    @property
    def text(self) -> str:
        """The text so far, without reasoning and tool calls."""
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        """What the model thought so far."""
        return "".join(self._reasoning)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls so far."""
        return tuple(ToolCall(*parts) for _, parts in sorted(self._calls.items()))

    def feed(self, chunk: bytes, at_ns: int) -> list[Token]:
        """Return the tokens that this read completes; afterwards look at `error`.

        Nothing is raised here, so that what arrived before a fault is never lost with it.

        Args:
            chunk: the bytes as they were read.
            at_ns: `time.perf_counter_ns` at the read.

        """
        tokens: list[Token] = []
        self.progressed = False
        if self.error is not None:
            return tokens
        try:
            for event in self._events.feed(chunk):
                if self.done or self.error is not None:
                    break
                self.progressed = True
                if event.data == b"[DONE]":
                    self.done = True
                elif event.name == "error":
                    self._fail(json_or_text(event.data))
                else:
                    self._chunk(event.data, at_ns, tokens)
        except ProtocolError as error:
            self.error = error
        if tokens:
            self.chunks += 1
        return tokens

    def end(self) -> None:
        """Judge the stream at its clean end.

        Raises:
            RequestError: it was not a success.

        """
        if self.error is not None:
            raise self.error
        if self.finish_reason is None:
            raise self.interrupted("the stream ended without a finish reason")
        if self.finish_reason in _FAILED:
            raise self.interrupted(f"the engine gave up with finish reason {self.finish_reason!r}")
        if not self.done:
            self.warnings.append("the stream ended without [DONE]")
        if self._events.pending:
            self.warnings.append("the stream ended within an event")

    def interrupted(self, why: str) -> StreamInterrupted:
        """Return the error for a stream that broke off; it carries the text so far."""
        self.error = StreamInterrupted(f"stream: {why}", partial=self.text)
        return self.error

    def metrics(self, sent_ns: int, end_ns: int, memory: Any = None) -> Metrics:
        """Return what the request cost; see `Metrics` for the definitions."""
        usage = self.usage
        ttft = (self.first_ns - sent_ns) / 1e9 if self.first_ns else None
        total = (end_ns - sent_ns) / 1e9
        if usage is None:
            return Metrics(ttft_s=ttft, total_s=total, memory=memory, timings=self.timings)
        read = usage.prompt_tokens - (usage.cached_tokens or 0)
        decode = (self.last_ns - self.first_ns) / 1e9
        return Metrics(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            ttft_s=ttft,
            prefill_tok_s=read / ttft if ttft else None,
            decode_tok_s=(usage.completion_tokens - 1) / decode if decode else None,
            total_s=total,
            memory=memory,
            timings=self.timings,
        )

    # -- one chunk ----------------------------------------------------------------------------------

    def _chunk(self, data: bytes, at_ns: int, tokens: list[Token]) -> None:
        try:
            chunk = decode_chunk(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"stream: not a chunk: {error}: {data[:200]!r}") from error
        if chunk.error is not None:
            self._fail(chunk.error)
            return
        for choice in chunk.choices or ():
            if choice.text and choice.logprobs is None and choice.token_ids is None:  # the common case
                self._texts.append(choice.text)
                tokens.append(Token(choice.text, None, None, self._count, at_ns))
                self._count += 1
                self.last_ns = at_ns
                self.first_ns = self.first_ns or at_ns
            elif choice.text is not None or choice.delta is not None or choice.token_ids:
                self._choice(choice, at_ns, tokens)
            if choice.finish_reason:
                self.finish_reason = choice.finish_reason
        if chunk.usage is not None:
            usage = chunk.usage
            cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None
            self.usage = Usage(usage.prompt_tokens, usage.completion_tokens, cached)
        if chunk.timings is not None:
            self.timings = timings = chunk.timings
            if self.usage is None:  # a server too old for usage in a stream
                self.usage = Usage(timings.cache_n + timings.prompt_n, timings.predicted_n, timings.cache_n)
        if chunk.prompt_progress is not None:
            self.prompt_progress = (chunk.prompt_progress.processed, chunk.prompt_progress.total)
        elif chunk.choices is None and chunk.usage is None and chunk.timings is None:
            # Older vLLM sends the error object itself: {"object": "error", "message": ..., "code": ...}
            value = json_or_text(data)
            if isinstance(value, dict) and value.get("object") == "error":
                self._fail(value)

    def _choice(self, choice: Choice, at_ns: int, tokens: list[Token]) -> None:
        parts = pieces(choice)
        named = marks(choice)
        if len(parts) == 1 < len(named):
            # Several tokens in one chunk (speculative decoding): their own texts when these add up to it;
            # else the text stays with the first, so that joining the tokens always gives the text.
            kind, text, tool = parts[0]
            if "".join(mark.text for mark in named) == text:
                parts = [(kind, mark.text, tool if at == 0 else None) for at, mark in enumerate(named)]
        for part, mark in itertools.zip_longest(parts, named):
            kind, text, tool = part or (parts[-1][0] if parts else "text", "", None)
            token_id, logprob, top = (mark.id, mark.logprob, mark.top) if mark else (None, None, ())
            tokens.append(Token(text, token_id, logprob, self._count, at_ns, kind, top, tool))
            self._count += 1
            if kind == "text":
                self._texts.append(text)
            elif kind == "reasoning":
                self._reasoning.append(text)
            elif tool is not None:
                call = self._calls.setdefault(tool.index, ["", "", ""])
                call[0] = tool.id or call[0]
                call[1] = tool.name or call[1]
                call[2] += text
            if text or tool:
                self.last_ns = at_ns
                self.first_ns = self.first_ns or at_ns

    def _fail(self, error: Any) -> None:
        inner = error.get("error", error) if isinstance(error, dict) else error
        code = inner.get("code") if isinstance(inner, dict) else None
        status = bad_status(code if isinstance(code, int) else 500, error)
        if self._count:
            self.interrupted(f"the server reports an error: {error_message(error)}").__cause__ = status
        else:
            self.error = status
