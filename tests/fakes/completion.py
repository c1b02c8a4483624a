"""How the fake engine answers a completion: which tokens, when, and every way in which a stream can fail."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import faults
from knobs import token_id, token_text, word_ids

if TYPE_CHECKING:
    from engine import Engine
    from http1 import Connection, Request

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Job:
    """One completion, decided before its first token: the text is known, only time passes."""

    chat: bool
    stream: bool
    with_usage: bool
    logprobs: int  # 0 = none
    prompt: int  # tokens
    pieces: tuple[str, ...]
    finish: str
    number: int
    speed: float  # 1 = as the knobs say

    @property
    def id(self) -> str:
        return f"chatcmpl-fake{self.number:08}"


def plan(engine: Engine, path: str, body: dict[str, Any]) -> Job:
    """Decide an answer.

    Raises:
        ValueError: the body is not a completion's.

    """
    chat = path.endswith("/chat/completions")
    field = "messages" if chat else "prompt"
    if field not in body:
        raise ValueError(f"[json.exception.out_of_range.403] key '{field}' not found")
    if chat:
        prompt = 8 + sum(3 + len(word_ids(str(message.get("content")))) for message in body["messages"])
    else:
        prompt = (
            len(body["prompt"]) if isinstance(body["prompt"], list) else 1 + len(word_ids(body["prompt"]))
        )
    asked = next(
        (body[k] for k in ("max_tokens", "max_completion_tokens", "n_predict") if body.get(k) is not None), -1
    )
    limit = max(1, min(asked if asked >= 0 else math.inf, engine.slot_context - prompt))
    own_end = math.inf if body.get("ignore_eos") else engine.knobs.eos_after
    count = int(min(limit, own_end))
    finish = "stop" if own_end <= limit else "length"
    pieces, text = [token_text(i) for i in range(count)], ""
    stops = body.get("stop") or []
    for i, piece in enumerate(pieces):
        text += piece
        cuts = [text.find(stop) for stop in ([stops] if isinstance(stops, str) else stops) if stop in text]
        if cuts:
            kept, finish = min(cuts), "stop"
            lengths = list(itertools.accumulate(map(len, pieces[: i + 1]), initial=0))
            pieces = [p[: max(0, kept - start)] for p, start in zip(pieces[: i + 1], lengths, strict=False)]
            break
    number = next(_numbers)
    speed = math.exp(engine.noise.gauss(0, engine.knobs.noise)) * (1 + engine.knobs.drift * (number - 1))
    logprobs = body.get("logprobs") or 0
    return Job(
        chat,
        bool(body.get("stream")),
        bool((body.get("stream_options") or {}).get("include_usage")),
        (body.get("top_logprobs") or 1) if logprobs is True else int(logprobs),
        prompt,
        tuple(pieces),
        finish,
        number,
        speed,
    )


async def complete(engine: Engine, c: Connection, request: Request) -> None:
    """Answer a completion, in a slot of its own."""
    knobs = engine.knobs
    engine.counts["completions"] += 1
    if engine.counts["completions"] == knobs.say_request:
        engine.log(knobs.say_line)
    if engine.counts["completions"] == knobs.crash_request:
        faults.end(knobs.crash_code)
    job = plan(engine, request.path, json.loads(request.body))
    if job.prompt >= engine.slot_context:
        message = (
            f"request ({job.prompt} tokens) exceeds the available context size "
            f"({engine.slot_context} tokens), try increasing it"
        )
        engine.log(f"srv    send_error: task id = {job.number}, error: {message}", "E")
        extra = {"n_prompt_tokens": job.prompt, "n_ctx": engine.slot_context}
        return await c.refuse(400, message, **extra | {"type": "exceed_context_size_error"})
    engine.waiting += 1
    try:
        await engine.free.acquire()
    finally:
        engine.waiting -= 1
    try:
        slot = engine.slots.index(None)
        state: dict[str, Any] = {"id_task": job.number, "n_prompt_tokens": job.prompt, "n_decoded": 0}
        engine.slots[slot] = state
        engine.counts["peak"] = max(engine.counts["peak"], sum(s is not None for s in engine.slots))
        engine.log(f"slot launch_slot_: id  {slot} | task {job.number} | processing task, is_child = 0")
        try:
            while engine.knobs.stuck:
                await engine.change()
            await (stream if job.stream else whole)(engine, c, job, state)
            engine.counts["finished"] += 1
        except asyncio.CancelledError:
            engine.counts["cancelled"] += 1
            engine.log(f"srv          stop: cancel task, id_task = {job.number}", "W")
            raise
        finally:
            engine.slots[slot] = None
            engine.log(f"slot      release: id  {slot} | task {job.number} | stop processing: truncated = 0")
    finally:
        engine.free.release()
    return None


async def tokens(engine: Engine, job: Job, state: dict[str, Any]) -> AsyncIterator[int]:
    """Yield the number of each token at its moment, which lateness of earlier ones does not move."""
    loop, knobs = asyncio.get_running_loop(), engine.knobs
    fresh = max(0, job.prompt - knobs.cached_tokens)
    prefill = knobs.ttft + (fresh / knobs.prefill_rate if knobs.prefill_rate else 0)
    gap = 1 / knobs.rate if knobs.rate else 0
    started = state["started"] = loop.time()
    engine.counts["prompt"] += fresh
    for i in range(len(job.pieces)):
        while engine.knobs.hang_after == i:
            await engine.change()
        if engine.knobs.crash_after == i:
            faults.end(engine.knobs.crash_code)
        moment = prefill + (i + (engine.noise.gauss(0, knobs.jitter) if knobs.jitter and i else 0)) * gap
        if (wait := started + max(moment, prefill) * job.speed - loop.time()) > 0:
            await asyncio.sleep(wait)
        if i == 0:
            state["first"] = loop.time()
        state["n_decoded"] = i + 1
        engine.counts["tokens"] += 1
        yield i
    if engine.knobs.crash_after == len(job.pieces):
        faults.end(engine.knobs.crash_code)
    state["last"] = loop.time()


async def whole(engine: Engine, c: Connection, job: Job, state: dict[str, Any]) -> None:
    """Answer in one piece."""
    async for i in tokens(engine, job, state):
        if engine.knobs.end in {"error", "eof"} and i >= engine.knobs.end_after:
            c.open = False
            return (
                await c.refuse(500, "the fake engine was told to fail")
                if engine.knobs.end == "error"
                else None
            )
    text = "".join(job.pieces)
    choice: dict[str, Any] = {"index": 0, "finish_reason": job.finish}
    choice |= {"message": {"role": "assistant", "content": text}} if job.chat else {"text": text}
    if job.logprobs or not job.chat:
        choice["logprobs"] = logprobs(job, range(len(job.pieces)))
    await c.answer(200, envelope(engine, job, [choice]) | figures(engine, job, state))
    return None


async def stream(engine: Engine, c: Connection, job: Job, state: dict[str, Any]) -> None:
    """Answer as events."""
    knobs = engine.knobs
    c.open = not knobs.close_streams
    await c.begin_stream()
    if job.chat:
        await event(engine, c, envelope(engine, job, [delta({"role": "assistant", "content": None})]))
    held: list[int] = []
    async for i in tokens(engine, job, state):
        if knobs.end in {"error", "eof"} and i >= knobs.end_after:
            break
        held.append(i)
        if len(held) == knobs.per_chunk or i + 1 == len(job.pieces):
            text = "".join(job.pieces[k] for k in held)
            choice: dict[str, Any] = (
                delta({"content": text}) if job.chat else {"text": text, "index": 0, "finish_reason": None}
            )
            if job.logprobs or not job.chat:
                choice["logprobs"] = logprobs(job, held)
            await event(engine, c, envelope(engine, job, [choice]))
            held = []
    if knobs.end == "eof":
        c.open = False
        return
    if knobs.end == "error":
        error = {"code": 500, "message": "the fake engine was told to fail", "type": "server_error"}
        await event(engine, c, {"error": error})
    else:
        last = delta({}, job.finish) if job.chat else {"text": "", "index": 0, "logprobs": None}
        tail = [envelope(engine, job, [last | {"finish_reason": job.finish}])]
        if job.chat and job.with_usage:
            tail.append(envelope(engine, job, []))
        tail[-1] |= figures(engine, job, state)
        if job.chat and not job.with_usage:
            del tail[-1]["usage"]
        for item in tail:
            await event(engine, c, item)
    if knobs.end != "no_done":
        await c.piece(b"data: [DONE]\n\n", knobs.split)
    await c.write(b"0\r\n\r\n")


async def event(engine: Engine, c: Connection, value: Any) -> None:
    """Send one event, after the comments asked for."""
    from http1 import dumps

    for _ in range(engine.knobs.pings):
        await c.piece(b":\n\n", engine.knobs.split)
    await c.piece(b"data: " + dumps(value) + b"\n\n", engine.knobs.split)


def delta(content: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    """A choice of a chat stream."""
    return {"finish_reason": finish, "index": 0, "delta": content}


def envelope(engine: Engine, job: Job, choices: list[Any]) -> dict[str, Any]:
    """What is around the choices."""
    kind = ("chat.completion.chunk" if job.stream else "chat.completion") if job.chat else "text_completion"
    outer = {
        "choices": choices,
        "created": int(time.time()),
        "model": engine.name,
        "object": kind,
        "id": job.id,
    }
    return outer | {"system_fingerprint": "b0-unknown"}


def figures(engine: Engine, job: Job, state: dict[str, Any]) -> dict[str, Any]:
    """Usage and timings, as the engine itself measured them."""
    count, cached = len(job.pieces), min(engine.knobs.cached_tokens, job.prompt)
    prompt_ms = (state["first"] - state["started"]) * 1000
    predicted_ms = max(0.001, (state["last"] - state["first"]) * 1000)
    usage = {"completion_tokens": count, "prompt_tokens": job.prompt, "total_tokens": count + job.prompt}
    timings = {
        "cache_n": cached,
        "prompt_n": job.prompt - cached,
        "prompt_ms": prompt_ms,
        "predicted_n": count,
    }
    timings |= {"predicted_ms": predicted_ms, "predicted_per_second": 1000 * count / predicted_ms}
    return {"usage": usage | {"prompt_tokens_details": {"cached_tokens": cached}}, "timings": timings}


def logprobs(job: Job, indices: Any) -> dict[str, Any] | None:
    """Probabilities that fall by half from one alternative to the next."""
    if not job.logprobs:
        return None
    return {
        "content": [
            alternative(i, 0) | {"top_logprobs": [alternative(i, rank) for rank in range(job.logprobs)]}
            for i in indices
        ]
    }


def alternative(index: int, rank: int) -> dict[str, Any]:
    """The token in place `rank` at position `index`."""
    text = token_text(index + rank)
    return {
        "id": token_id(index + rank),
        "token": text,
        "bytes": list(text.encode()),
        "logprob": math.log(0.5) * (rank + 1),
    }
